"""The ops of a rank from a table of phases, in groups that may run as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zbc.ir import Kind, Op

ANY = -1  # of a W: the oldest pending one of either leg
Step = tuple[Kind, int]  # of a leg, by its number
Group = tuple[Op, ...]  # one op, or two


class Leg(NamedTuple):
    """A rank's stage and pipe in one direction, and the microbatches of that direction: first, first + every, ..."""

    stage: int
    pipe: int = 0
    every: int = 1
    first: int = 0


def emitted(groups: Iterable[Sequence[Step]], legs: Sequence[Leg], m: int) -> list[Group]:
    """The ops of these steps, of which each leg counts its own microbatches, then every W that is left; without ops of
    microbatches from `m` on."""
    due, counts, made = list[Op](), Counter[tuple[bool, int]](), list[Group]()
    for steps in groups:
        group = list[Op]()
        for kind, leg in steps:
            if kind is Kind.W:
                group.append(next(op for op in due if leg == ANY or op.stage == legs[leg].stage))
                due.remove(group[-1])
                continue
            stage, pipe, every, first = legs[leg]
            group.append(Op(kind, stage, first + every * counts[kind is Kind.F, leg], pipe))
            counts[kind is Kind.F, leg] += 1
            due += [group[-1]._replace(kind=Kind.W)] if kind is Kind.B else []
        made.append(tuple(group))
    kept = (tuple(op for op in group if op.mb < m) for group in (*made, *((op,) for op in due)))
    return [group for group in kept if group]


def marked(group: Group) -> Group:
    """A group of two as one that overlaps."""
    return group if len(group) < 2 else (Op(Kind.OVERLAP, 0), *group)
