"""Chooses the share of each weight gradient to skip for the shortest step: a linear program (arXiv 2602.05754).

Variables are the end of every op, the frozen share x of each W (or of the W part of a BW) and the length T of a step:

    end(i) >= end(j) + length(i) - w(i) x(i)     for each j that i waits for, in the graph of the program
    end(i) >= end(j) + least(i)                  likewise, of a BW whose W hides tensor-parallel collectives
    T >= end(i)
    mean of x over the ops of a stage <= most

The least T counts first, then the least sum of x at that T. The solver is GLOP (`pip install 'zbc[solve]'`). Above
`LARGE` ops the program is solved without most of its microbatches: the first and the last p of them are free, and all
between get the cap; some of these stay to keep both ends apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import Graph, build
from zbc.compiler.sim.links import needs_of
from zbc.compiler.sim.simulate import lengths
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.ops import UNIT_SCOPES

LARGE = 2000  # compute ops; a larger program is solved in part
ENDS = 4  # times the ranks: microbatches kept then, half of them at each end of the step
_SAME = 1e-9  # relative slack of the step while freezing is minimised
_LEAST = 1e-7  # shares below this count as 0, the solver's tolerance


@dataclass(frozen=True)
class Shares:
    """The frozen share of each op, 0 to 1; other ops are not frozen. `ms`: T, None if solved in part."""

    of: Mapping[Op, float]
    ms: float | None


class _End(NamedTuple):
    """End of a node: `ms` after a variable, or after the beginning of the step."""

    variable: Any | None
    ms: float


_BEGIN = _End(None, 0.0)


def frozen_shares(program: Program, graph: Graph, costs: Costs, most: float) -> Shares:
    """The shares for a complete program of whole microbatches. Raises E602 without ortools."""
    if sum(map(len, graph.computing)) <= LARGE or program.microbatches <= ENDS * program.placement.ranks:
        return _Model(graph, costs, most).solve()
    kept, middle = _ends(program)
    part = _Model(build(kept), costs, most, range(middle.start // 2, middle.start + middle.start // 2)).solve()
    shift = middle.stop - middle.start
    shares = {op if op.mb < middle.start else op._replace(mb=op.mb + shift): x for op, x in part.of.items()}
    shares |= {op: most for _, _, op in program if op.kind.makes_part and op.mb in middle}
    return Shares(shares, None)


def _ends(program: Program) -> tuple[Program, range]:
    """The program with its first and last microbatches only, numbered without a gap, and the range left out."""
    half = ENDS * program.placement.ranks // 2
    middle = range(half, program.microbatches - half)
    gap = middle.stop - middle.start

    def some(ops: tuple[Op, ...]) -> Iterator[Op]:
        for op in ops:
            if op.kind.row.scope not in UNIT_SCOPES or op.mb < middle.start:
                yield op
            elif op.mb >= middle.stop:
                yield op._replace(mb=op.mb - gap)

    ranks = tuple(tuple(some(ops)) for ops in program.ranks)
    return replace(program, microbatches=2 * half, ranks=ranks), middle


class _Model:
    """The linear program of a graph, in units of its longest op; microbatches that are `alike` all get the cap."""

    def __init__(self, graph: Graph, costs: Costs, most: float, alike: range = range(0)) -> None:
        self.graph, self.costs, self.most, self.alike = graph, costs, most, alike
        self.solver = _solver()
        ms = lengths(graph, costs)
        self.unit = max(ms, default=0.0) or 1.0
        self.length = [value / self.unit for value in ms]
        self.x: dict[int, Any] = {}  # node -> its frozen share
        self.ends: dict[int, _End] = {}
        self.step = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self._freezable()
        for i in graph.ran[0]:
            self._place(i)
        self._close()

    def _freezable(self) -> None:
        """A variable for each op with weight gradients, and the cap of each stage."""
        caps, counts = dict[int, Any](), Counter[int]()
        for i, op in enumerate(self.graph.ops):
            if op.kind.makes_part and self.costs.left_out(op, 1.0) > 0:
                low, high = (self.most, self.most) if op.mb in self.alike else (0.0, 1.0)
                self.x[i] = self.solver.NumVar(low, high, "")
                if op.stage not in caps:
                    caps[op.stage] = self.solver.Constraint(-self.solver.infinity(), 0.0)
                caps[op.stage].SetCoefficient(self.x[i], 1.0)
                counts[op.stage] += 1
        for stage, cap in caps.items():
            cap.SetUb(self.most * counts[stage])

    def _place(self, i: int) -> None:
        """Defines the end of node i, after its dependencies. With a single dependency the end takes no variable."""
        needs = needs_of(self.graph, i, posted=self.costs.rendezvous)
        x, ends = self.x.get(i), list(dict.fromkeys(self.ends.get(k, _BEGIN) for k in needs))
        if x is None and len({end.variable for end in ends}) == 1:
            last = max(ends, key=lambda end: end.ms)
            self.ends[i] = last._replace(ms=last.ms + self.length[i])
            return
        own = self.solver.NumVar(0.0, self.solver.infinity(), "")
        for end in ends:
            row = self._behind(own, end, self.length[i])
            if x is not None:
                op = self.graph.ops[i]
                weight, most = self.costs.weight_ms(op), self.costs.left_out(op, 1.0)
                row.SetCoefficient(x, weight / self.unit)
                if most < weight:
                    self._behind(own, end, self.length[i] - most / self.unit)
        self.ends[i] = _End(own, 0.0)

    def _behind(self, own: Any, end: _End, ms: float) -> Any:
        """The row that puts an end at least `ms` after another."""
        row = self.solver.Constraint(end.ms + ms, self.solver.infinity())
        row.SetCoefficient(own, 1.0)
        if end.variable is not None:
            row.SetCoefficient(end.variable, -1.0)
        return row

    def _close(self) -> None:
        """The step ends when each rank's last op and all collectives have ended."""
        graph = self.graph
        lasts = [ops[-1] for ops in graph.computing if ops]
        lasts += [e for e, ops in graph.met.items() if graph.ops[ops[0]].kind.is_collective]
        for i in lasts:
            self._behind(self.step, self.ends[i], 0.0)

    def solve(self) -> Shares:
        """The least step, then the least freezing for it; equal shares if the numbers are too far apart to solve."""
        goal = self.solver.Objective()
        goal.SetCoefficient(self.step, 1.0)
        goal.SetMinimization()
        if not self._run():
            return Shares(dict.fromkeys((self.graph.ops[i] for i in self.x), self.most), None)
        least, shares = self.step.solution_value(), self._values()
        self.step.SetUb(least * (1 + _SAME))
        goal.SetCoefficient(self.step, 0.0)
        for x in self.x.values():
            goal.SetCoefficient(x, 1.0)
        shares = self._values() if self._run() else shares
        ops = self.graph.ops
        return Shares({ops[i]: min(1.0, x) for i, x in shares.items() if x > _LEAST}, least * self.unit)

    def _values(self) -> dict[int, float]:
        return {i: x.solution_value() for i, x in self.x.items()}

    def _run(self) -> bool:
        """Whether it is solved."""
        return bool(self.solver.Solve() == self.solver.OPTIMAL)


def _solver() -> Any:
    try:
        from ortools.linear_solver import pywraplp
    except ImportError:
        text = "plan: [freeze] is planned with ortools, which is not installed"
        raise ZbcError("E602", text, hint="pip install 'zbc[solve]'") from None
    return pywraplp.Solver.CreateSolver("GLOP")
