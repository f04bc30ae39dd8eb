"""Steps that follow one another without a flush (PipeDream-2BW, arXiv 2006.09503)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zbc import excludes
from zbc.compiler.passes.insert_comm import POSTED, InsertComm
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import NEXT, Kind, Op, Program

STEADY = ("1f1b", "interleaved-1f1b")  # schedules that are one backward after one forward, step after step
_BODY = 2  # of the steps that are laid out, the one that is cut out: all around it is as it always will be
_STEPS = 5
# Compute ops between a receive and what waits for it, where messages wait for a buffer: the forward and the backward
# before. By time receives of the steps that are laid out would stand where those of later steps do not.
_EARLY = 2


@dataclass(frozen=True, slots=True)
class Flushless:
    """Make the body of a cycle of a step of 1F1B: where its ranks would drain, they begin the next step.

    A rank that runs w forwards before its first backward does so once; from there on each backward follows a forward,
    and the last w forwards of a body are of the next step. A `STEP` stands behind the last backward of its stage, or,
    where stages step on their own, behind every few of them (`every`).

        F s0 m0           F s0 m1
        F s0 m1           SEND_F s0 m1 >r1
        BW s0 m0    ->    BW s0 m0
        BW s0 m1          F s0 m0 next
                          SEND_F s0 m0 next >r1
                          BW s0 m1
                          STEP s0
    """

    every: int = 0

    name: ClassVar[str] = "flushless"

    def run(self, program: Program, context: Context) -> Program:
        """Raises E210 where a rank would be ahead by more than one step, E118 for other schedules."""
        _refuse(program, alone=self.every > 0)
        m, ranks = program.microbatches, []
        for rank, ops in enumerate(program.ranks):
            warmup, length = _warmup(program, rank), sum(op.kind is Kind.F for op in ops)
            if warmup > length:
                raise _too_far(program, rank, warmup, length, alone=self.every > 0)
            ranks.append(_laid_out(ops, warmup, m))
        whole = replace(program, microbatches=m * _STEPS, ranks=tuple(map(tuple, ranks)))
        inserted = InsertComm(_EARLY if context.costs.rendezvous else POSTED)
        whole = inserted.run(whole, Context(whole, context.costs))
        cut = [_closed(_cut(ops, m), program, self.every) for ops in whole.ranks]
        made = program.with_ranks(cut, by=InsertComm.name).with_ranks(cut, by=self.name)
        return replace(made, flushless=True)


def _refuse(program: Program, *, alone: bool) -> None:
    name, placement = program.history[0], program.placement
    if name not in STEADY:
        raise excludes.refused("asynchronous" if alone else "two versions", "flush", "schedule", name)
    if len(set(placement.pipes[0])) == placement.ranks < placement.stages and program.microbatches % placement.ranks:
        p, m = placement.ranks, program.microbatches
        text = f"schedule: without a flush {name} needs a multiple of {p} microbatches, not {m}"
        raise ZbcError("E118", text, hint=f"set schedule.microbatches = {m + -m % p}")


def _warmup(program: Program, rank: int) -> int:
    """Forwards of a rank before its first pair of a forward and a backward, were there enough microbatches."""
    p, v = program.placement.ranks, program.placement.chunks or 1
    return p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * p


def _too_far(program: Program, rank: int, warmup: int, length: int, *, alone: bool) -> ZbcError:
    p, m = program.placement.ranks, program.microbatches
    per = length // m  # stages of a rank
    least = -(-warmup // per)
    least = least if per == 1 else least + -least % p
    hint = f"set schedule.microbatches = {least} or more"
    if alone:
        text = f"schedule: rank {rank} is {warmup} forwards ahead, and a step has {length}: more than one step"
        return ZbcError("E118", text, hint=hint)
    text = f"schedule: rank {rank} would run forwards of a step before the STEP of the step two earlier"
    details = [f"it is {warmup} forwards ahead, and a step has {length}: two versions of the weights are too few"]
    return ZbcError("E210", text, details=details, hint=hint)


def _laid_out(ops: Sequence[Op], warmup: int, m: int) -> list[Op]:
    """Some steps of a rank in a row, one backward behind one forward from the warm-up on."""
    forwards, backwards = [op for op in ops if op.kind is Kind.F], [op for op in ops if op.kind is not Kind.F]
    steps = range(_STEPS)
    ahead = [op._replace(mb=op.mb + m * step) for step in steps for op in forwards]
    behind = [op._replace(mb=op.mb + m * step) for step in steps for op in backwards]
    listed = ahead[:warmup]
    for forward, backward in zip(ahead[warmup:], behind, strict=False):
        listed += [forward, backward]
    return listed + behind[len(ahead) - warmup :]


def _cut(ops: Sequence[Op], m: int) -> list[Op]:
    """The body: what comes after the last backward of a step, and what it sends, up to that of the next."""
    ends = []
    for step in (_BODY - 1, _BODY):
        end = max(i for i, op in enumerate(ops) if op.kind.makes_part and op.mb // m == step) + 1
        while end < len(ops) and ops[end].kind.is_send:
            end += 1
        ends.append(end)
    body = ops[ends[0] : ends[1]]
    strange = next((op for op in body if op.mb // m not in (_BODY, _BODY + 1)), None)
    if strange is not None:
        text = f"schedule: {strange} would be of the step after the next: messages of three steps at once"
        raise ZbcError("E210", text, hint="set schedule.microbatches higher")
    return [op._replace(mb=op.mb % m + NEXT * (op.mb // m - _BODY)) for op in body]


def _closed(ops: Sequence[Op], program: Program, every: int) -> list[Op]:
    """The body with a STEP, and before it the sum over replicas, behind the last of so many backwards of a stage."""
    count: dict[int, int] = {}
    behind: dict[int, list[Op]] = {}
    for i, op in enumerate(ops):
        if op.kind.makes_part and op.mb < NEXT:
            made = count[op.stage] = count.get(op.stage, 0) + 1
            number, left = divmod(made, every or program.microbatches)
            if not left:
                sums = [Op(Kind.REDUCE, op.stage)] if program.shared(Op(Kind.REDUCE, op.stage)) else []
                behind[_sent(ops, i)] = [*sums, Op(Kind.STEP, op.stage, number - 1)]
    return [one for i, op in enumerate(ops) for one in (op, *behind.get(i, ()))]


def _sent(ops: Sequence[Op], i: int) -> int:
    """The last of the sends right behind an op, or that op."""
    while i + 1 < len(ops) and ops[i + 1].kind.is_send:
        i += 1
    return i
