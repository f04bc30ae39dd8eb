"""Does every microbatch go through every stage once, on the right ranks, in an order each rank can run?

A complete program runs, for every microbatch and slice, F once and the backward once (BW, or B and W) on every stage
of exactly one pipe. Step-level ops are optional; where a program has them, it has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check.found import raise_found
from zbc.compiler.check.numbered import Numbered, number
from zbc.compiler.check.order import Late, late_ops, late_step_ops
from zbc.compiler.check.redo import redo_problems
from zbc.errors import ZbcError
from zbc.ir import AHEAD, BARRIER, COLLECTIVE, COMPUTE, EVERYWHERE, RANK_WIDE, STAGE_WIDE, SUM, Kind, Op, Program


def check_complete(program: Program) -> None:
    """Raise what is wrong with a program before any message moves: E202, E205, E206.

    E202: ops missing, repeated or out of range. E205: ops on a rank that does not hold their stage. E206: ops that
    come before what they need on their own rank. Transfers are checked for range, rank and order only.
    """
    raise_found(complete_problems(number(program)))


def complete_problems(n: Numbered) -> Iterator[ZbcError]:
    """The problems of `check_complete`, one by one."""
    yield from _outside(n)
    yield from _repeated(n)
    yield from _missing_compute(n)
    yield from _groups(n)
    yield from _missing_step_ops(n)
    yield from _misplaced(n)
    yield from _out_of_order(n, late_ops(n))
    yield from _out_of_order(n, late_step_ops(n))
    yield from redo_problems(n)


# ---- E202 ----------------------------------------------------------------------------------------------------


def _outside(n: Numbered) -> Iterator[ZbcError]:
    placement, program = n.program.placement, n.program
    for i in n.outside:
        if n.op(i).kind in (Kind.TIE, Kind.GATHER):
            text = f"program: {n.op(i)} has nothing to work on: {_NOTHING[n.op(i).kind]}"
            yield ZbcError("E202", text, where=n.where(i), hint="drop it")
            continue
        size = f"{placement.stages} stages, {program.microbatches} microbatches"
        size += f", {len(placement.pipes)} pipes" if n.op(i).pipe else ""
        size += f", {program.slices} slices" if n.op(i).slice else ""
        text = f"program: {n.op(i)} is outside the program, which has {size}"
        yield ZbcError("E202", text, where=n.where(i), hint="drop it")


_NOTHING = {Kind.TIE: "no weight is shared by two stages", Kind.GATHER: "no stage is stepped in parts"}


def _repeated(n: Numbered) -> Iterator[ZbcError]:
    for i in n.repeated:
        op = n.op(i)
        if op.kind in COMPUTE:
            row = op.pipe * n.program.placement.stages + op.stage
            first = n.at[op.kind][row * n.width + op.mb * n.program.slices + op.slice]
            yield _twice(n, i, first)


def _twice(n: Numbered, again: int, first: int) -> ZbcError:
    text = f"program: {n.op(again)} runs a second time"
    return ZbcError("E202", text, where=n.where(again), hint="drop one", details=[f"first at {n.text(first)}"])


def _missing_compute(n: Numbered) -> Iterator[ZbcError]:
    """Each microbatch has one pipe, and all its ops there."""
    pipes, microbatches = len(n.program.placement.pipes), n.program.microbatches
    bad = _bad_places(n)
    if pipes == 1 and not bad:
        return
    homes: list[list[int]] = [[] for _ in range(microbatches)]
    for pipe in range(pipes):
        for mb in _microbatches_in(n, pipe):
            homes[mb].append(pipe)
    for mb, pipe_list in enumerate(homes):
        if not pipe_list:
            yield ZbcError("E202", f"program: microbatch {mb} never runs", hint=f"add F s0 m{mb} and what follows it")
        elif len(pipe_list) > 1:
            ops = [f"pipe {pipe}: {n.text(_first_op(n, pipe, mb))}" for pipe in pipe_list]
            text = f"program: microbatch {mb} runs in {len(pipe_list)} pipes"
            yield ZbcError("E202", text, details=ops, hint="drop its ops in all pipes but one")
    for row, index in bad:
        if row // n.program.placement.stages in homes[index // n.program.slices]:
            yield from _missing_at(n, row, index)


def _bad_places(n: Numbered) -> list[tuple[int, int]]:
    """(row, index) of every place that lacks an op or has BW next to B or W."""
    bad = []
    for row in range(len(n.owners)):
        columns = [n.cut(n.at[kind], row) for kind in (Kind.F, Kind.B, Kind.W, Kind.BW)]
        for index, (f, b, w, bw) in enumerate(zip(*columns, strict=True)):
            if f < 0 or (b < 0) is (bw < 0) or (b < 0) is not (w < 0):
                bad.append((row, index))
    return bad


def _microbatches_in(n: Numbered, pipe: int) -> set[int]:
    """The microbatches that run any compute op in a pipe."""
    found: set[int] = set()
    stages, slices = n.program.placement.stages, n.program.slices
    for row in range(pipe * stages, (pipe + 1) * stages):
        for kind in COMPUTE:
            found.update([index // slices for index, i in enumerate(n.cut(n.at[kind], row)) if i >= 0])
    return found


def _first_op(n: Numbered, pipe: int, mb: int) -> int:
    """The compute op of a microbatch in a pipe that stands first in the program."""
    stages, slices = n.program.placement.stages, n.program.slices
    starts = [row * n.width + mb * slices for row in range(pipe * stages, (pipe + 1) * stages)]
    return min(i for kind in COMPUTE for start in starts for i in n.at[kind][start : start + slices] if i >= 0)


def _missing_at(n: Numbered, row: int, index: int) -> Iterator[ZbcError]:
    f, b, w, bw = (n.at[kind][row * n.width + index] for kind in (Kind.F, Kind.B, Kind.W, Kind.BW))
    owner = n.owners[row]

    def missing(kind: Kind, more: str = "") -> ZbcError:
        text = f"program: no rank runs {n.wanted(kind, row, index)}{more}"
        return ZbcError("E202", text, hint=f"add it on rank {owner}")

    if f < 0:
        yield missing(Kind.F)
    if bw >= 0:
        for other in (b, w):
            if other >= 0:
                text = f"program: {n.op(other)} repeats a part of {n.op(bw)}"
                details = [f"also {n.text(bw)}"]
                yield ZbcError("E202", text, where=n.where(other), hint="drop one", details=details)
    elif b < 0 and w < 0:
        yield missing(Kind.BW, " (or its B and W)")
    elif b < 0 or w < 0:
        yield missing(Kind.B if b < 0 else Kind.W)


def _missing_step_ops(n: Numbered) -> Iterator[ZbcError]:
    """Ops that close a step come together and everywhere; sums and gathers on all ranks that share something or none.

    A step is closed either by a barrier or ahead of it.
    """
    seen: dict[tuple[int, Kind, int], int] = {}
    for i in n.step_ops:
        rank, op = n.place(i)[0], n.op(i)
        first = seen.setdefault((rank, op.kind, op.stage if op.kind in STAGE_WIDE else 0), i)
        if first != i:
            yield _twice(n, i, first)
    closing: set[Kind] = set()
    for family in (BARRIER, AHEAD):
        used = [i for (_, kind, _), i in seen.items() if kind in family]
        if used and closing:
            text = f"program: {n.op(used[0])} belongs to a step without a barrier, which this one has"
            yield ZbcError("E202", text, where=n.where(used[0]), hint="drop the ops of one kind of step or the other")
        closing |= family if used else set()
    for op in _step_ops(n.program):
        ranks = n.program.members(op)
        if op.kind in EVERYWHERE:
            ranks = tuple(range(max(len(ranks), len(n.program.ranks))))
        shared = op.kind in COLLECTIVE and op.kind is not Kind.VALIDATE
        always = bool(closing) if op.kind in SUM or op.kind is Kind.GATHER else op.kind in closing
        always = always and (not shared or n.program.shared(op))
        missing = [rank for rank in ranks if (rank, op.kind, op.stage) not in seen]
        if always or len(missing) < len(ranks):
            for rank in missing:
                yield ZbcError("E202", f"program: rank {rank} never runs {op}", hint=_STEP_HINTS[op.kind])


def _step_ops(program: Program) -> Iterator[Op]:
    """The step-level ops a program may have."""
    for kind in (Kind.VALIDATE, Kind.NORM, Kind.VERDICT, Kind.REDO):
        yield Op(kind, 0)
    if program.tied:
        yield Op(Kind.TIE, 0)
    for stage in range(program.placement.stages):
        for kind in (Kind.STEP, Kind.REDUCE, Kind.TENTATIVE, Kind.COMMIT):
            yield Op(kind, stage)
        if program.sharded:
            yield Op(Kind.GATHER, stage)


_STEP_HINTS = {
    Kind.REDUCE: "every rank that holds a copy of the stage sums its gradients, behind the last W or BW of the stage",
    Kind.TIE: "every rank with the first or the last stage sums the shared weight's gradients, behind both",
    Kind.GATHER: "one GATHER for each stage a rank holds, behind its STEP or TENTATIVE",
    Kind.VALIDATE: "one VALIDATE on each rank, behind its last op of compute",
    Kind.STEP: "one STEP for each stage a rank holds, behind VALIDATE",
    Kind.TENTATIVE: "one TENTATIVE for each stage a rank holds, behind its last op of compute",
    Kind.NORM: "one NORM on each rank, before VERDICT",
    Kind.VERDICT: "one VERDICT on each rank, between NORM and REDO",
    Kind.REDO: "one REDO on each rank, behind VERDICT, with nothing but forwards before it",
    Kind.COMMIT: "one COMMIT for each stage a rank holds, behind REDO and before its first B or BW",
}


def _groups(n: Numbered) -> Iterator[ZbcError]:
    """Behind every OVERLAP stand an F and a backward of something else, in either order."""
    for i in n.groups:
        rank, step = n.place(i)
        pair = n.program.ranks[rank][step + 1 : step + 3]
        forward = [op for op in pair if op.kind is Kind.F]
        backward = [op for op in pair if op.kind in (Kind.B, Kind.BW)]
        if len(forward) != 1 or len(backward) != 1 or forward[0][1:] == backward[0][1:]:
            behind = " and ".join(map(str, pair)) or "nothing"
            text = f"program: OVERLAP is not followed by an F and a backward that does not need it, but by {behind}"
            yield ZbcError("E202", text, where=n.where(i), hint="drop it, or put the two ops right behind it")


# ---- E205, E206 ----------------------------------------------------------------------------------------------


def _misplaced(n: Numbered) -> Iterator[ZbcError]:
    placement = n.program.placement
    for i in n.misplaced:
        op = n.op(i)
        step_level = op.kind in STAGE_WIDE or op.kind in RANK_WIDE
        owners = n.program.members(op) if step_level else (placement.rank_of(op.stage, op.pipe),)
        ranks = " and ".join(str(rank) for rank in sorted(set(owners)))
        text = f"program: {op} is on rank {n.place(i)[0]}, its stage is on rank {ranks}"
        yield ZbcError("E205", text, where=n.where(i), hint=f"move it to rank {ranks}")


def _out_of_order(n: Numbered, late: Iterator[Late]) -> Iterator[ZbcError]:
    for op, found, _ in late:
        if found > op and n.place(op)[0] == n.place(found)[0]:
            text = f"program: {n.op(op)} comes before {n.op(found)}, which it needs"
            hint = f"move step {n.place(found)[1]} before step {n.place(op)[1]}"
            yield ZbcError("E206", text, details=[n.text(op), n.text(found)], hint=hint)
