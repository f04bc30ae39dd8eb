"""The grid of small pipelines for tests of every schedule."""

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import Timeline, simulate
from zbc.ir import Program

WAVES = ["chimera", "bitpipe", "dualpipe", "dualpipe-v", "hanayo", "chimera-zb", "bitpipe-zb"]  # see test_waves.py
BRAIDS = ["braid-v"]  # see test_overlap.py
FIXED = [  # by formula
    name
    for name, schedule in SCHEDULES.items()
    if (not schedule.searched or name == "zb-v") and name not in (*WAVES, *BRAIDS)
]
RANKS = range(1, 9)
MICROBATCHES = range(1, 25)


def chunk_counts(name: str) -> list[int]:
    """The stages per rank worth trying."""
    schedule = SCHEDULES[name]
    return [1, 2, 3, 4] if schedule.chunks[1] is None else [schedule.default_chunks]


def make(name: str, p: int, m: int, v: int | None = None) -> Program:
    schedule = SCHEDULES[name]
    return schedule.make(Request(p, m, schedule.default_chunks if v is None else v))


def timed(program: Program, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0) -> Timeline:
    return simulate(program, Costs.uniform(program.placement, f, b, w, comm))


def units(program: Program) -> list[float]:
    """Peak activation units per rank."""
    return [rank.units for rank in peaks(program, Costs.uniform(program.placement))]
