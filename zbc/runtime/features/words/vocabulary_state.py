"""The state of a rank's vocabulary shard, its rows and units in flight, and the handlers of its ops (vocabulary.py).

A unit is a microbatch or a slice of it. The path of a unit through the stores, all keyed by (microbatch, slice):

    I -> looked until E; given -> GIVE -> coming, for F of the first stage on its rank
    SPREAD -> coming until S -> told -> MEET -> met until T; with 1 sum also coming, for B of the last stage on its rank
    T, with 2 sums -> parts -> SUM -> coming, for that B
    TAKE -> coming until E
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.errors import ZbcError
from zbc.ir import Kind, Message, Op
from zbc.ops import WORDS, At
from zbc.plan.dealing import CHUNK
from zbc.plan.directory import Manifest
from zbc.runtime.core.feature import Context, Feature, Site
from zbc.runtime.core.optimizer import Held, StageOptimizer
from zbc.runtime.core.private import users
from zbc.runtime.core.route import Edges, Keeps, Made, Route, read
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Finish, Stage
from zbc.runtime.core.state import PhaseRun, Worker
from zbc.runtime.core.tensors import IGNORED, Part, TensorSpec
from zbc.runtime.core.validate import chunks
from zbc.runtime.features import optimizer_of
from zbc.runtime.features.tensor_parallel import Group, bounds
from zbc.runtime.features.words.vocabulary import Embedding, Output, Told
from zbc.runtime.features.words.words import Own, as_one, combine
from zbc.runtime.transports.transport import Pending, Then, Transport

Unit = tuple[int, int]  # microbatch, slice


class Met(NamedTuple):
    """The key of a collective's result, of all ranks, which may be the input of an op."""

    kind: Kind
    mb: int
    slice: int

    @property
    def waits(self) -> bool:
        return True

    def take(self, worker: Worker, number: int) -> Tensor:
        return worker.features.of(Vocabulary).arrive(worker, self)

    def __str__(self) -> str:
        return str(Op(self.kind, 0, self.mb, 0, self.slice))


@dataclass
class Bringing:
    """A collective in flight, whose result is `tensor`, converted to `spec` with the same number of elements."""

    pending: Pending
    tensor: Tensor
    spec: TensorSpec

    def result(self) -> Tensor:
        return self.tensor.view(self.spec.shape).to(self.spec.dtype).detach()  # a view would hold its base


@dataclass
class Meeting:
    """A MEET: the softmax statistics of all ranks, (ranks, 3, N), and with 1 sum the reduce of the gradient after it,
    whose result is kept if this rank needs it (`here`)."""

    told: Told
    parts: Tensor
    spec: TensorSpec  # of the reduced gradient
    here: bool
    pending: Pending = field(init=False)
    made: Tensor = field(init=False)

    @functools.cached_property
    def known(self) -> tuple[Tensor, Tensor]:
        """Log of the sum of exp over the vocabulary, and the target's logit, once all parts have arrived."""
        return combine(self.parts)

    def make(self) -> Tensor:
        made = self.told.part(self.known[0])
        if self.here:
            self.made = made
        return made

    def result(self) -> Tensor:
        return self.made.view(self.spec.shape).to(self.spec.dtype)


