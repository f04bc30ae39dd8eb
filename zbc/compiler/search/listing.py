"""The list scheduler of the search, on plain integers and the columns of table.py.

Every kernel, here and in the other modules of engine.py, runs unchanged on lists (standard library) and, compiled, on
arrays when numba is installed; both make the same decisions on the same doubles, so both find the same plans.

Ranks run in time. At each decision a rank picks F, B or W, which mean their families of ops, by a vector of knobs:

- MODE 0 prefers B, 2 prefers F, 1 alternates; LOOK: wait that share of an op for the preferred one. MODE 3 takes the
  smallest key, `key_f[s] + i * PERIOD` or `key_b[s] + i * PERIOD` in ms, waits up to LOOK (of the first F) for a
  smaller one, and starts nothing earlier than RELEASE ms before its key.
- no stage has more than `cap[s]` microbatches between F and B.
- W runs in gaps of at least W_GAP of its length; with W_SLACK also when this rank would become the idlest; with
  W_MEMORY at once when memory blocks an F.
- FIRST_B: a warm-up F may put off the earliest possible first B by that share of itself (9 and more: no limit).
- of several stages the latest; with PICK_B the earliest with a B.
- if B leaves more than it frees, room for that is reserved, and W runs as soon as a B needs it.
- an F must leave a unit for each later stage of its rank, or it could deadlock: with slices, the rest of the microbatch
  that the stage runs next, since no slice returns before the last one has arrived. RESERVE and RESERVE_LATER scale the
  reserve beyond that, before and after the first B, while anything is in flight.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, NamedTuple

from zbc.compiler.search.table import Numbers, Table

INF = 1e300
EPS = 1e-9
ROOM = 1e-6  # slack of memory comparisons, in activation units
WAIT, FORWARD, INPUT, WEIGHT = range(4)  # decisions of a rank: nothing yet, or an op of a family


class Seats(NamedTuple):
    """The stages of all ranks, rank by rank and in path order; rank r has the seats `first[r]` to `first[r + 1]`. By
    seat: its stage, its number of units, and its first op of each family."""

    first: Numbers
    stage: Numbers
    units: Numbers
    forward: Numbers
    input: Numbers
    weight: Numbers


# Arguments of a kernel called in every step, in the order in which its first lines unpack them: Python unpacks a plain
# tuple of any size faster than any named structure.
View = Any
# A seat that can start an op of a family, -1 for none, and its key; the next time one may be ready; the least key of
# ops near enough to wait for; whether only memory keeps one from starting.
Choice = tuple[int, float, float, float, bool]
NONE: Choice = (-1, -INF, INF, INF, False)


def list_schedule(
    table: Table,
    seats: Seats,
    limit: Numbers,
    room: Numbers,
    first_b: Numbers,
    reserve: Numbers,
    knobs: Numbers,
    key_f: Numbers,
    key_b: Numbers,
    cap: Numbers,
    slices: int,
    unequal: bool,
    blank: tuple[Numbers, Numbers, Numbers, Numbers],
    order: Numbers,
) -> bool:
    """Event-driven list scheduling under a memory limit; fills `order` rank by rank. False if it got stuck. `room` are
    the units a rank may hold with an F; `blank` are zeros by op and by rank, whole ones by seat and by rank."""
    by_op, by_rank, seat_count, rank_count = blank
    first, rank, length, change, count, _, (feeds, reader, lag, after) = table
    seat_first, stage, units, forward, inputs, weight = seats
    mode, w_gap, w_slack, look, w_memory = knobs[0], knobs[1], knobs[2] > 0.5, knobs[4], knobs[6] > 0.5
    missing, ready, started, returned = count.copy(), by_op.copy(), seat_count.copy(), seat_count.copy()
    held, flying, had_b = by_rank.copy(), by_rank.copy(), rank_count.copy()
    free, idle, last_f, unstarted = by_rank.copy(), by_rank.copy(), rank_count.copy(), rank_count.copy()
    b_rules = (mode == 3, look * length[0], knobs[9], knobs[10], knobs[5])
    f_rules = (mode == 3, look * length[0], knobs[9], knobs[10], knobs[3], knobs[7], knobs[8])
    b_seats = (seat_first, stage, units, inputs, change, missing, ready, returned, held, limit, key_b)
    f_seats = (seat_first, stage, units, forward, change, missing, ready, started, returned, held, room, key_f)
    f_more = (cap, reserve, first_b, length, flying, had_b, slices, unequal)
    due = order.copy()  # by rank a queue of W whose B has run, from `head` to `tail`
    head, tail, place, wake = first.copy(), first.copy(), first.copy(), by_rank.copy()
    heap = first_calls(seats, count, wake, unstarted)
    worst = 0.0
    left = len(order)
    while left > 0:
        if len(heap) == 0:
            return False
        now, r = heappop(heap)
        if now != wake[r]:
            continue
        if now < free[r]:
            now = free[r]
        b_seat, b_key, next_b, soon_b, full = choose_b(r, now, b_rules, b_seats)
        f_seat, f_key, next_f, soon_f, blocked = NONE
        if unstarted[r] > 0:
            f_seat, f_key, next_f, soon_f, blocked = choose_f(r, now, f_rules, f_seats, f_more)
        act, later = WAIT, next_f if next_f < next_b else next_b
        if mode == 3:
            if f_seat >= 0 or b_seat >= 0:
                act = FORWARD if f_key > b_key else INPUT
                if -(soon_f if soon_f < soon_b else soon_b) > (f_key if act == FORWARD else b_key):
                    act = WAIT
        elif f_seat >= 0 or b_seat >= 0:
            wait_b = next_b <= now + look * length[forward[f_seat]]
            wait_f = next_f <= now + look * length[inputs[b_seat]]
            act = by_turns(mode, last_f[r], had_b[r], f_seat, b_seat, wait_b, wait_f)
            if act == WAIT:
                later = next_b if f_seat >= 0 else next_f
        if act == WAIT and head[r] < tail[r]:
            gap = later - now
            if (
                full
                or (blocked and w_memory and next_b > now + EPS and b_seat < 0)
                or gap >= w_gap * length[due[head[r]]] - EPS
                or (w_slack and gap > worst - idle[r] + EPS)
            ):
                act = WEIGHT
        if act == WAIT:
            wake[r] = INF
            if later < INF / 2:
                wake[r] = later if later > now else now + EPS
                heappush(heap, (wake[r], r))
            continue
        if place[r] > first[r]:
            idle[r] += now - free[r]
            if idle[r] > worst:
                worst = idle[r]
        if act == WEIGHT:
            op = due[head[r]]
            head[r] += 1
        elif act == FORWARD:
            op = forward[f_seat] + started[f_seat]
            started[f_seat] += 1
            unstarted[r] -= 1
            flying[r] += change[op]
            last_f[r] = 1
        else:
            op = inputs[b_seat] + returned[b_seat]
            i = returned[b_seat]
            due[tail[r]] = weight[b_seat] + i
            tail[r] += 1
            returned[b_seat] += 1
            flying[r] -= change[forward[b_seat] + i - 2 * (i % slices) + slices - 1]
            last_f[r] = 0
            had_b[r] = 1
        held[r] += change[op]
        order[place[r]] = op
        place[r] += 1
        left -= 1
        end = now + length[op]
        free[r] = wake[r] = end
        heappush(heap, (end, r))
        edge = feeds[op]
        while edge >= 0:
            t = reader[edge]
            at = end + lag[edge]
            if at < ready[t]:
                at = ready[t]
            ready[t] = at
            more = missing[t] - 1
            missing[t] = more
            there = rank[t]
            if more == 0 and there != r:
                if at < free[there]:
                    at = free[there]
                if at < wake[there]:
                    wake[there] = at
                    heappush(heap, (at, there))
            edge = after[edge]
    return True


def first_calls(seats: Seats, count: Numbers, wake: Numbers, unstarted: Numbers) -> list[tuple[float, int]]:
    """The ranks with an F that waits for nothing; fills each rank's first call, and its number of F to start."""
    heap = [(0.0, 0)]
    heappop(heap)
    for r in range(len(wake)):
        wake[r] = INF
        for seat in range(seats.first[r], seats.first[r + 1]):
            unstarted[r] += seats.units[seat]
            if count[seats.forward[seat]] == 0:
                wake[r] = 0.0
        if wake[r] < INF:
            heappush(heap, (wake[r], r))
    return heap


