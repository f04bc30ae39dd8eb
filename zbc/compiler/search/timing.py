"""Times of the ops of an order, and its step time; kernels like listing.py, which read the columns of table.py.

Times are stored by place, so that the times of a part of a rank are a slice.
"""

from __future__ import annotations

from zbc.compiler.search.table import Numbers, Table

SAME = 1e-12  # relative difference of steps in steady state
NOT_YET = -1.0  # the end of an op that has not run


def locate(order: Numbers, position: Numbers) -> None:
    """Fill `position`, the place of each op."""
    for place in range(len(order)):
        position[order[place]] = place


def run(table: Table, order: Numbers, position: Numbers, begin: Numbers, end: Numbers) -> bool:
    """Times `order`, rank r not before `begin[r]`: fills `end` by place; returns whether all ops ran. Runs each rank
    until its next op waits for one that has not run, then a rank whose awaited result exists."""
    first, rank, length = table.first, table.rank, table.length
    waits, source, lag, after = table.waits
    for place in range(len(order)):
        end[place] = NOT_YET
    p = len(begin)
    reached = [first[r] for r in range(p)]
    wanted = [-1] * p  # the place each rank waits for; ranks waiting for rank r: head[r], link[head[r]], ...
    head = [-1] * p
    link = [-1] * p
    stack = [p - 1 - r for r in range(p)]
    top = p
    left = len(order)
    while top > 0:
        top -= 1
        r = stack[top]
        k = reached[r]
        left += k
        time = end[k - 1] if k > first[r] else begin[r]
        while k < first[r + 1]:
            op = order[k]
            edge = waits[op]
            while edge >= 0:
                place = position[source[edge]]
                ready = end[place]
                if ready == NOT_YET:
                    break
                ready += lag[edge]
                if ready > time:
                    time = ready
                edge = after[edge]
            if edge >= 0:
                there = rank[source[edge]]
                wanted[r] = place
                link[r] = head[there]
                head[there] = r
                break
            time += length[op]
            end[k] = time
            k += 1
        left -= k
        reached[r] = k
        other = head[r]
        head[r] = -1
        while other >= 0:
            next_one = link[other]
            if wanted[other] < k:
                stack[top] = other
                top += 1
            else:
                link[other] = head[r]
                head[r] = other
            other = next_one
    return left == 0


def measure(table: Table, order: Numbers, position: Numbers, begin: Numbers, end: Numbers) -> tuple[bool, float, float]:
    """Whether all ops of an order run, and if so its longest span and its makespan; fills `position` and `end`."""
    locate(order, position)
    if not run(table, order, position, begin, end):
        return False, 0.0, 0.0
    span, makespan, _ = steps(table, order, end)
    return True, span, makespan


def steps(table: Table, order: Numbers, end: Numbers) -> tuple[float, float, float]:
    """(longest span, makespan, mean span) of a timed order."""
    first, length = table.first, table.length
    p = len(first) - 1
    span = 0.0
    makespan = 0.0
    total = 0.0
    for r in range(p):
        low = first[r]
        if low == first[r + 1]:
            continue
        last = end[first[r + 1] - 1]
        own = last - (end[low] - length[order[low]])
        total += own
        if own > span:
            span = own
        if last > makespan:
            makespan = last
    return span, makespan, total / p


def period(table: Table, order: Numbers, position: Numbers, begin: Numbers, end: Numbers, most: int) -> float:
    """ms of a step when steps follow one another without a barrier, as in `simulate.steady_state`. For an order that
    does not block; overwrites `begin` and `end`. At most `most` steps, fewer once all ranks take equally long."""
    first = table.first
    longest = 0.0
    for _ in range(most):
        run(table, order, position, begin, end)
        longest = 0.0
        shortest = -1.0
        for r in range(len(begin)):
            if first[r] == first[r + 1]:
                continue
            own = end[first[r + 1] - 1] - begin[r]
            begin[r] = end[first[r + 1] - 1]
            longest = max(longest, own)
            shortest = own if shortest < 0.0 else min(shortest, own)
        if longest - shortest <= SAME * longest:
            break
    return longest
