"""Improving an order by annealing; a kernel like listing.py, whose numbering of ops it shares.

What makes a step long is a chain of ops, each of which starts when the one before it ends or its result arrives. Moving
an op that is on no such chain changes nothing, so most moves (moves.py) are drawn from the chain that ends at the last
op of some rank. What a move changes of the times is in retiming.py.
"""

from __future__ import annotations

from math import log

from zbc.compiler.search.listing import EPS
from zbc.compiler.search.moves import carry, destination, fits, following, hold, shift_op, trace
from zbc.compiler.search.retiming import tails, tails_of_starts, take_back, time_far, time_near
from zbc.compiler.search.timing import Numbers, locate, run, steps

EVEN = 0.05  # weight of the mean span beside the objective; it tells plateaus apart
CHAINED = 60  # percent of the moves that are drawn from a chain
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
    hold(p, order, change, held)
    work = run(p, order, position, length, source, lag, where, starts, end)
    for k in range(size):
        best[k] = order[k]
    span, makespan, mean = steps(p, order, length, end)
    goal = makespan if by_makespan else span
    best_goal = goal
    best_value = current = goal + EVEN * mean
    work += CHANGE_VISITS * tails(
        p, 0, size - 1, order, position, length, aim, lag, source, by_makespan, end, tail, queued
    )
    begin = [end[k] for k in starts]
    state = seed
    for _ in range(8):
        state = following(state)
    cooling = (cold / hot) ** (1.0 / max(1, moves - 1))
    heat = hot
    links = 0  # of the chain; 0: to be traced
    kept = 0  # moves since it was
    for _ in range(moves):
        if work >= most:
            break
        work += MOVE_VISITS
        heat *= cooling
        state = following(state)
        if (state >> 8) % 100 < CHAINED:
            if links == 0:
                links, state = trace(p, order, position, length, source, lag, by_makespan, end, chain, state)
                work += links
                kept = 0
            state = following(state)
            i = position[chain[(state >> 8) % links]]
        else:
            state = following(state)
            i = (state >> 8) % size
        state = following(state)
        j, state = destination(i, m, per_kind, per_rank, order, position, state)
        if i == j:
            continue
        r = i // per_rank
        low, high = min(i, j), max(i, j)
        if not fits(i, j, limit[r], order, change, held):
            continue
        work += PLACE_VISITS * (high - low + 1)
        state = following(state)
        allowed = current + heat * worse[(state >> 8) % DRAWS]
        shift_op(order, position, i, j)
        most_goal = allowed - EVEN * mean + EPS
        changed, fine = time_near(
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
            changed, fine = time_far(
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
            take_back(changed, places, times, end)
            shift_op(order, position, j, i)
            continue
        carry(i, j, order, change, held)
        work += CHANGE_VISITS * tails(
            p, low, high, order, position, length, aim, lag, source, by_makespan, end, tail, queued
        )
        # The tails of a rank count from its first start.
        work += CHANGE_VISITS * tails_of_starts(
            p, order, position, length, aim, lag, source, by_makespan, end, tail, queued, begin
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
