"""The state of one rank while it runs a plan: the `Worker` and its stores.

The path of a tensor through a rank, keyed by `ir.Key` (stage, microbatch, pipe, slice) or by the edge:

    RECV_F -> F -> kept[key] until B; edges[message] until SEND_F, or until the F here that reads it
    OFFLOAD .. RELEASE .. RELOAD: from kept[key] into away[key] and back
    RECV_B -> B -> slots[key] until W; edges[message] until SEND_B, or until the B here that reads it

The row of an op in zbc/ops.py lists the values it reads, makes and consumes; `STORES` maps such values to stores, and
route.py maps each op to its entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.ir import Key, Kind, Message, Op
from zbc.plan.directory import RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.bucket import GradientSum
from zbc.runtime.core.ending import REPEATED, STORES, Ending
from zbc.runtime.core.feature import Features
from zbc.runtime.core.optimizer import StageOptimizer
from zbc.runtime.core.progress import Progress, StepResult, clock_for
from zbc.runtime.core.route import Left, Route, route_of
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.tensors import Batch, Length, Loss, Part
from zbc.runtime.core.validate import VectorLayout
from zbc.runtime.seeding import Watch
from zbc.runtime.transports.transport import Letter, Pending, Transport

if TYPE_CHECKING:
    from zbc.runtime.features.packing import Rows

Handler = Callable[["Worker", Op], None]
Around = Callable[[Handler, "Worker", Op], None]
Entry = tuple[Handler, Op, str]  # with the text of the op
Script = list[Entry]


class BatchSource(Protocol):
    """The data of every step, by microbatch, as tensors on the CPU."""

    @property
    def count(self) -> int: ...  # samples
    def follow(self, phases: Phases) -> None: ...
    def inputs(self, step: int, mb: int) -> Batch: ...
    def targets(self, step: int, mb: int) -> Batch: ...
    def digest(self) -> int: ...  # of a few samples
    def weight(self, step: int, mb: int) -> float | None:
        """A microbatch's weight by its targets that count; None: those of `Work`."""
        return None

    def close(self) -> None:
        """Reads nothing ahead from here on; ends the reader threads."""
        return

    def open(self) -> None:
        """Reads ahead once more, after `close`."""
        return


class Share(NamedTuple):
    """A microbatch's `weight` in the loss of its step, and the length of its rows, None: that of whole ones. `samples`:
    lengths of those in each row; None if each is one."""

    weight: float = 1.0
    length: Length | None = None
    samples: Rows | None = None


class Work:
    """Each replica's share of a step, here equal ones. A subclass deals out unequal ones (training/data/unequal.py). It
    is told the `phases` of a training before its first step."""

    phases: Phases
    most = 0  # maximum microbatches of a replica, which are numbered over all replicas; 0: the number in its plan

    def count(self, step: int, replica: int) -> int | None:
        """The number of microbatches of a replica; None: the phase's."""
        return None

    def share(self, step: int, number: int) -> Share:
        """A microbatch of a step."""
        return Share()

    def tokens(self, step: int) -> int | None:
        """The tokens of a step of all replicas; None: those of whole rows."""
        return None

    def follow(self, phases: Phases) -> None:
        """Starts the steps from the position of `phases`."""
        self.phases = phases


@dataclass
class PhaseRun:
    """The plan, script and routes of a rank in one phase of the training, or in evaluations."""

    plan: RankPlan
    layout: VectorLayout
    script: Script
    ending: Ending = field(default_factory=Ending)
    routes: dict[Op, Route] = field(default_factory=dict)
    trains: bool = True  # False for an evaluation, which has data of its own
    batches: BatchSource | None = None
    first: int = 0  # the number of this replica's first microbatch among those of all replicas of the pipeline
    _shares: dict[tuple[torch.dtype, float], Tensor] = field(default_factory=dict)

    def wrap(self, kinds: Container[Kind], around: Around) -> None:
        """Runs `around(handler, worker, op)` in place of the handlers of ops of these kinds."""
        once = functools.cache(functools.partial(functools.partial, around))
        self.script[:] = [(once(run) if op.kind in kinds else run, op, text) for run, op, text in self.script]

    @functools.cached_property
    def count(self) -> int:
        return self.plan.manifest.microbatches

    @functools.cached_property
    def halves(self) -> frozenset[Key]:
        """The keys whose W is a separate op."""
        return frozenset(op.key for op in self.ending.keyed(self.plan.ops) if op.kind.splits)

    def share(self, loss: Tensor, scale: float = 1.0) -> Tensor:
        """The derivative of a step's loss, a mean over the microbatches of all replicas, by the loss of one, times the
        loss scale. If stages step without a flush, the mean is over the microbatches of one stage's step."""
        share = self._shares.get((loss.dtype, scale))
        if share is None:
            share = self._shares[loss.dtype, scale] = loss.new_tensor(self.portion * scale)
        return share

    @functools.cached_property
    def portion(self) -> float:
        """`share` as a number; 1 if losses are already parts of the step's loss."""
        layout = self.layout
        of = 1 if layout.weighted else self.ending.every or layout.microbatches // layout.apart * layout.tell
        return 1.0 / of

    def weigh(self, worker: Worker, number: int, target: Tensor, share: float) -> float:
        """The weight of a mean over the targets of a microbatch, or of a slice that has `share` of them."""
        return share * worker.weight(number)

    def criterion(self, worker: Worker, number: int, loss: Loss) -> Loss:
        """The loss function of a microbatch, or of a slice of it, that is not trained on."""
        return loss


