"""Tensor parallelism: each rank of a group has a shard of every large weight (arXiv 1909.08053).

A column parallel linear layer is followed by a row parallel one; between them each rank has its own columns. Two
functions enclose the pair:

    Group.enter    forward: nothing                    backward: all-reduce of the gradients
    Group.leave    forward: all-reduce of the outputs  backward: nothing

so F has one all-reduce per pair of linear layers, B another, W none; in a BW it overlaps with the deferred weight
gradients. With sequence parallelism (arXiv 2205.05198) tokens are sharded outside of the pair:

    Group.enter    forward: all-gather of tokens           backward: reduce-scatter of the gradients
    Group.leave    forward: reduce-scatter of the outputs  backward: all-gather of the gradients

All ranks of a group run the same ops in the same order, and every all-reduce gives them the same bits: parameters that
are not sharded, such as those of norms, stay equal without a comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.ir import Op
from zbc.ops import WORDS
from zbc.runtime.core.feature import Answer, Context, Feature, Site
from zbc.runtime.core.slot import Slot, current_slot
from zbc.runtime.core.state import Worker
from zbc.runtime.features.groups.strands import PAIR
from zbc.runtime.features.words import words
from zbc.runtime.transports.transport import Pending, Transport
from zbc.topology import INNER


@dataclass(slots=True)
class Meter:
    """Seconds of collectives since the last `read`: from their start until this rank had waited for them, and the part
    of that in which it waited."""

    under_way: float = 0.0
    waited: float = 0.0

    def read(self) -> float | None:
        """The share of that time in which this rank did not wait; None if there was no collective."""
        hidden = None if self.under_way <= 0 else 1 - self.waited / self.under_way
        self.under_way = self.waited = 0.0
        return hidden


class Group(NamedTuple):
    """The ranks of a run that shard layers (or tokens, experts) with this one, which has index `place` among them."""

    ranks: tuple[int, ...]
    place: int
    transport: Transport
    sequence: bool = False  # sequence parallel: tokens are sharded between the layers
    meter: Meter | None = None  # of waits, if they can be measured
    folded: bool = False  # each rank has whole experts of its own
    steps: tuple[Group, ...] = ()  # in which its ranks exchange rows, if not all at once

    @property
    def size(self) -> int:
        return len(self.ranks)

    def bounds(self, count: int) -> tuple[int, int]:
        """The first row of this rank's shard of `count` rows, and the row after its last."""
        return bounds(count, self.place, self.size)

    def settle(self, pending: Pending, slot: Slot | None = None) -> None:
        """Waits for a collective that was just started, overlapped with other work: first the deferred weight gradients
        of `slot`, if they belong to the same op, then the other op of the overlap group, if any."""
        began, pair = time.perf_counter(), PAIR.value
        if slot is not None and slot.fills:
            slot.run()
        if pair is not None:
            pair.pause()
        back = time.perf_counter()
        pending.wait()
        if self.meter is not None:
            now = time.perf_counter()
            self.meter.under_way += now - began
            self.meter.waited += now - back

    def swapped(self, rows: Tensor, out: Sequence[int], into: Sequence[int]) -> Tensor:
        """The rows (sum of `into`, H) that come for `rows`, by an all-to-all of `out` and `into` rows per rank."""
        return meets(rows, self, partial(_swap, out, into), partial(_swap, into, out))

    def collect(self, mine: Tensor, slot: Slot | None = None) -> Tensor:
        """All-gathers tensors of one shape: (size, ...); blocks like `settle`."""
        parts = mine.new_empty((self.size, mine.numel()))
        self.settle(self.transport.start_gather(mine.reshape(-1), parts, self.ranks), slot)
        return parts.view(self.size, *mine.shape)

    def enter(self, x: Tensor) -> Tensor:
        """The input of sharded layers; tokens travel in the type that these compute in."""
        if self.sequence and x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return meets(x, self, *((_all, _own) if self.sequence else (_same, _sum)))

    def leave(self, x: Tensor) -> Tensor:
        """The output of sharded layers, of which each rank has a term."""
        return meets(x, self, *((_own, _all) if self.sequence else (_sum, _same)))

    def share(self, x: Tensor) -> Tensor:
        """This rank's share of the tokens of `x`: (rows, H), or all that it has with sequence parallelism."""
        if self.sequence:
            return x
        rows = x.flatten(0, -2)
        return meets(rows, self, partial(_part, 0), partial(_parts, 0, len(rows)))

    def shared(self, mine: Tensor, like: Tensor) -> Tensor:
        """All-gathers the rows that are made from shares of `like`, in its shape."""
        if self.sequence:
            return mine.view_as(like)
        rows = partial(_parts, 0, like.shape[:-1].numel())
        return meets(mine, self, rows, partial(_part, 0)).view_as(like)

    def whole(self, x: Tensor) -> Tensor:
        """All-gathers tokens for a computation that all ranks repeat, and whose gradients are equal on all."""
        return meets(x, self, _all, lambda group, x, slot: x.chunk(group.size, 1)[group.place].contiguous())

    def join(self, x: Tensor, count: int) -> Tensor:
        """All-gathers the last dimension, `count` features sharded by `bounds`."""
        return meets(x, self, partial(_parts, -1, count), partial(_part, -1))

    def split(self, x: Tensor) -> Tensor:
        """This rank's share, by `bounds`, of the last dimension of `x`, which is the same on all."""
        return meets(x, self, partial(_part, -1), partial(_parts, -1, x.shape[-1]))


