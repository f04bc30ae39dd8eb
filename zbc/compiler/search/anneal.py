"""Improving an order by annealing; a kernel like listing.py, whose numbering of ops it shares.

What makes a step long is a chain of ops, each of which starts when the one before it ends or its result arrives. Moving
an op that is on no such chain changes nothing, so most moves are drawn from the chain that ends at the last op of some
rank. A move changes nothing before the first place it touches: times are computed anew from there on only.

Random numbers come from `_next`, so that compiled and plain runs draw the same.
"""

from __future__ import annotations

from zbc.compiler.search.listing import EPS, ROOM
from zbc.compiler.search.timing import Numbers, locate, run, steps

EVEN = 0.05  # weight of the mean span beside the objective; it tells plateaus apart
CHAINED = 60  # percent of the moves that are drawn from a chain
REACH = 12  # places a move spans at most
MOVE_VISITS = 4  # what drawing a move costs, in op visits


def anneal(
    p: int,
    m: int,
    per_kind: int,
    length: Numbers,
    source: Numbers,
    lag: Numbers,
    where: Numbers,
    change: Numbers,
    limit: Numbers,
    order: Numbers,
    best: Numbers,
    moves: int,
    hot: float,
    cold: float,
    seed: int,
    by_makespan: bool,
    target: float,
    most: int,
) -> int:
    """Improve a feasible rank-major `order` by simulated annealing; `best` receives the best order found.

    A move shifts one op within its rank by up to REACH places, keeping microbatch order per stage, F before B before W
    of a microbatch, and the memory limit (`change` is what each op adds to it). The temperature falls geometrically
    from `hot` to `cold` ms over `moves` tried moves; the value is the objective plus EVEN of the mean span. Stops early
    at `target` and after `most` op visits. Returns the op visits: ops timed, and a little for each move.
    """
    size = len(order)
    per_rank = size // p
    end = [0.0] * size
    trial = [0.0] * size
    position = [0] * size
    chain = [0] * size
    first = [0] * p
    locate(order, position)
    for r in range(p):
        first[r] = r * per_rank
    work = run(p, order, position, length, source, lag, where, first, end)
    span, makespan, mean = steps(p, order, length, end)
    goal = makespan if by_makespan else span
    current = goal + EVEN * mean
    best_goal = goal
    best_value = current
    for k in range(size):
        best[k] = order[k]
        trial[k] = end[k]
    state = seed
    for _ in range(8):
        state = _next(state)
    cooling = (cold / hot) ** (1.0 / max(1, moves - 1))
    heat = hot
    links = 0  # of the chain; 0: to be traced
    for _ in range(moves):
        if work >= most:
            break
        work += MOVE_VISITS
        heat *= cooling
        state = _next(state)
        if (state >> 8) % 100 < CHAINED:
            if links == 0:
                links, state = _trace(p, order, position, length, source, lag, by_makespan, end, chain, state)
            state = _next(state)
            i = chain[(state >> 8) % links]
        else:
            state = _next(state)
            i = (state >> 8) % size
        state = _next(state)
        j, state = _aim(i, m, per_kind, per_rank, order, position, state)
        if i == j:
            continue
        r = i // per_rank
        _shift(order, position, i, j)
        accepted = False
        if _fits(r * per_rank, max(i, j), limit[r], order, change):
            _cut(p, r, min(i, j), end, first)
            timed = run(p, order, position, length, source, lag, where, first, trial)
            work += timed if timed >= 0 else size
            if timed >= 0:
                span, makespan, mean = steps(p, order, length, trial)
                goal = makespan if by_makespan else span
                value = goal + EVEN * mean
                state = _next(state)
                accepted = value <= current or (state >> 8) / 8388608.0 < _exp(-(value - current) / heat)
            for q in range(p):
                stop = (q + 1) * per_rank
                if accepted:
                    end[first[q] : stop] = trial[first[q] : stop]
                else:
                    trial[first[q] : stop] = end[first[q] : stop]
        if not accepted:
            _shift(order, position, j, i)
            continue
        current = value
        links = 0
        if goal < best_goal - EPS or (goal < best_goal + EPS and value < best_value - EPS):
            best_goal = goal
            best_value = value
            for k in range(size):
                best[k] = order[k]
            if best_goal <= target + EPS:
                break
    return work


