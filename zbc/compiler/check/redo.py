"""Checks that the forwards before REDO can be run again by themselves.

If the verdict differs from the assumed one, every rank drops the results of the ops before its REDO, waits for
outstanding messages from such ops, and runs them again. So only repeatable kinds may come before REDO, a message has
both ends before REDO or both after it, and the inputs of a forward before REDO are made before REDO. Then the second
run repeats the first one, messages and all, after all of it: it cannot deadlock where the first would not.

REDO repeats a part of the list; no value that an op reads or writes says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check import names
from zbc.compiler.graph import Graph
from zbc.errors import ZbcError
from zbc.ops import Kind


def redo_problems(g: Graph) -> Iterator[ZbcError]:
    """Yields E206 for ops not allowed before REDO, and for messages of which only one end would be repeated."""
    # Names a kind: of those that close a step ahead it alone runs ops again.
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