@dataclass
class Vocabulary(Feature):
    """One rank's vocabulary shard. `ranks` are the ranks of its pipeline, numbered in the run, ascending; `bounds[0]`
    has the words of each. In a tensor parallel `group`, the pipeline of the rank at `place` has the words of
    `bounds[place]`."""

    output: Output
    embedding: Embedding
    ranks: tuple[int, ...]
    bounds: Sequence[Sequence[tuple[int, int]]]
    first: int  # the one of `ranks` with the first stage
    last: int  # the one with the last stage
    last_stage: int
    sums: int
    slices: Sequence[Part]  # empty: microbatches are whole
    inputs: Sequence[TensorSpec]  # of the first stage, by slice
    outputs: Sequence[TensorSpec]  # of the last stage, by slice
    group: Group | None

    looked: dict[Unit, Own] = field(default_factory=dict)
    given: dict[Unit, Tensor] = field(default_factory=dict)
    told: dict[Unit, Told] = field(default_factory=dict)
    met: dict[Unit, Meeting] = field(default_factory=dict)
    parts: dict[Unit, Tensor] = field(default_factory=dict)
    coming: dict[Met, Bringing | Meeting] = field(default_factory=dict)
    sent: list[tuple[Pending, Tensor]] = field(default_factory=list)  # for others; held until delivered

    def slice_of(self, op: Op) -> Part | None:
        return self.slices[op.slice] if self.slices else None

    def entry(self, worker: Worker, op: Op) -> TensorSpec:
        """The first stage's input of a unit."""
        return self.inputs[op.slice].of_rows(worker.length(op.mb))

    def exit(self, worker: Worker, op: Op) -> TensorSpec:
        """The last stage's output of a unit."""
        return self.outputs[op.slice].of_rows(worker.length(op.mb))

    def start(self, kind: Kind, unit: Unit, pending: Pending, tensor: Tensor, spec: TensorSpec, *, here: bool) -> None:
        """Registers a collective whose result is needed `here`, or only by other ranks."""
        self.forget()
        if here:
            self.coming[Met(kind, *unit)] = Bringing(pending, tensor, spec)
        else:
            self.sent.append((pending, tensor))

    def routes(self, worker: Worker, run: PhaseRun, op: Op, route: Route) -> Route:
        """All ranks together come after the last stage and before the first one."""
        placement = worker.placement
        ends = {At.SOURCES: not placement.sources(op.stage), At.SINKS: not placement.sinks(op.stage)}
        if op.stage == 0:
            route = route._replace(keeps=LOOKED)
        if op.kind.takes is not None and ends[op.kind.takes]:
            kind = Kind.GIVE if op.kind.takes is At.SOURCES else Kind.MEET if self.sums == 1 else Kind.SUM
            route = route._replace(takes=Met(kind, op.mb, op.slice))
        if op.kind.gives is not None and ends[op.kind.gives]:
            reader = len(placement.pipes[0]) if op.kind.gives is At.SINKS else -1
            route = route._replace(gives=Edges((Message(op.stage, reader, *op.key[1:]),), route.stage))
        return route

    def forget(self) -> None:
        """Frees tensors that the other ranks have received."""
        self.sent = [message for message in self.sent if not message[0].ready()]

    def arrive(self, worker: Worker, met: Met) -> Tensor:
        """The result of a collective; blocks. Raises E703 if it was not started."""
        self.forget()
        coming = self.coming.pop(met, None)
        if coming is None:
            raise ZbcError("E703", f"run: {met} has not been started, and its result is needed", hint="plan again")
        worker.wait_for(str(met), coming.pending)
        return coming.result()

    def closes(self, worker: Worker) -> None:
        """Blocks until the other ranks have received all tensors."""
        worker.progress.waiting = True
        for pending, _ in self.sent:
            pending.wait()
        self.sent.clear()
        worker.progress.waiting = False

    def whole(self, mine: Tensor, transport: Transport) -> Tensor:
        """All rows of a table, of which this rank has `mine`; all ranks of the pipeline call this together; blocks."""
        words = sorted((own, part, i) for part, shards in enumerate(self.bounds) for i, own in enumerate(shards))
        most, width = max(high - low for (low, high), *_ in words), mine.shape[1]
        parts = mine.new_empty(len(self.ranks), most, width)
        padded = functional.pad(mine.detach(), (0, 0, 0, most - len(mine)))
        transport.start_gather(padded.view(-1), parts.flatten(1), self.ranks).wait()
        every = parts[None] if self.group is None else self.group.collect(parts)
        return torch.cat([every[part, i, : high - low] for (low, high), part, i in words])

    def leftovers(self, worker: Worker) -> list[str]:
        units = [(name, unit) for name in ("looked", "given", "told", "met", "parts") for unit in getattr(self, name)]
        return [f"{name}[m{mb}.{part}]" for name, (mb, part) in units] + [f"coming[{met}]" for met in self.coming]


class Looked(Keeps):
    """Keeps the graph, and frees the looked-up embeddings if backward needs only their gradient."""

    def forward(self, stage: Stage, x: Tensor, step: int, number: int, finish: Finish, slot: Slot | None) -> Made:
        result = super().forward(stage, x, step, number, finish, slot)
        again = stage.recompute or stage.spares  # its forward runs again, from its input
        if not again and users(x.untyped_storage()) == 2:
            x.data = x.new_empty(1).expand_as(x)
        return result


LOOKED = Looked()


