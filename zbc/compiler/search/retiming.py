"""Updates only the times that a move changes; kernels like listing.py, which read the columns of table.py.

Each place has two times: the end of its op, and the length of the step after that (`tail`). With them the moved ops
alone reveal most moves that make the step longer; for the rest, changed times are computed.
"""

from __future__ import annotations

from heapq import heappop, heappush

from zbc.compiler.search.table import Links, Numbers

CYCLE = 100  # computations per tail, on average, that indicate a cycle
# (order, position, end, tail, queued): the ops by place, the place of each op, its two times by place, and by place
# whether it is queued for timing, 0 or 1.
Course = tuple[Numbers, Numbers, Numbers, Numbers, Numbers]
Notes = tuple[Numbers, Numbers]  # places whose end a move has changed, and the old ends
# (length, rank, lowest, highest, waits, feeds), see table.py.
Ops = tuple[Numbers, Numbers, Numbers, Numbers, Links, Links]


def time_near(low: int, high: int, ops: Ops, course: Course, notes: Notes) -> tuple[int, bool]:
    """Times the places `low` to `high` after a move within them, as if nothing else changed. Returns the number of
    times it changed, which it notes, and whether no op waits for a later one of its rank."""
    length, rank, lowest, _, (waits, source, lag, after), _ = ops
    order, position, end, _, _ = course
    places, times = notes
    r = rank[order[low]]
    time = end[low - 1] if low > lowest[low] else 0.0
    for k in range(low, high + 1):
        op = order[k]
        places[k - low] = k
        times[k - low] = end[k]
        edge = waits[op]
        while edge >= 0:
            q = source[edge]
            place = position[q]
            if place > k and rank[q] == r:
                return k - low, False
            ready = end[place] + lag[edge]
            if ready > time:
                time = ready
            edge = after[edge]
        time += length[op]
        end[k] = time
    return high - low + 1, True


def too_long(low: int, high: int, most: float, ops: Ops, course: Course) -> bool:
    """Whether the step takes more than `most`, by the new times of `low` to `high` and the tails of other places."""
    length, rank, _, highest, _, (feeds, reader, lag, after) = ops
    order, position, end, tail, _ = course
    r = rank[order[low]]
    behind = length[order[high + 1]] + tail[high + 1] if high < highest[high] else tail[high]
    for k in range(high, low - 1, -1):
        op = order[k]
        edge = feeds[op]
        while edge >= 0:
            t = reader[edge]
            if rank[t] != r:
                rest = lag[edge] + length[t] + tail[position[t]]
                if rest > behind:
                    behind = rest
            edge = after[edge]
        if end[k] + behind > most:
            return True
        behind += length[op]
    return False


def time_far(i: int, j: int, changed: int, most: float, ops: Ops, course: Course, notes: Notes) -> tuple[int, bool]:
    """Times all other places affected by the new times from i to j, after a move between them. Returns as `time_near`,
    and counts on from `changed`. In the order of the old times, so that hardly any place is timed twice. Ops in a cycle
    of waits get later and later, until one exceeds `most`."""
    length, _, lowest, highest, waits, feeds = ops
    order, position, end, tail, queued = course
    places, times = notes
    waiting, source, lag, after_wait = waits
    feeding, reader, _, after = feeds
    low, high = min(i, j), max(i, j)
    heap = [(0.0, 0)]
    heappop(heap)
    for k in range(low, high + 1):
        before = times[(i if k == j else k + 1 if i < j else k - 1) - low]
        op = order[k]
        if end[k] != before:
            edge = feeding[op]
            while edge >= 0:
                place = position[reader[edge]]
                if (place < low or place > high) and queued[place] == 0:
                    queued[place] = 1
                    heappush(heap, (end[place], place))
                edge = after[edge]
    if end[high] != times[high - low] and high < highest[high] and queued[high + 1] == 0:
        queued[high + 1] = 1
        heappush(heap, (end[high + 1], high + 1))
    fine = True
    while len(heap) > 0:
        _, k = heappop(heap)
        queued[k] = 0
        if not fine:
            continue
        op = order[k]
        time = end[k - 1] if k > lowest[k] else 0.0
        edge = waiting[op]
        while edge >= 0:
            ready = end[position[source[edge]]] + lag[edge]
            if ready > time:
                time = ready
            edge = after_wait[edge]
        time += length[op]
        if time == end[k]:
            continue
        if changed == len(order) or time + tail[k] > most:
            fine = False
            continue
        places[changed] = k
        times[changed] = end[k]
        changed += 1
        end[k] = time
        if k < highest[k] and queued[k + 1] == 0:
            queued[k + 1] = 1
            heappush(heap, (end[k + 1], k + 1))
        edge = feeding[op]
        while edge >= 0:
            place = position[reader[edge]]
            if queued[place] == 0:
                queued[place] = 1
                heappush(heap, (end[place], place))
            edge = after[edge]
    return changed, fine


