"""What a rank holds of a vocabulary that all ranks of its pipeline share: its rows, and units on their way.

A unit is a microbatch or a slice of it. A unit's way, all of it keyed by (microbatch, slice):

    I -> looked until E; given -> GIVE -> coming, for F of the first stage on its rank
    SPREAD -> coming until S -> told -> MEET -> met until T; with 1 sum also coming, for B of the last stage on its rank
    T, with 2 sums -> parts -> SUM -> coming, for that B
    TAKE -> coming until E
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Op
from zbc.ops import At
from zbc.plan.dealing import CHUNK
from zbc.runtime.core.feature import Feature
from zbc.runtime.core.optimizer import Held, OptimizerOver, StageOptimizer
from zbc.runtime.core.private import users
from zbc.runtime.core.route import Finish, Keeps, Left, Source
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.core.validate import chunks
from zbc.runtime.features.slicing import Part
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.features.vocabulary import Embedding, Output, Told
from zbc.runtime.features.words import Own, combine
from zbc.runtime.transports.transport import Pending, Transport

if TYPE_CHECKING:
    from zbc.runtime.core.stage import Stage
    from zbc.runtime.core.state import PhaseRun, Worker

Unit = tuple[int, int]  # microbatch, slice


class Met(NamedTuple):
    """What a collective brings to those who wait for it."""

    kind: Kind
    mb: int
    slice: int

    def __str__(self) -> str:
        return str(Op(self.kind, 0, self.mb, 0, self.slice))


class Coming(Protocol):
    """A collective that was started, and what it brings."""

    pending: Pending

    def result(self) -> Tensor: ...


@dataclass
class Bringing:
    """A `Coming`: what is to be there lies in `tensor`, and goes on as `spec`, of the same number of elements."""

    pending: Pending
    tensor: Tensor
    spec: TensorSpec

    def result(self) -> Tensor:
        return self.tensor.view(self.spec.shape).to(self.spec.dtype).detach()  # a view would hold it


@dataclass
class Meeting:
    """A MEET: what all ranks told, (ranks, 3, N), and with 1 sum what is added up behind that, which is kept where it
    is wanted `here`. Also a `Coming`."""

    told: Told
    parts: Tensor
    spec: TensorSpec  # of the gradient that comes of it
    here: bool
    pending: Pending = field(init=False)
    made: Tensor | None = None
    _found: tuple[Tensor, Tensor] | None = None

    def known(self) -> tuple[Tensor, Tensor]:
        """Log of the sum of exp over all words, and the target's logit, once all parts are there."""
        if self._found is None:
            self._found = combine(self.parts)
        return self._found

    def make(self) -> Tensor:
        """This rank's part of the gradient."""
        made = self.told.part(self.known()[0])
        self.made = made if self.here else None
        return made

    def result(self) -> Tensor:
        if self.made is None:
            raise ZbcError("E703", "run: MEET adds up nothing: the plan has two sums")
        return self.made.view(self.spec.shape).to(self.spec.dtype)


