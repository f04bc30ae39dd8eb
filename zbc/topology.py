"""The axes of a run, and the mapping of its ranks to replicas and ranks of the pipeline.

Ranks of a run are numbered node by node. A node holds `node[0]` neighbouring ranks of the pipeline, of `node[1]`
replicas each; ranks of one replica are next to each other:

    pp 4, dp 2, node (4, 1)     rank 0..3 are replica 0, rank 4..7 replica 1
    pp 4, dp 2, node (2, 2)     rank 0 1 | 2 3 are replica 0 | 1, pipeline ranks 0 1; rank 4 5 | 6 7 the same of 2 3

The axes of INNER subdivide each rank r above, the last axis innermost: with tp 2 it becomes the neighbours 2r and
2r + 1, which share its layers; with cp 2 and tp 2 four ranks, of which 4r and 4r + 2 hold the same part. With an
`order` the ranks above are seats, and `order[seat]` is the rank of the run that takes the seat.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, product, starmap
from typing import Any, NamedTuple


class Axis(NamedTuple):
    """Ranks that run the same list of ops in parallel."""

    name: str
    parts: bool  # each rank has a part of the layers; else the whole layers, for a part of the tokens


INNER = (Axis("cp", parts=False), Axis("tp", parts=True))
At = tuple[int, ...]  # coordinates of a rank along the axes of INNER; (): all 0
ONE = (1,) * len(INNER)


def inner_of(traits: Any) -> At:
    """Number of ranks along each axis of INNER, read from the fields of these names."""
    return tuple(getattr(traits, axis.name) for axis in INNER)


class Place(NamedTuple):
    """Coordinates of a rank of the run: replica of the pipeline, rank in the pipeline, coordinates along INNER."""

    dp: int
    pp: int
    at: At


@dataclass(frozen=True, slots=True)
class Topology:
    """The size of each axis that a step is split along; `node[0]` divides `pp`, `node[1]` divides `dp`."""

    pp: int  # ranks of one pipeline
    dp: int = 1  # replicas of the pipeline; each runs its ops, and collectives are over all of them
    pipes: int = 1  # directions of a pipeline
    node: tuple[int, int] | None = None  # pipeline ranks, and replicas of each, on a node; None: replica by replica
    slices: int = 1  # of a microbatch
    microbatches: int = 1  # of a step, in each replica
    inner: At = ONE  # ranks along each axis of INNER
    order: tuple[int, ...] = ()  # seat -> rank of the run; (): as numbered
    replicas: tuple[int, ...] = ()  # number of ranks of each stage, if stages have replicas of their own; else ()
    host: Callable[[int], str] | None = field(default=None, compare=False)  # of a rank, in a run on several
    ep: int = 0  # neighbours in the list of a stage's ranks that share out its experts; 0: each rank has all
    folded: bool = False  # that list has all ranks of a stage; else those with one part of its layers
    near: int = 0  # ranks on a node, if a row crosses to each node once, and is passed on inside; 0: in one step

    @property
    def world(self) -> int:
        """The ranks of a run."""
        return self.pp * self.dp * self.width

    @property
    def width(self) -> int:
        """The number of ranks of a run per rank of a pipeline."""
        return math.prod(self.inner)

    @property
    def batch(self) -> int:
        """The microbatches of a step, over all replicas."""
        return self.microbatches * self.dp

    @property
    def copies(self) -> int:
        """The number of ranks of a run that hold the same part of a pipeline rank's layers."""
        return self.dp * self.width // self.parts

    @property
    def parts(self) -> int:
        """The number of parts that layers are split into."""
        return math.prod(count for count, axis in zip(self.inner, INNER, strict=True) if axis.parts)

    @property
    def fold(self) -> int:
        """The ranks that share layers, if each has whole experts, and tokens for them, of its own; else 1."""
        return self.parts if self.folded else 1

    @property
    def listed(self) -> int:
        """The ranks of one replica in a list whose neighbours share out experts."""
        return self.width // self.parts * self.fold

    @property
    def span(self) -> int:
        """The number of neighbouring replicas that exchange rows of experts, directly or through others."""
        return math.lcm(self.ep or 1, self.listed) // self.listed

    @property
    def alone(self) -> bool:
        """Whether a stage is held once."""
        return self.copies == self.pipes == 1

    def along(self, name: str) -> int:
        """The number of ranks along an axis of INNER."""
        return self.inner[_NUMBER[name]]

    @property
    def every(self) -> Iterator[At]:
        """All coordinates along the axes of INNER, in the order of ranks."""
        return product(*map(range, self.inner))

    def part(self, at: At) -> int:
        """The number of the part of the layers that ranks at these coordinates hold."""
        number = 0
        for count, where, axis in zip(self.inner, at or (0,) * len(INNER), INNER, strict=True):
            number = number * count + where if axis.parts else number
        return number

    def copy(self, rank: int) -> int:
        """The index of a rank among its `copies`: replicas innermost, then axes of INNER without parts."""
        place, number = self.of(rank), 0
        for count, where, axis in zip(self.inner, place.at, INNER, strict=True):
            number = number if axis.parts else number * count + where
        return number * self.dp + place.dp

    def rank(self, dp: int, pp: int, at: At = ()) -> int:
        """The rank of the run for rank `pp` of replica `dp`, at coordinates `at` along INNER."""
        return self._seat(dp, pp) * self.width + self._inside(at)

    def _seat(self, dp: int, pp: int) -> int:
        along, across = self.node or (self.pp, 1)
        block = dp // across * (self.pp // along) + pp // along
        seat = block * along * across + dp % across * along + pp % along
        return self.order[seat] if self.order else seat

    def _inside(self, at: At) -> int:
        number = 0
        for count, where in zip(self.inner, at, strict=True) if at else ():
            number = number * count + where
        return number

    def ranks(self, of: Iterable[int], at: At = ()) -> tuple[int, ...]:
        """The ranks of the run, ascending, for these ranks of the pipeline in any replica, that hold the same part of
        the layers as the ranks at `at`."""
        return _alike(self, frozenset(of), self.part(at))

    def held(self, pp: int) -> tuple[int, ...]:
        """The ranks of the run for rank `pp` of a pipeline, in any replica; ascending."""
        return tuple(sorted(rank for rank, _ in self.places((pp,))))

    def places(self, of: Iterable[int]) -> Iterator[tuple[int, Place]]:
        """The ranks of the run for these ranks of the pipeline, in any replica, with their coordinates."""
        for place in starmap(Place, product(range(self.dp), of, self.every)):
            yield self.rank(*place), place

    def sharing(self, rank: int) -> tuple[int, ...]:
        """The ranks that share out experts with this one, ascending, which is the order of their experts."""
        return _groups(self)[rank].ranks

    def steps(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The ranks with which this one exchanges rows of experts, in each step of an exchange: those at its place on
        all nodes, then those on its node; or all at once."""
        return tuple(ranks for ranks in self._exchanging(self.sharing(rank)) if rank in ranks)

    def _exchanging(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        nodes = by_node(group, self.near) if self.near else (group,)
        return [*zip(*nodes, strict=True), *nodes] if even(nodes) else [group]

    @property
    def exchanging(self) -> set[tuple[int, ...]]:
        """The sets of ranks that exchange rows of experts in a step, over the whole run."""
        return {ranks for group in self._sharing for ranks in self._exchanging(group)}

    def whole(self, rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that have all experts together with this one, each once."""
        return self._whole(self.sharing(rank))

    def _whole(self, group: tuple[int, ...]) -> tuple[int, ...]:
        return group if self.folded else tuple(sorted(other for one in group for other in self.beside("tp", one)))

    @property
    def wholes(self) -> set[tuple[int, ...]]:
        """All such sets of the run."""
        return {self._whole(group) for group in self._sharing}

    @property
    def _sharing(self) -> set[tuple[int, ...]]:
        return {of.ranks for of in _groups(self).values()}

    def first(self, rank: int, apart: int = 1) -> bool:
        """Whether its group has the first copy of all experts, among those in the same of `apart` sets of replicas."""
        return _groups(self)[rank].number % (self.dp // apart * self.listed // (self.ep or 1)) == 0

    def alike(self, of: Iterable[int], rank: int) -> tuple[int, ...]:
        """The ranks of the run with the same experts, for these ranks of the pipeline in any replica; ascending."""
        return self.experts(of).get(_groups(self)[rank].share, ())

    def experts(self, of: Iterable[int]) -> dict[tuple[int, int], tuple[int, ...]]:
        """All such sets for these ranks of the pipeline."""
        found, groups = dict[tuple[int, int], list[int]](), _groups(self)
        for rank in sorted(other for pp in {*of} for other in self.held(pp)):
            found.setdefault(groups[rank].share, []).append(rank)
        return {share: tuple(ranks) for share, ranks in found.items()}

    @property
    def shares(self) -> dict[int, tuple[int, int]]:
        """The share of experts of each rank of the run: the part of the layers, and the index of the rank."""
        return {rank: of.share for rank, of in _groups(self).items()}

    def beside(self, name: str, rank: int) -> tuple[int, ...]:
        """The group of a rank along an axis of INNER: ranks that differ in this coordinate only, ascending."""
        count, step = self.along(name), math.prod(self.inner[_NUMBER[name] + 1 :])
        first = rank - rank // step % count * step
        return tuple(range(first, first + count * step, step))

    def circles(self, name: str) -> set[tuple[int, ...]]:
        """All groups along an axis of INNER; empty if the axis has size 1."""
        return {self.beside(name, rank) for rank in range(self.world)} if self.along(name) > 1 else set()

    @property
    def inside(self) -> set[tuple[int, ...]]:
        """The groups of ranks that communicate inside of ops."""
        return {ranks for axis in INNER for ranks in self.circles(axis.name)}

    def of(self, rank: int) -> Place:
        """The coordinates of a rank of the run."""
        along, across = self.node or (self.pp, 1)
        at = list[int]()
        for count in reversed(self.inner):
            rank, where = divmod(rank, count)
            at.insert(0, where)
        seat = self.order.index(rank) if self.order else rank
        block, inside = divmod(seat, along * across)
        replicas, ranks = divmod(block, self.pp // along)
        replica, part = divmod(inside, along)
        return Place(replicas * across + replica, ranks * along + part, tuple(at))

    @property
    def axes(self) -> str:
        """` (2 pp x 2 dp)`, to follow a number of ranks; empty if the only axis is pp."""
        if self.dp == self.width == 1:
            return ""
        counts = [(self.dp, "dp"), *zip(self.inner, (axis.name for axis in INNER), strict=True)]
        rest = "".join(f" x {count} {axis}" for count, axis in counts if count > 1)
        return f" ({self.pp} pp{rest})"

    def name(self, rank: int) -> str:
        """A rank of the run for messages: `rank 5`, with replicas `rank 5 [dp 1, pp 1]`, also `[pp 1, tp 0]`. With an
        order `[pp 1]`; with replicas of stages `[stage 0, replica 1]`; on several machines also ` on node-2`."""
        if self.host is not None and 0 <= rank < self.world and (host := self.host(rank)):
            return f"{replace(self, host=None).name(rank)} on {host}"
        plain = self.dp == self.width == 1 and not self.order and not self.replicas
        if plain or not 0 <= rank < self.world:
            return f"rank {rank}"
        place, where = self.of(rank), ""
        if self.replicas:
            ends = [*accumulate(self.replicas)]
            stage = bisect_right(ends, place.pp)
            where = f"stage {stage}, replica {place.pp - ends[stage] + self.replicas[stage]}"
        axes = [f"dp {place.dp}"] * (self.dp > 1) + [where or f"pp {place.pp}"]
        inside = zip(INNER, self.inner, place.at, strict=True)
        axes += [f"{axis.name} {at}" for axis, count, at in inside if count > 1]
        return f"rank {rank} [{', '.join(axes)}]"


def by_node(ranks: Iterable[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of a run, ascending, by nodes of `size` ranks."""
    return tuple(tuple(some) for _, some in groupby(ranks, lambda rank: rank // size))


def even(nodes: Sequence[Sequence[int]]) -> bool:
    """Whether these are several nodes with equally many ranks each, more than one."""
    return len(nodes) > 1 and len({len(ranks) for ranks in nodes}) == 1 < len(nodes[0])


class _OfExperts(NamedTuple):
    """The group with which a rank shares out experts: its index in its list, and its ranks; the rank's `share` of them:
    the part of the layers, and the index of the rank."""

    number: int
    ranks: tuple[int, ...]
    share: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def _alike(run: Topology, of: frozenset[int], part: int) -> tuple[int, ...]:
    width = run.width
    seats = {run._seat(dp, pp) * width for pp in of for dp in range(run.dp)}
    inside = [run._inside(at) for at in run.every if run.part(at) == part]
    return tuple(sorted(seat + inner for seat in seats for inner in inside))


@functools.lru_cache(maxsize=64)
def _groups(run: Topology) -> dict[int, _OfExperts]:
    found, lists = dict[int, _OfExperts](), dict[tuple[int, int], list[int]]()
    for dp, pp, at in product(range(run.dp), range(run.pp), run.every):  # along tp first, then cp, then dp
        lists.setdefault((pp, 0 if run.folded else run.part(at)), []).append(run.rank(dp, pp, at))
    size = run.ep or 1
    for (_, part), ranks in lists.items():
        for first in range(0, len(ranks), size):
            group = tuple(sorted(ranks[first : first + size]))
            found |= {rank: _OfExperts(first // size, group, (part, place)) for place, rank in enumerate(group)}
    return found


_NUMBER = {axis.name: number for number, axis in enumerate(INNER)}


def row_unit(cp: int, shared: int) -> int:
    """The tokens of a row are a multiple of it, where `cp` ranks share them in two chunks each, and `shared` ranks."""
    return shared if cp == 1 else math.lcm(2 * cp, cp * shared)