@dataclass
class Shared:
    """The groups of this rank: `group` for tensor, `swaps` for expert, `tokens` for context parallelism. `experts`:
    prefixes of the names of experts' parameters; `cuts`: the parameters sharded over `group`; `partial`: unsharded
    parameters, of whose gradients each rank of the group has a term."""

    group: Group | None
    swaps: Group | None
    tokens: Group | None
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    experts: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, site: Site) -> Shared:
        """The groups of ranks that shard layers, experts and tokens with this rank."""
        run, rank, manifest = site.manifest.topology, site.rank, site.manifest
        meter = Meter() if site.device.type == "cpu" else None  # on a GPU the host does not wait
        inner = dict[str, Group | None]()
        for axis in INNER:
            ranks, sequence = run.beside(axis.name, rank), axis.parts and bool(site.shares_sequence)
            group = Group(ranks, ranks.index(rank), site.transport, sequence, meter, manifest.folded)
            inner[axis.name] = group if group.size > 1 else None
        sets = (run.sharing(rank), *run.steps(rank)) if manifest.ep else ()
        swaps = [Group(ranks, ranks.index(rank), site.transport, meter=meter) for ranks in sets]
        return cls(inner["tp"], swaps[0]._replace(steps=tuple(swaps[1:])) if swaps else None, inner["cp"])

    def apart(self, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], ...]:
        """The parameters of a stage that are not of sharded experts, and those that are."""
        starts = tuple(f"{name}." for name in self.experts)
        own = {name: p for name, p in parameters.items() if name.startswith(starts)}
        return {name: p for name, p in parameters.items() if name not in own}, own

    def hidden(self) -> float | None:
        """The share of the time of collectives inside of ops, since the last call, that other work has hidden."""
        inside = self.group or self.swaps or self.tokens  # with one meter
        return None if inside is None or inside.meter is None else inside.meter.read()


class SharedLayers(Feature):
    """Sums the `partial` gradients over the group, before replicas sum theirs; for the stages of `rest`, which have no
    REDUCE, at the end of the step."""

    def __init__(self, context: Context) -> None:
        shared = context.shared
        self.group, self.swaps, self.cuts = shared.group, shared.swaps, shared.cuts
        folded = self.group is not None and self.group.folded
        self.own = tuple(f"{name}." for name in shared.experts) if folded else ()  # other ranks have others
        self.meets = (self.group or shared.swaps or shared.tokens) is not None
        named = {s: stage.parameters.items() for s, stage in context.stages.items()}
        self._parameters = {s: [p for name, p in all_ if name in shared.partial] for s, all_ in named.items()}
        reduced = {op.stage for plan in context.plans for op in plan.ops if op.kind.sums}
        self.rest = sorted(named.keys() - reduced)

    def answers(self, worker: Worker, found: dict[str, Answer]) -> dict[str, Answer]:
        """Only the first rank of the group reports parameters that all have."""
        rows = worker.optimizers[WORDS].parameters if WORDS in worker.optimizers else {}
        own = {*self.cuts, *rows, *(name for name in found if name.startswith(self.own))}
        return {name: answer for name, answer in found.items() if name in own} if worker.share else found

    def reduces(self, worker: Worker, op: Op) -> None:
        self.complete(worker, op.stage)

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        for stage in self.rest:
            if stage in stages:
                self.complete(worker, stage)

    def complete(self, worker: Worker, stage: int) -> None:
        """Sums the partial gradients of a stage over the group; blocks."""
        terms = [p for p in self._parameters.get(stage, ()) if p.grad is not None]
        if self.group is None or not terms:
            return
        worker.progress.waiting = True
        flat = torch.cat([p.grad.reshape(-1) for p in terms if p.grad is not None])
        self.group.transport.all_reduce(flat, self.group.ranks)
        for parameter, part in zip(terms, torch.split(flat, [p.numel() for p in terms]), strict=True):
            parameter.grad = part.view_as(parameter)
        worker.progress.waiting = False


