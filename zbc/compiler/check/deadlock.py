"""Checks that the ranks of a program can never wait for each other forever.

Contract each matched send and receive into one message; let a message wait for both its ends and for the message before
it in its channel, an op for the op before it on its rank and for its inputs, a collective for all its ranks. A program
ends under every timing exactly when these waits have no cycle: no event disables another, so there are no races.

Data-parallel replicas of the pipeline run the same ops and meet only in collectives, each rank its counterparts. So a
cycle through several replicas, with the number of the replica left out, is one in the program, and one in the program
is one in every replica: the program alone is checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check import names
from zbc.compiler.check.faults import late_writers
from zbc.compiler.check.found import SHOWN, raise_found
from zbc.compiler.graph import FREED, Graph, build, happens, run
from zbc.errors import ZbcError
from zbc.ir import Op, Program

LONGEST = 12  # shown lines of a cycle


def check_deadlock(program: Program, *, blocking_sends: bool = False) -> None:
    """Raise E201, with the ops that wait for each other and the ops that wait for something that never comes.

    A step ends when every op has run and every message it started has moved. With `blocking_sends` a SEND ends only
    when its message has moved, as in a transport without buffers; receives are posted ahead all the same. Programs
    without transfers wait across ranks for each other's compute ops. Accepts any program, including one that the other
    checks reject.
    """
    raise_found(deadlock_problems(build(program), blocking_sends=blocking_sends))


def survives_blocking_sends(program: Program) -> bool:
    """Whether a program also ends when every SEND blocks its rank until its message has moved."""
    graph = build(program)
    return happens(graph, run(graph, blocking_sends=True)[1])


def deadlock_problems(g: Graph, *, blocking_sends: bool = False) -> Iterator[ZbcError]:
    """The problems of `check_deadlock`, one by one."""
    done = run(g, blocking_sends=True)[1] if blocking_sends else g.ran[1]
    if happens(g, done):
        return
    from zbc.compiler.check.cycle import (  # loads networkx, needed only for a program that deadlocks
        CycleWait,
        holds,
        shortest_cycle,
    )

    lines: list[CycleWait] = shortest_cycle(g, done, blocking_sends=blocking_sends)
    if lines:
        title = _title(g, [line.op for line in lines])
        hint = _hint(g, [(line.op, line.target, line.behind) for line in lines])
        shown = [line.text(g) for line in lines]
        if len(shown) > LONGEST:
            shown[LONGEST - 2 : -2] = [f"... {len(shown) - LONGEST} more waits, each for the next ..."]
        never = sum(not done[i] or holds(g, done, i, blocking_sends=blocking_sends) for i in range(len(g.ops)))
        summary = f"{never} of {len(g.ops)} ops never run"
        yield ZbcError("E201", title, details=[*shown, summary], hint=hint)
    yield from _never_comes(g)


def _title(g: Graph, ops: list[int]) -> str:
    if len(ops) == 1:
        return "deadlock: an op waits for a later op of its own rank"
    what = "transfers" if all(g.ops[i].kind.is_transfer for i in ops) else "ops"
    return f"deadlock: {len(ops)} {what} wait for each other"


def _hint(g: Graph, lines: list[tuple[int, int, int | None]]) -> str:
    """The smallest change that opens the cycle: a receive can always come earlier, other ops with their inputs."""
    if len(lines) > 1 and any(g.ops[op].kind.is_collective for op, _, _ in lines):
        return "let all ranks meet in the same order, each after the work it closes"
    moves = [(target - behind, target, behind) for _, target, behind in lines if behind is not None]
    receives = [move for move in moves if g.ops[move[1]].kind.is_recv]
    if receives:
        _, late, behind = min(receives)
        rank, step = g.place(behind)
        return f"post {names.named(g, g.ops[late])} on rank {rank} before step {step}, in the order of its channel"
    # An op of another microbatch does not depend on the ops it is to overtake.
    options = [move for move in moves if len(lines) == 1 or g.ops[move[1]][2:4] != g.ops[move[2]][2:4]]
    if options:
        _, late, behind = min(options)
        (rank, later), (_, step) = g.place(late), g.place(behind)
        return f"on rank {rank}, bring step {later} and what it needs before step {step}"
    return "change the order on one of these ranks"


def _never_comes(g: Graph) -> Iterator[ZbcError]:
    """Yields one problem for each awaited op or message that never comes."""
    waiters: dict[str, set[int]] = {}
    for i, sentence in _missed(g):
        waiters.setdefault(sentence, set()).add(i)
    for sentence, nodes in waiters.items():
        ops = sorted(nodes)
        shown = [f"{g.text(i)}  waits for it" for i in ops[:SHOWN]]
        rest = [f"and {len(ops) - SHOWN} more ops"] if len(ops) > SHOWN else []
        yield ZbcError(
            "E201", f"deadlock: {sentence}", details=shown + rest, hint="provide it, or drop what waits for it"
        )


def _missed(g: Graph) -> Iterator[tuple[int, str]]:
    """Yields (op, a sentence on the awaited thing that never comes)."""
    n = len(g.ops)
    for i, code in g.lost:
        what = "a tensor for {} never comes" if code == "E203" else "what {} works on never comes"
        yield i, what.format(g.ops[i])
    late = late_writers(g)
    for i, cell, was in g.unmet:
        if (i, cell) not in late:
            if was == FREED:
                yield i, f"what {g.ops[i]} works on is used up before"
            else:
                yield i, _comes_not(g, names.maker(g, cell), g.rank(i))
    readers: dict[int, list[int]] = {}
    for i in range(n):
        for node in g.pred[g.ptr[i] : g.ptr[i + 1]]:
            if node >= n:
                readers.setdefault(node, []).append(i)
    for x, (send, recv) in enumerate(zip(g.sender, g.receiver, strict=True)):
        message, _ = g.layout.meaning(x)
        waiting = readers.get(n + x, [])
        if message.edge < 0:
            sentence = f"{message.what.upper()} never comes on rank {message.home}"
            yield from ((i, sentence) for i in waiting if send < 0)
        elif not g.layout.explicit:
            if send < 0 and waiting:
                maker = names.maker(g, _far_cell(g, x))
                yield from ((i, _comes_not(g, maker, g.layout.channel_of(x)[0])) for i in waiting)
        elif (send < 0) is not (recv < 0):
            sender, receiver = names.ends(g, x)
            missing, there = (sender, recv) if send < 0 else (receiver, send)
            rank = g.layout.channel_of(x)[0 if send < 0 else 1]
            yield from ((i, _comes_not(g, missing, rank)) for i in (there, *waiting))
    for event, op in g.spare.items():
        carried, is_send = g.layout.message_of(g.ops[op]), g.ops[op].kind.is_send
        other, peer = names.ends(g, carried)[is_send], g.layout.channel_of(carried)[is_send]
        sentence = f"a second {names.named(g, other)} never comes on rank {peer}"
        yield from ((i, sentence) for i in (op, *readers.get(event, ())))
    for event, away in g.absent.items():
        count = sum(g.ops[ops[0]] == g.ops[g.met[event][0]] for earlier, ops in g.met.items() if earlier < event)
        yield from ((i, f"{'a second ' * bool(count)}{g.ops[i]} never comes on rank {away[0]}") for i in g.met[event])
    for (a, b), k, send, recv in g.mixed:
        sends, takes = names.named(g, g.ops[send]), names.named(g, g.ops[recv])
        sentence = (
            f"channel r{a} -> r{b} stands still at message {k}: rank {a} sends {sends}, rank {b} receives {takes}"
        )
        yield from ((i, sentence) for i in (send, recv, *readers.get(g.party[send], ())))


def _far_cell(g: Graph, x: int) -> int:
    """The cell that a message fills."""
    message, unit = g.layout.meaning(x)
    base = next(base for key, base in g.layout.columns.items() if key[:3] == tuple(message) and key.end)
    return base + unit


def _comes_not(g: Graph, op: Op, rank: int) -> str:
    """`F s0 m1 never comes on rank 0`; an op of a unit is missed on the rank of its stage."""
    if op.kind.computes or op.kind.is_transfer:
        return f"{names.named(g, op)} never comes on rank {names.rank_of(g, op)}"
    return f"{op} never comes on rank {rank}"
