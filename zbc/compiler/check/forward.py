"""Whether the forward-only program of a placement is right: the same questions as for a step, without its backward."""

from __future__ import annotations

from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.check.found import raise_found
from zbc.compiler.check.pairing import pairing_problems
from zbc.compiler.graph import build
from zbc.errors import ZbcError, raise_all
from zbc.ir import Kind, Op, Program, nth


def check_forward(program: Program) -> None:
    """Raise E202 (an F is missing, twice, or on another rank), E203, E204 (transfers) or E201 (deadlock)."""
    placement = program.placement
    found: dict[Op, int] = {}
    problems = []
    for rank, ops in enumerate(program.ranks):
        for op in (op for op in ops if op.kind is Kind.F):
            if op in found or placement.rank_of(op.stage) != rank:
                problems.append(ZbcError("E202", f"program: {op} is on rank {rank}", hint="make the plan again"))
            found[op] = rank
    units = program.microbatches * program.slices
    wanted = {nth(Kind.F, s, unit, program.slices) for s in range(placement.stages) for unit in range(units)}
    problems += [ZbcError("E202", f"program: no rank runs {op}") for op in sorted(wanted - found.keys())]
    problems += [ZbcError("E202", f"program: {op} is out of range") for op in sorted(found.keys() - wanted)]
    raise_all(problems)
    graph = build(program)
    for check in (pairing_problems, deadlock_problems):
        raise_found(check(graph))
