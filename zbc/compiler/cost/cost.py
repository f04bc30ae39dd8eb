"""What every op costs: one way to ask, whether costs were given or estimated.

Times are ms. Memory is activation units (one rank's share of one microbatch = 1.0) and, for known models, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, mul
from typing import NamedTuple

from zbc.compiler.cost import copies, estimate, nodes, profiled, stage_bytes
from zbc.compiler.cost.estimate import Layer
from zbc.compiler.cost.footprint import GRAD_BYTES
from zbc.compiler.cost.machine import Kernel, Machine
from zbc.compiler.cost.stage_bytes import StageBytes, boundaries
from zbc.errors import ZbcError
from zbc.ir import COPY, Edge, Kind, Op, Placement, chain
from zbc.job.spec import Job
from zbc.ops import VALUES, Ref

PerStage = tuple[float, ...]
Column = tuple[float | tuple[float, ...], ...]  # an entry per stage: of any slice of a microbatch, or one per slice
Links = Mapping[Edge, float]  # ms of a transfer along each edge, or back


def _activations_of(refs: Mapping[Kind, tuple[Ref, ...]]) -> dict[Kind, str]:
    """Per kind the one of its values that is an activation, if there is one; of copies, what of it can move."""
    found = ((kind, ref.what) for kind, each in refs.items() for ref in each)
    return {kind: "host" if kind in COPY else what for kind, what in found if VALUES[what].memory == "activations"}


_MAKES = _activations_of({kind: kind.row.writes for kind in Kind})
_FREES = _activations_of({kind: kind.row.frees for kind in Kind})


class Size(NamedTuple):
    """What a value takes on its rank; 0 bytes where the model's sizes are not known before it is built."""

    units: float
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What ops, transfers and values cost.

    `ms` has a column of times for each kind of work, with an entry per stage; what the ranks do for no stage of theirs
    has one entry. Ask `of`, `column`, `total` and `duration`, to which a column that is not there costs nothing, and
    BW takes B + W.

        f b w bw         F, B, W and BW
        reduce gather    one sum of a stage's gradients over its copies; collecting its weights from those who stepped
        step tentative   STEP, and COMMIT; TENTATIVE
        tie              the sum of the gradients of a weight that two stages share; one entry
        agree            what the ranks take to agree on a step with a barrier; one entry
        hop              a few numbers from a rank to the next; one entry
        out back         a copy to the host of what F keeps, and back

    `size` says what a stage's values take, for one microbatch: "kept" from F to B, "left" from B to W, "host" what of
    "kept" can move there. Ask `units`,
    `bytes_of`, `held` and `held_bytes`. `links[pipe]` is the ms of a transfer between two stages, 0 on one rank; ask
    `link`. For `occupies[pipe]` of them a message has its link to itself: the next one from the same rank to the same
    rank waits; () where links take any number of messages. With `rendezvous` a message waits for its receiver to post
    a buffer, too. `bytes` is None where the model's sizes are not known before it is built.
    """

    ms: Mapping[str, Column]
    size: Mapping[str, tuple[Size, ...]]
    links: tuple[Links, ...]
    bytes: tuple[StageBytes, ...] | None = None
    source: str = "given"
    tied: float = 0.0  # bytes of the gradient of a weight that two stages share
    node: tuple[int, int] | None = None  # neighbours of a pipeline, and copies of each, on one node
    overlap: float = 0.0  # of the shorter op of a group, the share that hides behind the longer one
    rendezvous: bool = False
    occupies: tuple[Links, ...] = ()

    @classmethod
    def uniform(
        cls, placement: Placement, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0, left: float = 1.0
    ) -> Costs:
        """Costs per rank, shared evenly by its stages: the papers' convention."""
        v = placement.stages / placement.ranks
        times = {name: (ms / v,) * placement.stages for name, ms in (("f", f), ("b", b), ("w", w))}
        size = {name: (Size(units / v),) * placement.stages for name, units in (("kept", 1.0), ("left", left))}
        return cls(times, size, _links(placement, lambda stage, edge: comm))

    @classmethod
    def per_stage(
        cls, f: PerStage, b: PerStage, w: PerStage, kept: PerStage, left: PerStage, comm: Sequence[PerStage]
    ) -> Costs:
        """Costs of stages in a row; `kept` and `left` are units, `comm[pipe][s]` is ms from stage s on."""
        size = {"kept": tuple(map(Size, kept)), "left": tuple(map(Size, left))}
        links = tuple(dict(zip(chain(len(f)), pipe, strict=True)) for pipe in comm)
        return cls({"f": f, "b": b, "w": w}, size, links)

    def with_ms(self, **columns: Column) -> Costs:
        """The same with other columns; () takes one away."""
        return replace(self, ms={name: ms for name, ms in {**self.ms, **columns}.items() if ms})

    def with_units(self, **values: PerStage) -> Costs:
        """The same with values of so many units; their bytes stay."""
        counted = {
            name: tuple(Size(each, size) for each, size in zip(units, self.bytes_of(name), strict=True))
            for name, units in values.items()
        }
        return replace(self, size={**self.size, **counted})

    def joined(self) -> Costs:
        """Backward in one piece, as a B that does everything and a W that does nothing."""
        nothing = (Size(0.0),) * self.stages
        whole = self.with_ms(b=self._column("bw"), w=(0.0,) * self.stages, bw=())
        return replace(whole, size={**self.size, "left": nothing})

    def least(self) -> Costs:
        """Costs that neither a BW nor a B and its W take less than."""
        if "bw" not in self.ms:
            return self
        return self.with_ms(w=self.each(lambda b, w, bw: min(w, max(0.0, bw - b)), "b", "w", "bw"), bw=())

    @property
    def stages(self) -> int:
        return len(self.ms["f"])

    def of(self, column: str, stage: int = 0, part: int = 0) -> float:
        """ms by a column: of slice `part` of a microbatch, on one stage."""
        entries = self.ms.get(column)
        if entries is None:
            return self.of("b", stage, part) + self.of("w", stage, part) if column == "bw" else 0.0
        entry = entries[stage]
        return entry[part] if isinstance(entry, tuple) else entry

    def column(self, name: str) -> PerStage:
        """ms of every stage for a whole microbatch: what loops fetch once."""
        return tuple(sum(entry) if isinstance(entry, tuple) else entry for entry in self._column(name))

    def each(self, combine: Callable[..., float], *names: str) -> Column:
        """The column of what `combine` makes of the ms by these columns, slice by slice where they have slices."""
        return tuple(_combined(combine, entries) for entries in zip(*map(self._column, names), strict=True))

    def total(self, column: str, stages: Iterable[int]) -> float:
        """ms by a column, for all of these stages."""
        return sum(self.of(column, s) for s in stages)

    def duration(self, op: Op) -> float:
        """ms of an op; 0 of one that takes no time of its own."""
        column = op.kind.row.cost
        return self.of(column, op.stage, op.slice) if column else 0.0

    def _column(self, name: str) -> Column:
        found = self.ms.get(name)
        if found is None and name == "bw":
            return self.each(add, "b", "w")
        return (0.0,) * self.stages if found is None else found

    def pair(self, f: float, b: float) -> float:
        """ms of a group of an F and a backward that take `f` and `b` ms alone."""
        return f + b - self.overlap * min(f, b)

    def link(self, pipe: int, a: int, b: int) -> float:
        """ms of a transfer from stage `a` to its neighbour `b`, an output or a gradient."""
        return self.links[pipe][(a, b) if a < b else (b, a)]

    def units(self, value: str) -> PerStage:
        """Activation units of a value on every stage."""
        return tuple(size.units for size in self.size[value])

    def bytes_of(self, value: str) -> PerStage:
        """The same in bytes; 0 where sizes are not known."""
        return tuple(size.bytes for size in self.size[value])

    def over(self, transfer: str) -> Costs:
        """The same where messages wait for a buffer ("rendezvous"), or do not ("eager")."""
        return replace(self, rendezvous=transfer == "rendezvous")

    def held(self, op: Op) -> float:
        """Activation units an op adds to what its rank holds; negative where it releases."""
        made, freed = self._values(op)
        return made.units - freed.units

    def held_bytes(self, op: Op) -> float:
        """The same in bytes; 0 where sizes are not known."""
        made, freed = self._values(op)
        return made.bytes - freed.bytes

    def _values(self, op: Op) -> tuple[Size, Size]:
        """What an op makes and what it frees."""
        made, freed = _MAKES.get(op.kind), _FREES.get(op.kind)
        return self._size(made, op.stage), self._size(freed, op.stage)

    def _size(self, value: str | None, stage: int) -> Size:
        """Without a size of its own, all of what F keeps can move to the host."""
        if value is None:
            return _NOTHING
        return self.size["kept" if value == "host" and value not in self.size else value][stage]

    def more_bytes(self, op: Op, *, first: bool = False) -> float:
        """What a compute op needs while it runs beyond the larger of what is held before and after it.

        `first`: where the gradients that it computes are the first of a step, which stay as they are.
        """
        return self._need(op, "first" if first else "more")

    def rise_bytes(self, op: Op, *, first: bool = False) -> float:
        """The most there is in a backward beyond what is held before it, the gradient that it is given included.

        `first`: where the gradients that it computes are the first of a step, which are counted as they come.
        """
        return self._need(op, "coming" if first else "rise")

    def _need(self, op: Op, what: str) -> float:
        """What `StageBytes.<what>` says of ops like this; 0 where sizes are not known."""
        if self.bytes is None:
            return 0.0
        found: float = getattr(getattr(self.bytes[op.stage], what), op.kind.row.cost, 0.0)
        return found


