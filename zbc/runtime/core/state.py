"""What one rank holds while it runs a plan: the `Worker`, and where each op finds its things.

A tensor's way through a rank, keyed by `ir.Key` (stage, microbatch, pipe, slice) or by the edge:

    RECV_F -> F -> kept[key] until B; edges[message] until SEND_F, or until the F here that reads it
    OFFLOAD .. RELEASE .. RELOAD: from kept[key] into away[key] and back
    RECV_B -> B -> slots[key] until W; edges[message] until SEND_B, or until the B here that reads it

What an op reads, makes and uses up is what its row in zbc/ops.py says; `STORES` says where such a value lies, and
route.py where each op looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.ir import Key, Kind, Message, Op
from zbc.ops import VALUES
from zbc.plan.directory import RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.bucket import GradientSum
from zbc.runtime.core.clock import clock_for
from zbc.runtime.core.ending import Barrier, Ending
from zbc.runtime.core.feature import Features
from zbc.runtime.core.optimizer import StageOptimizer
from zbc.runtime.core.progress import EvaluationResult, Progress, StepResult
from zbc.runtime.core.route import Left, Route, route_of
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.tensors import Loss
from zbc.runtime.core.validate import VectorLayout, Verdict
from zbc.runtime.transports.transport import Letter, Pending, Transport

if TYPE_CHECKING:
    from zbc.runtime.features.packing import Rows
    from zbc.runtime.features.slicing import Part
    from zbc.runtime.features.tensor_parallel import Cut, Group

Entry = tuple[Callable[["Worker", Op], None], Op, str]  # handler, op, its text
Script = list[Entry]


class Store(NamedTuple):
    """A store of a worker: the values that it holds, and what is said of a key that is left when a step is over."""

    name: str
    values: tuple[str, ...]  # of `ops.VALUES`
    left: str


STORES = (
    Store("edges", ("act", "grad"), "{}"),
    Store("kept", ("kept",), "F {} has no backward"),
    Store("slots", ("left",), "B {} has no W"),
    Store("away", ("host",), "what F {} left went to the host and was never fetched back"),
)
# What the ops make that REDO runs again.
REPEATED = frozenset(ref.what for kind in Kind if kind.row.repeats for ref in kind.row.writes)


class BatchSource(Protocol):
    """Where the microbatches of every step come from, as tensors on the CPU."""

    @property
    def count(self) -> int: ...  # samples
    def follow(self, phases: Phases) -> None: ...
    def inputs(self, step: int, mb: int, group: str = "") -> Tensor: ...
    def targets(self, step: int, mb: int) -> Tensor: ...
    def weight(self, step: int, mb: int) -> float | None: ...  # by the targets that count; None: as all others
    def digest(self) -> int: ...  # of a few samples
    def close(self) -> None: ...


class UnequalWork(Protocol):
    """What each replica gets of a step, where samples are of unequal length; microbatches are numbered over all
    replicas, `most` of them for each."""

    most: int

    def count(self, step: int, replica: int) -> int: ...
    def weight(self, step: int, number: int) -> float: ...  # in the mean over all tokens of the step
    def rows(self, step: int, number: int) -> Rows: ...
    def follow(self, phases: Phases) -> None: ...


@dataclass
class PhaseRun:
    """What a rank runs in one phase of the training."""

    plan: RankPlan
    layout: VectorLayout
    script: Script
    ending: Ending = field(default_factory=Barrier)
    routes: dict[Op, Route] = field(default_factory=dict)
    trains: bool = True  # not of an evaluation, which has data of its own
    batches: BatchSource | None = None
    first: int = 0  # the number of this replica's first microbatch among those of all replicas of the pipeline
    _shares: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def count(self) -> int:
        """Microbatches of a step."""
        return self.plan.manifest.microbatches

    @functools.cached_property
    def halves(self) -> frozenset[Key]:
        """Whose W is an op of its own."""
        return frozenset(op.key for op in self.ending.keyed(self.plan.ops) if op.kind is Kind.B)

    def share(self, loss: Tensor) -> Tensor:
        """The gradient of a step's loss, a mean over the microbatches of all replicas, by the loss of one. Where stages
        step on their own, of a mean over those of one such step."""
        share = self._shares.get(loss.dtype)
        if share is None:
            share = self._shares[loss.dtype] = loss.new_tensor(self.portion)
        return share

    @functools.cached_property
    def portion(self) -> float:
        """`share` as a number."""
        return 1.0 / (self.ending.every or self.layout.microbatches // self.layout.apart)


@dataclass
class Evaluation:
    """What a rank needs to evaluate: the forward-only program with data of its own, None where they are not read."""

    every: int
    count: int  # microbatches per evaluation, in all replicas; 0 where the rank does not know
    run: PhaseRun
    results: list[EvaluationResult] = field(default_factory=list)
    counts: Callable[[Tensor], float] | None = None  # how many targets count, where microbatches may differ in that
    weights: dict[int, float] = field(default_factory=dict)  # of the microbatches of a batch, where losses are found

    def weigh(self, number: int, target: Tensor, share: float) -> float:
        """What the mean loss of a microbatch, or of a slice of it, counts in that of all."""
        weight = share if self.counts is None else self.counts(target)
        self.weights[number] = self.weights.get(number, 0.0) + weight
        return weight


@dataclass(repr=False)
class Worker:
    """One rank at work. The only mutable object of the runtime; after a step every store is empty."""

    phase_runs: list[PhaseRun]  # by phase
    phases: Phases
    transport: Transport
    device: torch.device
    stages: dict[int, Stage]
    batches: BatchSource | None  # None on ranks with neither the first nor the last stage
    loss: Loss
    optimizers: dict[int, StageOptimizer]  # by owner: stages, then rows of a vocabulary
    clip: float | None
    rate: Callable[[Phases, int], float]  # the learning rate of a step
    features: Features
    sums: dict[Op, GradientSum] = field(default_factory=dict)  # of each REDUCE of the plan
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shared weights: their stages, the owner's first
    group: Group | None = None  # the ranks that share this one's layers
    swaps: Group | None = None  # those that share out experts with it
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # the parameters of which each of them has a part
    work: UnequalWork | None = None  # of unequal work
    warnings: tuple[str, ...] = ()  # for the console, before the first step

    watched: bool = False  # whether generators that nobody seeds are looked at: layers of users may draw from them
    suspicious: bool = False  # whether each layer is
    step: int = 0
    stop: bool = False
    ends: bool = True  # whether something comes between this step and the next
    verdict: Verdict | None = None
    progress: Progress = field(default_factory=Progress)
    results: list[StepResult] = field(default_factory=list)

    edges: dict[Message, Tensor] = field(default_factory=dict)  # until its SEND, or the stage here that reads it
    kept: dict[Key, Left] = field(default_factory=dict)
    slots: dict[Key, Slot] = field(default_factory=dict)
    away: dict[Key, Left] = field(default_factory=dict)  # from OFFLOAD to RELOAD
    losses: dict[int, Tensor | float] = field(default_factory=dict)
    reading: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # microbatches of which slices are to come
    evaluation: Evaluation | None = None
    summing: list[GradientSum] = field(default_factory=list)  # started, not finished
    copied: torch.cuda.Event | None = None  # when the state that is copied to the host may change
    renamed: dict[Letter, Letter] = field(default_factory=dict)  # what messages of this step that came twice are called

    def __repr__(self) -> str:
        return f"<worker {self.topology.name(self.rank)}>"  # not its weights, the bytes of which may be gone

    def __post_init__(self) -> None:
        self.phase_run = self.phase_runs[0]
        manifest = self.plan.manifest
        self.placement = manifest.to_placement()
        self.everyone = tuple(range(manifest.topology.world))
        self.rank = self.transport.rank  # of the run
        self.topology = manifest.topology
        _, _, self.share = place = self.topology.of(self.rank)
        self.replica = place.dp
        self.clock = clock_for(self.device, self.progress)
        self.on_host = self.device.type == "cpu"
        for run in self.phase_runs:
            most = run.plan.manifest.microbatches if self.work is None else self.work.most
            run.first = self.replica * most
            self.prepare(run)

    def suspect(self, drawn: bool) -> None:
        """Where a step has `drawn` from a generator that nobody seeds, look at each layer of the next one."""
        if drawn != self.suspicious:
            self.suspicious = drawn
            for stage in self.stages.values():
                for one in (stage, *stage.slices):
                    one.seed_all(suspect=drawn)

    @property
    def inside(self) -> Group | None:
        """The ranks that this one meets inside of ops."""
        return self.swaps if self.group is None else self.group

    @property
    def plan(self) -> RankPlan:
        return self.phase_run.plan

    @property
    def routes(self) -> dict[Op, Route]:
        return self.phase_run.routes

    @property
    def source(self) -> BatchSource | None:
        """The data of what runs: of training, or of evaluation."""
        return self.batches if self.phase_run.trains else self.phase_run.batches

    @property
    def layout(self) -> VectorLayout:
        return self.phase_run.layout

    @property
    def script(self) -> Script:
        return self.phase_run.script

    def run_of(self, step: int) -> PhaseRun:
        """What runs a step."""
        if self.work is not None:
            count = self.work.count(step, self.replica)
            return next(run for run in self.phase_runs if run.plan.manifest.microbatches == count)
        return self.phase_runs[self.phases.index(step)]

    def resume(self, step: int, position: int) -> None:
        """Go on with a training whose steps before `step` took `position` samples."""
        self.phases = self.phases.resumed(step, position)
        for one in (self.batches, self.work):
            if one is not None:
                one.follow(self.phases)

    def loss_share(self, loss: Tensor, number: int) -> Tensor:
        """The gradient of a step's loss by that of a microbatch."""
        weight = self.weight(number)
        if self.work is not None:
            return loss.new_tensor(weight)
        share = self.phase_run.share(loss)
        return share if weight == 1.0 else share * weight

    def portion(self, number: int, part: Part | None) -> float:
        """What a loss of a microbatch, or of a slice of it, counts in a mean over those of a step."""
        whole = self.phase_run.portion if self.work is None else self.work.weight(self.step, number)
        return whole if part is None else whole * part.rows / part.length

    def weight(self, number: int) -> float:
        """What a microbatch counts in the loss of its step, the sum of all; where that is a mean, 1 on the mean."""
        known = None if self.batches is None else self.batches.weight(self.step, number)
        if known is None:
            return 1.0 if self.work is None else self.work.weight(self.step, number)
        return known

    def weigh(self, number: int, target: Tensor, share: float) -> float:
        """What the mean over the targets of a microbatch, or of a slice of it that is `share` of it, counts."""
        if self.phase_run.trains or self.evaluation is None:
            return share * self.weight(number)
        return self.evaluation.weigh(number, target, share)

    def wait(self, message: Letter) -> Tensor:
        """Block until a posted message is there."""
        progress = self.progress
        progress.waiting = True
        tensor = self.transport.wait(self.renamed.get(message, message))
        progress.waiting = False
        return tensor

    def wait_for(self, what: str, pending: Pending) -> None:
        """Block until a collective has happened, which is said of the op that runs."""
        progress = self.progress
        text, progress.op, progress.waiting = progress.op, f"{progress.op}, waits for {what}", True
        pending.wait()
        progress.op, progress.waiting = text, False

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum over `ranks` in place; blocks."""
        self.progress.waiting = True
        self.transport.all_reduce(tensor, ranks)
        self.progress.waiting = False

    def learn(self, vector: Tensor) -> Verdict:
        """What all ranks agreed on: the one place in a step where the host reads what the device computed."""
        self.progress.waiting = True
        verdict = self.layout.read(vector, self.apart)
        self.progress.waiting = False
        return verdict

    def before_update(self) -> None:
        """Have the device wait until the state before is copied, if a checkpoint does so beside the steps."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None

    def finish_sums(self) -> None:
        """Block until every sum of gradients that was started is there."""
        self.progress.waiting = True
        for one in self.summing:
            one.finish()
        self.summing.clear()
        self.progress.waiting = False

    def entries(self, which: Callable[[Key], bool] = lambda key: True) -> dict[int, Tensor | float]:
        """What features tell of a step."""
        return {place: one for feature in self.features for place, one in feature.entries(self, which).items()}

    def settle(self, *stages: int) -> None:
        """Have all gradients of these stages as the optimizer is to see them; blocks."""
        self.finish_sums()
        for feature in self.features:
            feature.settles(self, stages)

    def number(self, mb: int) -> int:
        """The number of a microbatch among those of all replicas of the pipeline: what it reads and draws depend on."""
        return self.phase_run.first + mb % self.phase_run.count

    @property
    def apart(self) -> int:
        """The replica, where each answers for itself; else 0."""
        return self.replica if self.layout.apart > 1 else 0

    def seat(self, part: int) -> int:
        """The rank of the run that is rank `part` of the pipeline, in this replica and with this share of layers."""
        return self.topology.rank(self.replica, part, self.share)

    def prepare(self, run: PhaseRun) -> None:
        """Look up where the ops of a phase find their things."""
        ops = run.ending.keyed(run.plan.ops)
        run.routes = {op: route for op in ops if (route := route_of(self, run, op)) is not None}

    def store(self, which: Store) -> dict[Any, Any]:
        """One of `STORES`."""
        found: dict[Any, Any] = getattr(self, which.name)
        return found

    def drop_repeated(self) -> None:
        """Drop what the ops have made that REDO runs again."""
        self.edges = {edge: tensor for edge, tensor in self.edges.items() if not edge.forward}
        for store in STORES[1:]:
            if REPEATED.issuperset(store.values):
                self.store(store).clear()
        for feature in self.features:
            feature.repeats(self)
        self.reading.clear()

    def close(self) -> None:
        """End the threads that work for this rank."""
        self.transport.close()
        for feature in self.features:
            feature.ends()
        if self.batches is not None:
            self.batches.close()

    def leftovers(self) -> list[str]:
        """What a finished step should have used up and did not."""
        due = (store for store in STORES[1:] if not any(VALUES[value].stays for value in store.values))
        found = [store.left.format(name_of(key)) for store in due for key in self.store(store) if self._due(key.mb)]
        found += [self._left_on(edge) for edge in self.edges if self._due(edge.mb)]
        found += [text for feature in self.features for text in feature.leftovers(self)]
        found += ["a sum of gradients was started and never used"] * len(self.summing)
        found += [f"the slices of m{number - self.phase_run.first} did not all run" for _, number in self.reading]
        return [*found, *(f"the loss of m{mb} was never reported" for mb in self.losses if self._due(mb))]

    def _left_on(self, edge: Message) -> str:
        """What is said of a value that is left on an edge."""
        sent = self.placement.crosses(edge.source, edge.sink, edge.pipe)
        name = name_of(Key(edge.source if sent or self.placement.branches else edge.sink, *edge[2:]))
        name += f" to s{edge.sink}" if self.placement.branches else ""
        what, reader = ("output", "F") if edge.forward else ("gradient", "B")
        if sent:
            return f"the {'output of F' if edge.forward else 'input gradient of B'} {name} was never sent"
        return f"the {what} handed over for {reader} {name} was never used"

    def _due(self, mb: int) -> bool:
        return self.phase_run.ending.due(self, mb)


def name_of(key: Key) -> str:
    """`s1 m0`, as in the text of an op."""
    return str(Op(Kind.F, *key)).removeprefix("F ")
