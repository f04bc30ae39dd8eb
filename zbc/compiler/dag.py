"""What each compute op waits for, on plain integers.

Compute ops are numbered rank by rank in execution order. An op needs its rank to be free and at most one op that can
come from elsewhere: F the F of the stage before, B and BW the backward of the stage after (or, on the last stage, their
own F), W its own B. Whatever else an op needs (its own F, the slice before) lies earlier on the same rank in every
program that passed check/, so the rank's order already covers it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zbc.errors import ZbcError
from zbc.ir import AHEAD, COLLECTIVE, COMPUTE, MARK, Kind, Op, Program


class Meeting(NamedTuple):
    """A collective that takes time: `behind` is, per rank that meets, the last op before it, -1 if there is none."""

    op: Op
    behind: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Dag:
    """`source[i]` is the op that feeds op i, -1 for none; rank r runs ops `first[r]` .. `first[r+1]-1` in order."""

    ops: list[Op]
    first: list[int]
    rank: list[int]
    source: list[int]
    target: list[int]  # the op on another rank that op i feeds, -1 for none
    meetings: tuple[Meeting, ...] = ()  # in an order in which they can happen
    paired: bytes = b""  # 1 for an op that makes a group with the one behind it; empty if there is no group


def build(program: Program, *, ahead: bool = False) -> Dag:
    """Number the compute ops of `program` and link them. Raises E202 if an op needs one that no rank runs.

    `ahead`: and the ops that close a step without a barrier. NORM needs that of the rank before, VERDICT that of the
    rank behind.
    """
    kinds = COMPUTE | AHEAD if ahead else COMPUTE
    ops = [op for rank in program.ranks for op in rank if op.kind in kinds]
    rank, first = [], [0]
    for r, listed in enumerate(program.ranks):
        count = sum(op.kind in kinds for op in listed)
        rank += [r] * count
        first.append(first[-1] + count)
    forward: dict[tuple[int, int, int, int], int] = {}
    backward: dict[tuple[int, int, int, int], int] = {}
    for i, (kind, stage, mb, pipe, part) in enumerate(ops):
        if kind is Kind.F:
            forward[stage, mb, pipe, part] = i
        elif kind is Kind.B or kind is Kind.BW:
            backward[stage, mb, pipe, part] = i
    source, target = [-1] * len(ops), [-1] * len(ops)
    last = program.placement.stages - 1
    for i, (kind, stage, mb, pipe, part) in enumerate(ops):
        if kind is Kind.F:
            if stage == 0:
                continue
            j = forward.get((stage - 1, mb, pipe, part))
        elif kind is Kind.W:
            j = backward.get((stage, mb, pipe, part))
        elif kind in AHEAD:
            continue
        else:
            table, near = (forward, stage) if stage == last else (backward, stage + 1)
            j = table.get((near, mb, pipe, part))
        if j is None:
            raise ZbcError("E202", f"program: {ops[i]} on rank {rank[i]} needs an op that no rank runs")
        source[i] = j
        if rank[j] != rank[i]:
            target[j] = i
    for i, j in _hops(ops, rank, len(program.ranks)) if ahead else ():
        source[i], target[j] = j, i
    meetings = tuple(_meetings(program, first, kinds))
    return Dag(ops, first, rank, source, target, meetings, _paired(program, len(ops), kinds))


def with_meetings(dag: Dag, program: Program) -> Dag:
    """The dag of `program`, which has the compute ops of `dag` and other collectives."""
    return replace(dag, meetings=tuple(_meetings(program, dag.first, COMPUTE)))


def _paired(program: Program, count: int, kinds: Container[Kind]) -> bytes:
    paired, i = bytearray(count), 0
    for ops in program.ranks:
        for op in ops:
            if op.kind in MARK:
                paired[i] = 1
            i += op.kind in kinds
    return bytes(paired) if any(paired) else b""


def _hops(ops: Sequence[Op], rank: Sequence[int], ranks: int) -> Iterator[tuple[int, int]]:
    """The pairs (op, what it needs) of the ops that ranks agree by."""
    at = {(op.kind, rank[i]): i for i, op in enumerate(ops) if op.kind in (Kind.NORM, Kind.VERDICT)}
    for r in range(1, ranks):
        yield at[Kind.NORM, r], at[Kind.NORM, r - 1]
        yield at[Kind.VERDICT, r - 1], at[Kind.VERDICT, r]


def _meetings(program: Program, first: Sequence[int], kinds: Container[Kind]) -> list[Meeting]:
    """Every REDUCE, TIE and GATHER, those before that a rank starts earlier. `kinds` are those of numbered ops.

    Raises E201 if ranks start theirs in different orders.
    """
    queues: list[list[tuple[Op, int]]] = []
    for rank, ops in enumerate(program.ranks):
        queue, i = [], first[rank]
        for op in ops:
            if op.kind in kinds:
                i += 1
            elif op.kind in COLLECTIVE and op.kind is not Kind.VALIDATE:
                queue.append((op, i - 1 if i > first[rank] else -1))
        queues.append(queue[::-1])
    found: list[Meeting] = []
    while any(queues):
        heads = dict.fromkeys(queue[-1][0] for queue in queues if queue)
        ready = next((op for op in heads if all(_next(queues[r]) == op for r in program.members(op))), None)
        if ready is None:
            raise ZbcError("E201", "deadlock: ranks start their collectives in different orders")
        found.append(Meeting(ready, tuple((r, queues[r].pop()[1]) for r in program.members(ready))))
    return found


def _next(queue: Sequence[tuple[Op, int]]) -> Op | None:
    return queue[-1][0] if queue else None