class OfRows(StageOptimizer):
    """The optimizer of parameters that are rows of larger ones, as a `StageOptimizer` of the larger ones."""

    def __init__(self, inner: StageOptimizer, first: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The rows begin at `first`; `shapes` are the shapes of the whole parameters."""
        super().__init__(inner)
        self._shapes = shapes
        self._starts = {name: first * shape[1] for name, shape in shapes.items()}

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares at the index of their chunk in the whole parameter. If a chunk is spread over two ranks, each
        has a number for it, and these are summed."""
        found = {}
        for name, sums in self._inner.squares().items():
            shape = self._shapes[name]
            every = sums.new_zeros(chunks(shape[0] * shape[1]))
            before = self._starts[name] // CHUNK
            every[before : before + len(sums)] = sums
            found[name] = every
        return found

    def held(self) -> list[Held]:
        return [self._of(held) for held in self._inner.held()]

    def incomplete(self) -> list[Held]:
        return [self._of(held) for held in self._inner.incomplete()]

    def _of(self, one: Held) -> Held:
        return one._replace(start=self._starts[one.name] + one.start, shape=self._shapes[one.name])


class Words(NamedTuple):
    """What a `Vocabulary` is made of: this rank's rows of the tables, of whole `shapes` by name, from the word `first`
    on; its two ends; and by slice the first stage's input and the last one's output."""

    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, tuple[int, int]]
    first: int
    output: Output
    embedding: Embedding
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]

    def optimizer(self, site: Site) -> OfRows:
        return OfRows(optimizer_of(site, WORDS, self.parameters, (self.output.cast,)), self.first, self.shapes)


def words_of(manifest: Manifest, part: int) -> list[tuple[int, int]]:
    """The bounds of the words of each rank of the pipeline, for shard `part` of the layers."""
    rows = manifest.vocabulary.rows if manifest.vocabulary is not None else []
    parts = [(low, *bounds(high - low, part, manifest.topology.parts)) for low, high in pairwise(rows)]
    return [(low + start, low + stop) for low, start, stop in parts]


def build(context: Context) -> Vocabulary | None:
    words, manifest = context.words, context.manifest
    if words is None or manifest.vocabulary is None:
        return None
    run, placement, seat = manifest.topology, manifest.to_placement(), manifest.topology.of(context.rank)
    ranks = tuple(sorted(run.rank(seat.dp, part, seat.at) for part in range(run.pp)))
    return Vocabulary(
        words.output,
        words.embedding,
        ranks=ranks,
        bounds=[[words_of(manifest, part)[run.of(rank).pp] for rank in ranks] for part in range(run.parts)],
        first=run.rank(seat.dp, placement.rank_of(0), seat.at),
        last=run.rank(seat.dp, placement.rank_of(placement.ends[-1]), seat.at),
        last_stage=placement.ends[-1],
        sums=manifest.vocabulary.sums,
        slices=context.slices,
        inputs=words.inputs,
        outputs=words.outputs,
        group=context.shared.group,
    )


def look_up(worker: Worker, op: Op) -> None:
    """I: looks up this rank's words of the inputs; zeros for the words of other ranks."""
    shared, unit = shared_of(worker, op)
    tokens, _ = read(worker, worker.source, "inputs", worker.number(op.mb), shared.slice_of(op))
    began = worker.clock.start()
    shared.looked[unit], shared.given[unit] = shared.embedding.look_up(tokens)
    worker.clock.stop(began)


def embedding_gradient(worker: Worker, op: Op) -> None:
    """E: the gradient of this rank's rows of the embedding."""
    shared, unit = shared_of(worker, op)
    grad = shared.arrive(worker, Met(Kind.TAKE, *unit))
    began = worker.clock.start()
    shared.embedding.learn(shared.looked.pop(unit), grad)
    worker.clock.stop(began)


def tell(worker: Worker, op: Op) -> None:
    """S: the softmax statistics of this rank's words; with 1 sum its terms of the input gradient, too. Tensor parallel
    ranks have different words, and merge their statistics for the other ranks of the pipeline."""
    shared, unit = shared_of(worker, op)
    part, training = shared.slice_of(op), worker.phase_run.trains
    targets, share = read(worker, worker.source, "targets", worker.number(op.mb), part)
    hidden = shared.arrive(worker, Met(Kind.SPREAD, *unit))
    began = worker.clock.start()
    counting = (targets != IGNORED).sum().double().clamp(min=1.0)
    weight = worker.phase_run.weigh(worker, worker.number(op.mb), targets, share) / counting
    step = worker.phase_run.portion * worker.scale
    early = training and shared.sums == 1
    keep = training and (shared.sums == 2 or shared.output.weight.requires_grad)
    told = shared.told[unit] = shared.output.tell(hidden, targets, weight, step, early=early, keep=keep)
    if shared.group is not None:
        told.said = as_one(shared.group.collect(told.mine))
    worker.clock.stop(began)


