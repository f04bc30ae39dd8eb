"""Partitions the optimizer's work; shared by the runtime and the compiler's predictions.

The copies of a stage share it out (ZeRO-1), and a tentative step takes a few parameters at a time.

Parameters are cut into pieces of at most CHUNK elements, and these are dealt, the largest first, each to the rank with
the least. Many pieces are dealt evenly; a few large matrices are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heapreplace

from zbc.plan.balancing import longest_first

# Elements whose squares are summed at once, for norms; parts of an optimizer begin and end at multiples of it.
CHUNK = 2**20
BATCH = 2**22  # elements that a tentative step copies at a time
STACK = 2**24  # elements of a stack of matrices for which Muon's updates are made at a time


def cut(count: int, most: int = CHUNK) -> list[tuple[int, int]]:
    """(start, stop) of the pieces of `count` elements of a parameter, `most` each; an empty parameter is one piece."""
    return [(start, min(start + most, count)) for start in range(0, max(1, count), max(1, most))]


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The pieces of each rank, as ascending indices into their `sizes`."""
    return [sorted(share) for share in longest_first(sizes, ranks)]


def most(parameters: Iterable[int], ranks: int, uncut: Iterable[int] = ()) -> tuple[int, int]:
    """The most elements, and the most pieces, of a rank; `parameters`: elements of each, `uncut`: of those that are not
    cut into pieces."""
    counts = list(parameters)
    alone = Counter(uncut) & Counter(counts)
    if alone:
        others = (Counter(counts) - alone).elements()
        sizes = [*alone.elements(), *(stop - start for count in others for start, stop in cut(count))]
        shares = deal(sizes, ranks)
        return max(sum(sizes[i] for i in share) for share in shares), max(map(len, shares))
    whole = sum(count // CHUNK for count in counts)
    rest = [count % CHUNK for count in counts if count % CHUNK or not count]
    # Whole pieces are dealt first, round-robin, so only the remainders of a large model have to be dealt one by one.
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
    """Ranges of parameters in their order, of at most BATCH elements together, or of one that has more."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > BATCH:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def batch(sizes: Sequence[int]) -> int:
    """The most elements of a range of `batches`."""
    return max((sum(sizes[i] for i in part) for part in batches(sizes)), default=0)
