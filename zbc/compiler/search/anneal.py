"""Timing an order, and improving it by annealing; kernels like listing.py, whose numbering of ops they share.

Random numbers come from `_next`, so that compiled and plain runs draw the same.
"""

from __future__ import annotations

from zbc.compiler.search.listing import EPS, ROOM, Numbers


def _next(state: int) -> int:
    """The next state of a linear congruential generator modulo 2^31; its high bits are the random number."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


def evaluate(
    p: int,
    m: int,
    v: int,
    rank: Numbers,
    f_ms: Numbers,
    b_ms: Numbers,
    w_ms: Numbers,
    lag: Numbers,
    order: Numbers,
    end: Numbers,
) -> tuple[int, float, float]:
    """Time a rank-major order: (0, longest span, makespan), or (1, 0, 0) if it can never finish. Fills `end`.

    O(ops): run each rank until its next op waits for one that has not run, then go where a result is awaited.
    """
    n_stages = p * v
    per_kind = n_stages * m
    per_rank = 3 * v * m
    for i in range(3 * per_kind):
        end[i] = -1.0
    at = [0] * p
    free = [0.0] * p
    began = [-1.0] * p
    stack = [0] * (4 * p + 4)
    waiting = [True] * p
    top = 0
    for r in range(p):
        stack[top] = p - 1 - r
        top += 1
    done = 0
    while top > 0:
        top -= 1
        r = stack[top]
        waiting[r] = False
        k = at[r]
        time = free[r]
        base = r * per_rank
        while k < per_rank:
            op = order[base + k]
            start = time
            s = op // m
            there = -1
            if s < n_stages:
                if s > 0:
                    before = end[op - m]
                    if before < 0.0:
                        break
                    if before + lag[s] > start:
                        start = before + lag[s]
                length = f_ms[s]
                if s < n_stages - 1:
                    there = rank[s + 1]
                    awaited = op + m
            elif s < 2 * n_stages:
                s -= n_stages
                if s < n_stages - 1:
                    before = end[op + m]
                    if before < 0.0:
                        break
                    if before + lag[s + 1] > start:
                        start = before + lag[s + 1]
                else:
                    before = end[op - per_kind]
                    if before < 0.0:
                        break
                    if before > start:
                        start = before
                length = b_ms[s]
                if s > 0:
                    there = rank[s - 1]
                    awaited = op - m
            else:
                length = w_ms[s - 2 * n_stages]
            if began[r] < 0.0:
                began[r] = start
            time = start + length
            end[op] = time
            k += 1
            if (
                there >= 0
                and there != r
                and not waiting[there]
                and at[there] < per_rank
                and order[there * per_rank + at[there]] == awaited
            ):
                stack[top] = there
                top += 1
                waiting[there] = True
        done += k - at[r]
        at[r] = k
        free[r] = time
    if done < 3 * per_kind:
        return 1, 0.0, 0.0
    span = 0.0
    makespan = 0.0
    for r in range(p):
        if free[r] - began[r] > span:
            span = free[r] - began[r]
        if free[r] > makespan:
            makespan = free[r]
    return 0, span, makespan


def anneal(
    p: int,
    m: int,
    v: int,
    rank: Numbers,
    f_ms: Numbers,
    b_ms: Numbers,
    w_ms: Numbers,
    lag: Numbers,
    keep_b: Numbers,
    keep_w: Numbers,
    limit: Numbers,
    order: Numbers,
    best: Numbers,
    moves: int,
    hot: float,
    cold: float,
    reach: int,
    seed: int,
    by_makespan: bool,
    target: float,
) -> tuple[float, int]:
    """Improve a feasible rank-major `order` by simulated annealing; `best` receives the best order found.

    A move shifts one op within its rank by up to `reach` places, keeping microbatch order per stage, F before B before
    W of a microbatch, and the memory limit. The temperature falls geometrically from `hot` to `cold` ms over `moves`
    tried moves; the value is the objective plus a twentieth of the mean span, which tells plateaus apart. Stops early
    at `target`. Returns the best objective and the moves used.
    """
    n_stages = p * v
    per_kind = n_stages * m
    per_rank = 3 * v * m
    size = 3 * per_kind
    end = [0.0] * size
    position = [0] * size
    for k in range(size):
        position[order[k]] = k
        best[k] = order[k]
    status, span, makespan = evaluate(p, m, v, rank, f_ms, b_ms, w_ms, lag, order, end)
    goal = makespan if by_makespan else span
    current = goal + _mean_span(p, v, m, order, end, f_ms) * 0.05
    best_goal = goal
    best_value = current
    state = seed
    for _ in range(8):
        state = _next(state)
    cooling = (cold / hot) ** (1.0 / max(1, moves - 1))
    heat = hot
    used = 0
    while used < moves:
        used += 1
        heat *= cooling
        state = _next(state)
        i = (state >> 8) % size
        r = i // per_rank
        state = _next(state)
        shift = 1
        draw = state >> 8
        while shift < reach and draw & 3 != 0:
            shift += 1
            draw >>= 2
            if draw == 0:
                break
        state = _next(state)
        j = i - shift if (state >> 16) & 1 else i + shift
        op = order[i]
        s = op // m
        mb = op - s * m
        low = r * per_rank
        high = low + per_rank - 1
        if mb > 0 and position[op - 1] + 1 > low:
            low = position[op - 1] + 1
        if mb < m - 1 and position[op + 1] - 1 < high:
            high = position[op + 1] - 1
        if s >= n_stages and position[op - per_kind] + 1 > low:
            low = position[op - per_kind] + 1
        if s < 2 * n_stages and position[op + per_kind] - 1 < high:
            high = position[op + per_kind] - 1
        if j < low:
            j = low
        if j > high:
            j = high
        if i == j:
            continue
        _shift(order, position, i, j)
        accepted = False
        if _fits(r, r * per_rank, max(i, j), m, n_stages, order, keep_b, keep_w, limit):
            status, span, makespan = evaluate(p, m, v, rank, f_ms, b_ms, w_ms, lag, order, end)
            if status == 0:
                goal = makespan if by_makespan else span
                value = goal + _mean_span(p, v, m, order, end, f_ms) * 0.05
                state = _next(state)
                accepted = value <= current or (state >> 8) / 8388608.0 < _exp(-(value - current) / heat)
        if not accepted:
            _shift(order, position, j, i)
            continue
        current = value
        if goal < best_goal - EPS or (goal < best_goal + EPS and value < best_value - EPS):
            best_goal = goal
            best_value = value
            for k in range(size):
                best[k] = order[k]
            if best_goal <= target + EPS:
                break
    return best_goal, used


def _exp(x: float) -> float:
    """e^x for x <= 0, to the few digits an acceptance needs, from operations that round alike everywhere."""
    if x < -30.0:
        return 0.0
    y = 1.0 + x / 1024.0
    for _ in range(10):
        y *= y
    return y


def _mean_span(p: int, v: int, m: int, order: Numbers, end: Numbers, f_ms: Numbers) -> float:
    per_rank = 3 * v * m
    total = 0.0
    for r in range(p):
        first = order[r * per_rank]
        total += end[order[r * per_rank + per_rank - 1]] - (end[first] - f_ms[first // m])
    return total / p


def _shift(order: Numbers, position: Numbers, i: int, j: int) -> None:
    """Move the op at place i to place j, closing the gap."""
    op = order[i]
    step = 1 if j > i else -1
    k = i
    while k != j:
        order[k] = order[k + step]
        position[order[k]] = k
        k += step
    order[j] = op
    position[op] = j


def _fits(
    r: int,
    start: int,
    last: int,
    m: int,
    n_stages: int,
    order: Numbers,
    keep_b: Numbers,
    keep_w: Numbers,
    limit: Numbers,
) -> bool:
    """Whether rank r keeps to its limit up to place `last`."""
    held = 0.0
    for k in range(start, last + 1):
        s = order[k] // m
        if s < n_stages:
            held += keep_b[s]
            if held > limit[r] + ROOM:
                return False
        elif s < 2 * n_stages:
            held += keep_w[s - n_stages] - keep_b[s - n_stages]
            if held > limit[r] + ROOM:
                return False
        else:
            held -= keep_w[s - 2 * n_stages]
    return True
