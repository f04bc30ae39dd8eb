"""What must come before what on one rank.

    F s     after  RECV_F s if the stage before is elsewhere, else F s-1; with slices, after the slice before
    B, BW s after  F s; RECV_B s if the stage after is elsewhere, else B or BW s+1; with slices, the slice after
    W s     after  B s
    SEND_F s, SEND_B s  after F s, after B or BW s
    REDUCE s, TIE  after the last W or BW of s, of the first and the last stage
    VALIDATE  after all backward work, every REDUCE and TIE
    STEP s, GATHER s  after VALIDATE, after STEP s
    NORM, VERDICT, REDO, COMMIT s, B or BW s and all sums  in this order; before REDO only F and their transfers
    TENTATIVE s, GATHER s  after the last W or BW of s, after its REDUCE and TIE; after TENTATIVE s

Op ids grow along a rank, so an order is kept where the needed op's id is smaller and on the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbc.compiler.check.numbered import Numbered
from zbc.ir import AHEAD, COMPUTE, SUM, Kind, Op


class Late(NamedTuple):
    """`op` runs without `needs` before it on its rank; `found` is the id of `needs`, -1 if no rank runs it."""

    op: int
    found: int
    needs: Op


class _Rule(NamedTuple):
    """Place by place, the op of `ops` needs the one of `needed`, which is of this kind in this row."""

    kind: Kind
    row: int
    needed: list[int]
    ops: list[int]
    shift: int = 0  # where the needed op stands in its row, seen from the op: with slices, one place before or after


def late_ops(n: Numbered) -> Iterator[Late]:
    """Every op that its own rank's order leaves without something it needs; step-level ops: see `late_step_ops`."""
    explicit = n.explicit
    splits = max(n.at[Kind.B], default=-1) >= 0
    for row in range(len(n.owners)):
        low, high = n.span(row)
        for kind, from_row, needed, ops, shift in _rules(n, row, explicit):
            wrong = [j for j, (x, y) in enumerate(zip(needed, ops, strict=True)) if y >= 0 and not low <= x < y < high]
            for j in wrong:
                if shift and not 0 <= j % n.program.slices + shift < n.program.slices:
                    continue  # the first slice has none before it, the last none after it
                name = Kind.B if kind is Kind.BW and splits else kind
                needs = n.op(needed[j]) if needed[j] >= 0 else n.wanted(name, from_row, j + shift)
                yield Late(ops[j], needed[j], needs)


def _rules(n: Numbered, row: int, explicit: bool) -> Iterator[_Rule]:
    """The rules between the ops of one row, and with the neighbouring rows of the same rank."""
    forward, backward = n.cut(n.at[Kind.F], row), n.cut(n.backward, row)
    yield _Rule(Kind.F, row, forward, backward)
    yield _Rule(Kind.B, row, n.cut(n.at[Kind.B], row), n.cut(n.at[Kind.W], row))
    if explicit:
        yield _Rule(Kind.F, row, forward, n.cut(n.at[Kind.SEND_F], row))
        yield _Rule(Kind.BW, row, backward, n.cut(n.at[Kind.SEND_B], row))
    stages = n.program.placement.stages
    if row % stages:
        before = row - 1
        if n.owners[row] == n.owners[before]:
            yield _Rule(Kind.F, before, n.cut(n.at[Kind.F], before), forward)
            yield _Rule(Kind.BW, row, backward, n.cut(n.backward, before))
        elif explicit:
            yield _Rule(Kind.RECV_F, row, n.cut(n.at[Kind.RECV_F], row), forward)
    if explicit and row % stages < stages - 1 and n.owners[row] != n.owners[row + 1]:
        yield _Rule(Kind.RECV_B, row, n.cut(n.at[Kind.RECV_B], row), backward)
    if n.program.slices > 1 and forward:
        yield _Rule(Kind.F, row, [-1, *forward[:-1]], forward, -1)
        yield _Rule(Kind.BW, row, [*backward[1:], -1], backward, +1)


