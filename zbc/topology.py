"""The axes of a run, and which of its ranks is which rank of which replica of the pipeline.

Ranks of a run are numbered node by node. A node that holds `node[0]` neighbouring ranks of the pipeline, of `node[1]`
replicas each, has those of one replica next to each other:

    pp 4, dp 2, node (4, 1)     rank 0..3 are replica 0, rank 4..7 replica 1
    pp 4, dp 2, node (2, 2)     rank 0 1 | 2 3 are replica 0 | 1, pipeline ranks 0 1; rank 4 5 | 6 7 the same of 2 3

Tensor-parallel ranks are innermost: with tp 2 each rank above is two neighbours, 2r and 2r + 1, that share its layers.
With an `order` these are seats, and `order[seat]` is the rank of the run that takes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple


class Place(NamedTuple):
    """A rank of the run by the axes: its replica of the pipeline, its rank there, its share of that one's layers."""

    dp: int
    pp: int
    tp: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """How many there are of everything a step is shared out among; `node[0]` divides `pp`, `node[1]` divides `dp`."""

    pp: int  # ranks of one pipeline
    dp: int = 1  # replicas of the pipeline; each runs its ops, and collectives meet over all of them
    pipes: int = 1  # directions of a pipeline
    node: tuple[int, int] | None = None  # what shares a node; None: replicas follow one another
    slices: int = 1  # of a microbatch
    microbatches: int = 1  # of a step, in each replica
    tp: int = 1  # ranks that share the layers of one rank of a pipeline; they run one list of ops
    order: tuple[int, ...] = ()  # seat -> rank of the run; (): as numbered
    replicas: tuple[int, ...] = ()  # ranks of each stage, where stages have one rank or more each; (): elsewhere
    hosts: tuple[str, ...] = ()  # of each rank of a run, once they are known

    @property
    def world(self) -> int:
        """The ranks of a run."""
        return self.pp * self.dp * self.tp

    @property
    def batch(self) -> int:
        """The microbatches of a step, over all replicas."""
        return self.microbatches * self.dp

    @property
    def alone(self) -> bool:
        """Whether a stage is held once."""
        return self.dp == self.pipes == 1

    def rank(self, dp: int, pp: int, tp: int = 0) -> int:
        """The rank of the run that is rank `pp` of replica `dp`, and has share `tp` of its layers."""
        along, across = self.node or (self.pp, 1)
        block = dp // across * (self.pp // along) + pp // along
        seat = block * along * across + dp % across * along + pp % along
        return (self.order[seat] if self.order else seat) * self.tp + tp

    def ranks(self, of: Iterable[int], tp: int = 0) -> tuple[int, ...]:
        """The ranks of the run that are these ranks of the pipeline, in any replica, of one share; ascending."""
        mine = {*of}
        return tuple(sorted(self.rank(dp, pp, tp) for dp in range(self.dp) for pp in mine))

    def sharing(self, rank: int) -> tuple[int, ...]:
        """The ranks of the run that share the layers of one of them, ascending."""
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))

    def of(self, rank: int) -> Place:
        """Where a rank of the run is."""
        along, across = self.node or (self.pp, 1)
        seat, share = divmod(rank, self.tp)
        seat = self.order.index(seat) if self.order else seat
        block, inside = divmod(seat, along * across)
        replicas, ranks = divmod(block, self.pp // along)
        replica, part = divmod(inside, along)
        return Place(replicas * across + replica, ranks * along + part, share)

    @property
    def axes(self) -> str:
        """` (2 pp x 2 dp)`, behind a number of ranks; nothing where that says it."""
        if self.dp == self.tp == 1:
            return ""
        counts = [(self.pp, "pp"), *([(self.dp, "dp")] * (self.dp > 1)), *([(self.tp, "tp")] * (self.tp > 1))]
        return f" ({' x '.join(f'{count} {axis}' for count, axis in counts)})"

    def name(self, rank: int) -> str:
        """A rank of the run for messages: `rank 5`, with replicas `rank 5 [dp 1, pp 1]`, also `[pp 1, tp 0]`.

        With an order `[pp 1]`; of stages with replicas `[stage 0, replica 1]`; on several machines ` on node-2`.
        """
        if len(set(self.hosts)) > 1 and 0 <= rank < len(self.hosts):
            return f"{replace(self, hosts=()).name(rank)} on {self.hosts[rank]}"
        plain = self.dp == self.tp == 1 and not self.order and not self.replicas
        if plain or not 0 <= rank < self.world:
            return f"rank {rank}"
        place, where = self.of(rank), ""
        if self.replicas:
            ends = [*accumulate(self.replicas)]
            stage = bisect_right(ends, place.pp)
            where = f"stage {stage}, replica {place.pp - ends[stage] + self.replicas[stage]}"
        axes = [f"dp {place.dp}"] * (self.dp > 1) + [where or f"pp {place.pp}"] + [f"tp {place.tp}"] * (self.tp > 1)
        return f"rank {rank} [{', '.join(axes)}]"