def _aim(
    i: int, m: int, per_kind: int, per_rank: int, order: Numbers, position: Numbers, state: int
) -> tuple[int, int]:
    """Where to move the op at place i: near places are likelier; `i` itself when it is hemmed in."""
    state = _next(state)
    shift = 1
    draw = state >> 8
    while shift < REACH and draw & 3 != 0:
        shift += 1
        draw >>= 2
    state = _next(state)
    j = i - shift if (state >> 16) & 1 else i + shift
    op = order[i]
    mb = op % m
    low = i // per_rank * per_rank
    high = low + per_rank - 1
    if mb > 0 and position[op - 1] >= low:
        low = position[op - 1] + 1
    if mb < m - 1 and position[op + 1] <= high:
        high = position[op + 1] - 1
    if op >= per_kind and position[op - per_kind] >= low:
        low = position[op - per_kind] + 1
    if op < 2 * per_kind and position[op + per_kind] <= high:
        high = position[op + per_kind] - 1
    return max(low, min(high, j)), state


def _trace(
    p: int,
    order: Numbers,
    position: Numbers,
    length: Numbers,
    source: Numbers,
    lag: Numbers,
    by_makespan: bool,
    end: Numbers,
    chain: Numbers,
    state: int,
) -> tuple[int, int]:
    """Fill `chain` with the places of a chain without gaps back from the last op of a rank; returns its length.

    Half the time the rank is the one that makes the objective, else any.
    """
    per_rank = len(order) // p
    state = _next(state)
    r = (state >> 8) % p
    state = _next(state)
    if (state >> 16) & 1:
        longest = -1.0
        for q in range(p):
            own = end[(q + 1) * per_rank - 1]
            if not by_makespan:
                own -= end[q * per_rank] - length[order[q * per_rank]]
            if own > longest + EPS:
                longest = own
                r = q
    k = (r + 1) * per_rank - 1
    links = 0
    while k >= 0:
        chain[links] = k
        links += 1
        op = order[k]
        soon = end[k] - length[op] - 1e-7
        behind = -1  # the place whose end this op waited for
        if k % per_rank > 0 and end[k - 1] >= soon:
            behind = k - 1
        if source[op] >= 0 and end[position[source[op]]] + lag[op] >= soon:
            state = _next(state)
            if behind < 0 or (state >> 16) & 1:
                behind = position[source[op]]
        k = behind
    return links, state


def _cut(p: int, r: int, place: int, end: Numbers, first: Numbers) -> None:
    """Fill `first`: per rank, from where on times may change when rank r changes from `place` on.

    What ends before the time at which that place can start cannot depend on it.
    """
    per_rank = len(end) // p
    since = end[place - 1] if place > r * per_rank else 0.0
    for q in range(p):
        low = q * per_rank
        high = low + per_rank
        while low < high:
            middle = (low + high) // 2
            if end[middle] >= since:
                high = middle
            else:
                low = middle + 1
        first[q] = low
    first[r] = place


def _next(state: int) -> int:
    """The next state of a linear congruential generator modulo 2^31; its high bits are the random number."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


def _exp(x: float) -> float:
    """e^x for x <= 0, to the few digits an acceptance needs, from operations that round alike everywhere."""
    if x < -30.0:
        return 0.0
    y = 1.0 + x / 1024.0
    for _ in range(10):
        y *= y
    return y


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


def _fits(start: int, last: int, limit: float, order: Numbers, change: Numbers) -> bool:
    """Whether a rank whose places begin at `start` keeps to its limit up to place `last`."""
    held = 0.0
    for k in range(start, last + 1):
        held += change[order[k]]
        if held > limit + ROOM:
            return False
    return True
