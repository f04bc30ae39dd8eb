"""Names for problem texts: the op that would make a value, use it, or be the other end of a message."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.graph import FAR, CellKey, Graph
from zbc.ir import Message, Op
from zbc.ops import VALUES, Kind, Lane, Ref


def maker(g: Graph, cell: int) -> Op:
    """The op that writes a cell, whether or not the program has it. If several kinds could, one that the program
    uses."""
    key, unit = g.layout.key_of(cell)
    if key.end == FAR and VALUES[key.what].scope == "edge" and g.layout.explicit:
        return transfer(g, key.what, key.home, key.place, unit, sends=False)
    kinds = [kind for kind, row in g.layout.rows.items() if row.lane is not Lane.LINK and _has(row.writes, key.what)]
    return _op(g, chosen(g, kinds), key, unit, made=True)


def user(g: Graph, cell: int) -> Op:
    """The op that frees a cell, whether or not the program has it."""
    key, unit = g.layout.key_of(cell)
    kinds = [kind for kind, row in g.layout.rows.items() if row.lane is not Lane.LINK and _has(row.frees, key.what)]
    return _op(g, chosen(g, kinds), key, unit, made=False)


def chosen(g: Graph, kinds: list[Kind]) -> Kind:
    """One of these kinds that the program uses, or the last of them."""
    return next((kind for kind in kinds if kind in g.layout.kinds), kinds[-1])


def _has(refs: tuple[Ref, ...], what: str) -> bool:
    return any(ref.what == what for ref in refs)


def _op(g: Graph, kind: Kind, key: CellKey, unit: int, *, made: bool) -> Op:
    scope = VALUES[key.what].scope
    if scope == "rank":
        return Op(kind, 0)
    if scope == "stage":
        return Op(kind, key.place)
    mb, part = divmod(unit, g.layout.slices)
    stage = key.place
    if scope == "edge":
        source, sink = g.layout.edges[key.place]
        stage = source if (key.what == "act") is made else sink
    return Op(kind, stage, mb, key.home, part)


def transfer(g: Graph, what: str, pipe: int, edge: int, unit: int, *, sends: bool) -> Op:
    """The SEND or the RECV of the value on an edge."""
    source, sink = g.layout.edges[edge] if what == "act" else reversed(g.layout.edges[edge])
    mb, part = divmod(unit, g.layout.slices)
    message = Message(source, sink, mb, pipe, part)
    return g.program.placement.send(message) if sends else g.program.placement.recv(message)


def ends(g: Graph, message: int) -> tuple[Op, Op]:
    """The SEND and the RECV of a message between stages."""
    meaning, unit = g.layout.meaning(message)
    both = (transfer(g, meaning.what, meaning.home, meaning.edge, unit, sends=sends) for sends in (True, False))
    return next(both), next(both)


def travelling(g: Graph) -> Iterator[int]:
    """Yields the messages between stages, i.e. of values on edges."""
    for (_, message), base, stop in zip(g.layout.channels, g.layout.firsts, g.layout.stops, strict=True):
        if message.edge >= 0:
            yield from range(base, stop)


def rank_of(g: Graph, op: Op) -> int:
    """The rank that an op of a unit belongs on."""
    return g.program.placement.rank_of(op.stage, op.pipe)


def named(g: Graph, op: Op) -> str:
    """An op with its peer."""
    return g.program.placement.text(op)
