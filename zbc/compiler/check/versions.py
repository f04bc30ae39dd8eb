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

from collections.abc import Iterator
from dataclasses import replace

from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.check.faults import message_faults, op_faults
from zbc.compiler.graph import build, of_steps
from zbc.compiler.graph.graph import run
from zbc.errors import ZbcError, raise_found
from zbc.ir import NEXT, Kind, Op, Program
from zbc.ops import Scope, home_of, owner_text

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

CLOSING = {Kind.REDUCE: "r", Kind.STEP: "s", Kind.GATHER: "g"}


def version_problems(program: Program) -> Iterator[ZbcError]:
    """Yields ops that have no place in such steps, and owners whose ops do not come in this order: as many backwards as
    before each STEP, REDUCE where ranks share the owner, STEP, GATHER where they share it out; those of the next step
    after all of these."""
    units = program.microbatches * program.slices
    for rank, ops in enumerate(program.ranks):
        owners = program.owners(rank)
        for step, op in enumerate(ops):
            if op.kind.row.scope is not Scope.UNIT and not (op.kind in CLOSING and op.stage in owners):
                text = f"program: {op} has no place in steps that follow one another without a flush, or on this rank"
                yield ZbcError("E202", text, where=f"rank {rank} step {step}", hint="drop it")
        for owner in owners:
            mine = [(letter, op) for op in ops if (letter := _letter(op, owner))]
            order, steps = "".join(letter for letter, _ in mine), [op for letter, op in mine if letter == "s"]
            one = "p" * (units // max(1, len(steps))) + "r" * program.shared(Op(Kind.REDUCE, owner)) + "s"
            one += "g" * (program.sharded and program.shared(Op(Kind.GATHER, owner)))
            if order.rstrip("n") == one * len(steps) and [op.mb for op in steps] == [*range(len(steps))] != []:
                continue
            early = order.find("n")
            if 0 <= early < order.rfind("s"):
                text = f"{mine[early][1]} would add to the gradients of the step before: {steps[-1]} comes after it"
                code, hint = "E210", "backwards of a stage come after its STEP of the step before; fuse B and W"
            else:
                code = "E206" if sorted(order.rstrip("n")) == sorted(one * len(steps)) else "E202"
                turn = next((k for k, letter in enumerate(order) if letter != (one * len(order))[k]), len(order))
                first = mine[turn][1] if turn < len(order) else "the end"
                text = f"what makes and closes a step of {owner_text(owner)} is out of turn, or missing, at {first}"
                hint = "all backwards, REDUCE if ranks share the stage, STEP, GATHER if they step it in parts"
            yield ZbcError(code, f"program: {text}", where=f"rank {rank}", hint=hint)


def _letter(op: Op, owner: int) -> str:
    """What an op is for an owner: a backward of this step or the next one, or an op that closes a step."""
    if op.kind in CLOSING and op.stage == owner:
        return CLOSING[op.kind]
    if not op.kind.computes or op.kind.is_forward or op.stage != home_of(owner):
        return ""
    return "n" if op.mb >= NEXT else "p" if op.kind.makes_part else ""


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
