"""The facts of a plan: what `--json`, the manifest's prediction, comparisons and the summary on the console tell.

Times are in ms, memory is in bytes; a rate names its denominator. Facts are made here, and by the passes of which they
tell; nobody else leaves any out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from zbc.compiler.check.device import Survival, survival
from zbc.compiler.cost.copies import share_of
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory import host
from zbc.compiler.memory.per_rank import RankMemory
from zbc.compiler.search.engine import engine_name
from zbc.compiler.sim.beside import Copying, copied, sums_of
from zbc.compiler.sim.bounds import Bounds
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import Timeline, run, steady_state
from zbc.ir import Op, Program, forward
from zbc.job.sections import Memory
from zbc.job.throughput import NOTHING_KNOWN, balance, idle_rate
from zbc.ops import MAKER, TIED

FORMAT, VERSION = "zbc-report", 1
MET = 5e-7  # relative excess over its bound with which a step meets it
# Facts that a plan may lack -> what they read as. None is left out of these, and is a value of all others.
ABSENT: Mapping[str, Any] = MappingProxyType(
    {"slices": (), "copies": (), "selective": False, "kv_bytes": 0, "messages_ms": 0.0}
    | dict.fromkeys(("host", "copied", "freezing", "adapter", "unequal", "gathered", "flushless", "tp_sums", "exact"))
)
# Facts of this run of the planner, and of what the manifest has elsewhere.
_NOT_PREDICTED = frozenset(
    ("schedule", "ranks", "stages", "microbatches", "compile_seconds", "engine", "limits")
    + ("rates", "speedup_over_1f1b", "unequal", "exact")
)


class Facts(dict[str, Any]):
    """Facts by name, which are attributes, too. What a plan lacks reads as `ABSENT` says; other names raise
    AttributeError."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in ABSENT:
            return ABSENT[name]
        raise AttributeError(f"no such fact: {name}")


def told(**facts: Any) -> Facts:
    """The facts without those that are absent."""
    return Facts({name: value for name, value in facts.items() if value is not None or name not in ABSENT})


class Report(Facts):
    """The facts of one plan, and what follows from them. A fact of ranks (`peak_bytes`) is that of the rank with the
    most."""

    def __getattr__(self, name: str) -> Any:
        if name not in self and name not in ABSENT and all(name in rank for rank in self["per_rank"]):
            return max(rank[name] for rank in self["per_rank"])
        return super().__getattr__(name)

    def having(self, **facts: Any) -> Report:
        """These facts with others, or other values of them."""
        return Report({**self, **facts})

    def as_json(self) -> dict[str, Any]:
        data = {name: value for name, value in self.items() if name != "rates"}
        people = {"idle_rate": self.idle_rate, "balance": self.balance, **self.rates._asdict()}
        return {"format": FORMAT, "version": VERSION, **_plain({**data, **people, "bound_is": self.bound_is})}

    def predicted(self) -> dict[str, Any]:
        """The part that depends only on the plan, for the manifest."""
        return {name: _plain(value) for name, value in self.items() if name not in _NOT_PREDICTED}

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
        return float(self["steady_state_ms" if objective == "period" else f"{objective}_ms"])

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
    def parameter_bytes(self) -> int:
        """Bytes of weights, gradients, masters and optimizer state of the rank with the most."""
        return max(parameter_bytes(rank) for rank in self.per_rank)

    @property
    def moved(self) -> float:
        """The share of all activations that is offloaded."""
        return 0.0 if self.copied is None else float(self.copied.moved)


def parameter_bytes(rank: Facts) -> int:
    return sum(rank[f"{name}_bytes"] for name in ("weight", "gradient", "master", "optimizer"))


def loss(cut: Facts) -> float:
    """The excess of the busiest rank's work over an equal share."""
    return float(cut.busiest_ms / cut.balanced_ms - 1) if cut.balanced_ms > 0 else 0.0


def slice_ms(part: Facts) -> float:
    """ms of a slice through all stages."""
    return float(part.f_ms + part.b_ms + part.w_ms)