@dataclass
class Vocabulary(Feature):
    """One rank's share. `ranks` are those of its pipeline, as ranks of the run, ascending, `bounds[0]` the words of
    each; `replicas` are the ranks of the run with the same words. Of ranks that share layers, `group`, the one at
    `place` has `bounds[place]`."""

    output: Output
    embedding: Embedding
    optimizer: OfRows
    ranks: tuple[int, ...]
    bounds: Sequence[Sequence[tuple[int, int]]]
    replicas: tuple[int, ...]
    first: int  # of them the one with the first stage
    last: int  # and with the last
    last_stage: int
    sums: int
    slices: Sequence[Part]  # none: microbatches are whole
    inputs: Sequence[TensorSpec]  # of the first stage, by slice
    outputs: Sequence[TensorSpec]  # of the last
    group: Group | None

    looked: dict[Unit, Own] = field(default_factory=dict)
    given: dict[Unit, Tensor] = field(default_factory=dict)
    told: dict[Unit, Told] = field(default_factory=dict)
    met: dict[Unit, Meeting] = field(default_factory=dict)
    parts: dict[Unit, Tensor] = field(default_factory=dict)
    coming: dict[Met, Coming] = field(default_factory=dict)
    sent: list[tuple[Pending, Tensor]] = field(default_factory=list)  # for others; held until they have it

    def slice_of(self, op: Op) -> Part | None:
        return self.slices[op.slice] if self.slices else None

    def start(self, kind: Kind, unit: Unit, pending: Pending, tensor: Tensor, spec: TensorSpec, *, here: bool) -> None:
        """Note a collective: whose result is wanted `here`, or by others only."""
        self.forget()
        if here:
            self.coming[Met(kind, *unit)] = Bringing(pending, tensor, spec)
        else:
            self.sent.append((pending, tensor))

    def keeps(self, run: PhaseRun, stage: Stage, key: Key) -> Keeps | None:
        return None if key.stage else LOOKED

    def source(self, op: Op) -> Source:
        kind = Kind.GIVE if op.kind.takes is At.SOURCES else Kind.MEET if self.sums == 1 else Kind.SUM
        return Meets(kind, op.mb, op.slice)

    def reader(self, worker: Worker, op: Op) -> int:
        """All ranks together are behind the last stage, and before the first."""
        return len(worker.placement.pipes[0]) if op.kind.gives is At.SINKS else -1

    def forget(self) -> None:
        """Let go of what others have."""
        self.sent = [one for one in self.sent if not one[0].ready()]

    def arrive(self, worker: Worker, met: Met) -> Tensor:
        """What a collective brings here; blocks. Raises E703 if it was not started."""
        self.forget()
        coming = self.coming.pop(met, None)
        if coming is None:
            raise ZbcError("E703", f"run: {met} has not been started, and its result is needed", hint="plan again")
        worker.wait_for(str(met), coming.pending)
        return coming.result()

    def closes(self, worker: Worker) -> None:
        """Block until others have what they were to have."""
        worker.progress.waiting = True
        for pending, _ in self.sent:
            pending.wait()
        self.sent.clear()
        worker.progress.waiting = False

    def whole(self, name: str, transport: Transport) -> Tensor:
        """All rows of a table, which all ranks of the pipeline call for together; blocks."""
        mine = self.optimizer.parameters[name].detach()
        words = sorted((own, part, i) for part, each in enumerate(self.bounds) for i, own in enumerate(each))
        most, width = max(high - low for (low, high), *_ in words), mine.shape[1]
        parts = mine.new_empty(len(self.ranks), most, width)
        padded = functional.pad(mine, (0, 0, 0, most - len(mine)))
        transport.start_gather(padded.view(-1), parts.flatten(1), self.ranks).wait()
        every = parts[None] if self.group is None else self.group.collect(parts)
        return torch.cat([every[part, i, : high - low] for (low, high), part, i in words])

    def leftovers(self, worker: Worker) -> list[str]:
        """What a finished step should have used up and did not."""
        stores: Iterable[tuple[str, Mapping[Unit, object]]] = (
            ("the words that I {} looked up have no E", self.looked),
            ("what I {} looked up was never given", self.given),
            ("what S {} found was never told", self.told),
            ("MEET {} has no T", self.met),
            ("what T {} added to the input gradient was never summed", self.parts),
        )
        left = [text.format(_name(*unit)) for text, store in stores for unit in store]
        return [*left, *(f"what {met} brings was never used" for met in self.coming)]


def _name(mb: int, part: int) -> str:
    return str(Op(Kind.F, 0, mb, 0, part)).removeprefix("F s0 ")


@dataclass(frozen=True, slots=True)
class Meets:
    """A collective of all ranks brings it."""

    kind: Kind
    mb: int
    slice: int
    waits: bool = True

    def take(self, worker: Worker, number: int) -> Tensor:
        return worker.features.of(Vocabulary).arrive(worker, Met(self.kind, self.mb, self.slice))


class Looked(Keeps):
    """The graph, without what was looked up where that needs no more of it than a gradient."""

    def forward(
        self, worker: Worker, stage: Stage, x: Tensor, number: int, finish: Finish, slot: Slot | None
    ) -> tuple[Tensor, Left | None]:
        found = super().forward(worker, stage, x, number, finish, slot)
        again = stage.recompute or stage.spares  # its forward runs again, from what came in
        if not again and users(x.untyped_storage()) == 2:
            x.data = x.new_empty(1).expand_as(x)
        return found


LOOKED = Looked()


# ---- its weights ---------------------------------------------------------------------------------------------


class OfRows(OptimizerOver):
    """The optimizer of parameters that are rows of larger ones, as a `StageOptimizer` that says of which."""

    def __init__(self, inner: StageOptimizer, first: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """They begin with row `first`; `shapes` are those of the whole parameters."""
        super().__init__(inner)
        self._shapes = shapes
        self._starts = {name: first * shape[1] for name, shape in shapes.items()}

    def squares(self) -> dict[str, Tensor]:
        """Those of rows stand where they would in all of the parameter. Where a chunk of that lies on two ranks each
        has a number for it, and they are summed."""
        found = {}
        for name, sums in self._inner.squares().items():
            shape = self._shapes[name]
            every = sums.new_zeros(chunks(shape[0] * shape[1]))
            before = self._starts[name] // CHUNK
            every[before : before + len(sums)] = sums
            found[name] = every
        return found

    def held(self) -> list[Held]:
        return [self._of(one) for one in self._inner.held()]

    def incomplete(self) -> list[Held]:
        return [self._of(one) for one in self._inner.incomplete()]

    def _of(self, one: Held) -> Held:
        return one._replace(start=self._starts[one.name] + one.start, shape=self._shapes[one.name])
