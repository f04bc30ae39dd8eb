"""Complete plans of the programs that tests make."""

from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering, Pass
from zbc.compiler.passes.gather_weights import GatherWeights
from zbc.compiler.schedules import several
from zbc.compiler.sim.context import Context
from zbc.ir import Program


def lower(
    program: Program, sync: str = "before-step", costs: Costs | None = None, gather: GatherWeights | None = None
) -> Program:
    """Every pass in order; by default all ops take equally long, and weights stay."""
    return Lowering(sync, gather, several=several).lower(Context.of(program, costs)).program


def ran(one: Pass, program: Program) -> Program:
    """One pass alone, all ops taking equally long."""
    return one.run(program, Context.of(program))
