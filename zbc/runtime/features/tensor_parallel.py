"""Layers that several ranks share: each has a part of every large weight (tensor parallel, arXiv 1909.08053).

A linear layer that is cut by its outputs comes first, one cut by its inputs behind it; between them each rank works on
its own columns. Both meet the whole tensors outside through two functions:

    Group.enter    forward: nothing             backward: the sum of the ranks' gradients
    Group.leave    forward: the sum of outputs  backward: nothing

so F has one sum per pair of linear layers, B another, W none; in a BW the weight gradients that are due run beside the
sum. With a shared sequence (arXiv 2205.05198) each rank has its part of the tokens outside of them:

    Group.enter    forward: the tokens of all                backward: the sum of the gradients of one's own tokens
    Group.leave    forward: the sum of outputs of one's own  backward: the gradients of all

All ranks of a group run the same ops in the same order,
and get the same bits from every sum: what they hold whole, such as norms, stays alike without being compared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.ir import Kind, Op
from zbc.ops import WORDS
from zbc.runtime.core.feature import Answer, Context, Feature
from zbc.runtime.core.slot import Slot, current_slot
from zbc.runtime.features import words
from zbc.runtime.features.strands import current_pair
from zbc.runtime.transports.transport import Pending, Transport

if TYPE_CHECKING:
    from zbc.runtime.core.progress import StepResult
    from zbc.runtime.core.state import Worker


@dataclass(slots=True)
class Meter:
    """Seconds of sums since it was read: from their start until this rank came back to them and had them, and of that
    what it waited there."""

    under_way: float = 0.0
    waited: float = 0.0

    def read(self) -> float | None:
        """The share of the first that was not waited for; None where there was no sum."""
        found = None if self.under_way <= 0 else 1 - self.waited / self.under_way
        self.under_way = self.waited = 0.0
        return found


class Group(NamedTuple):
    """The ranks of a run that share the layers of this one, which has part `place`."""

    ranks: tuple[int, ...]
    place: int
    transport: Transport
    sequence: bool = False  # whether each has its part of the tokens between the layers
    meter: Meter | None = None  # of what is waited for, where that can be seen

    @property
    def size(self) -> int:
        return len(self.ranks)

    def bounds(self, count: int) -> tuple[int, int]:
        """From where to where this rank's part of `count` rows goes."""
        return bounds(count, self.place, self.size)

    def start(self, tensor: Tensor) -> Pending:
        """Start to sum it in place."""
        return self.transport.start_sum(tensor, self.ranks)

    def hidden(self) -> float | None:
        """Of the time of sums since this was asked last: the share in which this rank did something else."""
        return None if self.meter is None else self.meter.read()

    def settle(self, pending: Pending, slot: Slot | None = None) -> None:
        """Wait for what was started just now, with something else to do meanwhile: first the weight gradients of
        `slot` that are due, where they belong to the same op, then the other op of a group that this one is in."""
        began, pair = time.perf_counter(), current_pair()
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

    def swap(
        self, mine: Tensor, out: Sequence[int], into: Tensor, came: Sequence[int], slot: Slot | None = None
    ) -> None:
        """Give each rank its rows of `mine`, `out` of them, and take theirs, `came` of them; blocks like `settle`."""
        self.settle(self.transport.start_swap(mine.contiguous(), out, into, came, self.ranks), slot)

    def collect(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, all of one shape: (size, ...); blocks."""
        parts = mine.new_empty((self.size, mine.numel()))
        self.settle(self.transport.start_gather(mine.reshape(-1), parts, self.ranks))
        return parts.view(self.size, *mine.shape)

    def enter(self, x: Tensor) -> Tensor:
        """What all ranks have, into layers of which each has a part."""
        return _apply(_Meets, x, self, *((_all, _own) if self.sequence else (_same, _sum)))

    def leave(self, x: Tensor) -> Tensor:
        """What each rank has a term of: the sum."""
        return _apply(_Meets, x, self, *((_own, _all) if self.sequence else (_sum, _same)))

    def whole(self, x: Tensor) -> Tensor:
        """Of all tokens what each rank has of its own, for what all do alike: so are its gradients."""
        return _apply(_Meets, x, self, _all, _part)

    def tokens(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start to collect (batch, tokens, ...) of all ranks, each of which has its own; `joined` when it is there."""
        parts = x.new_empty((self.size, x.numel()))
        return parts, self.transport.start_gather(x.reshape(-1), parts, self.ranks)

    def joined(self, parts: Tensor, x: Tensor) -> Tensor:
        """What `tokens` has collected, of tensors like `x`."""
        return torch.cat(list(parts.view(self.size, *x.shape)), 1)

    def scatter(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start to sum (batch, tokens, ...) over all ranks, for each its part of the tokens."""
        parts = torch.stack(x.chunk(self.size, 1))
        mine = torch.empty_like(parts[0])
        return mine, self.transport.start_scatter(parts.view(self.size, -1), mine.view(-1), self.ranks)

    def join(self, x: Tensor, count: int) -> Tensor:
        """What each rank has some of the last `count` features of, as `bounds` says: all of them."""
        return _apply(_Join, x, self, count)


@dataclass
class Shared:
    """The ranks of `group` share the layers of this one, those of `swaps` its experts, whose parameters have names that
    begin with one of `experts`, those of `tokens` the tokens of its microbatches. `cuts`: the parameters of which each
    of a group has a part; `partial`: those that are whole here, of whose gradients each has a part."""

    group: Group | None
    swaps: Group | None
    tokens: Group | None
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)
    experts: list[str] = field(default_factory=list)


class SharedLayers(Feature):
    """Gradients of which each rank of a group has a part are summed before the replicas sum theirs; those of `rest`,
    whose stages no REDUCE sums, at the end of the step. And of a step, in how much of the time of its sums inside of
    ops this rank did something else."""

    def __init__(self, context: Context) -> None:
        shared = context.shared
        self.group, self.cuts = shared.group, shared.cuts
        self._inside = self.group or shared.swaps or shared.tokens  # with one meter
        self.meets = self._inside is not None
        found = {s: stage.parameters.items() for s, stage in context.stages.items()}
        self._parameters = {s: [p for name, p in all_ if name in shared.partial] for s, all_ in found.items()}
        reduced = {op.stage for plan in context.plans for op in plan.ops if op.kind is Kind.REDUCE}
        self.rest = sorted(found.keys() - reduced)

    def answers(self, worker: Worker, found: dict[str, Answer]) -> dict[str, Answer]:
        """What is no part of anything counts on the first of the ranks that share layers."""
        rows = worker.optimizers[WORDS].parameters if WORDS in worker.optimizers else {}
        own = {*self.cuts, *rows}
        return {name: one for name, one in found.items() if name in own} if worker.share else found

    def reduces(self, worker: Worker, op: Op) -> None:
        self.complete(worker, op.stage)

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        for stage in self.rest:
            if stage in stages:
                self.complete(worker, stage)

    def complete(self, worker: Worker, stage: int) -> None:
        """Blocks."""
        found = [p for p in self._parameters.get(stage, ()) if p.grad is not None]
        if self.group is None or not found:
            return
        worker.progress.waiting = True
        flat = torch.cat([p.grad.reshape(-1) for p in found if p.grad is not None])
        self.group.start(flat).wait()
        parts = torch.split_with_sizes(flat, [p.numel() for p in found])
        for parameter, part in zip(found, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        worker.progress.waiting = False

    def opens(self, worker: Worker) -> None:
        self._read()  # what stood between steps does not count

    def tells(self, worker: Worker, result: StepResult) -> StepResult:
        return replace(result, sums_hidden=self._read())

    def _read(self) -> float | None:
        return None if self._inside is None else self._inside.hidden()


class Cut(NamedTuple):
    """Which part of a weight a rank of a group of `ranks` has: along `dim` of its whole `shape` a share of each of the
    `blocks` that lie there one after the other."""

    shape: tuple[int, ...]
    dim: int
    blocks: tuple[int, ...]
    ranks: int
    place: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """From where to where, block by block."""
        starts = accumulate(self.blocks, initial=0)
        shares = (bounds(block, self.place, self.ranks) for block in self.blocks)
        return [(start + low, start + high) for start, (low, high) in zip(starts, shares, strict=False)]

    def of(self, whole: Tensor) -> Tensor:
        """The part, as a tensor of its own."""
        return torch.cat([whole.narrow(self.dim, low, high - low) for low, high in self.ranges], self.dim)

    def collect(self, part: Tensor, group: Group) -> Tensor:
        """The whole, of the parts that all ranks have; blocks."""
        cuts = [self._replace(place=place) for place in range(self.ranks)]
        sizes = [math.prod(cut.part) for cut in cuts]
        flat = functional.pad(part.reshape(-1), (0, max(sizes) - part.numel()))
        whole = part.new_empty(self.shape)
        for cut, size, found in zip(cuts, sizes, group.collect(flat), strict=True):
            pieces = found[:size].view(cut.part).split([high - low for low, high in cut.ranges], self.dim)
            for (low, high), piece in zip(cut.ranges, pieces, strict=True):
                whole.narrow(self.dim, low, high - low).copy_(piece)
        return whole

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of the part."""
        width = sum(high - low for low, high in self.ranges)
        return (*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])


def bounds(count: int, place: int, ranks: int) -> tuple[int, int]:
    """From where to where the part of one of so many ranks goes, of `count` rows."""
    return count * place // ranks, count * (place + 1) // ranks


class _Meets(torch.autograd.Function):
    """What `there` makes of a tensor, and `back` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Meeting, back: Meeting) -> Tensor:
        ctx.group, ctx.slot, ctx.back = group, current_slot(), back
        return there(group, x, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(ctx.group, grads[0], ctx.slot), None, None, None


def _same(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    return x.view_as(x)


def _sum(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    group.settle(group.start(y), slot)
    return y


def _all(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    """The tokens of all."""
    parts, pending = group.tokens(x)
    group.settle(pending, slot)
    return group.joined(parts, x)


def _part(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    return x.chunk(group.size, 1)[group.place].contiguous()


def _own(group: Group, x: Tensor, slot: Slot | None) -> Tensor:
    """The sum of one's own tokens."""
    mine, pending = group.scatter(x)
    group.settle(pending, slot)
    return mine


Meeting = Callable[[Group, Tensor, Slot | None], Tensor]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, count: int) -> Tensor:
        ctx.bounds = group.bounds(count)
        sizes = [stop - start for start, stop in (bounds(count, i, group.size) for i in range(group.size))]
        wide = functional.pad(x, (0, max(sizes) - x.shape[-1]))
        return torch.cat([part[..., :size] for part, size in zip(group.collect(wide), sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        start, stop = ctx.bounds
        return grads[0][..., start:stop], None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def look_up(group: Group, table: nn.Module, first: int, rows: int) -> Callable[[Tensor], Tensor]:
    """An embedding of which this rank has the `rows` from `first` on."""

    def forward(tokens: Tensor) -> Tensor:
        row, mine = words.own(tokens, first, rows)
        found: Tensor = table(row)
        return group.leave(found.masked_fill(~mine[..., None], 0.0))

    return forward


def build(context: Context) -> SharedLayers:
    return SharedLayers(context)