def bound_is(ms: float, bound: float, limit: float | None, ranks: int, stages: int) -> str:
    """Returns "met": no order takes less; "loose": the gap is mostly the bound's; "close": the gap is the order's. The
    bound follows work, paths and the memory of one rank. If activations are limited to less than 1F1B's peak, or to as
    much with several stages per rank, ranks must take turns in ways that it does not see: for small problems the search
    finds the optimum there, 4 to 30% above it; else it is met within 0.5%."""
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
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def build(
    complete: Context,
    memory: list[RankMemory],
    bounds: Bounds,
    name: str,
    layers: Sequence[Sequence[str]],
    policy: Memory,
    cuts: Sequence[int],
    found: Facts,
    **of_job: Any,
) -> Report:
    """The report of a program that passed check/, with the facts that the caller knows of its job: the layers of each
    stage, the activation policy, where microbatches are cut, how the partition was `found`, and more."""
    program, costs, timeline = complete.program, complete.costs, complete.timeline
    begin = min(timeline.first_start(r) for r in range(timeline.ranks))
    busy = [timeline.busy(rank) for rank in range(timeline.ranks)]
    facts = {
        "schedule": name,
        "ranks": program.placement.ranks,
        "stages": program.placement.stages,
        "microbatches": program.microbatches,
        "ops": program.size,
        "makespan_ms": timeline.makespan,
        "span_ms": timeline.span,
        "bubble_rate_makespan": timeline.bubble_rate_makespan,
        "bubble_rate_span": timeline.bubble_rate_span,
        "steady_state_ms": steady_state(timeline, costs),  # steps in a row without a barrier, of the order alone
        "barrier_ms": timeline.makespan,  # a step in steady state with the optimizer's barrier and the optimizer's time
        "ahead_ms": None,  # without the barrier, with the ops that replace it; None if it is needed, or not told
        "lower_bound_makespan_ms": bounds.makespan,
        "lower_bound_span_ms": bounds.span,
        "deadlock_free": True,
        **survival(timeline.graph).as_json(),
        "costs": costs.source,
        "bytes_known": costs.bytes is not None,
        "compile_seconds": 0.0,
        "engine": engine_name(),  # of searches: "numba" or "plain Python"
        "per_rank": tuple(_rank(program, costs, timeline, rank, held, begin) for rank, held in enumerate(memory)),
        "cut": _cut(program, costs, busy, layers, policy, found),
        "limits": told(activation_units=None, activation_bytes=None, device_bytes=None),
        "rates": NOTHING_KNOWN,  # with the optimizer, in steady state
        "speedup_over_1f1b": None,  # per sequence; None if not requested, or 1F1B is impossible
        "slices": tuple(_slice(costs, j, *ends) for j, ends in enumerate(pairwise(cuts))) or None,
        "host": host.predicted(program, costs) or None,  # of the ranks that copy activations there: see memory/host.py
        "copied": _copies(program, costs, timeline),
        "freezing": None,
        "adapter": None,
        "unequal": None,
        "exact": None,
        "gathered": _gathers(costs, timeline),
        "flushless": None,
        "tp_sums": _inside(costs, timeline),
    }
    return Report(told(**{**facts, **of_job}))


def _slice(costs: Costs, j: int, begin: int, end: int) -> Facts:
    """A slice of a microbatch, from this token on: ms through all stages, and the bytes that F keeps on all of them,
    without keys and values."""
    times = {f"{name}_ms": sum(costs.of(name, s, j) for s in range(costs.stages)) for name in ("f", "b", "w")}
    first = [forward(s, part=j) for s in range(costs.stages)]
    kept = sum(costs.held_bytes(op) - costs.held_kv(op).bytes for op in first)
    return told(begin=begin, tokens=end - begin, **times, activation_bytes=round(kept))


def _gathers(costs: Costs, timeline: Timeline) -> Facts | None:
    """Gathers of sharded weights: the most of a rank, ms on the rank with the longest, and by how much the makespan
    falls if they take no time."""
    gathers = [gather for gather in timeline.sums if gather.op.kind is MAKER["weights"]]
    if not gathers:
        return None
    ms = [[gather.end - gather.start for gather in gathers if rank in gather.ranks] for rank in range(timeline.ranks)]
    without = run(timeline.graph, costs.with_ms(gather=(0.0,) * costs.stages)).makespan
    return told(count=max(map(len, ms)), ms=max(map(sum, ms)), exposed_ms=max(0.0, timeline.makespan - without))


def _inside(costs: Costs, timeline: Timeline) -> Facts | None:
    """Collectives inside of ops: ms on the mean rank, the part that ranks wait for, the share that none waits for."""
    sums = sums_of(timeline, costs)
    return None if sums is None else told(**sums._asdict(), hidden=sums.hidden)


