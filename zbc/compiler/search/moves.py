"""Moves of annealing: draw an op and its destination, check memory, and move it; kernels like listing.py.

Most moves are drawn from a chain: ops each of which starts when the one before it ends or its result arrives. Random
numbers come from `following`, so that compiled and plain runs draw the same.
"""

from __future__ import annotations

from zbc.compiler.search.listing import EPS, ROOM
from zbc.compiler.search.table import Fences, Numbers, Table

REACH = 12  # places a move spans at most


def following(state: int) -> int:
    """The next state of a linear congruential generator modulo 2^31; its high bits are the random number."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


def trace(
    table: Table, order: Numbers, position: Numbers, by_makespan: bool, end: Numbers, chain: Numbers, state: int
) -> tuple[int, int]:
    """Fill `chain` with a gapless chain of ops back from the last op of a rank; returns its length and the state. Half
    the time the rank is the one that sets the objective, else any. Instant ops that wait for one another would be an
    endless chain: it is cut off at as many links as there are ops."""
    first, length = table.first, table.length
    waits, source, lag, after = table.waits
    p = len(first) - 1
    state = following(state)
    r = (state >> 8) % p
    while first[r] == first[r + 1]:
        r = (r + 1) % p
    state = following(state)
    if (state >> 16) & 1:
        longest = -1.0
        for q in range(p):
            if first[q] == first[q + 1]:
                continue
            own = end[first[q + 1] - 1]
            if not by_makespan:
                own -= end[first[q]] - length[order[first[q]]]
            if own > longest + EPS:
                longest = own
                r = q
    k = first[r + 1] - 1
    links = 0
    while k >= 0 and links < len(chain):
        op = order[k]
        chain[links] = op
        links += 1
        soon = end[k] - length[op] - 1e-7
        behind = -1  # the place whose end this op waited for
        if k > first[table.rank[op]] and end[k - 1] >= soon:
            behind = k - 1
        edge = waits[op]
        while edge >= 0:
            place = position[source[edge]]
            if end[place] + lag[edge] >= soon:
                state = following(state)
                if behind < 0 or (state >> 16) & 1:
                    behind = place
            edge = after[edge]
        k = behind
    return links, state


def destination(i: int, fences: Fences, order: Numbers, position: Numbers, state: int) -> tuple[int, int]:
    """The destination of the op at place i: near places are likelier; `i` itself if fences leave no other."""
    lowest, highest, (beside, fence, _, after) = fences
    state = following(state)
    shift = 1
    draw = state >> 8
    while shift < REACH and draw & 3 != 0:
        shift += 1
        draw >>= 2
    state = following(state)
    edge = beside[order[i]]
    if (state >> 16) & 1:
        j = i - shift
        if j < lowest[i]:
            j = lowest[i]
        while edge >= 0:
            place = position[fence[edge]]
            if j <= place < i:
                j = place + 1
            edge = after[edge]
    else:
        j = i + shift
        if j > highest[i]:
            j = highest[i]
        while edge >= 0:
            place = position[fence[edge]]
            if i < place <= j:
                j = place - 1
            edge = after[edge]
    return j, state


def fits(i: int, j: int, limit: float, order: Numbers, change: Numbers, held: Numbers) -> bool:
    """Whether the rank keeps to its limit if the op at place i moves to j; `held` are its units after each place."""
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


def shift_op(order: Numbers, position: Numbers, i: int, j: int) -> None:
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


def hold(table: Table, order: Numbers, held: Numbers) -> None:
    """Fill `held`: units held by a rank after the op at each place."""
    first, change = table.first, table.change
    for r in range(len(first) - 1):
        amount = 0.0
        for k in range(first[r], first[r + 1]):
            amount += change[order[k]]
            held[k] = amount


def carry(i: int, j: int, order: Numbers, change: Numbers, held: Numbers) -> None:
    """Updates `held` after the move of an op from place i to j."""
    own = change[order[j]]
    if i < j:
        for k in range(i, j):
            held[k] = held[k + 1] - own
    else:
        for k in range(i, j, -1):
            held[k] = held[k - 1] + own
        held[j] = held[j + 1] - change[order[j + 1]]
