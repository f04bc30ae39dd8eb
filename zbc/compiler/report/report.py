"""The report on a plan: the numbers of `--json`, the manifest's prediction and the summary on the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from zbc.compiler.check.device import Survival, survival
from zbc.compiler.cost.copies import share_of
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory import host
from zbc.compiler.memory.per_rank import RankMemory
from zbc.compiler.search.engine import engine_name
from zbc.compiler.sim.bounds import Bounds
from zbc.compiler.sim.copies import Copying, copied
from zbc.compiler.sim.shared import sums_of
from zbc.compiler.sim.simulate import Timeline, run, steady_state
from zbc.ir import Op, Program, forward
from zbc.job.sections import Memory
from zbc.job.throughput import NOTHING_KNOWN, Throughput, balance, idle_rate
from zbc.ops import MAKER, TIED

FORMAT = "zbc-report"
MET = 5e-7  # relative excess over its bound with which a step meets it
VERSION = 1
_NOT_PREDICTED = (
    *("schedule", "ranks", "stages", "microbatches", "compile_seconds", "engine", "limits"),
    *("rates", "speedup_over_1f1b", "unequal"),
)


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank; times in ms within the step, memory at its peak."""

    rank: int
    stages: tuple[int, ...]
    busy_ms: float
    first_start_ms: float
    last_end_ms: float
    idle_warm_up_ms: float
    idle_message_ms: float
    idle_drain_ms: float
    idle_sums_ms: float
    peak_activation_units: float
    peak_bytes: int
    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    buffer_bytes: int
    logit_bytes: int  # the part of activation_bytes with an entry per word of the vocabulary
    sent_bytes: int  # of boundary tensors it sends to neighbours in a step
    summed_bytes: int  # it sends to reduce gradients over the replicas of its stages
    kv_bytes: int = 0  # the part of activation_bytes in keys, values and their gradients, shared by slices
    messages_ms: float = 0.0  # the part of busy_ms in which messages keep it from computing

    @property
    def parameter_bytes(self) -> int:
        """Bytes of weights, gradients, masters and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage: ms and bytes of one microbatch, and its resident bytes; 0 if sizes are not known."""

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    f_ms: float
    b_ms: float
    w_ms: float
    state_bytes: int  # weights, gradients, masters and optimizer state
    activation_bytes: int  # from F to B
    recompute: bool
    selective: bool = False  # it recomputes selectively


@dataclass(frozen=True, slots=True)
class SliceReport:
    """One slice of a microbatch: ms through all stages, and the bytes that F keeps of it on all of them."""

    begin: int  # token of the sequence
    tokens: int
    f_ms: float
    b_ms: float
    w_ms: float
    activation_bytes: int  # without keys and values

    @property
    def ms(self) -> float:
        return self.f_ms + self.b_ms + self.w_ms


@dataclass(frozen=True, slots=True)
class CutReport:
    """Layers to stages, and the cost of their unevenness."""

    busiest_rank: int
    busiest_ms: float  # its work in a step
    balanced_ms: float  # each rank's work if layers could be split at will
    tried: int  # number of simulated partitions
    all_tried: bool  # whether no other could be better for this schedule
    stages: tuple[StageReport, ...]

    @property
    def loss(self) -> float:
        """The excess of the busiest rank's work over an equal share."""
        return self.busiest_ms / self.balanced_ms - 1 if self.balanced_ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Offload copies of activations out and back, over all ranks, in a step."""

    moved: float  # share of all activations
    copying_ms: float
    waited_ms: float  # by ranks, for these copies
    hidden: float  # share of copying_ms that no rank waits for
    k: float  # ms of copying a rank's share of a microbatch one way, over its F + B + W; of the rank with the most


@dataclass(frozen=True, slots=True)
class FreezeReport:
    """Skipped weight gradients of a step, as shares; ms of a step."""

    most: float  # requested, of a stage
    frozen: float  # mean over all ops that have weight gradients
    by_stage: tuple[float, ...]
    unfrozen_ms: float  # a step that skips nothing
    alike_ms: float  # a step in which each op skips the share `most`


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Trained parameters with adapters, and all parameters; the step of a full training, and the memory of its fullest
    rank, in the same order."""

    rank: int
    trained: int
    whole: int
    whole_ms: float | None = None
    whole_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class UnequalReport:
    """Microbatches of unequal length: the tokens of their rows, as they are numbered and as they were given; ms of a
    step, of one with the given numbers, and with these of one in the order for equal lengths (None: it does not
    fit)."""

    tokens: tuple[int, ...]
    given: tuple[int, ...]
    ms: float
    given_ms: float
    alike_ms: float | None = None


