"""Names for problem texts: the op that would make a value, use it, or be the other end of a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zbc.compiler.graph import Graph
from zbc.compiler.graph.layout import CellKey
from zbc.ir import Op
from zbc.ops import VALUES, At, Kind, Lane, Ref, Row, Scope

number = [*Kind].index


class Home(NamedTuple):
    """An op and the rank it is of; -1 for an op of a stage's unit, which has one rank."""

    rank: int
    op: Op


def home(rank: int, op: Op) -> Home:
    """The op as one of this rank, if others have the same; those of a unit on every rank are of no stage."""
    scope = op.kind.row.scope
    return Home(-1 if scope is Scope.UNIT else rank, op._replace(stage=0) if scope is Scope.EVERY else op)


def place(one: Home) -> tuple[int, ...]:
    """The place of an op among others: by pipe, stage and unit, then in the order of kinds."""
    op = one.op
    return op.pipe, op.stage, op.mb, op.slice, number(op.kind)


def makers(g: Graph, key: CellKey, unit: int) -> list[Home]:
    """The ops that could write a cell, whether or not the program has them; transfers aside."""
    return [home for kind, row in _able(g) for ref in row.writes for home in _ops(g, kind, ref, key, unit, made=True)]


def users(g: Graph, key: CellKey, unit: int) -> list[Home]:
    """The ops that could free a cell, likewise."""
    return [home for kind, row in _able(g) for ref in row.frees for home in _ops(g, kind, ref, key, unit, made=False)]


def travels(g: Graph, key: CellKey) -> bool:
    """Whether a value goes to another rank."""
    return VALUES[key.what].scope == "edge" and g.layout.crosses(key.home, key.place)


def _able(g: Graph) -> Iterator[tuple[Kind, Row]]:
    """The kinds that a program of these features and this end of a step may have."""
    closing = {kind.row.closes for kind in g.layout.kinds} | {""}
    for kind, row in g.layout.rows.items():
        closes = row.closes in closing or closing == {""}
        if row.lane is not Lane.LINK and closes and (not row.feature or row.feature in g.layout.features):
            yield kind, row


def _ops(g: Graph, kind: Kind, ref: Ref, key: CellKey, unit: int, *, made: bool) -> Iterator[Home]:
    """The op of a kind whose reference is to a cell; none if the reference is to another value."""
    if ref.what != key.what:
        return
    layout, scope = g.layout, VALUES[key.what].scope
    mb, part = divmod(unit, layout.slices)
    if scope == "rank":
        yield Home(key.home, Op(kind, 0))
    elif scope == "stage":
        yield Home(key.home, Op(kind, key.place))
    elif scope == "share":
        wide = kind.row.scope is Scope.EVERY
        stages = [0] if wide else [s for s in range(layout.stages) if layout.is_at(ref.at, key.home, s, kind.row)]
        yield from (Home(key.home if wide else -1, Op(kind, s, mb, 0, part)) for s in stages)
    else:
        source, sink = layout.edges[key.place] if scope == "edge" else (key.place, key.place)
        part += made and ref.at is At.EARLIER  # made for the slice before the op's own
        yield Home(-1, Op(kind, source if (key.what == "act") is made else sink, mb, key.home, part))


def op_of(g: Graph, node: int, cell: int | None = None) -> int:
    """The op that wrote a value as this node; -1 for none: a message, or a value that exists from the start."""
    op = node if node < len(g.ops) else g.met.get(node, (-1,))[0]
    if cell is None or cell < 0 or op < 0:
        return op
    what = g.layout.key_of(cell)[0].what
    return op if any(ref.what == what for ref in g.layout.rows[g.ops[op].kind].writes) else -1


def rank_of(g: Graph, op: Op) -> int:
    """The rank that an op of a unit belongs on."""
    return g.program.placement.rank_of(op.stage, op.pipe)


def named(g: Graph, op: Op) -> str:
    """An op with its peer."""
    return g.program.placement.text(op)
