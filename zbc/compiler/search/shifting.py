"""Annealing of orders for placements with one pipe or two; the kernel is the one of anneal.py.

A *row* is one stage of one pipe. Ops are numbered `kind * rows*n + row * n + place`, `place` counting the microbatches
of a pipe in their order and n those of the pipe with more. Where a pipe has fewer, ops of no length fill up its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler.cost import Costs
from zbc.compiler.search.anneal import WORSE
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.portfolio import Effort
from zbc.ir import Kind, Op, Program

KINDS = (Kind.F, Kind.B, Kind.W)
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
    seed: int = 0,
) -> Iterator[tuple[Program, bool]]:
    """Ever better orders that shifting single ops of `program` leads to, whose backwards are split, within the limits.

    With each comes whether its annealing was done to its end; those that were come for any larger effort, too. "Better"
    is by span or makespan of the ops alone. `seconds` are turned into a number of op visits, so that an order can be
    made again. Stops at `target` ms.
    """
    engine = Engine(available())
    table = _Table(program, costs)
    effort = Effort.seconds(seconds, engine, seed)
    n = engine.numbers
    best = table.order(program)
    columns = (n(table.length), n(table.source), n(table.lag), n(table.where), n(table.change))
    moves, turn, spent = FIRST_MOVES, 0, 0
    unit = sum(table.length) / len(table.length) or 1.0
    while spent < effort.visits:
        order, found = n(best), n([0] * len(best))
        heat = HEATS[turn % len(HEATS)] * unit
        spent += int(
            engine.anneal(
                program.placement.ranks,
                table.count,
                table.per_kind,
                *columns,
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
        best = [int(op) for op in found]
        yield table.program(best, program), spent < effort.visits
        moves, turn = moves * GROWTH, turn + 1
        if _reached(engine, table, best, program.placement.ranks, objective, target):
            break


def _reached(engine: Engine, table: _Table, order: list[int], p: int, objective: str, target: float) -> bool:
    n, size = engine.numbers, len(order)
    numbers, position, end = n(order), n([0] * size), n([0.0] * size)
    engine.locate(numbers, position)
    first = n([r * (size // p) for r in range(p)])
    columns = (n(table.length), n(table.source), n(table.lag), n(table.where))
    engine.run(p, numbers, position, *columns, first, end)
    span, makespan, _ = engine.steps(p, numbers, columns[0], end)
    return (makespan if objective == "makespan" else span) <= target * (1 + 1e-9)


class _Table:
    """Per op: ms it runs, what it needs and how long that travels, its rank, and what it adds to what that holds."""

    def __init__(self, program: Program, costs: Costs) -> None:
        placement = program.placement
        self.stages, pipes = placement.stages, len(placement.pipes)
        home = {op.mb: op.pipe for ops in program.ranks for op in ops if op.kind is Kind.F and op.stage == 0}
        self.dealt = [[mb for mb in sorted(home) if home[mb] == pipe] for pipe in range(pipes)]
        self.count = max(map(len, self.dealt))
        self.per_kind = pipes * self.stages * self.count
        size = 3 * self.per_kind
        self.length, self.lag, self.change = [0.0] * size, [0.0] * size, [0.0] * size
        self.source, self.where = [-1] * size, [0] * size
        self.numbers: dict[Op, int] = {}
        for pipe in range(pipes):
            for s in range(self.stages):
                for place in range(self.count):
                    self._enter(program, costs, pipe, s, place)

    def _enter(self, program: Program, costs: Costs, pipe: int, s: int, place: int) -> None:
        placement, last = program.placement, self.stages - 1
        row = (pipe * self.stages + s) * self.count + place
        exists = place < len(self.dealt[pipe])
        for k, kind in enumerate(KINDS):
            number = k * self.per_kind + row
            self.where[number] = placement.rank_of(s, pipe)
            if not exists:
                continue
            op = Op(kind, s, self.dealt[pipe][place], pipe)
            self.numbers[op] = number
            self.length[number], self.change[number] = float(costs.duration(op)), float(costs.held(op))
            if kind is Kind.F and s:
                self.source[number], self.lag[number] = number - self.count, float(costs.link(pipe, s - 1, s))
            elif kind is Kind.B and s < last:
                self.source[number], self.lag[number] = number + self.count, float(costs.link(pipe, s + 1, s))
            elif kind is Kind.B:
                self.source[number] = number - self.per_kind

    def order(self, program: Program) -> list[int]:
        """A program as a rank-major order, ops of no length last."""
        listed: list[int] = []
        for rank, ops in enumerate(program.ranks):
            real = [self.numbers[op] for op in ops]
            known = set(real)
            listed += real
            listed += [k for k, where in enumerate(self.where) if where == rank and k not in known]
        return listed

    def program(self, order: Sequence[int], like: Program) -> Program:
        names = {number: op for op, number in self.numbers.items()}
        share = len(order) // len(like.ranks)
        parts = [order[r * share : (r + 1) * share] for r in range(len(like.ranks))]
        ranks = tuple(tuple(names[number] for number in part if number in names) for part in parts)
        return Program(like.placement, like.microbatches, ranks, like.history)