@dataclass(frozen=True, slots=True)
class GatherReport:
    """Gathers of sharded weights, in a step."""

    count: int  # on the rank with the most
    ms: float  # of all gathers, on the rank with the longest
    exposed_ms: float  # decrease of the makespan if they take no time


@dataclass(frozen=True, slots=True)
class SumsReport:
    """Tensor-parallel collectives inside the ops of a step."""

    ms: float  # on a rank, mean of the ranks
    exposed_ms: float  # the part that ranks wait for
    hidden: float  # the share that no rank waits for


@dataclass(frozen=True, slots=True)
class StepsReport:
    """Gains and effects of steps without a flush."""

    period_ms: float  # a step in steady state
    flush_ms: float  # a step with a flush between any two
    delay: tuple[int, ...]  # staleness of each stage's gradients, in steps of the stage
    alone: bool  # whether each stage steps on its own, several times in a step of the training


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Limits of a rank: activations in units and in bytes, and bytes of everything; None for no such limit."""

    activation_units: float | None = None
    activation_bytes: float | None = None
    device_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The prediction for one plan. Bubble rates name their denominator."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    ops: int
    makespan_ms: float
    span_ms: float
    bubble_rate_makespan: float
    bubble_rate_span: float
    steady_state_ms: float  # consecutive steps without a barrier, of the order alone
    barrier_ms: float  # a step in steady state with the optimizer's barrier and the optimizer's own time
    ahead_ms: float | None  # without the barrier, with the ops that replace it; None if it is needed
    lower_bound_makespan_ms: float
    lower_bound_span_ms: float
    deadlock_free: bool
    survives_blocking_sends: bool  # these three: see check/device.py
    survives_device_waits: bool
    survives_one_queue: bool
    costs: str
    bytes_known: bool
    compile_seconds: float
    engine: str  # engine of searches: "numba" or "plain Python"
    per_rank: tuple[RankReport, ...]
    cut: CutReport
    limits: MemoryLimits = MemoryLimits()
    rates: Throughput = NOTHING_KNOWN  # with the optimizer, in steady state
    speedup_over_1f1b: float | None = None  # per sequence; None if not requested, or 1F1B is impossible
    slices: tuple[SliceReport, ...] = ()  # of a microbatch; () if it is whole
    host: dict[str, Any] = field(default_factory=dict)  # of the ranks that copy activations there: see memory/host.py
    copied: CopyReport | None = None  # if any do
    freezing: FreezeReport | None = None  # if weight gradients are skipped
    adapter: AdapterReport | None = None  # if adapters train in place of weights
    unequal: UnequalReport | None = None  # where microbatches are of unequal length
    gathered: GatherReport | None = None  # if steps gather weights
    flushless: StepsReport | None = None  # if steps follow one another without a flush
    tp_sums: SumsReport | None = None  # if ops have tensor-parallel collectives inside

    def as_json(self) -> dict[str, Any]:
        data = self._data()
        del data["rates"]
        _without_copies(data)
        people = {"idle_rate": self.idle_rate, "balance": self.balance, **self.rates._asdict()}
        people["bound_is"] = self.bound_is
        return {"format": FORMAT, "version": VERSION, **data, **_plain(people)}

    def predicted(self) -> dict[str, Any]:
        """The part that depends only on the plan, for the manifest."""
        data = self._data()
        _without_copies(data)
        for key in _NOT_PREDICTED:
            data.pop(key, None)
        return data

    def _data(self) -> dict[str, Any]:
        """All of it, without fields of slices or messages if there are none."""
        data: dict[str, Any] = _plain(asdict(self))
        if not self.slices:
            del data["slices"]
        for rank in data["per_rank"]:
            absent = [*([] if self.slices else ["kv_bytes"]), *([] if rank["messages_ms"] else ["messages_ms"])]
            for key in absent:
                del rank[key]
        for stage in data["cut"]["stages"]:
            if not stage["selective"]:
                del stage["selective"]
        return data

    @property
    def slice_balance(self) -> float:
        """The slowest slice relative to the mean; 1 for one."""
        ms = [part.ms for part in self.slices]
        return max(ms) * len(ms) / sum(ms) if ms and sum(ms) else 1.0

    @property
    def idle_rate(self) -> float:
        """The mean over ranks of 1 - busy / makespan."""
        return idle_rate([rank.busy_ms for rank in self.per_rank], self.makespan_ms)

    @property
    def balance(self) -> float:
        """The mean work of a rank relative to the busiest rank's."""
        return balance([rank.busy_ms for rank in self.per_rank])

    def step_ms(self, objective: str) -> float:
        """ms of a step by "makespan", "span" or "period"."""
        return {"makespan": self.makespan_ms, "span": self.span_ms, "period": self.steady_state_ms}[objective]

    def lower_bound_ms(self, objective: str) -> float:
        """The lower bound of the placement by the same objective."""
        return Bounds(self.lower_bound_makespan_ms, self.lower_bound_span_ms).of(objective)

    @property
    def bound_is(self) -> str:
        limit = self.limits.activation_units
        return bound_is(self.makespan_ms, self.lower_bound_makespan_ms, limit, self.ranks, self.stages)

    @property
    def survives(self) -> Survival:
        return Survival(self.survives_blocking_sends, self.survives_device_waits, self.survives_one_queue)

    @property
    def peak_activation_units(self) -> float:
        return max(rank.peak_activation_units for rank in self.per_rank)

    @property
    def parameter_bytes(self) -> int:
        """Parameter bytes of the rank with the most."""
        return max(rank.parameter_bytes for rank in self.per_rank)

    @property
    def summed_bytes(self) -> int:
        """Reduced bytes of the rank that sends the most."""
        return max(rank.summed_bytes for rank in self.per_rank)

    @property
    def moved(self) -> float:
        """The share of all activations that is offloaded."""
        return 0.0 if self.copied is None else self.copied.moved

    @property
    def sent_bytes(self) -> int:
        """Boundary tensor bytes of the rank that sends the most."""
        return max(rank.sent_bytes for rank in self.per_rank)

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.per_rank)


