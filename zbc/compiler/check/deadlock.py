"""Can the ranks of a program come to wait for each other forever?

Contract each matched send and receive into one message; let a message wait for both its ends and for the message
before it in its channel, an op for the op before it on its rank and for the messages it uses, a rendezvous for all its
ranks. A program ends under every timing exactly when these waits have no circle: nothing that happens takes away what
something else waits for, so there is no race to lose.

Data-parallel copies of the pipeline run the same ops and meet only in collectives, each rank its own like. So a circle
through several copies, with the number of the copy left out, is one in the program, and one in the program is one in
every copy: the program alone is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.check import waits as waiting
from zbc.compiler.check.circle import Line, shortest_circle
from zbc.compiler.check.found import SHOWN, raise_found
from zbc.compiler.check.numbered import Numbered, number
from zbc.errors import ZbcError
from zbc.ir import COLLECTIVE, Program

LONGEST = 12  # lines of a circle that are shown


def check_deadlock(program: Program, *, blocking_sends: bool = False) -> None:
    """Raise E201, with the ops that wait for each other and the ops that wait for what never comes.

    A step ends when every op has run and every message it started has moved. With `blocking_sends` a SEND ends only
    when its message has moved, as in a transport without buffers; receives are posted ahead all the same.
    Programs without transfers wait across ranks for each other's compute ops. Any program may be asked about, also one
    that the other checks reject.
    """
    raise_found(deadlock_problems(number(program), blocking_sends=blocking_sends))


def survives_blocking_sends(program: Program) -> bool:
    """Whether a program also ends when every SEND holds up its rank until its message has moved."""
    waits = waiting.build(number(program), blocking_sends=True)
    return _happens(waits, waiting.run(waits))


def deadlock_problems(n: Numbered, *, blocking_sends: bool = False) -> Iterator[ZbcError]:
    """The problems of `check_deadlock`, one by one."""
    waits = waiting.build(n, blocking_sends=blocking_sends)
    done = waiting.run(waits)
    if _happens(waits, done):
        return
    circle = shortest_circle(waits, done)
    if circle:
        yield _circle_error(n, circle, done)
    yield from _never_comes(waits)


def _happens(waits: waiting.Waits, done: bytearray) -> bool:
    """Whether all ops and the events they take part in happen."""
    size = waits.n.size
    return 0 not in done[:size] and all(done[size + e] for e in waits.event if e >= 0)


def _circle_error(n: Numbered, lines: list[Line], done: bytearray) -> ZbcError:
    if len(lines) == 1:
        title = "deadlock: an op waits for a later op of its own rank"
    else:
        what = "transfers" if all(n.op(line.op).kind.is_transfer for line in lines) else "ops"
        title = f"deadlock: {len(lines)} {what} wait for each other"
    shown = [line.text(n) for line in lines]
    if len(shown) > LONGEST:
        shown[LONGEST - 2 : -2] = [f"... {len(shown) - LONGEST} more waits, each for the next ..."]
    summary = f"{done.count(0, 0, n.size)} of {n.size} ops never run"
    return ZbcError("E201", title, details=[*shown, summary], hint=_hint(n, lines))


def _hint(n: Numbered, lines: list[Line]) -> str:
    """The smallest change that opens the circle: a receive can always come earlier, other ops with what they need."""
    if len(lines) > 1 and any(n.op(line.op).kind in COLLECTIVE for line in lines):
        return "let all ranks meet in the same order, each behind the work it closes"
    moves = [(line.target - line.behind, line.target, line.behind) for line in lines if line.behind is not None]
    receives = [move for move in moves if n.op(move[1]).kind.is_recv]
    if receives:
        _, late, behind = min(receives)
        rank, step = n.place(behind)
        return f"post {n.name(n.op(late))} on rank {rank} before step {step}, in the order of its channel"
    # An op of another microbatch does not need what it is to overtake.
    others = [move for move in moves if len(lines) == 1 or n.op(move[1])[2:4] != n.op(move[2])[2:4]]
    if others:
        _, late, behind = min(others)
        (rank, later), (_, step) = n.place(late), n.place(behind)
        return f"on rank {rank}, bring step {later} and what it needs before step {step}"
    return "change the order on one of these ranks"


def _never_comes(waits: waiting.Waits) -> Iterator[ZbcError]:
    """One problem for each thing that is waited for and never comes."""
    n = waits.n
    waiters: dict[int, list[int]] = {node: [] for node in waits.ghosts.values()}
    for i, event in enumerate(waits.event):
        for node in (*waits.needs(i), n.size + event):
            ghost = waits.lacks.get(node - n.size, node)
            if ghost >= 2 * n.size:
                waiters[ghost].append(i)
    for sentence, node in waits.ghosts.items():
        ops = waiters[node]
        shown = [f"{n.text(i)}  waits for it" for i in ops[:SHOWN]]
        more = [f"and {len(ops) - SHOWN} more ops"] if len(ops) > SHOWN else []
        hint = "provide it, or drop what waits for it"
        yield ZbcError("E201", f"deadlock: {sentence}", details=shown + more, hint=hint)