_NOTHING = Size(0.0)


def _combined(combine: Callable[..., float], entries: Sequence[float | tuple[float, ...]]) -> float | tuple[float, ...]:
    parts = max((len(entry) for entry in entries if isinstance(entry, tuple)), default=0)
    if not parts:
        return combine(*entries)
    return tuple(map(combine, *(entry if isinstance(entry, tuple) else (entry,) * parts for entry in entries)))


def refuse_slices(what: str, slices: int, *, where: str | None = None) -> None:
    """Raise E124 if `what` is an order of slices of microbatches: costs are known of whole ones only."""
    if slices != 1:
        text = f"{what} cuts microbatches into {slices} slices, which zbc can neither price nor run yet"
        raise ZbcError("E124", text, where=where, hint="make ops of whole microbatches: slices = 1, no slice in an op")


def build(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> Costs:
    """The costs of `job` with layers `stages[s]` (indices into `table`) on stage s.

    Where a stage recomputes, B takes the time of F as well, and F keeps the inputs of the layers only; of activations
    given in [costs] that is the share it has of the estimated bytes, all of them where no bytes are known.
    Raises E110 (memory.activations names a stage that there is not), E140 (a list has the wrong length), E144 (how fast
    activations are copied to the host is not known).
    """
    job = _seated(job, placement, stages, table)
    given = job.costs.f is not None
    times = _times(job, placement, stages, table)
    bytes = stage_bytes.of_stages(job, placement, stages, table)
    size = _sizes(job, placement, stages, table, bytes)
    known = job.model.builtin
    source = "profiled" if job.profile else "given" if given else "estimated" if known else "assumed equal"
    links, occupies = _transfers(job, placement, stages, table)
    costs = Costs(times, size, links, bytes, source, overlap=job.costs.overlap, occupies=occupies)
    costs = costs.over(job.hardware.transfer or ("eager" if given else "rendezvous"))
    if job.profile is not None:
        costs = costs.with_ms(agree=(profiled.agree_ms(job.profile.host, job.parallel.dp * placement.ranks),))
    costs = _with_copies(costs, job)
    costs = _with_optimizer(costs, job, placement, stages, table)
    return replace(_with_sums(costs, job, placement, stages, table), node=job.parallel.node)


def _with_copies(costs: Costs, job: Job) -> Costs:
    """The same with copies to the host of the stages whose activations may move."""
    moves = [job.memory.offloads(s) for s in range(costs.stages)]
    if not any(moves):
        return costs
    speed = copies.speed_of(job, bytes_known=costs.bytes is not None)
    found = copies.movable(costs.size["kept"], costs.bytes)
    away = tuple(Size(*one) if may else Size(0.0) for one, may in zip(found, moves, strict=True))
    timed = costs.with_ms(out=tuple(speed.out(*one) for one in away), back=tuple(speed.back(*one) for one in away))
    return replace(timed, size={**costs.size, "host": away})


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
) -> dict[str, Column]:
    """The columns of F, B and W, and that of BW where it is not B + W."""
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
        return {"f": f, "b": b, "w": w}
    fused = tuple(sum(one.bw for i in part if (one := table[i].measured)) for part in stages)
    host = profiled.host_ms(job.profile.host, placement)
    f, b, w, bw = (tuple(map(add, ms, host[key])) for key, ms in (("F", f), ("B", b), ("W", w), ("B", fused)))
    return {"f": f, "b": b, "w": w, "bw": tuple(map(add, bw, more))}


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
        return costs.with_ms(hop=(hop,))
    else:
        moved = estimate.optimizer_bytes(job.optimizer, job.model.parameters)
        machine = Machine.of(job)
        counts = [sum(table[i].params for i in part) for part in stages]
        step, tentative = (tuple(machine.ms([Kernel(0, each * count, 0)]) for count in counts) for each in moved)
    if job.optimizer.zero1:
        shares = [stage_bytes.dealt(job, placement, s, part, table).most for s, part in enumerate(stages)]
        step, tentative = (tuple(map(mul, each, shares)) for each in (step, tentative))
    return costs.with_ms(step=step, tentative=tentative, hop=(hop,))


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
    ends = [rank for stage in placement.ends for rank in placement.holders(stage)]
    tied = GRAD_BYTES * table[-1].tied if len(stages) > 1 else 0
    tie = _sum(job, tied, ends, 2) if tied else 0.0
    summed = costs.with_ms(reduce=tuple(reduce), gather=tuple(gather), tie=(tie,))
    return replace(summed, tied=float(tied))