def bound_is(ms: float, bound: float, limit: float | None, ranks: int, stages: int) -> str:
    """Returns "met": no order takes less; "loose": the gap is mostly the bound's; "close": the gap is the order's.

    The bound follows work, paths and the memory of one rank. If activations are limited to less than 1F1B's peak, or to
    as much with several stages per rank, ranks must take turns in ways that it does not see: for small problems the
    search finds the optimum there, 4 to 30% above it; else it is met within 0.5%.
    """
    if ms <= bound * (1 + MET):
        return "met"
    if limit is None or (limit > ranks + MET if stages > ranks else limit >= ranks - MET):
        return "close"
    return "loose"


def _plain(value: Any) -> Any:
    """Tuples as lists and floats without the noise of their last bits, so that reports read and compare well."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class Chosen(NamedTuple):
    """The partition of a plan, and how it was found: see `CutReport`."""

    layers: tuple[tuple[str, ...], ...]  # stage -> layer names
    memory: Memory  # the activation policy
    tried: int = 1
    all_tried: bool = False
    cuts: Sequence[int] = ()  # of a microbatch into slices


def build(
    program: Program,
    costs: Costs,
    timeline: Timeline,
    memory: list[RankMemory],
    bounds: Bounds,
    name: str,
    chosen: Chosen,
) -> Report:
    """The report of a program that passed check/; the caller sets `barrier_ms`, `ahead_ms` and `limits`."""
    survives = survival(timeline.graph)
    begin = min(timeline.first_start(r) for r in range(timeline.ranks))
    return Report(
        schedule=name,
        ranks=program.placement.ranks,
        stages=program.placement.stages,
        microbatches=program.microbatches,
        ops=program.size,
        makespan_ms=timeline.makespan,
        span_ms=timeline.span,
        bubble_rate_makespan=timeline.bubble_rate_makespan,
        bubble_rate_span=timeline.bubble_rate_span,
        steady_state_ms=steady_state(timeline.graph, costs),
        barrier_ms=timeline.makespan,
        ahead_ms=None,
        lower_bound_makespan_ms=bounds.makespan,
        lower_bound_span_ms=bounds.span,
        deadlock_free=True,
        survives_blocking_sends=survives.blocking_sends,
        survives_device_waits=survives.device_waits,
        survives_one_queue=survives.one_queue,
        costs=costs.source,
        bytes_known=costs.bytes is not None,
        compile_seconds=0.0,
        engine=engine_name(),
        per_rank=tuple(_rank(program, costs, timeline, rank, held, begin) for rank, held in enumerate(memory)),
        cut=_cut(program, costs, timeline, chosen),
        slices=tuple(_slice(costs, j, begin, end) for j, (begin, end) in enumerate(pairwise(chosen.cuts))),
        host=host.predicted(program, costs),
        copied=_copies(program, costs, timeline),
        gathered=_gathers(costs, timeline),
        tp_sums=_inside(costs, timeline),
    )


def _slice(costs: Costs, j: int, begin: int, end: int) -> SliceReport:
    f, b, w = (sum(costs.of(name, s, j) for s in range(costs.stages)) for name in ("f", "b", "w"))
    first = [forward(s, part=j) for s in range(costs.stages)]
    kept = sum(costs.held_bytes(op) - costs.held_kv(op).bytes for op in first)
    return SliceReport(begin, end - begin, f, b, w, round(kept))


def _without_copies(data: dict[str, Any]) -> None:
    """Removes absent features: host copies, freezing, adapters, unequal microbatches, gathers, steps without a flush,
    and collectives inside of ops."""
    for key in ("host", "copied", "freezing", "adapter", "unequal", "gathered", "flushless", "tp_sums"):
        if not data[key]:
            del data[key]


def _gathers(costs: Costs, timeline: Timeline) -> GatherReport | None:
    """Gathers of weights, and their exposed time; None if there are none."""
    gathers = [gather for gather in timeline.sums if gather.op.kind is MAKER["weights"]]
    if not gathers:
        return None
    ms = [[gather.end - gather.start for gather in gathers if rank in gather.ranks] for rank in range(timeline.ranks)]
    without = run(timeline.graph, costs.with_ms(gather=(0.0,) * costs.stages)).makespan
    return GatherReport(max(map(len, ms)), max(map(sum, ms)), max(0.0, timeline.makespan - without))


def _inside(costs: Costs, timeline: Timeline) -> SumsReport | None:
    sums = sums_of(timeline, costs)
    return None if sums is None else SumsReport(*sums, sums.hidden)


def _copies(program: Program, costs: Costs, timeline: Timeline) -> CopyReport | None:
    """Time of offload copies and the part that ranks wait for; None if there are none."""
    moved = sum(op.kind is MAKER["host"] for ops in program.ranks for op in ops)
    if not moved:
        return None
    whole = Copying(*map(sum, zip(*copied(timeline), strict=True)))
    forwards = sum(op.kind.is_forward for ops in program.ranks for op in ops)
    return CopyReport(moved / forwards, *whole, whole.hidden, share_of(costs, program.placement))


def _cut(program: Program, costs: Costs, timeline: Timeline, chosen: Chosen) -> CutReport:
    busy = [timeline.busy(rank) for rank in range(timeline.ranks)]
    busiest = max(range(timeline.ranks), key=lambda rank: busy[rank])
    stages = tuple(_stage(program, costs, s, names, chosen) for s, names in enumerate(chosen.layers))
    return CutReport(busiest, busy[busiest], sum(busy) / len(busy), chosen.tried, chosen.all_tried, stages)


def _stage(program: Program, costs: Costs, s: int, layers: tuple[str, ...], chosen: Chosen) -> StageReport:
    sizes = costs.bytes_of_stage(s)
    return StageReport(
        stage=s,
        ranks=program.placement.holders(s),
        layers=layers,
        f_ms=costs.column("f")[s],
        b_ms=costs.column("b")[s],
        w_ms=costs.column("w")[s],
        state_bytes=round(sum(layer.weights + layer.gradients + layer.masters + layer.optimizer for layer in sizes)),
        activation_bytes=round(costs.bytes_of("kept")[s]),
        recompute=chosen.memory.recomputes(s),
        selective=chosen.memory.spares(s),
    )


def _rank(
    program: Program, costs: Costs, timeline: Timeline, rank: int, memory: RankMemory, begin: float
) -> RankReport:
    idle = timeline.idle(rank)
    ops = program.ranks[rank]
    sends = Counter(
        (kind, stage, 0, pipe, part, share, peer) for kind, stage, _, pipe, part, share, peer in ops if kind.is_send
    )
    return RankReport(
        rank=rank,
        stages=program.placement.stages_of(rank),
        busy_ms=timeline.busy(rank),
        first_start_ms=timeline.first_start(rank) - begin,
        last_end_ms=timeline.last_end(rank) - begin,
        idle_warm_up_ms=idle.warm_up,
        idle_message_ms=idle.message,
        idle_drain_ms=idle.drain,
        idle_sums_ms=idle.sums,
        peak_activation_units=memory.units,
        peak_bytes=round(memory.bytes),
        weight_bytes=round(memory.weights),
        gradient_bytes=round(memory.gradients),
        master_bytes=round(memory.masters),
        optimizer_bytes=round(memory.optimizer),
        activation_bytes=round(memory.activations),
        buffer_bytes=round(memory.buffers),
        logit_bytes=round(memory.logits),
        sent_bytes=round(sum(count * _message(program, costs, Op(*op)) for op, count in sends.items())),
        summed_bytes=round(sum(_sent(program, costs, op) for op in ops if op[0].row.cost == "reduce")),
        kv_bytes=round(memory.kv),
        messages_ms=sum(
            costs.of("messages", op.stage, costs.part(op.mb, 0)) for op in ops if op.kind.row.cost in ("f", "b", "bw")
        ),
    )


def _message(program: Program, costs: Costs, op: Op) -> float:
    """Bytes of a SEND's tensor, which is that of the boundary it crosses."""
    message = program.placement.message(op)
    size = None if message is None else costs.bytes_at(message.edge[0], costs.part(op.mb, op.slice))
    return 0.0 if size is None else size.behind


def _sent(program: Program, costs: Costs, op: Op) -> float:
    """Bytes a rank sends in one ring reduction over k ranks: each of k parts goes round, once more for the result
    unless each rank keeps its part only."""
    k = program.holders(op)
    halves = 1 if program.sharded and op.stage != TIED else 2
    return costs.bytes_owned(op.stage).gradients * (k - 1) / k * halves
