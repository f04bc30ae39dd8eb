"""Checks that steps without a flush are right with two versions of the weights, and go on forever.

The ops of a rank are the body of a cycle. Batch t runs on the weights made by the steps up to t - 2, while STEP of
batch t - 1 is still to come on its stage. There are two versions, so per stage, in the order of the list:

    (a)  no F of batch t before STEP of batch t - 2
    (b)  no B or BW of batch t before STEP of batch t - 1, which would step its gradients, too

The checks of one step (complete, paired, free of deadlock) run on three in a row: these contain all relations between
two bodies. A cycle goes on forever if the positions in which its ranks stop with k bodies are the same, counted from
the end, as with k + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.check.faults import message_faults, op_faults
from zbc.compiler.check.found import raise_found
from zbc.compiler.graph import build, of_steps
from zbc.compiler.graph.graph import run
from zbc.errors import ZbcError
from zbc.ir import NEXT, Kind, Op, Program
from zbc.ops import home_of, owner_text

# Names kinds: the proof is about the order of STEP and the sums before it, by which alone such a step ends.
ROW = 3  # consecutive steps checked as one program


def check_steps(program: Program) -> None:
    """Raise all problems of the first failing check: E202, E205, E206, E210, then E203, E204, then E201."""
    raise_found(version_problems(program))
    graph = of_steps(program, ROW)
    for problems in (op_faults, message_faults, deadlock_problems):
        raise_found(problems(graph))
    raise_found(_stops(program))


# ---- E210, and the ends of a step ------------------------------------------------------------------------------


def version_problems(program: Program) -> Iterator[ZbcError]:
    """Yields problems with the versions that ops read, and with the ops that close the step of each stage."""
    for rank, ops in enumerate(program.ranks):
        yield from _strangers(program, rank)
        for owner in program.owners(rank):
            steps = [i for i, op in enumerate(ops) if op.kind is Kind.STEP and op.stage == owner]
            if not steps or program.microbatches % len(steps):
                text = f"program: rank {rank} runs STEP {owner_text(owner)} {len(steps)} times in a step"
                yield ZbcError("E202", text, hint="one STEP behind the last backward of each stage, or of so many")
            else:
                yield from _between(program, rank, owner, steps)
                yield from _around(program, rank, owner, steps[-1])


def _strangers(program: Program, rank: int) -> Iterator[ZbcError]:
    """Yields ops that have no place in steps without a flush, or on this rank."""
    owners = program.owners(rank)
    for step, op in enumerate(program.ranks[rank]):
        wide = op.kind.stage_wide or op.kind.rank_wide or op.kind.unit_wide
        if (wide and op.kind not in (Kind.STEP, Kind.REDUCE, Kind.GATHER)) or op.kind.is_mark:
            text = f"program: {op} does not go with steps that follow one another without a flush"
            yield ZbcError("E202", text, where=f"rank {rank} step {step}", hint="drop it")
        elif wide and op.stage not in owners:
            text = f"program: {op} is on rank {rank}, which does not hold its stage"
            yield ZbcError("E205", text, where=f"rank {rank} step {step}")
        elif NEXT > op.mb >= program.microbatches or op.mb >= NEXT + program.microbatches:
            text = f"program: {op} is outside the program, which has {program.microbatches} microbatches in a step"
            yield ZbcError("E202", text, where=f"rank {rank} step {step}", hint="drop it")


def _between(program: Program, rank: int, owner: int, steps: Sequence[int]) -> Iterator[ZbcError]:
    """Checks for equally many backwards between STEPs, if a stage steps on its own after every few of them."""
    stage = home_of(owner)
    ops, per_step = program.ranks[rank], program.microbatches // len(steps) * program.slices
    for number, (first, last) in enumerate(pairwise((-1, *steps))):
        count = sum(op.kind.makes_part and op.stage == stage and op.mb < NEXT for op in ops[first + 1 : last])
        if count != per_step and len(steps) > 1:
            text = f"program: {count} backwards come before {ops[last]}, all others have {per_step}"
            yield ZbcError("E202", text, where=f"rank {rank} step {last}", hint=f"one STEP behind {per_step} of them")
        if ops[last].mb != number:
            text = f"program: {ops[last]} is the STEP number {number} of its stage, counted from 0"
            yield ZbcError("E202", text, where=f"rank {rank} step {last}")


def _around(program: Program, rank: int, owner: int, step: int) -> Iterator[ZbcError]:
    """Yields ops on the wrong side of the STEP of an owner."""
    ops, stage = program.ranks[rank], home_of(owner)
    sums = [i for i, op in enumerate(ops) if op == Op(Kind.REDUCE, owner)]
    if len(sums) != program.shared(Op(Kind.REDUCE, owner)):
        text = f"program: rank {rank} runs REDUCE {owner_text(owner)} {len(sums)} times in a step"
        yield ZbcError("E202", text, hint="once where replicas share the stage, between its last backward and its STEP")
        return
    first = min(sums, default=step)
    for i, op in enumerate(ops):
        makes = op.stage == stage and op.kind.makes_part
        if makes and op.mb < NEXT and i > min(first, step):
            text = f"program: {ops[min(first, step)]} comes before {op}, which it needs"
            yield ZbcError("E206", text, where=f"rank {rank} step {i}", hint=f"move {op} before it")
        if op.stage == stage and op.kind.computes and op.kind is not Kind.F and op.mb >= NEXT and i < max(first, step):
            text = f"program: {op} would add to the gradients of the step before: {ops[step]} comes after it"
            hint = "a stage's backwards of a step come after the STEP of the step before; fuse B and W"
            yield ZbcError("E210", text, where=f"rank {rank} step {i}", hint=hint)
    if first > step:
        text = f"program: {ops[step]} comes before {ops[first]}, which it needs"
        yield ZbcError("E206", text, where=f"rank {rank} step {step}", hint="move it behind")


# ---- E201 of any number of steps -------------------------------------------------------------------------------


def _stops(program: Program) -> Iterator[ZbcError]:
    """Yields nothing if the steps go on forever."""
    before, most = None, program.placement.ranks + ROW
    for steps in range(ROW, ROW + most):
        left = _left(program, steps)
        if left == before:
            return
        before = left
    text = "deadlock: steps that follow one another come to an end"
    details = [f"rank {rank}: {count} ops are left" for rank, count in enumerate(before or ()) if count]
    yield ZbcError("E201", text, details=details, hint="plan again")


def _left(program: Program, steps: int) -> tuple[int, ...]:
    """The ops each rank has left after `steps` bodies, when it stops for lack of messages from later bodies."""
    longer = of_steps(program, steps + 1).program
    own = [_length(program, rank, steps) for rank in range(len(program.ranks))]
    graph = build(replace(longer, ranks=tuple(ops[:count] for ops, count in zip(longer.ranks, own, strict=True))))
    _, done = run(graph)
    return tuple(sum(not done[i] for i in graph.mine(rank)) for rank in range(len(own)))


def _length(program: Program, rank: int, steps: int) -> int:
    """The number of unit ops in `steps` bodies of a rank, with the ones before the first."""
    ops = [op for op in program.ranks[rank] if not op.kind.stage_wide]
    return sum(op.mb >= NEXT for op in ops) + steps * len(ops)
