"""Does every tensor that has to travel have one send and one receive, in the same order at both ends of a channel?

Channels are strictly FIFO, so the k-th send from rank a to rank b is what the k-th receive on b from a gets, whatever
the two are called.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check.channels import Channel, Crossing, channels, crossings, disorder
from zbc.compiler.check.found import raise_found
from zbc.compiler.check.numbered import TRANSFERS, Numbered, number
from zbc.errors import ZbcError
from zbc.ir import TRANSFER, Kind, Op, Program


def check_pairing(program: Program) -> None:
    """Raise E203 for transfers that miss an end or have one too many, E204 for channels in disorder.

    A program with neither transfers nor step-level ops is a schedule that a pass has yet to complete: it passes.
    """
    raise_found(pairing_problems(number(program)))


def pairing_problems(n: Numbered) -> Iterator[ZbcError]:
    """The problems of `check_pairing`, one by one. Of each channel in disorder the first message that disagrees."""
    if not n.explicit:
        return
    broken: set[Channel] = set()
    for crossing in crossings(n):
        for problem in _unpaired(n, crossing):
            broken.add(crossing.channel)
            yield problem
    for i in (*n.repeated, *n.misplaced):
        if n.op(i).kind in TRANSFER:
            broken.add(_channel(n, i))
    yield from _surplus(n)
    for channel, pairs in sorted(channels(n).items()):
        if channel not in broken:  # else its messages are numbered by guess
            yield from _disorder(n, channel, pairs)


# ---- E203 ----------------------------------------------------------------------------------------------------


def _unpaired(n: Numbered, crossing: Crossing) -> Iterator[ZbcError]:
    """The messages of a crossing that lack an end although something makes, sends, receives or uses them."""
    columns = zip(crossing.producers, crossing.sends, crossing.recvs, crossing.consumers, strict=True)
    lacking = [
        (j, send, recv)
        for j, (producer, send, recv, consumer) in enumerate(columns)
        if (send < 0 or recv < 0) and (producer >= 0 or send >= 0 or recv >= 0 or consumer >= 0)
    ]
    for j, send, recv in lacking:
        sender = n.wanted(crossing.send_kind, crossing.sender, j)
        receiver = n.wanted(crossing.recv_kind, crossing.receiver, j)
        if send < 0 and recv < 0:
            a, b = crossing.channel
            text = f"program: {n.name(sender)} and {n.name(receiver)} are missing"
            yield ZbcError("E203", text, hint=f"add the first on rank {a} and the second on rank {b}")
        elif send < 0:
            yield _no_other_end(n, recv, sender, f"add it on rank {crossing.channel[0]}, behind what makes the tensor")
        else:
            yield _no_other_end(n, send, receiver, f"add it on rank {crossing.channel[1]}, before what uses the tensor")


def _no_other_end(n: Numbered, present: int, missing: Op, hint: str) -> ZbcError:
    text = f"program: {n.name(n.op(present))} has no {n.name(missing)}"
    return ZbcError("E203", text, where=n.where(present), hint=hint)


def _surplus(n: Numbered) -> Iterator[ZbcError]:
    """Transfers that carry nothing: repeated, on a foreign rank, out of the pipeline or between stages of one rank."""
    for i in n.repeated:
        if n.op(i).kind in TRANSFER:
            yield ZbcError(
                "E203", f"program: {n.name(n.op(i))} appears a second time", where=n.where(i), hint="drop one"
            )
    for i in n.misplaced:
        op = n.op(i)
        if op.kind in TRANSFER:
            owner = n.program.placement.rank_of(op.stage, op.pipe)
            text = f"program: {n.name(op)} is on rank {n.place(i)[0]}, its stage is on rank {owner}"
            yield ZbcError("E203", text, where=n.where(i), hint=f"move it to rank {owner}")
    for i in n.outside:
        if n.op(i).kind in TRANSFER:
            text = f"program: {n.op(i)} carries nothing: the program has no such tensor"
            yield ZbcError("E203", text, where=n.where(i), hint="drop it")
    for i in sorted(_on_one_rank(n)):
        yield _goes_nowhere(n, i)


def _on_one_rank(n: Numbered) -> Iterator[int]:
    """The transfers whose stage has no neighbour on another rank on that side."""
    for row in range(len(n.owners)):
        for kind in TRANSFERS:
            if not _crosses(n, kind, row):
                yield from (i for i in n.cut(n.at[kind], row) if i >= 0)


def _crosses(n: Numbered, kind: Kind, row: int) -> bool:
    """Whether transfers of this kind in this row go to another rank."""
    stages = n.program.placement.stages
    other = row % stages + _FAR_SIDE[kind]
    return 0 <= other < stages and n.owners[row] != n.owners[row + _FAR_SIDE[kind]]


_FAR_SIDE = {Kind.SEND_F: +1, Kind.RECV_B: +1, Kind.RECV_F: -1, Kind.SEND_B: -1}


def _goes_nowhere(n: Numbered, i: int) -> ZbcError:
    op = n.op(i)
    other = op.stage + _FAR_SIDE[op.kind]
    if n.program.placement.peer(op) is None:
        text = f"program: {op} carries nothing: there is no stage {other}"
    else:
        owner = n.program.placement.rank_of(op.stage, op.pipe)
        text = f"program: {op} carries nothing: stages {op.stage} and {other} are both on rank {owner}"
    return ZbcError("E203", text, where=n.where(i), hint="drop it")


def _channel(n: Numbered, i: int) -> Channel:
    op = n.op(i)
    here, there = n.program.placement.rank_of(op.stage, op.pipe), n.program.placement.peer(op)
    there = here if there is None else there
    return (here, there) if op.kind.is_send else (there, here)


# ---- E204 ----------------------------------------------------------------------------------------------------


def _disorder(n: Numbered, channel: Channel, pairs: list[tuple[int, int]]) -> Iterator[ZbcError]:
    found = disorder(pairs)
    if found is not None:
        k, send, recv = found
        a, b = channel
        sent, taken = n.name(n.op(send)), n.name(n.op(recv))
        text = f"program: channel r{a} -> r{b} message {k}: rank {a} sends {sent}, rank {b} receives {taken}"
        hint = "order the receives of a channel as its sends"
        yield ZbcError("E204", text, details=[n.text(send), n.text(recv)], hint=hint)
