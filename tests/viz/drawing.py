"""Programs for pictures in tests."""

from tests.compiler.grid import make
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.simulate import simulate
from zbc.viz.strip import Drawn, once, repeated


def whole(program, costs=None, name=""):
    """One step of a program, at unit times unless costs are given."""
    costs = costs or Costs.uniform(program.placement)
    return Drawn(name, program, once(simulate(program, costs)), costs)


def drawn(name, p=4, m=8, steps=1, costs=(1.0, 1.3, 0.6, 0.2)):
    """Steps of a schedule with these ms of F, B, W and a transfer."""
    program = make(name, p, m)
    known = Costs.uniform(program.placement, *costs)
    return Drawn(name, program, repeated(simulate(program, known), program, known, steps, barrier=True), known)
