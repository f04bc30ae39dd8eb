"""Can the forwards before REDO be run again by themselves?

On a verdict that was not assumed every rank drops what the ops before its REDO made, waits for the messages it has
still to get from such ops, and runs them again. So before REDO stand only kinds that may be run again, of a message
both ends stand before REDO or both after it, and what a forward before REDO needs is made before REDO. Then the second
run is the first one over again, messages and all, after everything the first run did: it cannot come to a deadlock that
the first would not.

REDO repeats a part of the list; no value that an op reads or writes says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check import names
from zbc.compiler.graph import Graph
from zbc.errors import ZbcError
from zbc.ops import Kind


def redo_problems(g: Graph) -> Iterator[ZbcError]:
    """E206 for what may not stand before REDO, and for each message that only one end of would come again."""
    if Kind.REDO not in g.layout.kinds:
        return
    redo: dict[int, int] = {}
    for i, op in enumerate(g.ops):
        if op.kind is Kind.REDO:
            redo.setdefault(g.rank(i), i)
    for rank, at in redo.items():
        wrong = next((i for i in range(g.first[rank], at) if not g.layout.rows[g.ops[i].kind].repeats), -1)
        if wrong >= 0:
            yield _early(g, wrong, at)
    for message in names.travelling(g):
        send, recv = g.sender[message], g.receiver[message]
        both = send >= 0 and recv >= 0 and g.rank(send) in redo and g.rank(recv) in redo
        if both and (send < redo[g.rank(send)]) is not (recv < redo[g.rank(recv)]):
            yield _one_end(g, send, recv, redo)
    for rank, at in redo.items():
        for used in range(g.first[rank], at):
            makers = [g.before[message] for message in g.arrivals(used) if g.ops[used].kind.computes]
            yield from (_again(g, used, made) for made in makers if made > redo.get(g.rank(made), made))


def _early(g: Graph, wrong: int, redo: int) -> ZbcError:
    text = f"program: {g.ops[wrong]} comes before {g.ops[redo]}, which it needs"
    hint = f"move step {g.place(redo)[1]} before step {g.place(wrong)[1]}"
    return ZbcError("E206", text, details=[g.text(wrong), g.text(redo)], hint=hint)


def _one_end(g: Graph, send: int, recv: int, redo: dict[int, int]) -> ZbcError:
    early, late = (send, recv) if send < redo[g.rank(send)] else (recv, send)
    text = f"program: {names.named(g, g.ops[early])} comes before REDO and {names.named(g, g.ops[late])} after it"
    hint = f"move REDO after it on rank {g.rank(late)}, or before the other on rank {g.rank(early)}"
    return ZbcError("E206", text, details=[g.text(early), g.text(late)], hint=hint)


def _again(g: Graph, used: int, made: int) -> ZbcError:
    text = f"program: {g.ops[used]} comes before REDO and {g.ops[made]}, which it needs, after it"
    hint = f"move REDO on rank {g.rank(used)} before step {g.place(used)[1]}"
    return ZbcError("E206", text, details=[g.text(used), g.text(made)], hint=hint)
