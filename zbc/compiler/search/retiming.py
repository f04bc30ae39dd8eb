"""The times that a move changes, and no others; kernels like listing.py, whose numbering of ops they share.

Of each place two times are kept: when its op ends, and how long the step goes on behind that (`tail`). With them a look
at the moved ops alone tells most moves that make the step longer; what is left is timed anew where it changes.
"""

from __future__ import annotations

from heapq import heappop, heappush

from zbc.compiler.search.timing import Numbers


def time_near(
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


def time_far(
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
    """Time what the new times of the places `low` to `high` change elsewhere; returns as `time_near`.

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


def take_back(changed: int, places: Numbers, times: Numbers, end: Numbers) -> None:
    """Give the `changed` places that are noted the times they had."""
    while changed > 0:
        changed -= 1
        end[places[changed]] = times[changed]


def tails(
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


def tails_of_starts(
    p: int,
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
    begin: Numbers,
) -> int:
    """The same for the ranks whose first op ends at another time than in `begin`, which is brought up to date."""
    per_rank = len(order) // p
    count = 0
    for r in range(p):
        first, last = r * per_rank, (r + 1) * per_rank - 1
        if begin[r] != end[first]:
            begin[r] = end[first]
            count += tails(p, last, last, order, position, length, aim, lag, source, by_makespan, end, tail, queued)
    return count