class Cut(NamedTuple):
    """The shard of a weight on one of `ranks`: along `dim` of the whole `shape` its part of each of the consecutive
    `blocks`. Of a stack of weights a rank may hold some only."""

    shape: tuple[int, ...]
    dim: int
    blocks: tuple[int, ...]
    ranks: int
    place: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        starts = accumulate(self.blocks, initial=0)
        shares = (bounds(block, self.place, self.ranks) for block in self.blocks)
        return [(start + low, start + high) for start, (low, high) in zip(starts, shares, strict=False)]

    def of(self, whole: Tensor) -> Tensor:
        """The shard of `whole`, as a new tensor."""
        return torch.cat([whole.narrow(self.dim, low, high - low) for low, high in self.ranges], self.dim)

    def collect(self, part: Tensor, group: Group) -> Tensor:
        """All-gathers the whole weight from the ranks' shards; blocks."""
        whole = part.new_empty((len(part), *self.shape[1:]) if self.dim else self.shape)
        cuts = [self._replace(place=place, shape=tuple(whole.shape)) for place in range(self.ranks)]
        sizes = [math.prod(cut.part) for cut in cuts]
        flat = functional.pad(part.reshape(-1), (0, max(sizes) - part.numel()))
        for cut, size, shard in zip(cuts, sizes, group.collect(flat), strict=True):
            pieces = shard[:size].view(cut.part).split([high - low for low, high in cut.ranges], self.dim)
            for (low, high), piece in zip(cut.ranges, pieces, strict=True):
                whole.narrow(self.dim, low, high - low).copy_(piece)
        return whole

    @property
    def part(self) -> tuple[int, ...]:
        width = sum(high - low for low, high in self.ranges)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])


def bounds(count: int, place: int, ranks: int) -> tuple[int, int]:
    """The first of `count` rows in the shard of rank `place` of `ranks`, and the row after its last."""
    return count * place // ranks, count * (place + 1) // ranks


class _Meets(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, there: Meeting, back: Meeting) -> Tensor:
        ctx.group, ctx.slot, ctx.back = group, current_slot(), back
        return there(group, x, ctx.slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(ctx.group, grads[0], ctx.slot), None, None, None


def meets(x: Tensor, group: Any, there: Meeting, back: Meeting) -> Tensor:
    """Applies `there` to a tensor, and `back` to its gradient: functions of the group, the tensor and the slot."""
    return _Meets.apply(x, group, there, back)  # type: ignore[no-any-return, no-untyped-call]


def _same(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    return x.view_as(x)


def _sum(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    group.settle(group.transport.start_sum(y, group.ranks), slot)
    return y


def _all(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    """All-gathers tokens."""
    return torch.cat(list(group.collect(x, slot)), 1)


def _own(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    """Reduce-scatters tokens."""
    parts = torch.stack(x.chunk(group.size, 1))
    mine = torch.empty_like(parts[0])
    group.settle(group.transport.start_scatter(parts.view(group.size, -1), mine.view(-1), group.ranks), slot)
    return mine


def _part(dim: int, group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    low, high = group.bounds(x.shape[dim])
    return x.narrow(dim, low, high - low).clone()


def _parts(dim: int, count: int, group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    """All-gathers a dimension, of which each rank has its share of `count`."""
    sizes = [high - low for low, high in (bounds(count, place, group.size) for place in range(group.size))]
    if dim == 0 and min(sizes) == max(sizes):  # without a copy
        return group.collect(x, slot).flatten(0, 1)
    after = (x.dim() - 1 if dim == 0 else 0) * [0, 0]
    wide = functional.pad(x, [*after, 0, max(sizes) - x.shape[dim]])
    return torch.cat(
        [part.narrow(dim, 0, size) for part, size in zip(group.collect(wide, slot), sizes, strict=True)], dim
    )


def _swap(out: Sequence[int], into: Sequence[int], group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    received = x.new_empty(sum(into), x.shape[1])
    group.settle(group.transport.start_swap(x.contiguous(), out, received, into, group.ranks), slot)
    return received


Meeting = Callable[[Any, Tensor, Slot | None], Tensor]


def look_up(group: Group, table: Callable[[Tensor], Any], first: int, rows: int) -> Callable[[Tensor], Tensor]:
    """The forward of an embedding of which this rank has the `rows` from `first` on."""

    def forward(tokens: Tensor) -> Tensor:
        row, mine = words.own(tokens, first, rows)
        found: Tensor = table(row)
        return group.leave(found.masked_fill(~mine[..., None], 0.0))

    return forward


def build(context: Context) -> SharedLayers:
    return SharedLayers(context)
