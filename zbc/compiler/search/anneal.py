"""Improves an order by annealing; a kernel like listing.py, which reads the columns of table.py.

The length of a step is set by a chain of ops, each of which starts when the one before it ends or its result arrives.
Moving an op off all such chains changes nothing, so most moves (moves.py) are drawn from the chain that ends at the
last op of some rank. The times that a move changes are computed in retiming.py.
"""

from __future__ import annotations

from math import log

from zbc.compiler.search.listing import EPS
from zbc.compiler.search.moves import carry, destination, fits, following, hold, shift_op, trace
from zbc.compiler.search.retiming import tails, tails_of_starts, take_back, time_far, time_near, too_long
from zbc.compiler.search.table import Fences, Numbers, Table
from zbc.compiler.search.timing import locate, run, steps

EVEN = 0.05  # weight of the mean span relative to the objective; it distinguishes plateaus
CHAINED = 60  # percent of the moves drawn from a chain
INSTANT = 1e-12  # share of a step below which an op counts as instant
KEPT = 8  # accepted moves after which a chain is traced again
MOVE_VISITS, PLACE_VISITS, CHANGE_VISITS = 16, 4, 7  # in op visits: a move, each place it spans, each time it changes
# Degrees by which a move may be worse, drawn at random; rounded, so that they are the same everywhere.
DRAWS = 1024
WORSE = [round(-log((k + 0.5) / DRAWS), 9) for k in range(DRAWS)]


def anneal(
    table: Table,
    fences: Fences,
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
    """Improve a feasible rank-major `order` by simulated annealing; `best` receives the best order found. A move shifts
    one op within its rank by up to REACH places, keeping to its fences and to the memory limit. The temperature falls
    geometrically from `hot` to `cold` ms over `moves` tried moves; the value is the objective plus EVEN of the mean
    span. Stops early at `target` and after `most` op visits. Returns the op visits. `worse` is WORSE."""
    size = len(order)
    first, rank, length, change, _, _, _ = table
    ops = (length, rank, fences.lowest, fences.highest, table.waits, table.feeds)
    position, chain, places = rank.copy(), rank.copy(), rank.copy()
    end, trial, tail = length.copy(), length.copy(), length.copy()
    held, times = length.copy(), length.copy()
    queued = rank.copy()
    for op in range(size):
        queued[op] = 0
    course, notes = (order, position, end, tail, queued), (places, times)
    zero = limit.copy()
    for r in range(len(limit)):
        zero[r] = 0.0
    begin = zero.copy()
    locate(order, position)
    hold(table, order, held)
    run(table, order, position, zero, end)
    best[:] = order
    span, makespan, mean = steps(table, order, end)
    goal = makespan if by_makespan else span
    best_goal = goal
    best_value = current = goal + EVEN * mean
    # Ops in a cycle of waits get later and later times, which reveals it, unless they are instant.
    instant = any_instant(table, INSTANT * makespan)
    work = size + CHANGE_VISITS * tails(0, size - 1, by_makespan, ops, course)
    for r in range(len(begin)):
        if first[r] < first[r + 1]:
            begin[r] = end[first[r]]
    state = seed
    for _ in range(8):
        state = following(state)
    cooling = (cold / hot) ** (1.0 / max(1, moves - 1))
    heat = hot
    links = 0  # length of the chain; 0: to be traced
    kept = 0  # moves since the chain was traced
    for _ in range(moves):
        if work >= most:
            break
        work += MOVE_VISITS
        heat *= cooling
        state = following(state)
        if (state >> 8) % 100 < CHAINED:
            if links == 0:
                links, state = trace(table, order, position, by_makespan, end, chain, state)
                work += links
                kept = 0
            state = following(state)
            i = position[chain[(state >> 8) % links]]
        else:
            state = following(state)
            i = (state >> 8) % size
        state = following(state)
        j, state = destination(i, fences, order, position, state)
        if i == j or not fits(i, j, limit[rank[order[i]]], order, change, held):
            continue
        work += PLACE_VISITS * (abs(i - j) + 1)
        state = following(state)
        allowed = current + heat * worse[(state >> 8) % DRAWS]
        shift_op(order, position, i, j)
        low, high = min(i, j), max(i, j)
        changed, fine = time_near(low, high, ops, course, notes)
        enough = allowed - EVEN * mean + EPS
        fine = fine and not too_long(low, high, enough, ops, course)
        if fine:
            near = changed
            changed, fine = time_far(i, j, near, enough, ops, course, notes)
            work += CHANGE_VISITS * (changed - near)
        value = even = 0.0
        if fine:
            span, makespan, even = steps(table, order, end)
            goal = makespan if by_makespan else span
            value = goal + EVEN * even
            fine = value <= allowed
        if fine and instant:
            work += size
            fine = run(table, order, position, zero, trial)
        if not fine:
            take_back(changed, notes, end)
            shift_op(order, position, j, i)
            continue
        carry(i, j, order, change, held)
        work += CHANGE_VISITS * tails(low, high, by_makespan, ops, course)
        # The tails of a rank count from its first start.
        work += CHANGE_VISITS * tails_of_starts(first, by_makespan, ops, course, begin)
        kept += 1
        if kept == KEPT or value != current:
            links = 0
        current, mean = value, even
        if goal < best_goal - EPS or (goal < best_goal + EPS and value < best_value - EPS):
            best_goal, best_value = goal, value
            best[:] = order
            if best_goal <= target + EPS:
                break
    return work


def any_instant(table: Table, least: float) -> bool:
    """Whether ops of at most `least` ms, which is nothing compared with a step, wait for others."""
    for op in range(len(table.rank)):  # noqa: SIM110 - no generators in compiled code
        if table.count[op] > 0 and table.length[op] <= least:
            return True
    return False
