"""How an optimizer's work is cut up: the compiler predicts what the runtime does.

The copies of a stage share it out (ZeRO-1), and a tentative step takes a few parameters at a time.

Parameters are cut into pieces of at most CHUNK elements, and these are dealt, the largest first, each to the rank that
has least. Many pieces come out even; a few large matrices do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace

# Elements whose squares are summed in one go, for norms; parts of an optimizer begin and end at these marks.
CHUNK = 2**20
BATCH = 2**22  # elements that a tentative step copies at a time


def cut(count: int) -> list[tuple[int, int]]:
    """The pieces of a parameter of `count` elements, each from where to where; an empty one is one piece."""
    return [(start, min(start + CHUNK, count)) for start in range(0, max(1, count), CHUNK)]


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which pieces each rank gets, as indices into their `sizes`, in order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapreplace(loads, (load + sizes[index], rank))
    return [sorted(share) for share in shares]


def most(parameters: Iterable[int], ranks: int, uncut: Iterable[int] = ()) -> tuple[int, int]:
    """The most elements, and the most pieces, that a rank gets of parameters of so many elements each; those of them
    that are `uncut` stay whole."""
    counts = list(parameters)
    alone = Counter(uncut) & Counter(counts)
    if alone:
        others = (Counter(counts) - alone).elements()
        sizes = [*alone.elements(), *(stop - start for count in others for start, stop in cut(count))]
        shares = deal(sizes, ranks)
        return max(sum(sizes[i] for i in share) for share in shares), max(map(len, shares))
    whole = sum(count // CHUNK for count in counts)
    rest = [count % CHUNK for count in counts if count % CHUNK or not count]
    # Whole pieces come first and go around, so of a large model only what is left over has to be dealt.
    around, first = divmod(whole, ranks)
    loads = [(CHUNK * (around + (rank < first)), rank) for rank in range(ranks)]
    heapify(loads)
    pieces = [around + (rank < first) for rank in range(ranks)]
    for size in sorted(rest, reverse=True):
        load, rank = loads[0]
        pieces[rank] += 1
        heapreplace(loads, (load + size, rank))
    return max(loads)[0], max(pieces)


def batches(sizes: Sequence[int]) -> Iterator[range]:
    """Parameters in their order, as many at a time as have BATCH elements together, or one that has more."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > BATCH:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def batch(sizes: Sequence[int]) -> int:
    """The most elements of parameters that are taken at a time."""
    return max((sum(sizes[i] for i in part) for part in batches(sizes)), default=0)