def _sum(job: Job, size: float, holders: Sequence[int], halves: int) -> float:
    """ms of a sum over these ranks of all replicas of the pipeline, or of half of one."""
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
    return {s for s in range(placement.stages) if job.memory.recomputes(s)}


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
    homes = placement.pipes[0]
    return tuple(numbers[rank] / homes.count(rank) for rank in homes)


def _sizes(
    job: Job,
    placement: Placement,
    stages: Sequence[Sequence[int]],
    table: Sequence[Layer],
    bytes: tuple[StageBytes, ...] | None,
) -> dict[str, tuple[Size, ...]]:
    """What F keeps until B and B leaves to W; where a stage recomputes, F keeps the inputs of its layers only."""
    left_bytes = tuple(sum(table[i].size.act_w for i in part) if bytes else 0.0 for part in stages)
    whole, left = _activations(job, placement, stages, table, bytes, left_bytes)
    left_sizes = tuple(map(Size, left, left_bytes))
    if bytes is None:
        return {"kept": tuple(map(Size, whole)), "left": left_sizes}
    again, kept = _recomputed(job, placement), []
    for s, (units, stage) in enumerate(zip(whole, bytes, strict=True)):
        size = (_entries(stages[s], table) if s in again else stage.share) - stage.given
        kept.append(Size(units * size / (stage.share or 1.0), size))
    return {"kept": tuple(kept), "left": left_sizes}