def late_step_ops(n: Numbered) -> Iterator[Late]:
    """Every step-level op that comes before what it closes."""
    work = last_work(n) if n.step_ops else {}
    first: dict[tuple[int, Kind, int], int] = {}  # rank, kind, stage (of STEP) -> op
    for i in n.step_ops:
        op = n.op(i)
        first.setdefault((n.place(i)[0], op.kind, op.stage if op.kind is Kind.STEP else 0), i)
    ends = {0, n.program.placement.stages - 1}
    for i in n.step_ops:
        op, (rank, _) = n.op(i), n.place(i)
        validate = first.get((rank, Kind.VALIDATE, 0), -1)
        if op.kind in AHEAD:
            continue
        if op.kind is Kind.STEP:
            needs = [validate]
        elif op.kind is Kind.GATHER:
            needs = [first.get((rank, Kind.STEP, op.stage), -1)]
        elif op.kind is Kind.REDUCE:
            needs = [work.get((rank, op.stage), -1)]
        else:
            mine = [last for (r, s), last in work.items() if r == rank and (op.kind is Kind.VALIDATE or s in ends)]
            needs = [max(mine, default=-1)]
        yield from (Late(i, last, n.op(last)) for last in needs if last > i)
        if op.kind in SUM and 0 <= validate < i:
            yield Late(validate, i, op)
    yield from _late_ahead(n, work)


def _late_ahead(n: Numbered, work: dict[tuple[int, int], int]) -> Iterator[Late]:
    """The same of steps without a barrier."""
    first: dict[tuple[int, Kind, int], int] = {}
    for i in n.step_ops:
        op = n.op(i)
        first.setdefault((n.place(i)[0], op.kind, op.stage), i)
    ends = (0, n.program.placement.stages - 1)
    for (rank, kind, stage), i in first.items():
        if kind is Kind.TENTATIVE:
            needs = [work.get((rank, stage), -1), *_sums(first, rank, stage, ends)]
        elif kind is Kind.GATHER:
            needs = [first.get((rank, Kind.TENTATIVE, stage), -1)]
        elif kind in _BEFORE:
            needs = [first.get((rank, _BEFORE[kind], 0), -1)]
        else:
            needs = []
        yield from (Late(i, last, n.op(last)) for last in needs if last > i)
        if kind is Kind.COMMIT:
            adds = [*_backwards(n, rank, stage), *_sums(first, rank, stage, ends)]
            early = min((j for j in adds if 0 <= j < i), default=-1)
            if early >= 0:
                yield Late(early, i, n.op(i))
        elif kind is Kind.REDO:
            ops = n.program.ranks[rank][: i - n.starts[rank]]
            wrong = next((k for k, op in enumerate(ops) if op.kind not in _REPEATABLE), -1)
            if wrong >= 0:
                yield Late(n.starts[rank] + wrong, i, n.op(i))


def _sums(first: dict[tuple[int, Kind, int], int], rank: int, stage: int, ends: tuple[int, int]) -> list[int]:
    """The sums that change the gradients of a stage on a rank, -1 for none."""
    reduce, tie = first.get((rank, Kind.REDUCE, stage), -1), first.get((rank, Kind.TIE, 0), -1)
    return [reduce, tie if stage in ends else -1]


_BEFORE = {Kind.VERDICT: Kind.NORM, Kind.REDO: Kind.VERDICT, Kind.COMMIT: Kind.REDO}
_REPEATABLE = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.NORM, Kind.VERDICT})


def _backwards(n: Numbered, rank: int, stage: int) -> Iterator[int]:
    """The ids of the B and BW (and W) of a stage on a rank."""
    stages = n.program.placement.stages
    for row in range(stage, len(n.owners), stages):
        low, high = n.span(row)
        if n.owners[row] == rank:
            for kind in (Kind.B, Kind.BW, Kind.W):
                yield from (i for i in n.cut(n.at[kind], row) if low <= i < high)


def last_work(n: Numbered) -> dict[tuple[int, int], int]:
    """(rank, stage) -> the id of the last compute op of that stage on that rank."""
    last: dict[tuple[int, int], int] = {}
    for row, owner in enumerate(n.owners):
        low, high = n.span(row)
        key = owner, row % n.program.placement.stages
        for kind in COMPUTE:
            ops = n.cut(n.at[kind], row)
            found = max(ops, default=-1)
            if not low <= found < high:  # some op of the row is on another rank
                found = max((i for i in ops if low <= i < high), default=-1)
            last[key] = max(last.get(key, -1), found)
    return last
