"""What one rank holds while it runs a plan: the `Worker`, and where each op finds its things.

A tensor's way through a rank, all of it keyed by `ir.Key` (stage, microbatch, pipe, slice):

    RECV_F -> F -> kept[key] until B; outputs[key] -> SEND_F, or handed[key of the next stage] if that is on this rank
    OFFLOAD .. RELEASE .. RELOAD: from kept[key] into away[key] and back
    RECV_B -> B -> slots[key] until W; input_grads[key] -> SEND_B, or output_grads[key of the stage before]

What an op reads, makes and uses up is what its row in zbc/ops.py says; `STORES` says where such a value lies.

Where stages are more than a chain, what is on an edge is keyed by the message that it is or would be.

Where two neighbouring stages share a rank there is no transfer: the producer puts the tensor where the consumer looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Message, Op
from zbc.ops import VALUES, At, Scope
from zbc.plan.directory import RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.averaging import Averaging, meet
from zbc.runtime.bucket import GradientSum
from zbc.runtime.clock import clock_for
from zbc.runtime.copying import copier_for
from zbc.runtime.cycle import Cycle
from zbc.runtime.freezing import Turns, scale
from zbc.runtime.optimizer import StageOptimizer
from zbc.runtime.packing import Rows
from zbc.runtime.parcels import Parcel, Pool
from zbc.runtime.pending import Ahead
from zbc.runtime.progress import EvaluationResult, Progress, StepResult
from zbc.runtime.sharded import Sharded
from zbc.runtime.slicing import Part, Pasts
from zbc.runtime.slot import Slot, know
from zbc.runtime.stage import Stage
from zbc.runtime.stage_slice import StageSlice
from zbc.runtime.tape import Tape
from zbc.runtime.tensor_parallel import Cut, Group
from zbc.runtime.tensors import Loss
from zbc.runtime.transport import Letter, Pending, Transport
from zbc.runtime.units import Units
from zbc.runtime.validate import VectorLayout, Verdict
from zbc.runtime.vocabulary_state import Met, Vocabulary
from zbc.runtime.windows import WindowCopier

Value = TypeVar("Value")
Entry = tuple[Callable[["Worker", Op], None], Op, str]  # handler, op, its text
Script = list[Entry]

# What F leaves for B: the stage input, a leaf that collects its gradient, or the parcel where it moves; the way back;
# what that starts with, at the loss; the slot, None where backward is one op and the layers are torch's own.
Kept = tuple[Tensor | Parcel, Tape, Tensor | None, Slot | None]


class Store(NamedTuple):
    """A store of a worker: the value that it holds, and what is said of a key that is left when a step is over."""

    name: str
    value: str  # of `ops.VALUES`
    left: str


STORES = (
    Store("handed", "act", "the output handed over for F {} was never used"),
    Store("kept", "kept", "F {} has no backward"),
    Store("outputs", "act", "the output of F {} was never sent"),
    Store("output_grads", "grad", "the gradient handed over for B {} was never used"),
    Store("input_grads", "grad", "the input gradient of B {} was never sent"),
    Store("slots", "left", "B {} has no W"),
    Store("away", "host", "what F {} left went to the host and was never fetched back"),
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
class Evaluation:
    """What a rank needs to evaluate: the forward-only program, and the data where they are read."""

    every: int
    microbatches: int  # of a batch, per replica of the pipeline
    batches: BatchSource | None  # None on ranks with neither the first nor the last stage
    count: int  # microbatches per evaluation, in all replicas; 0 where the rank does not know
    script: Script
    results: list[EvaluationResult] = field(default_factory=list)
    counts: Callable[[Tensor], float] | None = None  # how many targets count, where microbatches may differ in that
    weights: dict[int, float] = field(default_factory=dict)  # of the microbatches of a batch, where losses are found

    def weigh(self, mb: int, target: Tensor, share: float) -> float:
        """What the mean loss of a microbatch, or of a slice of it, counts in that of all."""
        weight = share if self.counts is None else self.counts(target)
        self.weights[mb] = self.weights.get(mb, 0.0) + weight
        return weight

    def number(self, worker: Worker, mb: int) -> int:
        """The number of a microbatch among those of all replicas of the pipeline."""
        return worker.replica * self.microbatches + mb


@dataclass
class PhaseRun:
    """What a rank runs in one phase of the training."""

    plan: RankPlan
    layout: VectorLayout
    script: Script
    ahead: Ahead | None = None  # of a plan without a barrier
    cycle: Cycle | None = None  # of one whose steps have no flush; the script is that of the step that runs
    turns: dict[int, Turns] = field(default_factory=dict)  # of the stages in which layers are frozen
    first: int = 0  # the number of this replica's first microbatch among those of all replicas of the pipeline
    _shares: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def count(self) -> int:
        """Microbatches of a step."""
        return self.plan.manifest.microbatches

    @functools.cached_property
    def halves(self) -> frozenset[Key]:
        """Whose W is an op of its own."""
        ops = self.plan.ops if self.cycle is None else self.cycle.all_keyed()
        return frozenset(op.key for op in ops if op.kind is Kind.B)

    @functools.cached_property
    def moves(self) -> frozenset[Key]:
        """What goes to the host."""
        return frozenset(op.key for op in self.plan.ops if op.kind is Kind.OFFLOAD)

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
        alone = self.layout.microbatches // self.layout.apart
        return 1.0 / (alone if self.cycle is None or not self.cycle.every else self.cycle.every)


class Ends(NamedTuple):
    """The edges of a stage, where stages are more than a chain: (what is on it, whether it crosses ranks)."""

    takes: tuple[tuple[Message, bool], ...]  # in the order of the stage's arguments; of gradients by stage
    gives: tuple[tuple[Message, bool], ...]


class Route(NamedTuple):
    """What the plan and the placement fix about an op, looked up once per plan."""

    key: Key
    stage: Stage
    message: Message | None  # a transfer's own; of others the one that brings what they read, if they wait for one
    peer: int  # of a transfer, in the run
    local: Key | None  # where the result goes in memory, if it goes to a stage on this rank
    first: bool  # a stage that reads the data: B and BW give nothing
    last: bool  # one that no other reads: F ends in the loss, B and BW begin there
    ends: Ends | None = None  # of a stage in a graph that is no chain


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
    optimizers: dict[int, StageOptimizer]
    clip: float | None
    rate: Callable[[Phases, int], float]  # the learning rate of a step
    sums: dict[Op, GradientSum] = field(default_factory=dict)  # of each REDUCE and TIE of the plan
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shared weights: their stages, the owner's first
    group: Group | None = None  # the ranks that share this one's layers
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # the parameters of which each of them has a part
    partial: Mapping[int, list[nn.Parameter]] = field(default_factory=dict)  # by stage: whole here, gradients are not
    vocabulary: Vocabulary | None = None  # this rank's words, if all ranks of the pipeline share them
    work: UnequalWork | None = None  # of unequal work
    averages: dict[int, Averaging] = field(default_factory=dict)  # by stage, where replicas sum no gradients
    units: Units | None = None  # runs groups of ops, where ranks share layers
    warnings: tuple[str, ...] = ()  # for the console, before the first step
    in_turn: tuple[str, ...] = ()  # why some groups run one op after the other all the same

    watched: bool = False  # whether generators that nobody seeds are looked at: layers of users may draw from them
    suspicious: bool = False  # whether each layer is
    step: int = 0
    stop: bool = False
    one_by_one: bool = False  # whether the ops of groups are to run one after the other now
    ends: bool = True  # whether something comes between this step and the next
    verdict: Verdict | None = None
    progress: Progress = field(default_factory=Progress)
    results: list[StepResult] = field(default_factory=list)

    handed: dict[Key | Message, Tensor] = field(default_factory=dict)
    kept: dict[Key, Kept] = field(default_factory=dict)
    outputs: dict[Key | Message, Tensor] = field(default_factory=dict)
    output_grads: dict[Key | Message, Tensor] = field(default_factory=dict)
    input_grads: dict[Key | Message, Tensor] = field(default_factory=dict)
    slots: dict[Key, Slot] = field(default_factory=dict)
    away: dict[Key, Kept] = field(default_factory=dict)  # from OFFLOAD to RELOAD
    losses: dict[int, Tensor | float] = field(default_factory=dict)
    added: dict[Key, Tensor] = field(default_factory=dict)  # by layers to the loss of a step: added.py
    reading: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # microbatches of which slices are to come
    evaluation: Evaluation | None = None
    summing: list[GradientSum] = field(default_factory=list)  # started, not finished
    gathering: list[Sharded] = field(default_factory=list)
    scattering: list[Sharded] = field(default_factory=list)  # sums of gradients that are shared out, under way
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
        self.routes: dict[Op, Route] = {}
        for run in self.phase_runs:
            most = run.plan.manifest.microbatches if self.work is None else self.work.most
            run.first = self.replica * most
            self.prepare(run.plan.ops if run.cycle is None else run.cycle.all_keyed())

    def suspect(self, drawn: bool) -> None:
        """Where a step has `drawn` from a generator that nobody seeds, look at each layer of the next one."""
        if drawn != self.suspicious:
            self.suspicious = drawn
            for stage in self.stages.values():
                for one in (stage, *stage.slices):
                    one.seed_all(suspect=drawn)

    @property
    def plan(self) -> RankPlan:
        return self.phase_run.plan

    @property
    def layout(self) -> VectorLayout:
        return self.phase_run.layout

    @property
    def script(self) -> Script:
        return self.phase_run.script

    @property
    def cycle(self) -> Cycle | None:
        return self.phase_run.cycle

    @property
    def ahead(self) -> Ahead | None:
        return self.phase_run.ahead

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

    def told(self, added: Mapping[Key, Tensor] | None = None) -> dict[int, Tensor | float]:
        """The entry of the vector of a step for what layers here added, or some of it; none where none did."""
        values = list((self.added if added is None else added).values())
        if not values:
            return {}
        device = values[-1].device
        return {self.layout.microbatches: torch.stack([value.to(device) for value in values]).sum()}

    def weight(self, number: int) -> float:
        """What a microbatch counts in the loss of its step, the sum of all; where that is a mean, 1 on the mean."""
        known = None if self.batches is None else self.batches.weight(self.step, number)
        if known is None:
            return 1.0 if self.work is None else self.work.weight(self.step, number)
        return known

    @functools.cached_property
    def pool(self) -> Pool:
        """Host memory for what moves, of the phase that moves most."""
        counts: dict[int, int] = {}
        for run in self.phase_runs:
            for stage, count in run.plan.manifest.slabs(run.plan.rank).items():
                counts[stage] = max(count, counts.get(stage, 0))
        know(p for stage in self.stages.values() for p in stage.parameters.values())
        return Pool(copier_for(self.device), counts)

    @functools.cached_property
    def anchor(self) -> Tensor:
        """What parcels let gradients flow to; it never has one."""
        return torch.zeros((), device=self.device, requires_grad=True)

    def wait(self, message: Letter) -> Tensor:
        """Block until a posted message is there."""
        progress = self.progress
        progress.waiting = True
        tensor = self.transport.wait(self.renamed.get(message, message))
        progress.waiting = False
        return tensor

    def arrive(self, met: Met) -> Tensor:
        """What a collective of the vocabulary brings here; blocks. Raises E703 if it was not started."""
        shared = self.vocabulary
        coming = None if shared is None else shared.coming.pop(met, None)
        if coming is None:
            raise ZbcError("E703", f"run: {met} has not been started, and its result is needed", hint="plan again")
        self.wait_for(str(met), coming.pending)
        return coming.result()

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
        self.scattering.clear()
        self.progress.waiting = False

    def complete(self, stage: int) -> None:
        """Sum the gradients of which each rank that shares the layers of a stage has a part; blocks."""
        found = [p for p in self.partial.get(stage, ()) if p.grad is not None]
        if self.group is None or not found:
            return
        self.progress.waiting = True
        flat = torch.cat([p.grad.reshape(-1) for p in found if p.grad is not None])
        self.group.start(flat).wait()
        parts = torch.split_with_sizes(flat, [p.numel() for p in found])
        for parameter, part in zip(found, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.progress.waiting = False

    @functools.cached_property
    def incomplete(self) -> list[int]:
        """The stages whose gradients no REDUCE sums, of which each rank may have parts."""
        return [stage for stage in sorted(self.partial) if Op(Kind.REDUCE, stage) not in self.sums]

    def average(self) -> None:
        """Make the gradients of layers that were frozen in some microbatches means over the others."""
        for stage, turns in self.phase_run.turns.items():
            scale(self.stages[stage], self.optimizers[stage], turns, self.step)

    def finish_sent(self) -> None:
        """Block until the other ranks of the pipeline have what this one brought to collectives of the vocabulary."""
        if self.vocabulary is not None:
            self.progress.waiting = True
            self.vocabulary.finish()
            self.progress.waiting = False

    def poll_sums(self) -> None:
        """Let go of the messages of sums that are over."""
        self.scattering = [one for one in self.scattering if not one.poll()]

    def finish_gathers(self) -> None:
        """Block until the weights that other ranks stepped are here."""
        self.progress.waiting = True
        for one in self.gathering:
            one.finish_gather()
        self.gathering.clear()
        self.progress.waiting = False

    def finish_gather(self, stage: int) -> None:
        """Block until the weights of a stage are here, if they are on their way."""
        one = self.optimizers.get(stage)
        if isinstance(one, Sharded) and one in self.gathering:
            self.progress.waiting = True
            self.gathering.remove(one)
            one.finish_gather()
            self.progress.waiting = False

    def sharded(self, op: Op) -> Sharded:
        """The optimizer of the stage of an op, which other ranks step parts of."""
        optimizer = self.optimizers[op.stage]
        if not isinstance(optimizer, Sharded):
            raise ZbcError("E703", f"run: {op} has nothing to gather: this rank steps all of the stage")
        return optimizer

    def frees_with(self, stage: int, tensor: Tensor) -> bool:
        """Whether the bytes of a tensor go with the weights of a stage."""
        one = self.optimizers.get(stage)
        return isinstance(one, Sharded) and one.takes_away(tensor)

    @property
    def frees(self) -> list[Sharded]:
        """The stages whose weights are here only when ops need them, ascending."""
        return self.gathers if self.plan.manifest.resident else []

    @property
    def gathers(self) -> list[Sharded]:
        """The stages whose weights a step gathers before ops use them, ascending: between steps they are not here, or
        those of before the last one."""
        if self.ahead is not None:
            return []
        return [one for _, one in sorted(self.optimizers.items()) if isinstance(one, Sharded)]

    def open_windows(self) -> None:
        """Have replicas take weights from each other's memory, if the plan says so; all ranks do so together, once the
        weights to begin with are there."""
        if self.plan.manifest.one_sided:
            copier = WindowCopier(self.device)
            for one in self.gathers:
                one.open_window(self.transport, copier)

    def gather_all(self) -> None:
        """Have the weights of all stages here, between steps; all ranks do so together."""
        for one in self.gathers:
            one.start_gather(self.transport, whole=True)
            self.gathering.append(one)
            self.finish_gathers()

    def free_all(self) -> None:
        """Give back the room of all weights that a step will gather."""
        for one in self.frees:
            one.free()

    def number(self, mb: int) -> int:
        """The number of a microbatch among those of all replicas of the pipeline: what it reads and draws depend on."""
        return self.phase_run.first + mb % self.phase_run.count

    @property
    def apart(self) -> int:
        """Which of several gradients are its own, where replicas do not sum theirs."""
        return self.replica if self.averages else 0

    def meet(self) -> None:
        """Make all replicas alike that do not sum gradients: weights, and what the optimizer keeps, become means."""
        for stage, one in sorted(self.averages.items()):
            one.forget()
            optimizer = self.optimizers[stage]
            state = {} if optimizer.optimizer is None else optimizer.optimizer.state
            parameters = [p for _, p in sorted(optimizer.parameters.items())]
            kept = [state[p][key] for p in parameters if p in state for key in sorted(state[p])]
            numbers = [value for value in kept if isinstance(value, Tensor) and value.is_floating_point()]
            meet(
                self.topology.ranks(self.placement.holders(stage), self.share), [*parameters, *numbers], self.transport
            )

    def counted(self) -> list[StageOptimizer]:
        """The stages whose gradients this rank answers for in the norm of all.

        Of several copies of a stage the one in pipe 0 of the first pipeline counts; where they share out its optimizer,
        each counts its part, and where replicas do not sum gradients each counts its own.
        """
        rank, placement = self.plan.rank, self.placement
        if self.averages:
            return list(self.optimizers.values())
        found = [
            optimizer
            for s, optimizer in self.optimizers.items()
            if (isinstance(optimizer, Sharded) and not optimizer.mirrored)
            or ((self.replica == 0 or isinstance(optimizer, Sharded)) and placement.rank_of(s) == rank)
        ]
        rows = None if self.vocabulary is None else self.vocabulary.optimizer
        return [*found, *([rows] if rows is not None and (self.replica == 0 or rows.dealt is not None) else [])]

    @property
    def every_optimizer(self) -> list[StageOptimizer]:
        """Those of the stages, and of this rank's words."""
        shared = self.vocabulary
        return [*self.optimizers.values(), *([] if shared is None else [shared.optimizer])]

    def primary(self) -> dict[str, nn.Parameter]:
        """The weights that are written down from this rank: each of the model's on one rank, in the first pipeline."""
        rank, placement = self.plan.rank, self.placement
        mine = [s for s in self.stages if self.replica == 0 and placement.rank_of(s) == rank]
        found = {name: p for s in mine for name, p in self.optimizers[s].parameters.items()}
        for name, stages in self.tied.items():
            if placement.rank_of(stages[0]) != rank:
                found.pop(name, None)
        return found

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares of the gradients this rank answers for, by parameter name; see `StageOptimizer.squares`."""
        found = {name: value for optimizer in self.counted() for name, value in optimizer.squares().items()}
        if self.share:  # what is no part of anything is counted on the first of the ranks that share layers
            found = {name: value for name, value in found.items() if name in self.cuts}
        if self.tied:
            own = self.primary()
            found = {name: value for name, value in found.items() if name not in self.tied or name in own}
        return found

    def sharing(self, name: str) -> tuple[int, ...]:
        """The ranks of the run that hold a shared weight."""
        ranks = {rank for stage in self.tied[name] for rank in self.placement.holders(stage)}
        return self.topology.ranks(sorted(ranks), self.share)

    def seat(self, part: int) -> int:
        """The rank of the run that is rank `part` of the pipeline, in this replica and with this share of layers."""
        return self.topology.rank(self.replica, part, self.share)

    def prepare(self, ops: Iterable[Op]) -> None:
        """Look up where further ops find their things."""
        self.routes |= {op: route for op in ops if (route := _route(self, op)) is not None}

    def store(self, which: Store) -> dict[Any, Any]:
        """One of `STORES`."""
        found: dict[Any, Any] = getattr(self, which.name)
        return found

    def drop_repeated(self) -> None:
        """Drop what the ops have made that REDO runs again."""
        for store in STORES:
            if store.value in REPEATED:
                self.store(store).clear()
        for pasts in self._pasts():
            pasts.clear()
        self.reading.clear()

    def close(self) -> None:
        """End the threads that work for this rank."""
        self.transport.close()
        if self.units is not None:
            self.units.close()
        if "pool" in self.__dict__:
            self.pool.copier.close()
        if self.batches is not None:
            self.batches.close()

    def leftovers(self) -> list[str]:
        """What a finished step should have used up and did not."""
        due = (store for store in STORES if not VALUES[store.value].stays)
        found = [store.left.format(name_of(key)) for store in due for key in self.store(store) if self._due(key.mb)]
        found += [] if self.vocabulary is None else self.vocabulary.leftovers()
        found += ["a sum of gradients was started and never used"] * len(self.summing)
        numbers = sorted({number for pasts in self._pasts() for number in pasts})
        found += [f"keys and values of microbatch {number} were never freed" for number in numbers]
        found += [f"the slices of m{number - self.phase_run.first} did not all run" for _, number in self.reading]
        return [*found, *(f"the loss of m{mb} was never reported" for mb in self.losses if self._due(mb))]

    def _due(self, mb: int) -> bool:
        """Whether a microbatch is not one of the next step, whose forwards may have run."""
        return self.cycle is None or self.ends or mb // self.phase_run.count == self.step % 2

    def _pasts(self) -> list[dict[int, Pasts]]:
        """What stages that run slices keep of those before."""
        return [one.pasts for stage in self.stages.values() for one in stage.slices[:1] if isinstance(one, StageSlice)]


def _route(worker: Worker, op: Op) -> Route | None:
    kind, placement = op.kind, worker.placement
    if kind.row.scope in (Scope.RANK, Scope.EVERY):
        return None
    whole = worker.stages.get(op.stage)
    if whole is None:
        text = f"run: {op} is in the plan of rank {worker.plan.rank}, which does not hold stage {op.stage}"
        raise ZbcError("E205", text, hint="plan again")
    stage, key, here = whole.at(op.slice), op.key, op.stage
    sources, sinks = placement.sources(here), placement.sinks(here)
    if kind.is_transfer:
        peer = placement.peer(op)
        if peer is None:
            raise ZbcError("E203", f"run: {op} leads out of the pipeline", hint="plan again")
        rank = worker.seat(peer)
        by_edge = Ends((), ()) if placement.branches else None
        return Route(key, stage, placement.message(op), rank, None, not sources, not sinks, by_edge)
    taken, given = placement.beside(here, kind.takes), placement.beside(here, kind.gives)
    if placement.branches:
        return Route(key, stage, None, -1, None, not sources, not sinks, _ends(worker, op, stage))
    messages = [Message(other, *key) for other in taken if placement.crosses(other, here, op.pipe)]
    inside = [key._replace(stage=other) for other in given if not placement.crosses(here, other, op.pipe)]
    message, local = next(iter(messages), None), next(iter(inside), None)  # a chain has one
    ends = worker.vocabulary is None  # elsewhere all ranks together are before the first stage and behind the last
    return Route(key, stage, message, -1, local, ends and not sources, ends and not sinks)


def _ends(worker: Worker, op: Op, stage: Stage) -> Ends:
    placement, here, kind = worker.placement, op.stage, op.kind
    arguments = stage.inputs or placement.sources(here)
    backward = kind.takes is At.SINKS
    taken = placement.sinks(here) if backward else arguments if kind.takes else ()
    given = arguments if backward else placement.sinks(here) if kind.gives else ()
    return Ends(
        tuple((Message(other, *op.key), placement.crosses(other, here, op.pipe)) for other in taken),
        tuple((Message(here, other, *op.key[1:]), placement.crosses(here, other, op.pipe)) for other in given),
    )


def take(store: dict[Any, Value], key: Key | Message, missing: str) -> Value:
    """Remove and return; raises E703 with `missing`, {} filled with the key, if it is not there."""
    try:
        return store.pop(key)
    except KeyError:
        raise ZbcError("E703", "run: " + missing.format(name_of(key))) from None


def name_of(key: Key | Message) -> str:
    """`s1 m0`, as in the text of an op; of an edge `s1 m0 to s4`."""
    if isinstance(key, Message):
        return f"{name_of(Key(key.source, *key[2:]))} to s{key.sink}"
    return str(Op(Kind.F, *key)).removeprefix("F ")
