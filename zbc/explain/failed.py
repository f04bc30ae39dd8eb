"""E7xx: runs that failed."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E701": entry(
        "no progress",
        """
No op ended on any rank for train.watchdog_s seconds. The lines say in which op
each rank is; the marked one is not waiting for another rank and so holds the
others up, and its Python stack follows. A rank that does not respond at all
was stopped, has lost its machine, or is in native code that holds Python's
lock. A slow first step (compilation, cold files) may need a larger
train.watchdog_s.
""",
    ),
    "E702": entry(
        "a rank was lost",
        """
A rank ended, so the others cannot continue. The message of the rank that failed
first has the reason; if there is none, it was killed from outside, often by
the system for lack of memory. With checkpoints and --max-restarts, zbc's own
with --local or torchrun's, a run continues by itself (docs/failures.md).
""",
    ),
    "E703": entry(
        "an op failed",
        """
The message names the rank, the step and the op, and the lines where the code
failed. One that ran out of memory names what it asked for and what the plan
predicts for its rank. If it is about the plan (a message that no rank takes, a
tensor that is missing), the plan did not come from this zbc: check it with
`zbc check`.
""",
    ),
    "E704": entry(
        "the gradients are not finite",
        """
A step whose gradients are not all finite changes nothing on any rank. With
train.nonfinite = "skip" the run goes on, until train.skip_limit steps in a row
or train.skip_total in all were skipped; with "stop" it ends at the first. The
message says whether the losses were finite, and in which stage backward first
met such a gradient. A lower learning rate, a longer warm-up or clipping help
against steps that are too large; data that are broken are the same each time.

`zbc doctor --model` says whether plain autograd has the same problem.
""",
    ),
    "E705": entry(
        "ranks that hold the same weights differ",
        """
Ranks that hold the same stage (parallel.dp, the two pipes of bidirectional
schedules) or the same tied weight are equal bit for bit after every step. Their
hashes are compared before a checkpoint is complete; the message names tensors
and ranks. Something other than the optimizer wrote to a weight, or a device
computes wrongly. The checkpoint before is untouched.
""",
    ),
}