def take_back(changed: int, notes: Notes, end: Numbers) -> None:
    """Restores the old times of the `changed` noted places."""
    places, times = notes
    while changed > 0:
        changed -= 1
        end[places[changed]] = times[changed]


def tails(low: int, high: int, by_makespan: bool, ops: Ops, course: Course) -> int:
    """Recomputes the tails affected by the order of places `low` to `high`; returns their number. A tail is the longest
    path from the end of the op at a place to the end of a rank, less the time before the first op of that rank if the
    span counts. In a cycle of ops tails would grow forever: then it stops."""
    length, _, lowest, highest, waits, feeds = ops
    order, position, end, tail, queued = course
    waiting, source, _, after_wait = waits
    feeding, reader, lag, after = feeds
    heap = [(0.0, 0)]
    heappop(heap)
    for k in range(low, high + 1):
        queued[k] = 1
        heappush(heap, (-end[k], k))
        op = order[k]
        edge = waiting[op]
        while edge >= 0:
            place = position[source[edge]]
            if queued[place] == 0:
                queued[place] = 1
                heappush(heap, (-end[place], place))
            edge = after_wait[edge]
    if low > lowest[low] and queued[low - 1] == 0:
        queued[low - 1] = 1
        heappush(heap, (-end[low - 1], low - 1))
    count = 0
    while len(heap) > 0:
        _, k = heappop(heap)
        queued[k] = 0
        count += 1
        if count > CYCLE * len(order):
            continue
        op = order[k]
        if k < highest[k]:
            behind = length[order[k + 1]] + tail[k + 1]
        elif by_makespan:
            behind = 0.0
        else:
            behind = length[order[lowest[k]]] - end[lowest[k]]
        edge = feeding[op]
        while edge >= 0:
            t = reader[edge]
            rest = lag[edge] + length[t] + tail[position[t]]
            if rest > behind:
                behind = rest
            edge = after[edge]
        if behind == tail[k]:
            continue
        tail[k] = behind
        if k > lowest[k] and queued[k - 1] == 0:
            queued[k - 1] = 1
            heappush(heap, (-end[k - 1], k - 1))
        edge = waiting[op]
        while edge >= 0:
            place = position[source[edge]]
            if queued[place] == 0:
                queued[place] = 1
                heappush(heap, (-end[place], place))
            edge = after_wait[edge]
    return count


def tails_of_starts(first: Numbers, by_makespan: bool, ops: Ops, course: Course, begin: Numbers) -> int:
    """Recomputes tails for ranks whose first op ends at another time than in `begin`, which is updated."""
    end = course[2]
    count = 0
    for r in range(len(begin)):
        low = first[r]
        if low < first[r + 1] and begin[r] != end[low]:
            begin[r] = end[low]
            last = first[r + 1] - 1
            count += tails(last, last, by_makespan, ops, course)
    return count
