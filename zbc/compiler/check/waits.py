"""Who waits for whom in a program, as integer lists, and which ops ever run.

Nodes: op i is node i; an *event* (a message between two ranks, a rendezvous of several) is node `size + e`, where e is
the id of one of the ops that take part in it; a *ghost*, behind those, is something that never comes.
An op runs when the op before it on its rank has run and what it needs has happened; an op that blocks ends with its
event. An event happens when all its parties have come.

The collectives of a rank happen one after the other in the order in which it starts them, as on one queue of a device,
whether it waits for them (VALIDATE) or goes on (all others): a collective's event also has the events right before it
for parties. A message also waits for the one before it in its channel, but that takes no edge: both ends of the one
before stand before its own ends, or else the two ends of the channel disagree and from there on nothing in it moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from zbc.compiler.check.channels import channels, crossings, disorder
from zbc.compiler.check.numbered import TRANSFERS, Numbered
from zbc.compiler.check.order import late_ops, late_step_ops
from zbc.ir import COLLECTIVE, SUM, TRANSFER, Kind, Op

NONE = -1
SEVERAL = -2


@dataclass(frozen=True, slots=True)
class Waits:
    """Lists over ops (`need`, `event`, `blocks`) and over events (`parties`)."""

    n: Numbered
    need: list[int]  # the node an op needs before it starts; NONE, or SEVERAL: see `more`
    event: list[int]  # the event an op takes part in, or NONE
    blocks: bytearray  # whether the op ends with its event
    parties: list[int]  # how many have to come to an event
    more: dict[int, list[int]] = field(default_factory=dict)
    lacks: dict[int, int] = field(default_factory=dict)  # event -> the ghost that keeps it from happening
    ghosts: dict[str, int] = field(default_factory=dict)  # what never comes, as a sentence -> its node
    behind: dict[int, list[int]] = field(default_factory=dict)  # collective's event -> the events right behind it
    met: dict[int, list[int]] = field(default_factory=dict)  # collective's event -> the ops that meet in it

    @property
    def nodes(self) -> int:
        return 2 * self.n.size + len(self.ghosts)

    def needs(self, op: int) -> list[int]:
        """The nodes an op needs, its rank's order and its event aside."""
        need = self.need[op]
        return self.more[op] if need == SEVERAL else [] if need == NONE else [need]

    def add_need(self, op: int, node: int) -> None:
        if self.need[op] == NONE:
            self.need[op] = node
        else:
            self.more[op] = [*self.needs(op), node]
            self.need[op] = SEVERAL

    def ghost(self, sentence: str) -> int:
        """The node of something that never comes."""
        return self.ghosts.setdefault(sentence, self.nodes)

    def ghost_op(self, op: Op, which: str = "") -> int:
        """The node of an op that should be on its rank and is not."""
        rank = self.n.program.placement.rank_of(op.stage, op.pipe)
        return self.ghost(f"{which}{self.n.name(op)} never comes on rank {rank}")

    def never(self, event: int, ghost: int) -> None:
        """Keep an event from happening."""
        self.parties[event] += 1
        self.lacks[event] = ghost


def build(n: Numbered, *, blocking_sends: bool) -> Waits:
    """The waits of a program at either level, whatever is wrong with it.

    Waits that the order of a rank implies are left out, so a correct program has little more than its messages.
    """
    size = n.size
    waits = Waits(n, [NONE] * size, [NONE] * size, bytearray(size), [0] * size)
    if n.explicit:
        _messages(waits)
        _halves(waits)
        _fifo(waits)
        _rendezvous(waits)
        _agreement(waits)
    else:
        _direct(waits)
    _together(waits)
    for late in (*late_ops(n), *late_step_ops(n)):
        waits.add_need(late.op, late.found if late.found >= 0 else waits.ghost_op(late.needs))
    for i in n.outside:
        waits.add_need(i, waits.ghost(f"what {n.op(i)} works on never comes"))
    if blocking_sends:
        _block(waits, (*n.at[Kind.SEND_F], *n.at[Kind.SEND_B], *(i for i in n.repeated if n.op(i).kind.is_send)))
    return waits


