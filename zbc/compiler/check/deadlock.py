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
from zbc.compiler.graph import Graph, happens, run
from zbc.errors import ZbcError

LONGEST, SHOWN = 12, 8  # shown lines of a cycle, and of ops that never run in none


def deadlock_problems(g: Graph, *, blocking_sends: bool = False) -> Iterator[ZbcError]:
    """Yields E201 with the ops that wait for each other, if any do.

    A step ends when every op has run and every message it started has moved. With `blocking_sends` a SEND ends only
    when its message has moved, as in a transport without buffers; receives are posted ahead all the same. Programs
    without transfers wait across ranks for each other's compute ops. For any program; in one that the other checks
    reject, ops may wait for what never comes instead, of which these tell more.
    """
    done = run(g, blocking_sends=True)[1] if blocking_sends else g.ran[1]
    if happens(g, done):
        return
    from zbc.compiler.check import cycle  # loads networkx, needed only for a program that deadlocks

    stuck = [i for i in range(len(g.ops)) if not done[i] or cycle.holds(g, done, i, blocking_sends=blocking_sends)]
    summary = f"{len(stuck)} of {len(g.ops)} ops never run"
    lines = cycle.shortest_cycle(g, done, blocking_sends=blocking_sends)
    if not lines:
        yield ZbcError("E201", f"deadlock: {summary}", details=[g.text(i) for i in stuck[:SHOWN]])
        return
    hint = _hint(g, [(line.op, line.target, line.behind) for line in lines])
    shown = [line.text(g) for line in lines]
    if len(shown) > LONGEST:
        shown[LONGEST - 2 : -2] = [f"... {len(shown) - LONGEST} more waits, each for the next ..."]
    what = "transfers" if all(g.ops[line.op].kind.is_transfer for line in lines) else "ops"
    title = f"deadlock: {len(lines)} {what} wait for each other"
    yield ZbcError("E201", title, details=[*shown, summary], hint=hint)


def _hint(g: Graph, lines: list[tuple[int, int, int | None]]) -> str:
    """The smallest change that opens the cycle: a receive can always come earlier, other ops with their inputs."""
    if any(g.ops[op].kind.is_collective for op, _, _ in lines):
        return "let all ranks meet in the same order, each after the work it closes"
    moves = [(target - behind, target, behind) for _, target, behind in lines if behind is not None]
    receives = [move for move in moves if g.ops[move[1]].kind.is_recv]
    if receives:
        _, late, behind = min(receives)
        rank, step = g.place(behind)
        return f"post {names.named(g, g.ops[late])} on rank {rank} before step {step}, in the order of its channel"
    # An op of another microbatch does not depend on the ops it is to overtake.
    options = [move for move in moves if g.ops[move[1]][2:4] != g.ops[move[2]][2:4]]
    if options:
        _, late, behind = min(options)
        (rank, later), (_, step) = g.place(late), g.place(behind)
        return f"on rank {rank}, bring step {later} and what it needs before step {step}"
    return "change the order on one of these ranks"
