"""Orders in which all ranks share a vocabulary, made from those where the first and the last stage have it.

Ranks take turns: each runs what it can, one op at a time. A collective stands in all lists where it can happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.lowered import lower
from zbc.compiler.check import check_all
from zbc.compiler.schedules import Request, find
from zbc.ir import Kind, Op, Program

Unit = tuple[int, int]
BACK = {Kind.B, Kind.BW}


def shared_program(
    schedule: str, p: int, m: int, sums: int, *, slices: int = 1, copies: int = 1, late: int = 1, **how
) -> Program:
    """A complete, checked program; T waits until `late` others wait, or nothing else can run."""
    found = find(schedule)
    order = found.make(Request(p=p, m=m, v=found.stages_per_rank(None), slices=slices))
    lists = _Play(order, sums, late).run()
    program = lower(replace(order.with_ranks(lists, by="shared-words"), vocabulary=sums, dp=copies, **how))
    if copies > 1 and not any(op.kind is Kind.REDUCE_V for op in program.ranks[0]):
        program = program.with_ranks([_summed(ops) for ops in program.ranks], by="words-summed")
    check_all(program)
    return program


def _summed(ops: tuple[Op, ...]) -> list[Op]:
    at = next(i for i, op in enumerate(ops) if op.kind is Kind.VALIDATE)
    return [*ops[:at], Op(Kind.REDUCE_V, 0), *ops[at:]]


@dataclass
class _Play:
    order: Program
    sums: int
    late: int
    done: set[Op] = field(default_factory=set)
    happened: set[Op] = field(default_factory=set)

    def run(self) -> list[list[Op]]:
        order, ranks = self.order, range(self.order.placement.ranks)
        units = [(mb, part) for mb in range(order.microbatches) for part in range(order.slices)]
        self.units, self.ops = units, [list(ops) for ops in order.ranks]
        self.own = [set[Op]() for _ in ranks]
        lists = [list[Op]() for _ in ranks]
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                op = self.next_op(rank)
                if op is not None:
                    lists[rank].append(op)
                    self.own[rank].add(op)
                    self.done |= set() if op.kind.unit_wide else {op}
                    moved = True
            for op in self.collectives():
                self.happened.add(op)
                moved = True
                for ops in lists:
                    ops.append(op)
        assert not any(self.ops) and all(
            of(Kind.E, unit) in own and of(Kind.T, unit) in own for own in self.own for unit in units
        )
        return lists

    def next_op(self, rank: int) -> Op | None:
        own, after = self.own[rank], self.happened
        for unit in self.units:
            if of(Kind.SPREAD, unit) in after and of(Kind.S, unit) not in own:
                return of(Kind.S, unit)
        looked = [unit for unit in self.units if of(Kind.I, unit) in own]
        begun = sum(op.kind is Kind.F and op.stage == 0 for op in self.done)
        if len(looked) < min(len(self.units), begun + 2):
            return of(Kind.I, self.units[len(looked)])
        late = [of(Kind.T, u) for u in self.units if of(Kind.MEET, u) in after and of(Kind.T, u) not in own]
        if late and (self.sums == 2 or len(late) > self.late):
            return late[0]
        if self.ops[rank] and self.ready(self.ops[rank][0]):
            return self.ops[rank].pop(0)
        late += [of(Kind.E, u) for u in self.units if of(Kind.TAKE, u) in after and of(Kind.E, u) not in own]
        return late[0] if late else None

    def ready(self, op: Op) -> bool:
        unit, last = (op.mb, op.slice), self.order.placement.stages - 1
        if op.kind is Kind.F:
            return op._replace(stage=op.stage - 1) in self.done if op.stage else of(Kind.GIVE, unit) in self.happened
        if op.kind not in BACK:
            return True
        if op.stage == last:
            return of(Kind.SUM if self.sums == 2 else Kind.MEET, unit) in self.happened
        return any(op._replace(kind=kind, stage=op.stage + 1) in self.done for kind in BACK)

    def collectives(self) -> list[Op]:
        """Those that can happen now."""
        found, last = [], self.order.placement.stages - 1
        for unit in self.units:
            mine = {
                Kind.GIVE: all(of(Kind.I, unit) in own for own in self.own),
                Kind.SPREAD: Op(Kind.F, last, unit[0], 0, unit[1]) in self.done,
                Kind.MEET: all(of(Kind.S, unit) in own for own in self.own),
                Kind.SUM: self.sums == 2 and all(of(Kind.T, unit) in own for own in self.own),
                Kind.TAKE: any(Op(kind, 0, unit[0], 0, unit[1]) in self.done for kind in BACK),
            }
            found += [of(kind, unit) for kind, fit in mine.items() if fit and of(kind, unit) not in self.happened]
        return found


def of(kind: Kind, unit: Unit) -> Op:
    return Op(kind, 0, unit[0], 0, unit[1])