def _block(waits: Waits, ops: Iterable[int]) -> None:
    for i in ops:
        if i >= 0:
            waits.blocks[i] = 1


def _direct(waits: Waits) -> None:
    """Without transfers, the op that uses a tensor of another rank waits for the op that makes it."""
    n = waits.n
    splits = max(n.at[Kind.B], default=NONE) >= 0
    for crossing in crossings(n):
        producer = Kind.F if crossing.send_kind is Kind.SEND_F else Kind.B if splits else Kind.BW
        for j, (made, used) in enumerate(zip(crossing.producers, crossing.consumers, strict=True)):
            if used >= 0 and made >= 0:
                waits.need[used] = made
            elif used >= 0:
                waits.need[used] = waits.ghost_op(n.wanted(producer, crossing.sender, j))


def _together(waits: Waits) -> None:
    """What the ops of a group need from other ranks, the group needs before it starts."""
    n = waits.n
    for i in n.groups:
        end = n.starts[n.place(i)[0] + 1]
        for k in range(i + 1, min(i + 3, end)):
            for node in waits.needs(k):
                waits.add_need(i, node)


# ---- messages ------------------------------------------------------------------------------------------------


def _messages(waits: Waits) -> None:
    """One event per message that has both ends, named by its send; the consumer needs it."""
    n, size = waits.n, waits.n.size
    need, event, parties = waits.need, waits.event, waits.parties
    for crossing in crossings(n):
        low, high = n.span(crossing.sender)
        start, end = n.span(crossing.receiver)
        for send, recv, used in zip(crossing.sends, crossing.recvs, crossing.consumers, strict=True):
            if low <= send < high and start <= recv < end:
                event[send] = event[recv] = send
                parties[send] = 2
                if used >= 0:
                    need[used] = size + send
            elif recv >= 0 and used >= 0:
                need[used] = size + recv  # a half message; an op without any receive is found late


def _halves(waits: Waits) -> None:
    """A transfer without its other end is an event that never happens."""
    n, event, repeated = waits.n, waits.event, set(waits.n.repeated)
    alone = sorted(i for kind in TRANSFERS for i in n.at[kind] if i >= 0 and event[i] < 0)
    for i in (*alone, *(i for i in n.repeated if n.op(i).kind in TRANSFER)):
        op = n.op(i)
        message = n.program.placement.message(op)
        event[i], waits.parties[i] = i, 1
        if message is None or not n.program.placement.crosses(message.source, message.sink, op.pipe):
            waits.never(i, waits.ghost(f"a tensor for {op} never comes"))
        else:
            other = message.recv if op.kind.is_send else message.send
            waits.never(i, waits.ghost_op(other, "a second " if i in repeated else ""))


def _fifo(waits: Waits) -> None:
    """A channel stands still from the first message on that is not received where it is sent."""
    n = waits.n
    for (a, b), pairs in channels(n).items():
        found = disorder(pairs)
        if found is not None:
            k, send, recv = found
            ends = f"rank {a} sends {n.name(n.op(send))}, rank {b} receives {n.name(n.op(recv))}"
            ghost = waits.ghost(f"channel r{a} -> r{b} stands still at message {k}: {ends}")
            for event, _ in pairs[k:]:
                waits.never(event, ghost)