def meet(worker: Worker, op: Op) -> None:
    """MEET: starts the all-gather of the statistics of S; with 1 sum followed by the reduce of the gradient of the last
    stage's output to its rank, whose B waits. T waits."""
    shared, unit = shared_of(worker, op)
    told = shared.told.pop(unit)
    mine = (told.mine if told.said is None else told.said).contiguous()
    parts = mine.new_empty(len(shared.ranks), *mine.shape)
    meeting = Meeting(told, parts, shared.exit(worker, op), worker.rank == shared.last)
    then = None if told.spread is None else Then(meeting.make, shared.last)
    meeting.pending = worker.transport.start_gather(mine.view(-1), meeting.parts.flatten(1), shared.ranks, then)
    shared.met[unit] = meeting
    if then is not None and meeting.here:
        shared.coming[Met(Kind.MEET, *unit)] = meeting


def output_gradient(worker: Worker, op: Op) -> None:
    """T: the gradient of this rank's rows of the output layer; with 2 sums its part of the input gradient, too."""
    shared, unit = shared_of(worker, op)
    meeting = shared.met.pop(unit)
    worker.wait_for(f"MEET {str(op).partition(' ')[2]}", meeting.pending)
    began = worker.clock.start()
    if worker.rank == shared.last:
        count_loss(worker, unit, meeting)
    if (part := shared.output.learn(meeting.told, meeting.known[0], part=shared.sums == 2)) is not None:
        shared.parts[unit] = part
    worker.clock.stop(began)


def broadcast(worker: Worker, op: Op) -> None:
    """SPREAD: starts the broadcast of the last stage's output, for which S waits; TAKE: that of the gradient of the
    first stage's input, for which E waits."""
    shared, unit = shared_of(worker, op)
    last, key = shared.last_stage, op.key[1:]
    if op.kind is Kind.TAKE:
        edge, root, spec = Message(0, -1, *key), shared.first, shared.entry(worker, op)
    else:
        edge, root, spec = Message(last, last + 1, *key), shared.last, shared.exit(worker, op)
    if worker.rank != root:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=worker.device)
    else:
        tensor = worker.edges.pop(edge).contiguous()
    pending = worker.transport.start_broadcast(tensor, root, shared.ranks)
    shared.start(op.kind, unit, pending, tensor, spec, here=True)


def reduce(worker: Worker, op: Op) -> None:
    """GIVE: starts the reduce of all ranks' embeddings to the first stage's rank, whose F waits; SUM: that of the
    gradient of the last stage's output to its rank, whose B waits."""
    shared, unit = shared_of(worker, op)
    if op.kind is Kind.GIVE:
        tensor, root, spec = shared.given.pop(unit), shared.first, shared.entry(worker, op)
    else:
        tensor, root, spec = shared.parts.pop(unit), shared.last, shared.exit(worker, op)
    pending = worker.transport.start_reduce(tensor, root, shared.ranks)
    shared.start(op.kind, unit, pending, tensor, spec, here=worker.rank == root)


def settle(worker: Worker, count: Callable[[Worker, Unit, Meeting], None]) -> None:
    """After forwards without backwards: waits for the statistics of MEET, calls `count` for them on the rank that
    reports losses, and frees all units."""
    shared = worker.features.find(Vocabulary)
    if shared is None:
        return
    for unit, meeting in shared.met.items():
        worker.wait_for("MEET", meeting.pending)
        if worker.rank == shared.last:
            count(worker, unit, meeting)
    shared.met.clear()
    shared.looked.clear()
    shared.closes(worker)


def count_loss(worker: Worker, unit: Unit, meeting: Meeting) -> None:
    """Adds the loss on the last stage's rank, which reports losses as it does with a whole output layer."""
    loss = meeting.told.loss(*meeting.known)
    worker.losses[unit[0]] = worker.losses.get(unit[0], 0.0) + (loss.item() if worker.on_host else loss)


def shared_of(worker: Worker, op: Op) -> tuple[Vocabulary, Unit]:
    return worker.features.of(Vocabulary), (op.mb, op.slice)


VOCABULARY: dict[Kind, Callable[[Worker, Op], None]] = {
    Kind.I: look_up,
    Kind.GIVE: reduce,
    Kind.SPREAD: broadcast,
    Kind.S: tell,
    Kind.MEET: meet,
    Kind.T: output_gradient,
    Kind.SUM: reduce,
    Kind.TAKE: broadcast,
    Kind.E: embedding_gradient,
}
