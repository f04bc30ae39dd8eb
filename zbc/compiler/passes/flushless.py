"""Steps that follow one another without a flush (PipeDream-2BW, arXiv 2006.09503)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from zbc import excludes
from zbc.compiler.passes.fuse_backward import FuseBackward
from zbc.compiler.passes.insert_comm import POSTED, InsertComm, sent
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import NEXT, Kind, Op, Program
from zbc.ops import experts_of

_BODY = 2  # the step of the laid-out ones that is cut out: it is in steady state
_STEPS = 5
# Compute ops between a receive and its user, if messages wait for a buffer: the forward and the backward before. Placed
# by time, receives of the laid-out steps would differ from those of later steps.
_EARLY = 2

# A schedule's program of n steps as one; None if it has no steady state.
Several = Callable[[Program, int], Program | None]


def never(program: Program, steps: int) -> Program | None:
    """None, for every schedule."""


@dataclass(frozen=True, slots=True)
class Flushless:
    """Make the body of a cycle of a step: instead of draining, ranks begin the next step.

    The schedule makes several steps as one with more microbatches, and passes insert their ops there. Then one step is
    cut out of the middle, in steady state. A `STEP` follows the last backward of its stage or, if stages step on their
    own, every few of them (`every`).

        F s0 m0           F s0 m1
        F s0 m1           SEND_F s0 m1 >r1
        BW s0 m0    ->    BW s0 m0
        BW s0 m1          F s0 m0 next
                          SEND_F s0 m0 next >r1
                          BW s0 m1
                          STEP s0
    """

    every: int = 0
    several: Several = never
    group: int | None = None  # of the schedule

    name: ClassVar[str] = "flushless"

    def run(self, program: Program, context: Context) -> Program:
        """Raises E210 if a rank would be ahead by more than one step, E110 for other schedules."""
        m = program.microbatches
        whole = self._unrolled(program)
        early = _EARLY if context.costs.rendezvous else POSTED
        for step in (InsertComm(early), FuseBackward()):
            whole = step.run(whole, Context(whole, context.costs))
        cut = [_closed(_cut(ops, m), program, self.every) for ops in whole.ranks]
        made = program.with_ranks(cut, by=InsertComm.name).with_ranks(cut, by=self.name)
        return replace(made, flushless=True)

    def _unrolled(self, program: Program) -> Program:
        """Several consecutive steps."""
        name, m, p = program.history[0], program.microbatches, program.placement.ranks
        longer = self.several(program, _STEPS)
        if longer is None:
            raise excludes.refused("asynchronous" if self.every else "two versions", "flush", "schedule", name)
        v, k = program.placement.chunks or 1, program.slices
        rounds = 1 if v == 1 else self.group or -(-p // k)
        if m % rounds:
            text = f"schedule: without a flush {name} needs a multiple of {rounds} microbatches, not {m}"
            raise ZbcError("E110", text, hint=f"set schedule.microbatches = {m + -m % rounds}")
        for rank, ops in enumerate(longer.ranks):
            ahead = next(i for i, op in enumerate(ops) if op.kind is not Kind.F) - 1
            if ahead > m * k * v:
                raise self._too_far(program, rank, ahead, rounds)
        return replace(program, microbatches=longer.microbatches, ranks=longer.ranks)

    def _too_far(self, program: Program, rank: int, ahead: int, rounds: int) -> ZbcError:
        forwards = program.slices * (program.placement.chunks or 1)  # forwards of a rank for a microbatch
        least, length = -(-ahead // forwards), program.microbatches * forwards
        hint = f"set schedule.microbatches = {least + -least % rounds} or more"
        if self.every:
            text = f"schedule: rank {rank} is {ahead} forwards ahead, and a step has {length}: more than one step"
            return ZbcError("E110", text, hint=hint)
        text = f"schedule: rank {rank} would run forwards of a step before the STEP of the step two earlier"
        details = [f"it is {ahead} forwards ahead, and a step has {length}: two versions of the weights are too few"]
        return ZbcError("E210", text, details=details, hint=hint)


def _cut(ops: Sequence[Op], m: int) -> list[Op]:
    """The body: ops after the last backward of a step and its sends, up to those of the next step."""
    ends = []
    for step in (_BODY - 1, _BODY):
        last = max(i for i, op in enumerate(ops) if op.kind.makes_part and op.mb // m == step)
        ends.append(sent(ops, last) + 1)
    body = ops[ends[0] : ends[1]]
    strange = next((op for op in body if op.mb // m not in (_BODY, _BODY + 1)), None)
    if strange is not None:
        text = f"schedule: {strange} would be of the step after the next: messages of three steps at once"
        raise ZbcError("E210", text, hint="set schedule.microbatches higher")
    return [op._replace(mb=op.mb % m + NEXT * (op.mb // m - _BODY)) for op in body]


def _closed(ops: Sequence[Op], program: Program, every: int) -> list[Op]:
    """The body with, after every `every` backwards of a stage, its sum over replicas, its STEP, and the gather of their
    parts."""
    count: dict[int, int] = {}
    behind: dict[int, list[Op]] = {}
    for i, op in enumerate(ops):
        if op.kind.makes_part and op.mb < NEXT:
            made = count[op.stage] = count.get(op.stage, 0) + 1
            number, left = divmod(made, (every or program.microbatches) * program.slices)
            if not left:
                owners = (op.stage, experts_of(op.stage)) if program.has_experts(op.stage) else (op.stage,)
                sums = [one for owner in owners if program.shared(one := Op(Kind.REDUCE, owner))]
                gathers = [one for owner in owners if program.sharded and program.shared(one := Op(Kind.GATHER, owner))]
                behind[sent(ops, i)] = [*sums, *(Op(Kind.STEP, owner, number - 1) for owner in owners), *gathers]
    return [item for i, op in enumerate(ops) for item in (op, *behind.get(i, ()))]
