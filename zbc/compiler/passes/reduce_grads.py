"""Reduces the gradients of weights that several ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from zbc.compiler.passes.insert_comm import sent, with_experts
from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Program, groups
from zbc.ops import COUNTED, TIED, WORDS, experts_of, home_of


@dataclass(frozen=True, slots=True)
class ReduceGrads:
    """Put `REDUCE s` after the last op of each stage that pipes or data-parallel replicas replicate, on each holder.

    Weights that stages share are reduced by `REDUCE t`, after all of them; a rank's vocabulary shard by `REDUCE v`,
    after its own. Weights with one holder need none. A REDUCE only starts the collective, which runs in parallel with
    the following ops, up to VALIDATE.

        BW s1 m3          BW s1 m3
        SEND_B s1 m3      SEND_B s1 m3
        BW s0 m2    ->    REDUCE s1
        BW s0 m3          BW s0 m2
                          BW s0 m3
                          REDUCE s0

    Ranks that meet in more than one collective must start them in one order, so all of a program follow one: the order
    in which their gradients are complete on all holders, by costs. If a rank completes a stage before its turn in that
    order, its REDUCE follows the previous one.

    If gradients are sharded, `SCATTER s1` follows each run of backwards of a stage but the last; where ranks meet in
    several, in the same order of all reductions, and as often as the holder with fewest runs.
    """

    name: ClassVar[str] = "reduce-grads"

    def run(self, program: Program, context: Context) -> Program:
        stages = range(program.placement.stages)
        owners = [owner for owner, there in ((TIED, program.tied), (WORDS, program.vocabulary)) if there]
        sums = [Op(Kind.REDUCE, owner) for owner in (*stages, *owners, *map(experts_of, stages))]
        sums = [op for op in sums if program.shared(op)]
        if not sums:
            return program
        meets = not all(program.apart(op) or len(program.members(op)) == 1 for op in sums)  # not its replicas only
        runs = [_runs(ops, program) if program.scatters else {} for ops in program.ranks]
        if meets:
            common = {op for own in runs for op in own if all(op in runs[rank] for rank in program.members(op))}
            runs = [{op: step for op, step in own.items() if op in common} for own in runs]
        ready = _ready(program, sums, runs, context) if meets else {}
        ranks = []
        for rank, ops in enumerate(program.ranks):
            own = [op for op in sums if rank in program.members(op)]
            steps = runs[rank] | _starts(program, ops, own)
            listed = _insert(ops, sorted(steps, key=(ready or steps).__getitem__), steps)
            ranks.append(with_experts(listed, program, Kind.SCATTER) if program.scatters else listed)
        return program.with_ranks(ranks, by=self.name)


def reduced_as(program: Program, others: Program) -> Program:
    """A complete program with its reductions in the order of another program of the same ranks and stages, after all
    collectives within a pipeline: replicas have other numbers of these."""
    ranks = []
    for row, theirs in zip(program.ranks, others.ranks, strict=True):
        ops = [op for op in row if not op.kind.sums]
        inside = max((step for step, op in enumerate(ops) if op.kind.unit_wide and op.kind.is_collective), default=-1)
        sums = [op for op in theirs if op.kind.sums]
        ranks.append(_insert(ops, sums, _starts(program, ops, sums), inside))
    return program.with_ranks(ranks, by=ReduceGrads.name) if ranks != [list(ops) for ops in program.ranks] else program


def _ready(program: Program, sums: Sequence[Op], runs: Sequence[dict[Op, int]], context: Context) -> dict[Op, float]:
    """When the gradients of each reduction are there on all holders."""
    ends, done = dict[Op, float](), dict[int, float]()
    for span in context.timeline:
        ends[span.op] = span.end
        done[span.op.stage] = max(done.get(span.op.stage, 0.0), span.end)
    ready = {op: max(done.get(s, 0.0) for s in _closes(program, op)) for op in sums}
    for ops, own in zip(program.ranks, runs, strict=True):
        for op, step in own.items():
            last = next(ops[i] for i in range(step, -1, -1) if ops[i].kind.makes_part and ops[i].stage == op.stage)
            ready[op] = max(ready.get(op, 0.0), ends.get(last, 0.0))
    return ready


def _runs(ops: Sequence[Op], program: Program) -> dict[Op, int]:
    """A `SCATTER` for each run of backwards of a stage but the last, which REDUCE closes, and the step it follows.

        BW s1 m3          BW s1 m3
        BW s0 m0    ->    SCATTER s1
        BW s1 m4          BW s0 m0
                          BW s1 m4

    A run ends when the next weight gradients are of another stage.
    """
    inside, makers = groups(ops), [i for i, op in enumerate(ops) if op.kind.makes_part]
    final = {ops[i].stage: i for i in makers}
    found, count = dict[Op, int](), dict[int, int]()
    for i, after in pairwise(makers):
        stage = ops[i].stage
        if ops[after].stage != stage and final[stage] != i and program.deals(stage):
            number = count[stage] = count.get(stage, -1) + 1
            found[Op(Kind.SCATTER, stage, number)] = sent(ops, inside.get(i, i - 2) + 2, *COUNTED)
    return found


def _starts(program: Program, ops: Sequence[Op], sums: Sequence[Op]) -> dict[Op, int]:
    """The step of a rank that each reduction follows."""
    least = -1
    if program.resident and len(program.placement.pipes) > 1:  # the other rank may wait for weights yet to be gathered
        least = max((step for step, op in enumerate(ops) if op.kind is Kind.GATHER), default=-1)
    return {op: max(least, _ends(program, ops, op)) for op in sums}


def _insert(ops: Sequence[Op], sums: Sequence[Op], steps: Mapping[Op, int], position: int = -1) -> list[Op]:
    """The ops of a rank with `sums` in that order, each as early as possible after its step and the `position`."""
    behind: dict[int, list[Op]] = {}
    for op in sums:
        position = max(position, steps[op])
        behind.setdefault(position, []).append(op)
    return [*behind.get(-1, ()), *(one for step, op in enumerate(ops) for one in (op, *behind.get(step, ())))]


def _ends(program: Program, ops: Sequence[Op], op: Op) -> int:
    """The step after which a reduction can start: the last compute op of its gradients, or the SEND of its result."""
    owners = _closes(program, op)
    last = max((i for i, use in enumerate(ops) if use.kind.computes and use.owner in owners), default=-1)
    return sent(ops, groups(ops).get(last, last - 2) + 2, *COUNTED)


def _closes(program: Program, op: Op) -> tuple[int, ...]:
    return program.tying if op.stage == TIED else (home_of(op.stage),)
