"""`schedule.passes`: functions of the user that change a complete program, (program, context) -> Program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from zbc.compiler.check import check_graph
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Program
from zbc.job import userobject
from zbc.job.spec import Job


class PassFailed(ZbcError):
    """No other schedule is tried in place of one whose order a pass of the user breaks."""


@dataclass(frozen=True, slots=True)
class UserPass:
    """A pass of the user, whose result is proven before the next one runs."""

    name: str
    where: str
    function: Callable[[Program, Context], object]

    def run(self, program: Program, context: Context) -> Program:
        """Raises PassFailed: E121 for a function that fails or returns another program, E2xx if that cannot run."""
        try:
            made = self._made(program, context)
            check_graph(context.then(made).graph)
        except ZbcError as error:
            check_graph(context.graph)  # else it is not the pass that is wrong
            first = error.errors[0]
            why = first.message.removeprefix("program: ")
            text = why if first.code == "E121" else f"schedule: pass {self.name} made an order that cannot run: {why}"
            raise PassFailed(first.code, text, where=self.where, hint=first.hint, details=first.details) from error
        return made

    def _made(self, program: Program, context: Context) -> Program:
        call, whose = partial(self.function, program, context), f"pass {self.name}"
        made = userobject.call(call, {}, self.name, "schedule.passes", code="E121")
        if not isinstance(made, Program):
            text = f"schedule: {whose} returned {type(made).__name__}, not a zbc.ir.Program"
            raise ZbcError("E121", text, hint='return program.with_ranks(ranks, by="its name")')
        refuse_what_is_no_op(made, whose, self.where)
        if replace(made, ranks=program.ranks, history=program.history) != program:
            text = f"schedule: {whose} returned a program of other stages, microbatches or settings"
            raise ZbcError("E121", text, hint="change the order of ops alone: program.with_ranks")
        return made


def passes_of(job: Job) -> tuple[UserPass, ...]:
    """The passes that a job names, in its order. Raises E121 for one that cannot be imported."""
    found = []
    for number, name in enumerate(job.schedule.passes):
        where = job.where("schedule", "passes", number)
        found.append(UserPass(name, where, userobject.load(name, "schedule.passes", code="E121", where=where)))
    return tuple(found)


def refuse_what_is_no_op(program: Program, whose: str, where: str) -> None:
    """Raises E121 if a plugin or a pass put something other than ops of whole numbers into the order of a rank."""
    for rank, step, op in program:
        if not (isinstance(op, Op) and isinstance(op.kind, Kind) and all(type(part) is int for part in op[1:])):
            text = f"schedule: {whose} has {op!r} in the order of rank {rank}, step {step}"
            # Names a kind: so does a plugin.
            hint = "an entry is zbc.ir.Op(Kind.F, stage, microbatch), with whole numbers"
            raise ZbcError("E121", text, where=where, hint=hint)