@dataclass(repr=False)
class Worker:
    """The state of one rank. The only mutable object of the runtime; after a step every store is empty."""

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
    work: Work = field(default_factory=lambda: Work())  # each replica's share of a step
    warnings: tuple[str, ...] = ()  # for the console, before the first step
    hidden: Callable[[], float | None] = lambda: None  # the share of collectives inside ops hidden since the last call

    watch: Watch | None = None  # of all its stages
    step: int = 0
    scale: float = 1.0  # of the loss, in the gradients of this step
    stop: bool = False
    ends: bool = True  # whether something runs between this step and the next
    verdict: StepResult | None = None
    progress: Progress = field(default_factory=Progress)
    results: list[StepResult] = field(default_factory=list)

    edges: dict[Message, Tensor] = field(default_factory=dict)  # until its SEND, or the stage here that reads it
    kept: dict[Key, Left] = field(default_factory=dict)
    slots: dict[Key, Slot] = field(default_factory=dict)
    away: dict[Key, Left] = field(default_factory=dict)  # from OFFLOAD to RELOAD
    losses: dict[int, Tensor | float] = field(default_factory=dict)
    reports: dict[Key, list[tuple[int, Tensor]]] = field(default_factory=dict)  # by place in the vector
    reading: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)  # of slices to come
    evaluation: PhaseRun | None = None
    summing: list[GradientSum] = field(default_factory=list)  # started, not finished
    copied: torch.cuda.Event | None = None  # from when on the state being copied to the host may change
    renamed: dict[Letter, Letter] = field(default_factory=dict)  # new names of messages sent twice in this step

    def __repr__(self) -> str:
        return f"<worker {self.topology.name(self.rank)}>"  # without weights, the bytes of which may be freed

    def __post_init__(self) -> None:
        self.phase_run = self.phase_runs[0]
        manifest = self.plan.manifest
        self.placement = manifest.to_placement()
        self.everyone = tuple(range(manifest.topology.world))
        self.rank = self.transport.rank  # of the run
        self.topology = manifest.topology
        self.replica, _, self.at = self.topology.of(self.rank)
        self.share = self.topology.part(self.at)  # the number of its shard of the layers
        self.copy = self.topology.copy(self.rank)  # its index among the ranks with the same `share`
        self.clock = clock_for(self.device, self.progress)
        self.on_host = self.device.type == "cpu"
        self.meets = any(feature.meets for feature in self.features)
        for run in self.phase_runs:
            run.first = self.replica * (self.work.most or run.count)
        for run in (*self.phase_runs, *([] if self.evaluation is None else [self.evaluation])):
            self.prepare(run)

    @property
    def plan(self) -> RankPlan:
        return self.phase_run.plan

    @property
    def routes(self) -> dict[Op, Route]:
        return self.phase_run.routes

    @property
    def source(self) -> BatchSource | None:
        """The data of the current PhaseRun: training's or evaluation's."""
        return self.batches if self.phase_run.trains else self.phase_run.batches

    @property
    def layout(self) -> VectorLayout:
        return self.phase_run.layout

    @property
    def script(self) -> Script:
        return self.phase_run.script

    def run_of(self, step: int) -> PhaseRun:
        return run_of(self.phase_runs, self.work, self.phases, step, self.replica)

    def resume(self, step: int, position: int) -> None:
        """Resumes a training whose steps before `step` used `position` samples."""
        self.phases = self.phases.resumed(step, position)
        self.work.follow(self.phases)
        if self.batches is not None:
            self.batches.follow(self.phases)

    def length(self, mb: int) -> Length | None:
        """The length of the rows of a microbatch; None for whole ones."""
        return self.work.share(self.step, self.number(mb)).length

    def portion(self, number: int, part: Part | None) -> float:
        """The weight of the loss of a microbatch, or of a slice of it, in the mean over a step."""
        whole = self.phase_run.portion * self.work.share(self.step, number).weight
        return whole if part is None else whole * part.rows / part.length

    def weight(self, number: int) -> float:
        """The weight of a microbatch in the loss of its step, a sum over all; if that is a mean, 1 on average."""
        known = None if self.batches is None else self.batches.weight(self.step, number)
        return self.work.share(self.step, number).weight if known is None else known

    def wait(self, message: Letter) -> Tensor:
        """Blocks until a posted message has arrived."""
        progress = self.progress
        progress.waiting = True
        tensor = self.transport.wait(self.renamed.get(message, message))
        progress.waiting = False
        return tensor

    def wait_for(self, what: str, pending: Pending) -> None:
        """Blocks until a collective has completed; meanwhile `progress` shows `what` next to the current op."""
        progress = self.progress
        text, progress.op, progress.waiting = progress.op, f"{progress.op}, waits for {what}", True
        pending.wait()
        progress.op, progress.waiting = text, False

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sums a tensor over `ranks` in place; blocks."""
        self.progress.waiting = True
        self.transport.all_reduce(tensor, ranks)
        self.progress.waiting = False

    def vector(
        self, squares: Mapping[str, Tensor], losses: Mapping[int, Tensor | float], busy: float, peak: int
    ) -> Tensor:
        """This rank's entries of the vector of a step; see validate.py."""
        rank, device, replica = self.rank, self.device, self.apart
        return self.layout.vector(
            squares, losses, rank=rank, stop=self.stop, busy=busy, peak=peak, device=device, replica=replica
        )

    def learn(self, vector: Tensor) -> StepResult:
        """The verdict of all ranks: the only place in a step where the host reads values computed by the device."""
        self.progress.waiting = True
        verdict = self.layout.read(vector, self.apart)
        self.progress.waiting = False
        return verdict.unscaled(self.scale)

    def before_update(self) -> None:
        """Makes the device wait for the copy of the previous state, if a checkpoint copies it in the background."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None

    def finish_sums(self) -> None:
        """Blocks until every gradient all-reduce that was started has completed."""
        self.progress.waiting = True
        for bucket in self.summing:
            bucket.finish()
        self.summing.clear()
        self.progress.waiting = False

    def entries(self, which: Callable[[Key], bool] = lambda key: True) -> dict[int, Tensor | float]:
        """The sums of what forwards with these keys reported, by place in the vector of a step; removed here."""
        found = dict[int, list[Tensor]]()
        for place, value in chain(*(self.reports.pop(key) for key in list(self.reports) if which(key))):
            found.setdefault(place, []).append(value)
        return {place: torch.stack([one.to(own[-1].device) for one in own]).sum(0) for place, own in found.items()}

    def settle(self, *stages: int) -> None:
        """Completes all gradients of these stages for the optimizer; blocks."""
        self.finish_sums()
        for feature in self.features:
            feature.settles(self, stages)

    def number(self, mb: int) -> int:
        """A microbatch's number over all replicas of the pipeline, which determines its data and random draws."""
        return self.phase_run.first + mb % self.phase_run.count

    @property
    def apart(self) -> int:
        """Its index among the replicas, or groups of them, that report gradients separately; otherwise 0."""
        return self.replica * self.layout.apart // self.topology.dp

    @property
    def within(self) -> int:
        """Its index among the replicas that sum gradients together."""
        dp = self.topology.dp
        return self.copy // dp * (dp // self.layout.apart) + self.copy % (dp // self.layout.apart)

    def seat(self, part: int) -> int:
        """The rank of the run that is rank `part` of the pipeline, with this replica and these inner coordinates."""
        return self.topology.rank(self.replica, part, self.at)

    def prepare(self, run: PhaseRun) -> None:
        """Completes a phase or an evaluation: its script, its end, and the routes of its ops."""
        for feature in self.features:
            feature.completes(self, run)
        ops = run.ending.keyed(run.plan.ops)
        run.routes = {op: route for op in ops if (route := route_of(self, run, op)) is not None}

    def drop_repeated(self) -> None:
        """Drops the outputs of the ops that REDO runs again."""
        self.edges = {edge: tensor for edge, tensor in self.edges.items() if not edge.forward}
        for name, values in STORES.items():
            if REPEATED.issuperset(values):
                getattr(self, name).clear()
        for feature in self.features:
            feature.repeats(self)
        self.reports.clear()
        self.reading.clear()

    def close(self) -> None:
        """Ends the threads of this rank."""
        self.transport.close()
        for feature in self.features:
            feature.ends()
        if self.batches is not None:
            self.batches.close()


def run_of(runs: Sequence[PhaseRun], work: Work, phases: Phases, step: int, replica: int) -> PhaseRun:
    """The PhaseRun of a step of a replica, among those of all phases."""
    count = work.count(step, replica)
    if count is None:
        return runs[phases.index(step)]
    return next(run for run in runs if run.count == count)