def _activations(
    job: Job,
    placement: Placement,
    stages: Sequence[Sequence[int]],
    table: Sequence[Layer],
    bytes: tuple[StageBytes, ...] | None,
    left: PerStage,
) -> tuple[PerStage, PerStage]:
    """Units that F keeps without recompute, and B leaves: given ones, else from bytes, else equal shares of 1 per rank.

    `left` are the bytes that B leaves.
    """
    layered = estimate.given_activations(job, list(table))
    if layered is not None:
        raw_b = tuple(sum(layered[i][0] for i in part) for part in stages)
        raw_w = tuple(sum(layered[i][1] for i in part) for part in stages)
    elif job.costs.act_b is not None and job.costs.per != "layer":
        raw_b = _per_stage(job, "act_b", placement)
        raw_w = raw_b if job.costs.act_w is None else _per_stage(job, "act_w", placement)
    elif bytes is not None and job.costs.f is None:
        raw_b, raw_w = tuple(stage.share for stage in bytes), left
    else:
        raw_b = raw_w = (placement.ranks / placement.stages,) * placement.stages
    unit = sum(raw_b) / placement.ranks or 1.0
    return tuple(x / unit for x in raw_b), tuple(x / unit for x in raw_w)


def _transfers(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> tuple[tuple[Links, ...], tuple[Links, ...]]:
    """ms of transfers, and in which they occupy their link: given, or estimated from the links.

    Costs given without `comm` mean transfers that take no time.
    """
    if job.costs.comm is not None or job.costs.f is not None:
        ms, busy = job.costs.comm or 0.0, job.costs.occupies
        return _links(placement, lambda stage, edge: ms), _links(placement, lambda stage, edge: busy) if busy else ()
    sizes, machine = boundaries(job, stages, table), Machine.of(job)
    return (
        _links(placement, lambda stage, edge: machine.link(edge).ms(sizes[stage])),
        _links(placement, lambda stage, edge: sizes[stage] / machine.link(edge).speed),
    )


def _links(placement: Placement, ms: Callable[[int, tuple[int, int]], float]) -> tuple[Links, ...]:
    """`ms` of every edge of every pipe, from its source and its two ranks; 0 within a rank."""
    return tuple(
        {
            edge: ms(edge[0], ends) if placement.crosses(*edge, pipe) else 0.0
            for edge, ends in zip(placement.edges, placement.links(pipe), strict=True)
        }
        for pipe in range(len(placement.pipes))
    )