def _copies(program: Program, costs: Costs, timeline: Timeline) -> Facts | None:
    """Offload copies of a step over all ranks: the share of activations that moves, ms, those that ranks wait for, the
    share that none waits for, and k: ms of copying a rank's share of a microbatch one way, over its F + B + W."""
    moved = sum(op.kind is MAKER["host"] for ops in program.ranks for op in ops)
    if not moved:
        return None
    whole = Copying(*map(sum, zip(*copied(timeline), strict=True)))
    forwards = sum(op.kind.is_forward for ops in program.ranks for op in ops)
    times = {"copying_ms": whole.copying, "waited_ms": whole.waited, "hidden": whole.hidden}
    return told(moved=moved / forwards, **times, k=share_of(costs, program.placement))


def _cut(
    program: Program, costs: Costs, busy: Sequence[float], layers: Sequence[Sequence[str]], policy: Memory, found: Facts
) -> Facts:
    """Layers to stages, and the cost of their unevenness."""
    busiest = max(range(len(busy)), key=lambda rank: busy[rank])
    times = {f"{name}_ms": costs.column(name) for name in ("f", "b", "w")}
    held = {**times, "activation_bytes": tuple(map(round, costs.bytes_of("kept")))}  # from F to B
    return told(
        busiest_rank=busiest,
        busiest_ms=busy[busiest],  # its work in a step
        balanced_ms=sum(busy) / len(busy),  # each rank's work if layers could be split at will
        **found,
        stages=tuple(_stage(program, costs, s, names, policy, held) for s, names in enumerate(layers)),
    )


def _stage(
    program: Program, costs: Costs, s: int, layers: Sequence[str], memory: Memory, held: Mapping[str, Sequence[float]]
) -> Facts:
    """One stage: ms and bytes of one microbatch, and its resident bytes; 0 if sizes are not known."""
    state = sum(one.weights + one.gradients + one.masters + one.optimizer for one in costs.bytes_of_stage(s))
    return told(
        stage=s,
        ranks=program.placement.holders(s),
        layers=layers,
        **{name: column[s] for name, column in held.items()},
        state_bytes=round(state),
        recompute=memory.recomputes(s),
        selective=memory.spares(s) or None,
    )


def _rank(program: Program, costs: Costs, timeline: Timeline, rank: int, memory: RankMemory, begin: float) -> Facts:
    """One rank: times within the step, memory at its peak, and bytes that it sends in a step."""
    ops = program.ranks[rank]
    alike = Counter(ops if costs.unequal else [(*op[:2], 0, *op[3:]) for op in ops])
    each = [(Op(*op), count) for op, count in alike.items()]
    waits = [n * costs.of("messages", op.stage, costs.part(op.mb, 0)) for op, n in each if op.kind.row.cost in _WAITING]
    return told(
        rank=rank,
        stages=program.placement.stages_of(rank),
        busy_ms=timeline.busy(rank),
        first_start_ms=timeline.first_start(rank) - begin,
        last_end_ms=timeline.last_end(rank) - begin,
        **{f"idle_{cause}_ms": ms for cause, ms in timeline.idle(rank)._asdict().items()},
        peak_activation_units=memory.units,
        peak_bytes=round(memory.bytes),
        weight_bytes=round(memory.weights),
        gradient_bytes=round(memory.gradients),
        master_bytes=round(memory.masters),
        optimizer_bytes=round(memory.optimizer),
        activation_bytes=round(memory.activations),
        buffer_bytes=round(memory.buffers),
        logit_bytes=round(memory.logits),  # the part of activation_bytes with an entry per word of the vocabulary
        sent_bytes=round(sum(n * _message(program, costs, op) for op, n in each if op.kind.is_send)),  # to neighbours
        summed_bytes=round(sum(n * _sent(program, costs, op) for op, n in each if op.kind.row.cost == "reduce")),
        kv_bytes=round(memory.kv) if program.slices > 1 else None,  # of activation_bytes: shared by slices
        messages_ms=sum(waits) or None,  # of busy_ms: messages keep it from computing
    )


_WAITING = ("f", "b", "bw")  # the costs of ops that messages keep from computing


def _message(program: Program, costs: Costs, op: Op) -> float:
    """Bytes of a SEND's tensor, which is that of the boundary it crosses."""
    message = program.placement.message(op)
    return 0.0 if message is None else costs.bytes_at(message.edge[0], costs.part(op.mb, op.slice)).behind


def _sent(program: Program, costs: Costs, op: Op) -> float:
    """Bytes a rank sends in one ring reduction over k ranks: each of k parts goes round, once more for the result
    unless each rank keeps its part only."""
    k = program.holders(op)
    halves = 1 if program.sharded and op.stage != TIED else 2
    return costs.bytes_owned(op.stage).gradients * (k - 1) / k * halves