def _rendezvous(waits: Waits) -> None:
    """The k-th collective of one kind and stage on each of its ranks happens at once, behind those started before."""
    n = waits.n
    met: dict[tuple[Op, int], dict[int, int]] = {}  # collective, k -> rank -> op
    count: dict[tuple[Op, int], int] = {}
    queues: dict[int, list[int]] = {}
    for i in n.step_ops:
        op, (rank, _) = n.op(i), n.place(i)
        if op.kind in COLLECTIVE:
            k = count.get((op, rank), 0)
            count[op, rank] = k + 1
            met.setdefault((op, k), {})[rank] = i
            queues.setdefault(rank, []).append(i)
    for (op, k), ops in met.items():
        first = min(ops.values())
        waits.met[first] = list(ops.values())
        waits.parties[first] = len(ops)
        for i in ops.values():
            waits.event[i], waits.blocks[i] = first, op.kind is Kind.VALIDATE
        wanted = range(len(n.program.ranks)) if op.kind is Kind.VALIDATE else n.program.members(op)
        absent = sorted(set(wanted) - set(ops))
        if absent:
            which = "a second " if k else ""
            waits.never(first, waits.ghost(f"{which}{op} never comes on rank {absent[0]}"))
    for queue in queues.values():
        for before, i in pairwise(queue):
            waits.behind.setdefault(waits.event[before], []).append(waits.event[i])
            waits.parties[waits.event[i]] += 1


def _agreement(waits: Waits) -> None:
    """NORM waits for NORM of the rank before, VERDICT for that of the rank after, TENTATIVE for the sums it steps with.

    Their messages are few and small: each rank has their buffers posted when its step begins, so no send is held up.
    """
    n, program = waits.n, waits.n.program
    first: dict[tuple[int, Kind], int] = {}
    sums: dict[tuple[int, int], list[int]] = {}  # rank, stage -> the sums started so far
    for i in n.step_ops:
        first.setdefault((n.place(i)[0], n.op(i).kind), i)
    for i in n.step_ops:
        op, (rank, _) = n.op(i), n.place(i)
        other = rank - 1 if op.kind is Kind.NORM else rank + 1
        if op.kind in SUM:
            stages = (op.stage,) if op.kind is Kind.REDUCE else {0, program.placement.stages - 1}
            for stage in stages:
                sums.setdefault((rank, stage), []).append(i)
        elif op.kind is Kind.TENTATIVE:
            for j in sums.get((rank, op.stage), ()):
                waits.add_need(i, n.size + waits.event[j])
        elif op.kind in (Kind.NORM, Kind.VERDICT) and 0 <= other < len(program.ranks):
            found = first.get((other, op.kind), NONE)
            waits.add_need(i, found if found >= 0 else waits.ghost(f"{op} never comes on rank {other}"))


# ---- running -------------------------------------------------------------------------------------------------


def run(waits: Waits) -> bytearray:
    """Let every rank go as far as it can: 1 for each node that happens, 0 for each that never does.

    Kahn's algorithm, with the chain of ops of a rank walked instead of stored. The outcome is the same for every order
    of progress: nothing that happens takes away what something else waits for.
    """
    n, size = waits.n, waits.n.size
    need, event, blocks, left = waits.need, waits.event, waits.blocks, waits.parties[:]
    done = bytearray(waits.nodes)
    sleeping: dict[int, list[int]] = {}  # node -> ranks that wait for it

    def come(event: int) -> None:
        """One more party of an event is there; perhaps it happens, and with it those that only waited for it."""
        coming = [event]
        while coming:
            event = coming.pop()
            left[event] -= 1  # once more, and to no effect, when an op that blocks wakes up behind its event
            if not left[event]:
                done[size + event] = 1
                ready.extend(sleeping.pop(size + event, ()))
                coming += waits.behind.get(event, ())

    at = n.starts[:-1]
    ready = list(range(len(at)))
    while ready:
        rank = ready.pop()
        i, end = at[rank], n.starts[rank + 1]
        while i < end:
            unmet = need[i]
            if unmet == SEVERAL:
                unmet = next((node for node in waits.more[i] if not done[node]), NONE)
            if unmet >= 0 and not done[unmet]:
                sleeping.setdefault(unmet, []).append(rank)
                break
            e = event[i]
            if e >= 0:
                come(e)
                if blocks[i] and not done[size + e]:
                    sleeping.setdefault(size + e, []).append(rank)
                    break
            done[i] = 1
            if i in sleeping:
                ready += sleeping.pop(i)
            i += 1
        at[rank] = i
    return done
