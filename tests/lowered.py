"""Lowers the programs of tests to complete plans."""

from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering, Pass
from zbc.compiler.passes.gather_weights import GatherWeights
from zbc.compiler.schedules import several
from zbc.compiler.sim.context import Context
from zbc.ir import Program


def lower(
    program: Program, sync: str = "before-step", costs: Costs | None = None, gather: GatherWeights | None = None
) -> Program:
    """Runs every pass in order; by default all ops are equally long, and weights stay."""
    return Lowering(sync, gather, several=several).lower(Context.of(program, costs)).program


def ran(one: Pass, program: Program) -> Program:
    """Runs one pass alone, with all ops equally long."""
    return one.run(program, Context.of(program))
