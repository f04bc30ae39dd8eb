"""The list scheduler of the search, on plain integers and flat sequences.

Ops are numbered `kind * S*m + stage * m + microbatch` with kinds F = 0, B = 1, W = 2, so predecessors are arithmetic.
Every kernel, here and in the other modules of engine.py, runs unchanged on lists (standard library) and, compiled, on
arrays when numba is installed; both make the same decisions on the same doubles, so both find the same plans.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

Numbers = Any  # a flat list, or an array of the same length when compiled
INF = 1e300
EPS = 1e-9
ROOM = 1e-6  # slack of memory comparisons, in activation units


def list_schedule(
    p: int,
    m: int,
    v: int,
    rank: Numbers,
    stages: Numbers,
    f_ms: Numbers,
    b_ms: Numbers,
    w_ms: Numbers,
    lag: Numbers,
    keep_b: Numbers,
    keep_w: Numbers,
    limit: Numbers,
    first_b: Numbers,
    reserve: Numbers,
    knobs: Numbers,
    key_f: Numbers,
    key_b: Numbers,
    cap: Numbers,
    order: Numbers,
) -> tuple[int, float, float]:
    """Event-driven list scheduling under a memory limit; fills `order` rank by rank, 3*v*m ops each.

    Returns (0, longest span, makespan), or (1, 0, 0) when it got stuck. At each decision a rank picks F, B or W:

    - MODE 0 prefers B, 2 prefers F, 1 alternates; LOOK: wait that share of an op for the preferred one. MODE 3 takes
      the smallest key, `key_f[s] + i * PERIOD` or `key_b[s] + i * PERIOD` in ms, waits up to LOOK (of an F) for a
      smaller one, and starts nothing earlier than RELEASE ms before its key.
    - no stage has more than `cap[s]` microbatches between F and B.
    - W runs in gaps of at least W_GAP of its length; with W_SLACK also when this rank would become the idlest; with
      W_MEMORY at once when memory blocks an F.
    - FIRST_B: a warm-up F may put off the earliest possible first B by that share of itself (9 and more: no limit).
    - PICK_F, PICK_B: of several chunks the latest stage (0), the earliest (1) or the oldest microbatch (2).
    - where B leaves more than it frees, room for that is kept free, and W runs as soon as a B needs it.
    - an F must leave a unit for each later chunk of its rank, or it could deadlock; RESERVE and RESERVE_LATER scale
      what is kept for them beyond that, before and after the first B, while anything is in flight.
    """
    n_stages = p * v
    per_kind = n_stages * m
    mode, w_gap, w_slack = knobs[0], knobs[1], knobs[2] > 0.5
    overshoot, look = knobs[3], knobs[4]
    pick_f, pick_b, w_memory = knobs[5], knobs[6], knobs[7] > 0.5
    reserve_early, reserve_late = knobs[8], knobs[9]
    keyed, period, release = mode == 3, knobs[10], knobs[11]
    look_ms = look * f_ms[0]
    f_next = [0] * n_stages
    b_next = [0] * n_stages
    f_end = [0.0] * per_kind
    b_end = [0.0] * per_kind
    free = [0.0] * p
    held = [0.0] * p
    flying = [0.0] * p
    began = [-1.0] * p
    idle = [0.0] * p
    last_f = [False] * p
    had_b = [False] * p
    pending = [0] * per_kind  # per rank a queue of B ops whose W is due, v*m slots each
    head = [0] * p
    tail = [0] * p
    count = [0] * p
    wake = [INF] * p
    per_rank = 3 * v * m
    queue = v * m
    wake[rank[0]] = 0.0
    heap = [(0.0, rank[0])]
    total = 3 * per_kind
    done = 0
    growth = [0.0] * p  # the most that a B leaves beyond what it frees; an F keeps that room for it
    for r in range(p):
        for k in range(v):
            s = stages[r * v + k]
            if keep_w[s] - keep_b[s] > growth[r]:
                growth[r] = keep_w[s] - keep_b[s]
    worst = 0.0
    while done < total:
        if len(heap) == 0:
            return 1, 0.0, 0.0
        now, r = heappop(heap)
        if now != wake[r]:
            continue
        if now < free[r]:
            now = free[r]
        soon = now + EPS
        best_f = -1
        best_b = -1
        key_f_best = -INF
        key_b_best = -INF
        next_f = INF
        next_b = INF
        next_key = INF
        blocked = False
        full = False
        for k in range(v):
            s = stages[r * v + k]
            i = b_next[s]
            if i < m:
                ready = -1.0
                if s == n_stages - 1:
                    if f_next[s] > i:
                        ready = f_end[s * m + i]
                elif b_next[s + 1] > i:
                    ready = b_end[(s + 1) * m + i] + lag[s + 1]
                if ready >= 0.0:
                    key = s * 1.0
                    if keyed:
                        key = key_b[s] + i * period
                        if key - release > ready:
                            ready = key - release
                        if soon < ready <= now + look_ms and key < next_key:
                            next_key = key
                        key = -key
                    if ready <= soon and held[r] + keep_w[s] - keep_b[s] > limit[r] + ROOM:
                        full = True
                    elif ready <= soon:
                        if keyed:
                            pass
                        elif pick_b == 1:
                            key = -1.0 * s
                        elif pick_b == 2:
                            key = s - 1.0 * i * n_stages
                        if key > key_b_best:
                            key_b_best = key
                            best_b = s
                    elif ready < next_b:
                        next_b = ready
            i = f_next[s]
            if i < m and i - b_next[s] < cap[s]:
                ready = -1.0
                if s == 0:
                    ready = 0.0
                elif f_next[s - 1] > i:
                    ready = f_end[(s - 1) * m + i] + lag[s]
                if ready >= 0.0:
                    spare = 0.0
                    for k2 in range(k + 1, v):
                        s2 = stages[r * v + k2]
                        need = 1.0
                        if k == 0 and flying[r] > EPS:
                            scale = reserve_late if had_b[r] else reserve_early
                            need = scale * reserve[r * v + k2] - (f_next[s2] - b_next[s2])
                            if need > m - f_next[s2]:
                                need = 1.0 * (m - f_next[s2])
                            if need < 1.0:
                                need = 1.0
                        spare += keep_b[s2] * ((need + EPS) // 1.0)
                    allowed = True
                    if i > 0 and overshoot < 9.0 and not had_b[r]:
                        begin = now if ready <= now else ready
                        if begin + f_ms[s] > first_b[r] + overshoot * f_ms[s] + EPS:
                            allowed = False
                    key = s * 1.0
                    if keyed:
                        key = key_f[s] + i * period
                        if key - release > ready:
                            ready = key - release
                    if allowed:
                        if held[r] + keep_b[s] + spare + growth[r] <= limit[r] + ROOM:
                            if keyed:
                                if soon < ready <= now + look_ms and key < next_key:
                                    next_key = key
                                key = -key
                            if ready <= soon:
                                if keyed:
                                    pass
                                elif pick_f == 1:
                                    key = -1.0 * s
                                elif pick_f == 2:
                                    key = s - 1.0 * i * n_stages
                                if key > key_f_best:
                                    key_f_best = key
                                    best_f = s
                            elif ready < next_f:
                                next_f = ready
                        elif ready <= soon:
                            blocked = True
        later = next_f if next_f < next_b else next_b
        act = 0
        if keyed:
            if best_f >= 0 or best_b >= 0:
                act = 1 if key_f_best > key_b_best else 2
                if -next_key > (key_f_best if act == 1 else key_b_best):
                    act = 0
        elif best_f >= 0 and best_b >= 0:
            if mode == 0:
                act = 2
            elif mode == 2:
                act = 1
            else:
                act = 2 if last_f[r] else 1
        elif best_f >= 0:
            act = 1
            if (mode == 0 or (mode == 1 and last_f[r])) and had_b[r] and next_b <= now + look * f_ms[best_f]:
                act = 0
                later = next_b
        elif best_b >= 0:
            act = 2
            if (mode == 2 or (mode == 1 and not last_f[r] and had_b[r])) and next_f <= now + look * b_ms[best_b]:
                act = 0
                later = next_f
        if act == 0 and head[r] < tail[r]:
            s = pending[r * queue + head[r]] // m
            gap = later - now
            if (
                full
                or (blocked and w_memory and next_b > soon and best_b < 0)
                or gap >= w_gap * w_ms[s] - EPS
                or (w_slack and gap > worst - idle[r] + EPS)
            ):
                act = 3
        if act == 0:
            if later < INF / 2:
                at = later if later > now else now + EPS
                wake[r] = at
                heappush(heap, (at, r))
            else:
                wake[r] = INF
            continue
        if began[r] < 0.0:
            began[r] = now
        else:
            idle[r] += now - free[r]
            if idle[r] > worst:
                worst = idle[r]
        there = r
        arrival = 0.0
        if act == 1:
            s = best_f
            i = f_next[s]
            end = now + f_ms[s]
            op = s * m + i
            f_end[op] = end
            f_next[s] = i + 1
            held[r] += keep_b[s]
            flying[r] += keep_b[s]
            last_f[r] = True
            if s < n_stages - 1:
                there = rank[s + 1]
                arrival = end + lag[s + 1]
        elif act == 2:
            s = best_b
            i = b_next[s]
            end = now + b_ms[s]
            op = s * m + i
            b_end[op] = end
            b_next[s] = i + 1
            held[r] += keep_w[s] - keep_b[s]
            flying[r] -= keep_b[s]
            pending[r * queue + tail[r]] = op
            tail[r] += 1
            op += per_kind
            last_f[r] = False
            had_b[r] = True
            if s > 0:
                there = rank[s - 1]
                arrival = end + lag[s]
        else:
            op = pending[r * queue + head[r]]
            head[r] += 1
            s = op // m
            end = now + w_ms[s]
            held[r] -= keep_w[s]
            op += 2 * per_kind
        order[r * per_rank + count[r]] = op
        count[r] += 1
        done += 1
        free[r] = end
        wake[r] = end
        heappush(heap, (end, r))
        if there != r:
            at = arrival if arrival > free[there] else free[there]
            if at < wake[there]:
                wake[there] = at
                heappush(heap, (at, there))
    span = 0.0
    makespan = 0.0
    for r in range(p):
        if free[r] - began[r] > span:
            span = free[r] - began[r]
        if free[r] > makespan:
            makespan = free[r]
    return 0, span, makespan
