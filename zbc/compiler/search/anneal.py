"""Improving an order by annealing; a kernel like listing.py, whose numbering of ops it shares.

What makes a step long is a chain of ops, each of which starts when the one before it ends or its result arrives. Moving
an op that is on no such chain changes nothing, so most moves are drawn from the chain that ends at the last op of some
rank. Of each place two times are kept: when its op ends, and how long the step goes on behind that (`tail`). With them
a look at the moved ops alone tells most moves that make the step longer; what is left is timed anew where it changes.

Random numbers come from `_next`, so that compiled and plain runs draw the same.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import log

from zbc.compiler.search.listing import EPS, ROOM
from zbc.compiler.search.timing import Numbers, locate, run, steps

EVEN = 0.05  # weight of the mean span beside the objective; it tells plateaus apart
CHAINED = 60  # percent of the moves that are drawn from a chain
REACH = 12  # places a move spans at most
KEPT = 8  # accepted moves after which a chain is traced anew
MOVE_VISITS, PLACE_VISITS, CHANGE_VISITS = 16, 4, 7  # in op visits: a move, each place it spans, each time it changes
# By how many degrees a move may be worse, drawn at random; with digits that are the same everywhere.
DRAWS = 1024
WORSE = [round(-log((k + 0.5) / DRAWS), 9) for k in range(DRAWS)]


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
    worse: Numbers,
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
    at `target` and after `most` op visits. Returns the op visits. `worse` is WORSE.
    """
    size = len(order)
    per_rank = size // p
    position, aim, chain, queued = source.copy(), source.copy(), source.copy(), source.copy()
    end, trial, tail, held = length.copy(), length.copy(), length.copy(), length.copy()
    places, times = source.copy(), length.copy()  # of the times that a move has changed, and what these were
    starts = [r * per_rank for r in range(p)]
    locate(order, position)
    for op in range(size):
        aim[op] = -1  # the op that waits for its result
        queued[op] = 0
    instant = False  # whether ops that take no time might wait for one another, which no time tells
    for op in range(size):
        if source[op] >= 0:
            aim[source[op]] = op
            instant = instant or length[op] <= 0.0
    for r in range(p):
        amount = 0.0
        for k in range(r * per_rank, (r + 1) * per_rank):
            amount += change[order[k]]
            held[k] = amount
    work = run(p, order, position, length, source, lag, where, starts, end)
    for k in range(size):
        best[k] = order[k]
    span, makespan, mean = steps(p, order, length, end)
    goal = makespan if by_makespan else span
    best_goal = goal
    best_value = current = goal + EVEN * mean
    work += CHANGE_VISITS * _tails(
        p, 0, size - 1, order, position, length, aim, lag, source, by_makespan, end, tail, queued
    )
    begin = [end[k] for k in starts]
    state = seed
    for _ in range(8):
        state = _next(state)
    cooling = (cold / hot) ** (1.0 / max(1, moves - 1))
    heat = hot
    links = 0  # of the chain; 0: to be traced
    kept = 0  # moves since it was
    for _ in range(moves):
        if work >= most:
            break
        work += MOVE_VISITS
        heat *= cooling
        state = _next(state)
        if (state >> 8) % 100 < CHAINED:
            if links == 0:
                links, state = _trace(p, order, position, length, source, lag, by_makespan, end, chain, state)
                work += links
                kept = 0
            state = _next(state)
            i = position[chain[(state >> 8) % links]]
        else:
            state = _next(state)
            i = (state >> 8) % size
        state = _next(state)
        j, state = _aim(i, m, per_kind, per_rank, order, position, state)
        if i == j:
            continue
        r = i // per_rank
        low, high = min(i, j), max(i, j)
        if not _fits(i, j, limit[r], order, change, held):
            continue
        work += PLACE_VISITS * (high - low + 1)
        state = _next(state)
        allowed = current + heat * worse[(state >> 8) % DRAWS]
        _shift(order, position, i, j)
        most_goal = allowed - EVEN * mean + EPS
        changed, fine = _near(
            low,
            high,
            per_rank,
            most_goal,
            order,
            position,
            length,
            source,
            lag,
            where,
            aim,
            end,
            tail,
            places,
            times,
        )
        if fine:
            near = changed
            changed, fine = _far(
                low,
                high,
                i,
                j,
                near,
                per_rank,
                most_goal,
                order,
                position,
                length,
                source,
                lag,
                aim,
                end,
                tail,
                queued,
                places,
                times,
            )
            work += CHANGE_VISITS * (changed - near)
        accepted = False
        if fine:
            span, makespan, even = steps(p, order, length, end)
            goal = makespan if by_makespan else span
            value = goal + EVEN * even
            accepted = value <= allowed
        better = accepted and (goal < best_goal - EPS or (goal < best_goal + EPS and value < best_value - EPS))
        if better and instant:
            work += size
            accepted = run(p, order, position, length, source, lag, where, starts, trial) >= 0
        if not accepted:
            while changed > 0:
                changed -= 1
                end[places[changed]] = times[changed]
            _shift(order, position, j, i)
            continue
        _carry(i, j, order, change, held)
        work += CHANGE_VISITS * _tails(
            p, low, high, order, position, length, aim, lag, source, by_makespan, end, tail, queued
        )
        for q in range(p):  # the tails of a rank count from its first start
            if begin[q] != end[starts[q]]:
                begin[q] = end[starts[q]]
                k = starts[q] + per_rank - 1
                work += CHANGE_VISITS * _tails(
                    p, k, k, order, position, length, aim, lag, source, by_makespan, end, tail, queued
                )
        kept += 1
        if kept == KEPT or value != current:
            links = 0
        current, mean = value, even
        if better:
            best_goal, best_value = goal, value
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
    """Fill `chain` with the ops of a chain without gaps back from the last op of a rank; returns its length.

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
        op = order[k]
        chain[links] = op
        links += 1
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


def _near(
    low: int,
    high: int,
    per_rank: int,
    most: float,
    order: Numbers,
    position: Numbers,
    length: Numbers,
    source: Numbers,
    lag: Numbers,
    where: Numbers,
    aim: Numbers,
    end: Numbers,
    tail: Numbers,
    places: Numbers,
    times: Numbers,
) -> tuple[int, bool]:
    """Time the places `low` to `high` after a move from i to j, as if nothing else changed.

    Returns how many times it changed, which are noted in `places` and `times`, and whether the step may be at most
    `most` with them.
    """
    r = low // per_rank
    time = end[low - 1] if low > r * per_rank else 0.0
    for k in range(low, high + 1):
        op = order[k]
        q = source[op]
        places[k - low] = k
        times[k - low] = end[k]
        if q >= 0:
            place = position[q]
            if where[q] == r and place > k:
                return k - low, False
            if end[place] + lag[op] > time:
                time = end[place] + lag[op]
        time += length[op]
        end[k] = time
    behind = length[order[high + 1]] + tail[high + 1] if (high + 1) % per_rank else tail[high]
    for k in range(high, low - 1, -1):
        op = order[k]
        t = aim[op]
        if t >= 0 and where[t] != r:
            after = lag[t] + length[t] + tail[position[t]]
            if after > behind:
                behind = after
        if end[k] + behind > most:
            return high - low + 1, False
        behind += length[op]
    return high - low + 1, True


def _far(
    low: int,
    high: int,
    i: int,
    j: int,
    changed: int,
    per_rank: int,
    most: float,
    order: Numbers,
    position: Numbers,
    length: Numbers,
    source: Numbers,
    lag: Numbers,
    aim: Numbers,
    end: Numbers,
    tail: Numbers,
    queued: Numbers,
    places: Numbers,
    times: Numbers,
) -> tuple[int, bool]:
    """Time what the new times of the places `low` to `high` change elsewhere; returns as `_near`.

    In the order of the times before, so that hardly anything is timed twice. Ops that wait for one another come later
    and later, until one exceeds `most`.
    """
    size = len(order)
    heap = [(0.0, 0)]
    heappop(heap)
    for k in range(low, high + 1):
        before = times[(i if k == j else k + 1 if i < j else k - 1) - low]
        t = aim[order[k]]
        if t >= 0 and end[k] != before:
            place = position[t]
            if (place < low or place > high) and queued[place] == 0:
                queued[place] = 1
                heappush(heap, (end[place], place))
    if end[high] != times[high - low] and (high + 1) % per_rank and queued[high + 1] == 0:
        queued[high + 1] = 1
        heappush(heap, (end[high + 1], high + 1))
    fine = True
    while len(heap) > 0:
        _, k = heappop(heap)
        queued[k] = 0
        if not fine:
            continue
        op = order[k]
        time = end[k - 1] if k % per_rank else 0.0
        q = source[op]
        if q >= 0 and end[position[q]] + lag[op] > time:
            time = end[position[q]] + lag[op]
        time += length[op]
        if time == end[k]:
            continue
        if changed == size or time + tail[k] > most:
            fine = False
            continue
        places[changed] = k
        times[changed] = end[k]
        changed += 1
        end[k] = time
        if (k + 1) % per_rank and queued[k + 1] == 0:
            queued[k + 1] = 1
            heappush(heap, (end[k + 1], k + 1))
        t = aim[op]
        if t >= 0 and queued[position[t]] == 0:
            place = position[t]
            queued[place] = 1
            heappush(heap, (end[place], place))
    return changed, fine


def _tails(
    p: int,
    low: int,
    high: int,
    order: Numbers,
    position: Numbers,
    length: Numbers,
    aim: Numbers,
    lag: Numbers,
    source: Numbers,
    by_makespan: bool,
    end: Numbers,
    tail: Numbers,
    queued: Numbers,
) -> int:
    """Compute the tails anew that follow from the order of places `low` to `high`; returns how many.

    A tail is the longest way from the end of the op at a place to the end of a rank, less what comes before the first
    op of that rank where it is the span that counts.
    """
    size = len(order)
    per_rank = size // p
    heap = [(0.0, 0)]
    heappop(heap)
    for k in range(low, high + 1):
        queued[k] = 1
        heappush(heap, (-end[k], k))
        q = source[order[k]]
        if q >= 0 and queued[position[q]] == 0:
            queued[position[q]] = 1
            heappush(heap, (-end[position[q]], position[q]))
    if low % per_rank and queued[low - 1] == 0:
        queued[low - 1] = 1
        heappush(heap, (-end[low - 1], low - 1))
    count = 0
    while len(heap) > 0:
        _, k = heappop(heap)
        queued[k] = 0
        count += 1
        op = order[k]
        if (k + 1) % per_rank:
            behind = length[order[k + 1]] + tail[k + 1]
        elif by_makespan:
            behind = 0.0
        else:
            first = k + 1 - per_rank
            behind = length[order[first]] - end[first]
        t = aim[op]
        if t >= 0 and lag[t] + length[t] + tail[position[t]] > behind:
            behind = lag[t] + length[t] + tail[position[t]]
        if behind == tail[k]:
            continue
        tail[k] = behind
        if k % per_rank and queued[k - 1] == 0:
            queued[k - 1] = 1
            heappush(heap, (-end[k - 1], k - 1))
        q = source[op]
        if q >= 0 and queued[position[q]] == 0:
            queued[position[q]] = 1
            heappush(heap, (-end[position[q]], position[q]))
    return count


def _next(state: int) -> int:
    """The next state of a linear congruential generator modulo 2^31; its high bits are the random number."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


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


def _fits(i: int, j: int, limit: float, order: Numbers, change: Numbers, held: Numbers) -> bool:
    """Whether the rank keeps to its limit if the op at place i moves to j; `held` is what it holds after each."""
    own = change[order[i]]
    if i < j:
        if own < 0.0:
            for k in range(i + 1, j + 1):
                if held[k] - own > limit + ROOM:
                    return False
    elif own > 0.0:
        if held[j] - change[order[j]] + own > limit + ROOM:
            return False
        for k in range(j, i):
            if held[k] + own > limit + ROOM:
                return False
    return True


def _carry(i: int, j: int, order: Numbers, change: Numbers, held: Numbers) -> None:
    """Bring `held` up to date after the move of an op from place i to j."""
    own = change[order[j]]
    if i < j:
        for k in range(i, j):
            held[k] = held[k + 1] - own
    else:
        for k in range(i, j, -1):
            held[k] = held[k - 1] + own
        held[j] = held[j + 1] - change[order[j + 1]]
