"""The CP-SAT model of a problem: one start per op, and for every two ops of a rank a literal for their order.

With explicit variables for orders, memory is linear: the memory of a rank after an op is the sum of the changes by all
ops before it. (As a cumulative resource over time the same cases took a hundred times longer.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zbc.compiler.search.problem import KINDS, Problem
from zbc.compiler.search.table import Numbers
from zbc.compiler.search.timing import measure

F, B, W = range(3)


class CpModel:
    """Orders with a cost between `least` and the cost of `first`, the order that the solver starts from. All numbers of
    the problem are integers."""

    def __init__(self, cp_model: Any, problem: Problem, objective: str, first: Sequence[int], least: int) -> None:
        self.model = cp_model.CpModel()
        self.problem, self.by_makespan = problem, objective == "makespan"
        self.n, self.m, rows = problem.n_stages, problem.m, problem.rows()
        self.table = rows.table()
        # Of every op: its kind (F, B, W), stage and microbatch.
        self.what = [(KINDS.index(row.kind), row.stage, unit) for row in rows.rows for unit in range(row.units)]
        self.base = [rows.bases(kind) for kind in KINDS]
        self.heads = self._heads()
        starts, most = self._timed(first)
        self.start = [self._variable(op, starts[op], most) for op in range(problem.size)]
        self._precede(*rows.fed())
        for r in range(problem.p):
            self._rank(r)
        self._minimise(min(least, most), most)

    def _heads(self) -> list[int | None]:
        """The begin of each rank: its first stage's first F, if only first F's come before it; else None."""
        problem, f = self.problem, self.problem.f
        result: list[int | None] = [None] * problem.p
        at = 0
        for s, r in enumerate(problem.rank):
            if r in problem.rank[:s]:
                break
            at += int(f[s - 1] + problem.lag[s]) if s else 0
            result[r] = at
        return result

    def _timed(self, order: Sequence[int]) -> tuple[list[int], int]:
        """Start of every op under `order`, and its cost."""
        length, position, end = self.table.length, [0] * len(order), [0.0] * len(order)
        _, span, makespan = measure(self.table, list(order), position, [0.0] * self.problem.p, end)
        starts = [round(end[place]) - ms for place, ms in zip(position, length, strict=True)]
        return starts, round(makespan if self.by_makespan else span)

    def _variable(self, op: int, hint: int, most: int) -> Any:
        """The start of an op, between the rank's begin and the latest end that is as good as the first order."""
        kind, s, unit = self.what[op]
        head = self.heads[self.problem.rank[s]]
        if head is None and not self.by_makespan:  # no rank waits longer than one microbatch after another takes
            last = sum(self.table.length) + int(2 * self.m * sum(self.problem.lag))
        else:
            last = most if self.by_makespan else (head or 0) + most
        variable = self.model.new_int_var(head or 0, last, "")
        self.model.add_hint(variable, hint)
        if head is not None and kind == F and unit == 0 and s == self.problem.stages[self.problem.rank[s]][0]:
            self.model.add(variable == head)
        return variable

    def _after(self, later: int, earlier: int, lag: int = 0) -> Any:
        return self.model.add(self.start[later] >= self.start[earlier] + self.table.length[earlier] + lag)

    def _precede(self, head: Numbers, reader: Numbers, lag: Numbers, after: Numbers) -> None:
        """Constraints: an op starts after the previous microbatch, and after its inputs."""
        for op, (_, _, unit) in enumerate(self.what):
            if unit:
                self._after(op, op - 1)
            edge = head[op]
            while edge >= 0:
                self._after(reader[edge], op, lag[edge])
                edge = after[edge]

    def _rank(self, rank: int) -> None:
        """Constraints of a rank: one op at a time, within the memory limit."""
        stages = self.problem.stages[rank]
        ops = [self.base[kind][s] + i for kind in (F, B, W) for s in stages for i in range(self.m)]
        intervals = [self.model.new_fixed_size_interval_var(self.start[op], self.table.length[op], "") for op in ops]
        self.model.add_no_overlap(intervals)
        before = _Before(self, stages)
        for op in ops:
            for other in ops:
                before(op, other)
        for pair in before.implied():
            self.model.add_implication(*pair)
        self._memory(rank, ops, before)

    def _memory(self, rank: int, ops: Sequence[int], before: _Before) -> None:
        """Constraints: after each op that takes memory, the memory of all ops so far is within the limit."""
        most = [*map(max, self.problem.keep_b, self.problem.keep_w)]
        limit, change = self.problem.limit[rank], self.table.change
        if self.m * sum(most[s] for s in self.problem.stages[rank]) <= limit:
            return
        for op in ops:
            if change[op] > 0:
                held = sum(change[other] * before(other, op) for other in ops if change[other])
                self.model.add(held + change[op] <= limit)

    def _minimise(self, least: int, most: int) -> None:
        cost = self.model.new_int_var(least, most, "")
        for r in range(self.problem.p):
            stages = self.problem.stages[r]
            begin = 0 if self.by_makespan else self.start[self.base[F][stages[0]]]
            for s in stages:
                last = self.base[W][s] + self.m - 1
                self.model.add(cost >= self.start[last] + self.table.length[last] - begin)
        self.model.minimize(cost)

    def order(self, solver: Any) -> list[int]:
        """The solution as a rank-major order."""
        problem = self.problem

        def place(op: int) -> tuple[int, int, int, int, int]:
            """By time; ops without length before others of their start, and along the path of the microbatches."""
            kind, s, unit = self.what[op]
            start = solver.value(self.start[op])
            return problem.rank[s], start, start + self.table.length[op], unit, s if kind == F else 2 * self.n - s

        return sorted(range(problem.size), key=place)


class _Before:
    """Whether the first of two ops of a rank runs first: 0, 1, or a literal of the model."""

    def __init__(self, model: CpModel, stages: Sequence[int]) -> None:
        self._model = model
        self._literals: dict[tuple[int, int], Any] = {}
        path = [(F, s) for s in stages] + [(B, s) for s in reversed(stages)]
        # What of a microbatch surely comes after each of its ops: the rest of the path, and W after its B.
        self._later = {row: set(path[k:]) | {(W, s) for kind, s in path[k:] if kind == B} for k, row in enumerate(path)}
        self._later |= {(W, s): {(W, s)} for s in stages}

    def __call__(self, op: int, other: int) -> Any:
        if op == other or self._surely(other, op):
            return 0
        if self._surely(op, other):
            return 1
        known = self._literals.get((op, other))
        if known is not None:
            return known
        model = self._model
        literal = model.model.new_bool_var("")
        self._literals[op, other], self._literals[other, op] = literal, literal.negated()
        model._after(other, op).only_enforce_if(literal)
        model._after(op, other).only_enforce_if(literal.negated())
        return literal

    def _surely(self, op: int, other: int) -> bool:
        """The order of two ops that follows from microbatches and their paths; None if it is open."""
        kind, s, unit = self._model.what[op]
        other_kind, other_s, other_unit = self._model.what[other]
        return unit <= other_unit and (other_kind, other_s) in self._later[kind, s]

    def implied(self) -> Iterator[tuple[Any, Any]]:
        """Implications: an op before another is before its next microbatch, too; so is its previous microbatch."""
        m, what = self._model.m, self._model.what
        for (op, other), literal in self._literals.items():
            if what[other][2] < m - 1 and (op, other + 1) in self._literals:
                yield literal, self._literals[op, other + 1]
            if what[op][2] and (op - 1, other) in self._literals:
                yield literal, self._literals[op - 1, other]
