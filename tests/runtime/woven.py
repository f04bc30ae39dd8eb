"""Programs with a shared vocabulary, made from orders with the vocabulary on the first and the last stage."""

from dataclasses import replace

from tests.lowered import lower, ran
from zbc.compiler.check import check_all
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import Request, find
from zbc.ir import Kind, Op, Program
from zbc.ops import WORDS


def shared_program(schedule: str, p: int, m: int, sums: int, *, slices: int = 1, copies: int = 1, **how) -> Program:
    """A complete, checked program; `how` sets `sharded`."""
    found = find(schedule)
    order = found.make(Request(p=p, m=m, v=found.stages_per_rank(None), slices=slices))
    program = lower(replace(ran(Weave(sums), order), dp=copies, **how))
    if copies > 1 and not any(op.stage == WORDS for op in program.ranks[0]):
        program = program.with_ranks([_summed(ops) for ops in program.ranks], by="words-summed")
    check_all(program)
    return program


def _summed(ops: tuple[Op, ...]) -> list[Op]:
    at = next(i for i, op in enumerate(ops) if op.kind is Kind.VALIDATE)
    return [*ops[:at], Op(Kind.REDUCE, WORDS), *ops[at:]]
