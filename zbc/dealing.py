"""How the copies of a stage share out its optimizer (ZeRO-1): the compiler predicts what the runtime does.

Parameters are cut into pieces of at most CHUNK elements, and these are dealt, the largest first, each to the rank that
has least. Many pieces come out even; a few large matrices do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Elements whose squares are summed in one go, for norms; parts of an optimizer begin and end at these marks.
CHUNK = 2**20


def cut(count: int) -> list[tuple[int, int]]:
    """The pieces of a parameter of `count` elements, each from where to where; an empty one is one piece."""
    return [(start, min(start + CHUNK, count)) for start in range(0, max(1, count), CHUNK)]


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which pieces each rank gets, as indices into their `sizes`, in order."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += sizes[index]
    return [sorted(share) for share in shares]


def most(parameters: Iterable[int], ranks: int) -> tuple[int, int]:
    """The most elements, and the most pieces, that a rank gets of parameters of so many elements each."""
    sizes = [stop - start for count in parameters for start, stop in cut(count)]
    shares = deal(sizes, ranks)
    return max(sum(sizes[i] for i in share) for share in shares), max(map(len, shares))
