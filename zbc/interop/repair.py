"""Makes a working order from one that deadlocks: the same ops on the same ranks, with few moves and a fast step.

Candidates come from running the given order op by op while each rank may look `ahead` a few ops past one that cannot
start yet. Looking ahead 0 keeps the order until all ranks are stuck and then moves just one op; looking farther moves
more and waits less. Named schedules of the same placement are candidates, too, since a broken order is often a known
one with a mistake. The best two are then improved by moving single ops. No rank holds more activations than the fullest
rank of the given order, if any candidate keeps to that. Of those within 2% of the best step, the one with the fewest
moves wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random

from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.report.difference import kept
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError, raise_found
from zbc.ir import Kind, Op, Program
from zbc.ops import At, round_trip

AHEAD = (0, 1, 2, 3, 5, 8, 13, 1_000_000)  # ops past the first
LARGE = 5_000  # ops from which on only some of AHEAD are tried
FEW = (0, 3, 13)
CLOSE = 1.02  # of the best step: fast enough to prefer the order that moves least
EFFORT = 150_000  # ops visited while improving
PATIENCE = 120  # moves in a row without gain before improving ends
Ranks = tuple[tuple[Op, ...], ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """A working program, the number of moved ops, and the repeated ops that were dropped."""

    program: Program
    moved: int
    dropped: tuple[Op, ...]
    makespan: float


def repair(program: Program, costs: Costs) -> Repair:
    """The repaired order of a compute-only program of one pipe; of a repeated op the first is kept. Raises E411 if ops
    are missing, as reordering cannot fix that."""
    ranks, dropped = _without_repeats(program)
    program = replace(program, ranks=ranks)
    raise_found(_missing(program))
    limits = [max(rank.units for rank in peaks(program, costs)) + 1e-9] * len(ranks)
    steps: dict[Ranks, float] = {}
    for candidate in _candidates(program, costs, limits):
        if candidate not in steps and _fits(program, candidate, costs, limits):
            steps[candidate] = _step(program, candidate, costs)
    if not steps:  # no candidate keeps to the memory of the given order
        steps = {c: _step(program, c, costs) for c in _candidates(program, costs, [float("inf")] * len(ranks))}
    for candidate in sorted(steps, key=lambda c: steps[c])[:2]:
        better, step = _improved(program, candidate, costs, limits, steps[candidate])
        steps[better] = step
    best = min(steps.values())
    near = [candidate for candidate, step in steps.items() if step <= best * CLOSE]
    chosen = min(near, key=lambda candidate: (_moved(ranks, candidate), steps[candidate]))
    result = program.with_ranks(chosen, by="repair")
    check_all(result)
    return Repair(result, _moved(ranks, chosen), dropped, steps[chosen])


def _without_repeats(program: Program) -> tuple[Ranks, tuple[Op, ...]]:
    seen: set[Op] = set()
    dropped: list[Op] = []
    ranks = []
    for ops in program.ranks:
        stay: list[Op] = []
        for op in ops:
            if op.kind.computes:  # groups are split: the ops to overlap depend on the order
                (dropped if op in seen else stay).append(op)
                seen.add(op)
        ranks.append(tuple(stay))
    return tuple(ranks), tuple(dropped)


def _missing(program: Program) -> Iterator[ZbcError]:
    """E411 for stages and microbatches without F, or without exactly one backward."""
    ops, ways = {op for rank in program.ranks for op in rank}, [{*round_trip(split=split)} for split in (True, False)]
    for stage in range(program.placement.stages):
        for mb in range(program.microbatches):
            done = {kind for way in ways for kind in way if Op(kind, stage, mb) in ops}
            if done not in ways:
                text = f"csv: stage {stage} does not run F and one backward of microbatch {mb}"
                hint = "add or drop actions first: --fix changes the order only"
                yield ZbcError("E411", text, where=f"row {program.placement.rank_of(stage) + 1}", hint=hint)


def _step(program: Program, ranks: Ranks, costs: Costs) -> float:
    return simulate(replace(program, ranks=ranks), costs).makespan


def _fits(program: Program, ranks: Ranks, costs: Costs, limits: Sequence[float]) -> bool:
    held = peaks(replace(program, ranks=ranks), costs)
    return all(rank.units <= limit for rank, limit in zip(held, limits, strict=True))


def _moved(before: Ranks, after: Ranks) -> int:
    """The number of ops to move: all but a longest common subsequence."""
    return sum(len(old) - len(kept(old, new)) for old, new in zip(before, after, strict=True))


# ---- candidates ----------------------------------------------------------------------------------------------


def _candidates(program: Program, costs: Costs, limits: Sequence[float]) -> Iterator[Ranks]:
    for ahead in AHEAD if program.size < LARGE else FEW:
        yield _run(program, costs, limits, ahead)
    yield from _known(program)


def _known(program: Program) -> Iterator[Ranks]:
    """Named schedules by formula on this placement, with this program's split or fused backwards."""
    placement, m = program.placement, program.microbatches
    p, v = placement.ranks, placement.chunks
    if v is None:
        return
    wanted = [frozenset(ops) for ops in program.ranks]
    for card in SCHEDULES.values():
        if card.allows(v) and card.placement(p, v) == placement and (not card.searched or card.budget == 0):
            ranks = card.make(Request(p, m, v)).ranks
            adapted = tuple(tuple(_as_in(ops, wanted[rank])) for rank, ops in enumerate(ranks))
            if [frozenset(ops) for ops in adapted] == wanted:
                yield adapted


