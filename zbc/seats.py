"""Which rank of the run is which rank of which copy of the pipeline.

Ranks of a run are numbered node by node. A node that holds `node[0]` neighbouring ranks of the pipeline, of `node[1]`
copies each, has those of one copy next to each other:

    pp 4, dp 2, node (4, 1)     rank 0..3 are copy 0, rank 4..7 copy 1
    pp 4, dp 2, node (2, 2)     rank 0 1 | 2 3 are copy 0 | 1, pipeline ranks 0 1; rank 4 5 | 6 7 the same of 2 3
"""

from __future__ import annotations

from typing import NamedTuple


class Seat(NamedTuple):
    """A rank of the run: its copy of the pipeline, and its rank there."""

    copy: int
    part: int


class Seats(NamedTuple):
    """All seats of a run; `node[0]` divides `ranks`, `node[1]` divides `copies`."""

    ranks: int  # of a pipeline
    copies: int
    node: tuple[int, int]

    @classmethod
    def plain(cls, ranks: int, copies: int) -> Seats:
        """One copy of the pipeline after the other."""
        return cls(ranks, copies, (ranks, 1))

    def rank(self, copy: int, part: int) -> int:
        """The rank of the run that is rank `part` of a copy."""
        parts, copies = self.node
        block = copy // copies * (self.ranks // parts) + part // parts
        return block * parts * copies + copy % copies * parts + part % parts

    def of(self, rank: int) -> Seat:
        """The seat of a rank of the run."""
        parts, copies = self.node
        block, inside = divmod(rank, parts * copies)
        across, along = divmod(block, self.ranks // parts)
        copy, part = divmod(inside, parts)
        return Seat(across * copies + copy, along * parts + part)
