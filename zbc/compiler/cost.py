"""What every op costs: one way to ask, whether costs were given or estimated.

Times are ms. Memory is activation units (one rank's share of one microbatch = 1.0) and, for known models, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add, mul

from zbc.compiler import estimate, nodes, profiled, stage_bytes
from zbc.compiler.estimate import Layer
from zbc.compiler.footprint import GRAD_BYTES
from zbc.compiler.machine import Kernel, Machine
from zbc.compiler.stage_bytes import StageBytes, boundaries
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement
from zbc.spec import Job

PerStage = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """Per stage: ms of F, B, W and BW (B + W where `bw` is not set), activation units kept from F to B and from B to W.

    `comm[pipe][s]` is the ms of a transfer between stages s and s+1 of that pipe, 0 on one rank. `bytes` is None where
    the model's sizes are not known before it is built.
    """

    f: PerStage
    b: PerStage
    w: PerStage
    act_b: PerStage
    act_w: PerStage
    comm: tuple[PerStage, ...]
    bytes: tuple[StageBytes, ...] | None = None
    source: str = "given"
    bw: PerStage = ()  # ms of BW, where that is not B + W
    agree: float = 0.0  # ms that the ranks take to agree on a step with a barrier
    reduce: PerStage = ()  # ms of one sum of a stage's gradients over its copies; () for none
    gather: PerStage = ()  # ms of collecting a stage's weights from the ranks that stepped parts of them
    tie: float = 0.0  # ms of the sum of the gradients of a weight that two stages share
    tied: float = 0.0  # bytes of that gradient
    step: PerStage = ()  # ms of STEP, and of COMMIT; () for none
    tentative: PerStage = ()  # ms of TENTATIVE
    hop: float = 0.0  # ms of a few numbers from a rank to the next
    node: tuple[int, int] | None = None  # neighbours of a pipeline, and copies of each, on one node
    overlap: float = 0.0  # of the shorter op of a group, the share that hides behind the longer one

    @classmethod
    def uniform(
        cls, placement: Placement, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0, act_w: float = 1.0
    ) -> Costs:
        """Costs per rank, shared evenly by its stages: the papers' convention."""
        v = placement.stages / placement.ranks
        each = [(x / v,) * placement.stages for x in (f, b, w, 1.0, act_w)]
        return cls(each[0], each[1], each[2], each[3], each[4], _links(placement, lambda stage, edge: comm))

    def joined(self) -> Costs:
        """Backward in one piece, as a B that does everything and a W that does nothing."""
        zero, both = (0.0,) * self.stages, tuple(b + w for b, w in zip(self.b, self.w, strict=True))
        return replace(self, b=self.bw or both, w=zero, bw=(), act_w=zero)

    def least(self) -> Costs:
        """Costs that neither a BW nor a B and its W take less than."""
        if not self.bw:
            return self
        halves = list(zip(self.b, self.w, self.bw, strict=True))
        return replace(self, w=tuple(min(w, max(0.0, bw - b)) for b, w, bw in halves), bw=())

    @property
    def stages(self) -> int:
        return len(self.f)

    def duration(self, op: Op) -> float:
        """ms of a compute op, a collective or a step of the optimizer; 0 for all others."""
        kind, stage = op.kind, op.stage
        if kind is Kind.F:
            return self.f[stage]
        if kind is Kind.B:
            return self.b[stage]
        if kind is Kind.W:
            return self.w[stage]
        if kind is Kind.BW:
            return self.bw[stage] if self.bw else self.b[stage] + self.w[stage]
        if kind is Kind.TIE:
            return self.tie
        table: PerStage = getattr(self, _TABLES[kind]) if kind in _TABLES else ()
        return table[stage] if table else 0.0

    def tentative_ms(self, stages: Sequence[int]) -> float:
        """ms of the tentative steps of these stages."""
        return sum(self.tentative[s] for s in stages) if self.tentative else 0.0

    def pair(self, f: float, b: float) -> float:
        """ms of a group of an F and a backward that take `f` and `b` ms alone."""
        return f + b - self.overlap * min(f, b)

    def transfer(self, stage: int, pipe: int = 0) -> float:
        """ms from `stage` to the next one, or back."""
        return self.comm[pipe][stage]

    def held(self, op: Op) -> float:
        """Activation units an op adds to what its rank holds; negative where it releases."""
        return _delta(op.kind, self.act_b[op.stage], self.act_w[op.stage])

    def held_bytes(self, op: Op) -> float:
        """The same in bytes; 0 where sizes are not known."""
        if self.bytes is None:
            return 0.0
        stage = self.bytes[op.stage]
        return _delta(op.kind, stage.act_b, stage.act_w)

    def more_bytes(self, op: Op, *, first: bool = False) -> float:
        """What a compute op needs while it runs beyond the larger of what is held before and after it.

        `first`: where the gradients that it computes are the first of a step, which stay as they are.
        """
        if self.bytes is None:
            return 0.0
        stage = self.bytes[op.stage]
        more = stage.first if first else stage.more
        return {Kind.F: more.f, Kind.B: more.b, Kind.W: more.w, Kind.BW: more.bw}[op.kind]

    def rise_bytes(self, op: Op, *, first: bool = False) -> float:
        """The most there is in a backward beyond what is held before it, the gradient that it is given included.

        `first`: where the gradients that it computes are the first of a step, which are counted as they come.
        """
        if self.bytes is None:
            return 0.0
        stage = self.bytes[op.stage]
        rise = stage.coming if first else stage.rise
        return {Kind.B: rise.b, Kind.W: rise.w, Kind.BW: rise.bw}[op.kind]


