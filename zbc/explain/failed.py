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
A rank ended, so the others cannot go on. The reason stands in the message of
the rank that failed first; if it has none, it was killed from outside, often
by the system for lack of memory. With checkpoints and --max-restarts, zbc's own
with --local or torchrun's, a run goes on by itself (docs/failures.md).
""",
    ),
    "E703": entry(
        "an op failed",
        """
The message names the rank, the step and the op, and the lines where the code
failed. If it speaks of the plan (a message nobody takes, a tensor that is not
there), the plan did not come from this zbc: check it with `zbc check`.
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

`zbc doctor --model` says so where they are not finite in plain autograd either.
""",
    ),
    "E705": entry(
        "copies that must be equal differ",
        """
Copies of a stage (parallel.dp, the two pipes of bidirectional schedules) and of
a tied weight are bit for bit equal after every step. Before a checkpoint is
complete their hashes are compared; the message names the tensors and the ranks.
Something else than the optimizer wrote to a weight, or a device computes
wrongly. The checkpoint before is untouched.
""",
    ),
}
