"""Programs for pictures in tests."""

from tests.compiler.grid import make
from tests.listing import listing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement
from zbc.viz.strip import Drawn, once, repeated

UP_AND_DOWN = """
    rank 0: F s0 m0, F s1 m1 up, BW s1 m1 up, BW s0 m0
    rank 1: F s0 m1 up, F s1 m0, BW s1 m0, BW s0 m1 up
"""


def both_ways(name=""):
    """One step of two pipes, one in each direction."""
    return whole(listing(UP_AND_DOWN, Placement.bidirectional((0, 1)), microbatches=2), name=name)


def whole(program, costs=None, name=""):
    """One step of a program, at unit times unless costs are given."""
    costs = costs or Costs.uniform(program.placement)
    return Drawn(name, program, once(simulate(program, costs)), costs)


def drawn(name, p=4, m=8, steps=1, costs=(1.0, 1.3, 0.6, 0.2)):
    """Steps of a schedule with these ms of F, B, W and a transfer."""
    program = make(name, p, m)
    known = Costs.uniform(program.placement, *costs)
    return Drawn(name, program, repeated(simulate(program, known), program, known, steps, barrier=True), known)