def by_turns(mode: float, last_f: int, had_b: int, f_seat: int, b_seat: int, wait_b: bool, wait_f: bool) -> int:
    """The op to run by a policy without keys; it may wait for a B or an F instead if one comes soon enough."""
    if f_seat >= 0 and b_seat >= 0:
        return FORWARD if mode == 2 or (mode == 1 and last_f == 0) else INPUT
    if f_seat >= 0:
        return WAIT if wait_b and had_b == 1 and (mode == 0 or (mode == 1 and last_f == 1)) else FORWARD
    if b_seat >= 0:
        return WAIT if wait_f and (mode == 2 or (mode == 1 and last_f == 0 and had_b == 1)) else INPUT
    return WAIT


def choose_b(r: int, now: float, rules: View, seats: View) -> Choice:
    """The B that rank r should start."""
    keyed, look_ms, period, release, pick = rules
    first, stage, units, base, change, missing, ready, returned, held, limit, keys = seats
    best, key_best, later, least, full = -1, -INF, INF, INF, False
    soon = now + EPS
    for seat in range(first[r], first[r + 1]):
        i = returned[seat]
        op = base[seat] + i
        if i == units[seat] or missing[op] > 0:
            continue
        at = ready[op]
        s = stage[seat]
        if keyed:
            key = keys[s] + i * period
            if key - release > at:
                at = key - release
            if at > soon and at <= now + look_ms and key < least:
                least = key
            key = -key
        else:
            key = s * 1.0 if pick == 0 else -1.0 * s
        if at > soon:
            if at < later:
                later = at
        elif held[r] + change[op] > limit[r] + ROOM:
            full = True
        elif key > key_best:
            key_best = key
            best = seat
    return best, key_best, later, least, full