_TABLES = {
    Kind.REDUCE: "reduce",
    Kind.GATHER: "gather",
    Kind.STEP: "step",
    Kind.COMMIT: "step",
    Kind.TENTATIVE: "tentative",
}


def _delta(kind: Kind, act_b: float, act_w: float) -> float:
    if kind is Kind.F:
        return act_b
    if kind is Kind.B:
        return act_w - act_b
    if kind is Kind.W:
        return -act_w
    return -act_b if kind is Kind.BW else 0.0


def build(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> Costs:
    """The costs of `job` with layers `stages[s]` (indices into `table`) on stage s.

    Where a stage recomputes, B takes the time of F as well, and F keeps the inputs of the layers only; of activations
    given in [costs] that is the share it has of the estimated bytes, all of them where no bytes are known.
    Raises E110 (memory.activations names a stage that there is not), E140 (a list has the wrong length).
    """
    job = _seated(job, placement, stages, table)
    again = _recomputed(job, placement)
    given = job.costs.f is not None
    f, b, w, bw = _times(job, placement, stages, table)
    sizes = stage_bytes.of_stages(job, placement, stages, table)
    act_b, act_w = _activations(job, placement, stages, table, sizes, given)
    if sizes is not None:
        kept = tuple(
            (_entries(stages[s], table) if s in again else size.act_b) - size.given for s, size in enumerate(sizes)
        )
        act_b = tuple(units * keep / (size.act_b or 1.0) for units, keep, size in zip(act_b, kept, sizes, strict=True))
        sizes = tuple(replace(size, act_b=keep) for size, keep in zip(sizes, kept, strict=True))
    known = job.model.builtin
    source = "profiled" if job.profile else "given" if given else "estimated" if known else "assumed equal"
    links = _transfers(job, placement, stages, table)
    costs = Costs(f, b, w, act_b, act_w, links, sizes, source, bw=bw, overlap=job.costs.overlap)
    if job.profile is not None:
        costs = replace(costs, agree=profiled.agree_ms(job.profile.host, job.parallel.dp * placement.ranks))
    costs = _with_optimizer(costs, job, placement, stages, table)
    return replace(_with_sums(costs, job, placement, stages, table), node=job.parallel.node)


def _seated(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> Job:
    """The job with its ranks on nodes."""
    parallel = job.parallel
    if parallel.node is not None:
        return job
    grads = [float(GRAD_BYTES * sum(table[i].params for i in part)) for part in stages]
    sent, size = boundaries(job, stages, table), job.hardware.ranks_per_node
    node = nodes.choose(placement, parallel.dp, size, job.schedule.microbatches, sent, grads)
    return replace(job, parallel=parallel.model_copy(update={"node": node}))


def _times(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> tuple[PerStage, PerStage, PerStage, PerStage]:
    """ms of F, B, W and BW of each stage, the last () where it is B + W."""
    if job.costs.f is not None and job.costs.per != "layer":
        f, b, w = (_per_stage(job, key, placement) for key in ("f", "b", "w"))
        more = f
    else:
        keys = ("f", "b", "w", "again")
        f, b, w, more = (tuple(sum(getattr(table[i], key) for i in part) for part in stages) for key in keys)
    again = _recomputed(job, placement)
    more = tuple(ms if s in again else 0.0 for s, ms in enumerate(more))
    b = tuple(map(add, b, more))
    if job.profile is None:
        return f, b, w, ()
    fused = tuple(sum(one.bw for i in part if (one := table[i].measured)) for part in stages)
    host = profiled.host_ms(job.profile.host, placement)
    f, b, w, bw = (tuple(map(add, ms, host[key])) for key, ms in (("F", f), ("B", b), ("W", w), ("B", fused)))
    return f, b, w, tuple(map(add, bw, more))


def _with_optimizer(
    costs: Costs, job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> Costs:
    """The same with the time of optimizer steps: given, or estimated from the bytes they move.

    Op times that are given without `costs.optimizer` mean an optimizer that takes no time.
    """
    given = job.costs.f is not None
    hop = (job.costs.comm or 0.0) if given else Machine.of(job).link(range(placement.ranks)).latency
    if job.costs.optimizer is not None:
        step = tentative = _given_optimizer(job, placement, stages, table)
    elif (measured := _measured_optimizer(job, stages, table)) is not None:
        step, tentative = measured
    elif given or not job.model.builtin:
        return replace(costs, hop=hop)
    else:
        moved = estimate.optimizer_bytes(job.optimizer, job.model.parameters)
        machine = Machine.of(job)
        counts = [sum(table[i].params for i in part) for part in stages]
        step, tentative = (tuple(machine.ms([Kernel(0, each * count, 0)]) for count in counts) for each in moved)
    if job.optimizer.zero1:
        shares = [stage_bytes.dealt(job, placement, s, part, table).most for s, part in enumerate(stages)]
        step, tentative = (tuple(map(mul, each, shares)) for each in (step, tentative))
    return replace(costs, step=step, tentative=tentative, hop=hop)


def _measured_optimizer(
    job: Job, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> tuple[PerStage, PerStage] | None:
    """ms of STEP and of TENTATIVE by a profile; None where it does not know this job's optimizer."""
    found = [layer.measured for layer in table]
    if job.profile is None or any(one is None or one.step is None for one in found):
        return None
    step = tuple(sum(one.step or 0.0 for i in part if (one := found[i])) for part in stages)
    ahead = tuple(sum(one.tentative or 0.0 for i in part if (one := found[i])) for part in stages)
    return step, tuple(map(max, step, ahead))  # a tentative step does what a step does, on copies


def _given_optimizer(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> PerStage:
    if job.costs.per != "layer":
        return _per_stage(job, "optimizer", placement)
    each = estimate.given_optimizer(job.costs, table)
    return tuple(sum(each[i] for i in part) for part in stages)


def _with_sums(
    costs: Costs, job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> Costs:
    """The same with the time of sums over copies: given, or estimated from the link where bytes are known."""
    halves = 1 if job.optimizer.zero1 else 2
    reduce, gather = [], []
    for s, part in enumerate(stages):
        holders = placement.holders(s)
        count: float = sum(table[i].params - (table[i].tied if len(stages) > 1 else 0) for i in part)
        if job.optimizer.zero1:
            shares = stage_bytes.dealt(job, placement, s, part, table)
            count = shares.ranks * shares.row
        reduce.append(_sum(job, GRAD_BYTES * count, holders, halves))
        weight = 2 if job.model.parameters == "bfloat16" else 4
        gather.append(_sum(job, weight * count, holders, 1) if halves == 1 else 0.0)
    ends = [*placement.holders(0), *placement.holders(len(stages) - 1)]
    tied = GRAD_BYTES * table[-1].tied if len(stages) > 1 else 0
    tie = _sum(job, tied, ends, 2) if tied else 0.0
    return replace(costs, reduce=tuple(reduce), gather=tuple(gather), tie=tie, tied=float(tied))


def _sum(job: Job, size: float, holders: Sequence[int], halves: int) -> float:
    """ms of a sum over these ranks of all copies of the pipeline, or of half of one."""
    if job.costs.reduce is not None:
        return job.costs.reduce * halves / 2 if job.parallel.dp * len(set(holders)) > 1 else 0.0
    return Machine.of(job).sum_ms(size, holders, halves=halves) if size else 0.0


def check_stages(job: Job, placement: Placement) -> None:
    """Raise E110 if memory.activations names a stage that there is not."""
    named = job.memory.activations
    for key in named if isinstance(named, dict) else ():
        if int(key) >= placement.stages:
            text = f"config: memory.activations names stage {key}, there are {placement.stages}"
            where = job.where("memory", "activations", key)
            raise ZbcError("E110", text, where=where, hint=f"stages are numbered from 0 to {placement.stages - 1}")


def _recomputed(job: Job, placement: Placement) -> set[int]:
    """The stages whose F keeps only the inputs of its layers."""
    check_stages(job, placement)
    return {s for s in range(placement.stages) if job.memory.of(s) == "recompute"}


def _entries(part: Sequence[int], table: Sequence[Layer]) -> float:
    return sum(table[i].size.entry for i in part)


def _per_stage(job: Job, key: str, placement: Placement) -> PerStage:
    """A number or list of `[costs]` given per rank or per stage, as one number per stage."""
    value, per = getattr(job.costs, key), job.costs.per
    count = placement.ranks if per == "rank" else placement.stages
    if isinstance(value, list) and len(value) != count:
        text = f"costs: {key} has {len(value)} numbers, there are {count} {per}s"
        raise ZbcError("E140", text, where=job.where("costs", key), hint=f"give one number, or {count}")
    numbers = [float(x) for x in value] if isinstance(value, list) else [float(value)] * count
    if per == "stage":
        return tuple(numbers)
    v = placement.stages / placement.ranks
    return tuple(numbers[placement.rank_of(s)] / v for s in range(placement.stages))


def _activations(
    job: Job,
    placement: Placement,
    stages: Sequence[Sequence[int]],
    table: Sequence[Layer],
    sizes: tuple[StageBytes, ...] | None,
    given: bool,
) -> tuple[PerStage, PerStage]:
    """Activation units per stage: given ones, else from bytes, else an equal share of 1 per rank."""
    layered = estimate.given_activations(job, list(table))
    if layered is not None:
        raw_b = tuple(sum(layered[i][0] for i in part) for part in stages)
        raw_w = tuple(sum(layered[i][1] for i in part) for part in stages)
    elif job.costs.act_b is not None and job.costs.per != "layer":
        raw_b = _per_stage(job, "act_b", placement)
        raw_w = raw_b if job.costs.act_w is None else _per_stage(job, "act_w", placement)
    elif sizes is not None and not given:
        raw_b, raw_w = tuple(s.act_b for s in sizes), tuple(s.act_w for s in sizes)
    else:
        raw_b = raw_w = (placement.ranks / placement.stages,) * placement.stages
    unit = sum(raw_b) / placement.ranks or 1.0
    return tuple(x / unit for x in raw_b), tuple(x / unit for x in raw_w)


def _transfers(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> tuple[PerStage, ...]:
    """Given, or estimated from the links; costs given without `comm` mean transfers that take no time."""
    if job.costs.comm is not None or job.costs.f is not None:
        ms = job.costs.comm or 0.0
        return _links(placement, lambda stage, edge: ms)
    sizes, machine = boundaries(job, stages, table), Machine.of(job)
    return _links(placement, lambda stage, edge: machine.link(edge).ms(sizes[stage]))


def _links(placement: Placement, ms: Callable[[int, tuple[int, int]], float]) -> tuple[PerStage, ...]:
    """`ms` of every boundary of every pipe, from the stage before it and its two ranks; 0 within a rank."""
    pairs = [list(pairwise(pipe)) for pipe in placement.pipes]
    return tuple(tuple(ms(s, (a, b)) if a != b else 0.0 for s, (a, b) in enumerate(pipe)) for pipe in pairs)