def _as_in(ops: Sequence[Op], wanted: frozenset[Op]) -> Iterator[Op]:
    """`ops` with each backward split or fused as in `wanted`; a new W directly follows its B."""
    for op in ops:
        if op in wanted:
            yield op
        elif op.kind.is_backward:
            yield from (op._replace(kind=kind) for kind in round_trip(split=op.kind.makes_part)[1:])


def _makers(kind: Kind, at: At | None) -> tuple[Kind, ...]:
    """The compute kinds that write the values that `kind` reads at `at`."""
    read = {ref.what for ref in kind.row.reads if ref.at is at}
    return tuple(maker for maker in Kind if maker.computes and any(ref.what in read for ref in maker.row.writes))


_OWN = {kind: _makers(kind, At.OWN) for kind in Kind if kind.computes}  # makers of the same stage and microbatch
_NEAR = {kind: _makers(kind, kind.takes) for kind in Kind if kind.computes}  # makers of the stages it reads from


class _State:
    """The state of a simulated run of the ranks."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.left = [list(ops) for ops in program.ranks]
        self.ended: dict[Op, float] = {}
        self.free = [0.0] * len(program.ranks)
        self.units = [0.0] * len(program.ranks)
        self.order: list[list[Op]] = [[] for _ in program.ranks]

    def ready(self, op: Op) -> float | None:
        """The time at which all inputs of `op` exist; None if one has not been started."""
        own = (self.ended.get(op._replace(kind=kind)) for kind in _OWN[op.kind])
        stages = self.program.placement.beside(op.stage, op.kind.takes)
        return _latest([*own, *(self._from(op, stage, _NEAR[op.kind]) for stage in stages)])

    def _from(self, op: Op, other: int, kinds: Sequence[Kind]) -> float | None:
        """The time at which the input of `op` from stage `other`, made by one of these kinds, has arrived."""
        ends = (self.ended.get(op._replace(kind=kind, stage=other)) for kind in kinds)
        end = next((end for end in ends if end is not None), None)
        return None if end is None else end + self.costs.link(0, op.stage, other, op.mb)

    def start(self, rank: int, place: int, time: float) -> float:
        """Runs the op at `place` of the remaining ops; returns its end."""
        op = self.left[rank].pop(place)
        self.order[rank].append(op)
        self.units[rank] += self.costs.held(op)
        self.ended[op] = self.free[rank] = time + self.costs.duration(op)
        return self.free[rank]


def _latest(times: Iterable[float | None]) -> float | None:
    """The latest time, 0 without any; None if one is None."""
    latest = 0.0
    for time in times:
        if time is None:
            return None
        latest = max(latest, time)
    return latest


def _run(program: Program, costs: Costs, limits: Sequence[float], ahead: int) -> Ranks:
    """Simulates all ranks; a rank takes the first op within `ahead` of its next that can start now."""
    state = _State(program, costs)
    events = [(0.0, rank) for rank in range(len(program.ranks))]
    while any(state.left):
        if not events:
            _force(state, events)
        time = events[0][0]
        while events and events[0][0] <= time + 1e-9:
            heappop(events)
        for rank in range(len(state.left)):
            while state.free[rank] <= time + 1e-9 and state.left[rank]:
                place = _pick(state, rank, time, limits[rank], ahead, events)
                if place is None:
                    break
                end = state.start(rank, place, time)
                for peer in range(len(state.left)):
                    heappush(events, (end, peer))
                if end > time + 1e-9:
                    break
    return tuple(map(tuple, state.order))


def _pick(
    state: _State, rank: int, time: float, limit: float, ahead: int, events: list[tuple[float, int]]
) -> int | None:
    """The place of an op that can start at `time`; else pushes the arrival time of an awaited message to `events`."""
    for place, op in enumerate(state.left[rank][: ahead + 1]):
        at = state.ready(op)
        if at is not None and at > time + 1e-9:
            heappush(events, (at, rank))
            if place == 0:
                return None  # the input of the next op is in flight
        if at is not None and at <= time + 1e-9 and state.units[rank] + state.costs.held(op) <= limit:
            return place
    return None


def _force(state: _State, events: list[tuple[float, int]]) -> None:
    """All ranks are stuck: runs the op that has to move forward least."""
    now = max(state.free)
    options = [
        (place, rank)
        for rank, left in enumerate(state.left)
        for place in [next((k for k, op in enumerate(left) if state.ready(op) is not None), None)]
        if place is not None
    ]
    place, rank = min(options)
    at = state.ready(state.left[rank][place]) or 0.0
    end = state.start(rank, place, max(state.free[rank], at))
    for peer in range(len(state.left)):
        heappush(events, (max(end, now if peer != rank else end), peer))


# ---- improving -----------------------------------------------------------------------------------------------


def _improved(
    program: Program, ranks: Ranks, costs: Costs, limits: Sequence[float], step: float
) -> tuple[Ranks, float]:
    """Moves single ops at random and keeps moves that do not make the step longer; deterministic."""
    rng = Random(0)
    best = [list(ops) for ops in ranks]
    idle = 0
    for _ in range(EFFORT // max(1, program.size)):
        idle += 1
        if idle > PATIENCE:
            break
        rank = rng.randrange(len(best))
        if len(best[rank]) < 2:
            continue
        source = rng.randrange(len(best[rank]))
        target = max(0, min(len(best[rank]) - 1, source + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4))))
        trial = [list(ops) if r == rank else ops for r, ops in enumerate(best)]
        trial[rank].insert(target, trial[rank].pop(source))
        if not _legal(trial[rank]):
            continue
        frozen = tuple(map(tuple, trial))
        try:
            new_step = _step(program, frozen, costs)
        except ZbcError:
            continue
        if new_step <= step + 1e-9 and _fits(program, frozen, costs, limits):
            idle = 0 if new_step < step - 1e-9 else idle
            best, step = trial, new_step
    return tuple(map(tuple, best)), step


def _legal(ops: Sequence[Op]) -> bool:
    """Whether every op comes after the ops of its stage and microbatch that it reads from."""
    at = {op: k for k, op in enumerate(ops)}
    return all(at.get(op._replace(kind=kind), k + 1) < k for op, k in at.items() for kind in _OWN[op.kind])