def choose_f(r: int, now: float, rules: View, seats: View, more: View) -> Choice:
    """The F that rank r should start."""
    keyed, look_ms, period, release, overshoot, early, late = rules
    first, stage, units, base, change, missing, ready, started, returned, held, room, keys = seats
    cap, reserve, first_b, length, flying, had_b, slices, unequal = more
    low, high = first[r], first[r + 1]
    best, key_best, later, least, blocked = -1, -INF, INF, INF, False
    soon = now + EPS
    for seat in range(low, high):
        i = started[seat]
        s = stage[seat]
        op = base[seat] + i
        if i == units[seat] or i - returned[seat] >= cap[s] or missing[op] > 0:
            continue
        at = ready[op]
        if overshoot < 9.0 and i >= slices and had_b[r] == 0:
            begin = now if at <= now else at
            if begin + length[op] > first_b[r] + overshoot * length[op] + EPS:
                continue
        if keyed:
            key = keys[s] + i * period
            if key - release > at:
                at = key - release
        else:
            key = s * 1.0
        most = held[r] + change[op]  # with the reserve for later stages of the rank, as far as it matters
        other = seat + 1
        while other < high and most <= room[r] + ROOM:
            need = 1.0
            if seat == low and flying[r] > EPS:
                rest = units[other] - started[other]
                need = (late if had_b[r] == 1 else early) * reserve[other] - (started[other] - returned[other])
                if need > rest:
                    need = 1.0 * rest
                if need < 1.0:
                    need = 1.0
            if slices == 1 and not unequal:
                most += change[base[other]] * ((need + EPS) // 1.0)
            else:
                unit = started[other]
                end = unit + slices - unit % slices
                while unit < units[other] and (unit < end or unit + 1.0 <= started[other] + need + EPS):
                    most += change[base[other] + unit]
                    unit += 1
            other += 1
        if most > room[r] + ROOM:
            if at <= soon:
                blocked = True
            continue
        if keyed:
            if at > soon and at <= now + look_ms and key < least:
                least = key
            key = -key
        if at > soon:
            if at < later:
                later = at
        elif key > key_best:
            key_best = key
            best = seat
    return best, key_best, later, least, blocked
