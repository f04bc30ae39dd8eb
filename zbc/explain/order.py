"""E2xx: the order of operations."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E201": entry(
        "deadlock",
        """
The order of ops makes ranks wait for each other forever. The lines are a
shortest cycle: each op waits for the next, the last for the first.

    rank 0 step 3: SEND_F s0 m1 >r1  waits for  rank 1 step 4: RECV_F s1 m1 <r0
    rank 1 step 3: SEND_B s1 m0 >r0  waits for  rank 0 step 4: RECV_B s0 m0 <r1

zbc's own schedules never do that; a plugin or an edited plan may. Break the
cycle at one place: post the receive earlier, or run the op that another rank
waits for before the one that waits.
""",
    ),
    "E202": entry(
        "the program is not complete",
        """
Every stage runs F and either BW or B and W of every microbatch, once, and with
two pipes a microbatch goes through one of them. A step is closed by a barrier
(VALIDATE, STEP) or without one (NORM, VERDICT, REDO, COMMIT, TENTATIVE), not
by both. An op is missing, runs twice, or does not belong to this program.
After an OVERLAP come an F and a B or BW that do not need each other.
""",
    ),
    "E203": entry(
        "a transfer has no other end",
        """
Every SEND needs one RECV on the rank of the neighbouring stage; stages on the
same rank need neither. zbc adds transfers itself: plugins return compute ops
only.
""",
    ),
    "E204": entry(
        "messages of one direction are received in another order than sent",
        """
The messages from one rank to another arrive in the order in which they were
sent. Receives must be posted in that order; they may be posted early.
""",
    ),
    "E205": entry(
        "an op runs on a rank that does not hold its stage",
        """
The placement says which rank holds which stage; an op of a stage runs there.
""",
    ),
    "E206": entry(
        "an op runs before what it needs",
        """
Within a rank ops run in the order of the list, so F stands before B of the
same stage and microbatch, B before W, a SEND after the op that makes its
tensor, a STEP after all gradients. Without the optimizer's barrier, the ops
before REDO run again if the step before does not stand. So they must be
forwards and their messages, with both ends before REDO; COMMIT comes before
the first backward of its stage.
""",
    ),
    "E207": entry(
        "the plan needs sends that return at once",
        """
Asked for with `zbc check --strict`. The plan is free of deadlock as long as a
SEND only starts a message, which is how the runtime sends. On a transport
where a SEND holds up its rank until the message is received, it would hang.
Schedules on a line of ranks usually survive that, V placements do not.
""",
    ),
}
