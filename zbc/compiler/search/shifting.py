"""Annealing of orders for placements with one pipe or two; the kernel is the one of anneal.py.

Ops are numbered as in table.py, a row for each kind, pipe and stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from zbc.compiler.cost.cost import Costs
from zbc.compiler.search.anneal import WORSE
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.portfolio import Effort
from zbc.compiler.search.problem import KINDS
from zbc.compiler.search.table import Lag, Rows, SearchRow
from zbc.ir import Op, Program

FIRST_MOVES, GROWTH = 600.0, 1.5
HEATS = (0.03, 0.03, 0.15)  # in mean op times, in turn


def annealed(
    program: Program,
    costs: Costs,
    limits: Sequence[float],
    objective: str,
    seconds: float,
    *,
    target: float = 0.0,
    beside: float = 0.0,
    seed: int = 0,
) -> Iterator[tuple[Program, bool]]:
    """Yields ever better orders within the limits, reached by shifting single ops of `program`, whose backwards are
    split, each with whether its annealing ran to its end; if so, any larger effort yields it, too.

    "Better" is by span or makespan of the ops alone. `seconds` are converted to a number of op visits, so that an order
    can be made again. Stops at `target` ms.
    """
    engine = Engine(available())
    numbered = _Numbered(program, costs)
    effort = Effort.seconds(seconds, engine, seed)
    n, best = engine.numbers, numbered.order()
    table, fences = engine.columns(numbered.rows.table()), engine.columns(numbered.rows.fences())
    moves, turn, spent, more = FIRST_MOVES, 0, 0, Effort.seconds(beside, engine).visits
    unit = sum(table.length) / len(table.length) or 1.0
    while spent < effort.visits:
        order, found = n(best), n([0] * len(best))
        heat = HEATS[turn % len(HEATS)] * unit
        spent += int(
            engine.anneal(
                table,
                fences,
                n([float(limit) for limit in limits]),
                n(WORSE),
                order,
                found,
                int(moves),
                heat,
                heat / 10,
                effort.seed + 7 * turn,
                objective == "makespan",
                target,
                effort.visits - spent,
            )
        )
        best = engine.whole(found)
        yield numbered.program(best), spent < effort.visits
        spent += more
        moves, turn = moves * GROWTH, turn + 1
        if _reached(engine, table, found, objective, target):
            break


def _reached(engine: Engine, table: Any, order: Any, objective: str, target: float) -> bool:
    n, size = engine.numbers, len(order)
    position, end, begin = n([0] * size), n([0.0] * size), n([0.0] * (len(table.first) - 1))
    _, span, makespan = engine.measure(table, order, position, begin, end)
    return (makespan if objective == "makespan" else span) <= target * (1 + 1e-9)


class _Numbered:
    """The ops of a program as ops of rows, `rows`. Units of a row: the microbatches of a pipe, in their order."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.like = program
        pipes, stages = range(len(program.placement.pipes)), range(program.placement.stages)
        home = {op.mb: op.pipe for ops in program.ranks for op in ops if op.kind.is_forward and op.stage == 0}
        dealt = [[mb for mb in sorted(home) if home[mb] == pipe] for pipe in pipes]
        whose = [(kind, pipe, s) for kind in KINDS for pipe in pipes for s in stages]
        self.rows = Rows(
            program.placement,
            [self._row(costs, Op(kind, s, 0, pipe), dealt[pipe]) for kind, pipe, s in whose],
            lambda a, b, pipe: _of_units(costs.lag(pipe, a, b), dealt[pipe]),
        )
        self.ops = [Op(kind, s, mb, pipe) for kind, pipe, s in whose for mb in dealt[pipe]]

    def _row(self, costs: Costs, op: Op, dealt: Sequence[int]) -> SearchRow:
        rank, units = self.like.placement.rank_of(op.stage, op.pipe), len(dealt)
        if not (costs.unequal and dealt):
            return SearchRow(op.kind, op.stage, op.pipe, rank, units, float(costs.duration(op)), float(costs.held(op)))
        each = [op._replace(mb=mb) for mb in dealt]
        ms, change = (tuple(float(ask(one)) for one in each) for ask in (costs.duration, costs.held))
        return SearchRow(op.kind, op.stage, op.pipe, rank, units, ms, change)

    def order(self) -> list[int]:
        """The program as a rank-major order."""
        numbers = {op: number for number, op in enumerate(self.ops)}
        return [numbers[op] for ops in self.like.ranks for op in ops]

    def program(self, order: Sequence[int]) -> Program:
        ranks = tuple(tuple(map(self.ops.__getitem__, order[low:high])) for low, high in pairwise(self.rows.first))
        return Program(self.like.placement, self.like.microbatches, ranks, self.like.history)


def _of_units(lag: Lag, dealt: Sequence[int]) -> Lag:
    return tuple(float(lag[mb]) for mb in dealt) if isinstance(lag, tuple) else float(lag)
