"""Can the forwards before REDO be run again by themselves?

On a verdict that was not assumed every rank drops what the ops before its REDO made, waits for the messages it has
still to get from such ops, and runs them again. So of a message both ends stand before REDO or both behind it, and what
a forward before REDO needs is made before REDO. Then the second run is the first one over again, messages and all,
behind everything the first run did: it cannot come to a deadlock that the first would not.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check.channels import crossings, matched
from zbc.compiler.check.numbered import Numbered
from zbc.errors import ZbcError
from zbc.ir import Kind


def redo_problems(n: Numbered) -> Iterator[ZbcError]:
    """E206 for each message that only one end of would come again."""
    redo: dict[int, int] = {}
    for i in n.step_ops:
        if n.op(i).kind is Kind.REDO:
            redo.setdefault(n.place(i)[0], i)
    if not redo:
        return
    for crossing in crossings(n):
        a, b = crossing.channel
        if a not in redo or b not in redo:
            continue
        for send, recv in matched(n, crossing):
            if (send < redo[a]) is not (recv < redo[b]):
                yield _one_end(n, send, recv, redo)
        (low, high), (start, _) = n.span(crossing.sender), n.span(crossing.receiver)
        for made, used in zip(crossing.producers, crossing.consumers, strict=True):
            if start <= used < redo[b] and low <= redo[a] < made < high:
                yield _again(n, used, made)


def _one_end(n: Numbered, send: int, recv: int, redo: dict[int, int]) -> ZbcError:
    early, late = (send, recv) if send < redo[n.place(send)[0]] else (recv, send)
    text = f"program: {n.name(n.op(early))} comes before REDO and {n.name(n.op(late))} behind it"
    hint = f"move REDO behind it on rank {n.place(late)[0]}, or before the other on rank {n.place(early)[0]}"
    return ZbcError("E206", text, details=[n.text(early), n.text(late)], hint=hint)


def _again(n: Numbered, used: int, made: int) -> ZbcError:
    text = f"program: {n.op(used)} comes before REDO and {n.op(made)}, which it needs, behind it"
    hint = f"move REDO on rank {n.place(used)[0]} before step {n.place(used)[1]}"
    return ZbcError("E206", text, details=[n.text(used), n.text(made)], hint=hint)
