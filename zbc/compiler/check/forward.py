"""Checks the forward-only program of a placement: as for a step, without its backward."""

from __future__ import annotations

from collections import Counter
from itertools import product

from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.check.faults import message_faults
from zbc.compiler.check.found import raise_found
from zbc.compiler.graph import build
from zbc.errors import ZbcError, raise_all
from zbc.ir import Op, Program, forward
from zbc.plan.forward import SHARED


def check_forward(program: Program) -> None:
    """Raise E202 (an F is missing, twice, or on another rank), E203, E204 (transfers) or E201 (deadlock)."""
    placement = program.placement
    homes: dict[Op, int] = {}
    problems = []
    for rank, ops in enumerate(program.ranks):
        for op in (op for op in ops if op.kind.is_forward):
            if op in homes or placement.rank_of(op.stage) != rank:
                problems.append(ZbcError("E202", f"program: {op} is on rank {rank}", hint="make the plan again"))
            homes[op] = rank
    units = product(range(placement.stages), range(program.microbatches), (0,), range(program.slices))
    wanted = {forward(*unit) for unit in units}
    problems += [ZbcError("E202", f"program: no rank runs {op}") for op in sorted(wanted - homes.keys())]
    problems += [ZbcError("E202", f"program: {op} is out of range") for op in sorted(homes.keys() - wanted)]
    problems += _words(program) if program.vocabulary else []
    raise_all(problems)
    graph = build(program)
    for check in (message_faults, deadlock_problems):
        raise_found(check(graph))


def _words(program: Program) -> list[ZbcError]:
    """Problems of vocabulary ops that are not exactly once on each rank for each unit."""
    units = product(SHARED, range(program.microbatches), range(program.slices))
    wanted = Counter(Op(kind, 0, mb, 0, part) for kind, mb, part in units)
    problems = []
    for rank, ops in enumerate(program.ranks):
        counts = Counter(op for op in ops if op.kind.unit_wide)
        missing, extra = sorted((wanted - counts).keys()), sorted((counts - wanted).keys())
        problems += [ZbcError("E202", f"program: rank {rank} never runs {op}") for op in missing]
        problems += [ZbcError("E202", f"program: {op} is on rank {rank} too often") for op in extra]
    return problems
