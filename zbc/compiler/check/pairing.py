"""Checks that every tensor between ranks has one send and one receive, in the same order at both ends of a channel.

Channels are strictly FIFO, so the k-th receive on rank b from rank a gets the k-th send from a to b, whatever the two
are called.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check import names
from zbc.compiler.check.found import raise_found
from zbc.compiler.graph import MESSAGE, Channel, Graph, Mixed, build
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.ops import VALUES, At


def check_pairing(program: Program) -> None:
    """Raise E203 for transfers that miss an end or have one too many, E204 for channels in disorder.

    A program with neither transfers nor step-level ops is a schedule that a pass has yet to complete: it passes.
    """
    raise_found(pairing_problems(build(program)))


def pairing_problems(g: Graph) -> Iterator[ZbcError]:
    """The problems of `check_pairing`, one by one. For each channel in disorder the first message that disagrees."""
    if not g.layout.explicit:
        return
    broken: set[Channel] = set()
    misplaced = {g.ops[i] for i, code in g.lost if code == "E205"}
    for message in _unpaired(g):
        broken.add(g.layout.channel_of(message))
        if not misplaced & {*names.ends(g, message)}:
            yield _lacks(g, message)
    transfers = [i for i, _ in g.lost if g.ops[i].kind.is_transfer] + list(g.spare.values())
    broken |= {_channel(g, i) for i in transfers}
    yield from _surplus(g)
    for mixed in g.mixed:
        if mixed.channel not in broken:  # the numbers of its messages would be guesses
            yield _disorder(g, mixed)


# ---- E203 ----------------------------------------------------------------------------------------------------


def _unpaired(g: Graph) -> list[int]:
    """The messages that lack an end although an op makes, sends, receives or uses them."""
    messages = [x for x, (s, r) in enumerate(zip(g.sender, g.receiver, strict=True)) if (s < 0) is not (r < 0)]
    wanted = {x for x in messages if g.layout.meaning(x)[0].edge >= 0}
    if g.unmet or g.lost or _left_over(g):
        there = {op for op in g.ops if op.kind.computes}
        for x in names.travelling(g):
            if g.sender[x] < 0 and g.receiver[x] < 0 and any(op in there for op in _both_sides(g, x)):
                wanted.add(x)
    return sorted(wanted, key=lambda x: (g.layout.meaning(x)[0].home, g.layout.meaning(x)[0].edge, x))


def _left_over(g: Graph) -> bool:
    """Whether a value that should have been sent remains."""
    layout = g.layout
    for key, base in layout.columns.items():
        travels = VALUES[key.what].scope == "edge" and layout.crosses(key.home, key.place)
        if travels and max(layout.cells[base : base + layout.width], default=-1) >= 0:
            return True
    return False


def _both_sides(g: Graph, message: int) -> Iterator[Op]:
    """Yields the ops that would make or use the tensor of a message."""
    meaning, unit = g.layout.meaning(message)
    mb, part = divmod(unit, g.layout.slices)
    source, sink = g.layout.edges[meaning.edge]
    for kind, row in g.layout.rows.items():
        if kind.computes and any(ref.what == meaning.what for ref in (*row.writes, *row.reads)):
            yield Op(kind, source, mb, meaning.home, part)
            yield Op(kind, sink, mb, meaning.home, part)


def _lacks(g: Graph, message: int) -> ZbcError:
    send, recv = g.sender[message], g.receiver[message]
    sender, receiver = names.ends(g, message)
    a, b = g.layout.channel_of(message)
    if send < 0 and recv < 0:
        text = f"program: {names.named(g, sender)} and {names.named(g, receiver)} are missing"
        return ZbcError("E203", text, hint=f"add the first on rank {a} and the second on rank {b}")
    if send < 0:
        return _no_other_end(g, recv, sender, f"add it on rank {a}, after what makes the tensor")
    return _no_other_end(g, send, receiver, f"add it on rank {b}, before what uses the tensor")


def _no_other_end(g: Graph, present: int, missing: Op, hint: str) -> ZbcError:
    text = f"program: {names.named(g, g.ops[present])} has no {names.named(g, missing)}"
    return ZbcError("E203", text, where=g.where(present), hint=hint)


def _surplus(g: Graph) -> Iterator[ZbcError]:
    """Transfers that carry nothing: repeated, on a foreign rank, out of the pipeline or between stages of one rank."""
    for i, cell, _ in g.again:
        if cell == MESSAGE and g.ops[i].kind.is_transfer:
            text = f"program: {names.named(g, g.ops[i])} appears a second time"
            yield ZbcError("E203", text, where=g.where(i), hint="drop one")
    for wanted in ("E205", "E202", "E203"):
        for i, code in g.lost:
            if code == wanted and g.ops[i].kind.is_transfer:
                yield _carries_nothing(g, i, code)


def _carries_nothing(g: Graph, i: int, code: str) -> ZbcError:
    op, placement = g.ops[i], g.program.placement
    if code == "E205":
        owner = names.rank_of(g, op)
        text = f"program: {names.named(g, op)} is on rank {g.rank(i)}, its stage is on rank {owner}"
        return ZbcError("E203", text, where=g.where(i), hint=f"move it to rank {owner}")
    message = placement.message(op) if code == "E203" else None
    if code == "E202":
        text = f"program: {op} carries nothing: the program has no such tensor"
    elif message is None:
        nothing = "reads the output" if At.SINKS in (op.kind.takes, op.kind.gives) else "makes the input"
        text = f"program: {op} carries nothing: no stage {nothing} of stage {op.stage}"
    else:
        end = message.sink if op.stage == message.source else message.source
        owner = names.rank_of(g, op)
        text = f"program: {op} carries nothing: stages {op.stage} and {end} are both on rank {owner}"
    return ZbcError("E203", text, where=g.where(i), hint="drop it")


def _channel(g: Graph, i: int) -> Channel:
    op = g.ops[i]
    placement = g.program.placement
    here = names.rank_of(g, op) if 0 <= op.stage < placement.stages and op.pipe < len(placement.pipes) else g.rank(i)
    peer = placement.peer(op)
    there = here if peer is None else peer
    return (here, there) if op.kind.is_send else (there, here)


# ---- E204 ----------------------------------------------------------------------------------------------------


def _disorder(g: Graph, one: Mixed) -> ZbcError:
    (a, b), send, recv = one.channel, one.send, one.recv
    sent, taken = names.named(g, g.ops[send]), names.named(g, g.ops[recv])
    text = f"program: channel r{a} -> r{b} message {one.k}: rank {a} sends {sent}, rank {b} receives {taken}"
    hint = "order the receives of a channel as its sends"
    return ZbcError("E204", text, details=[g.text(send), g.text(recv)], hint=hint)
