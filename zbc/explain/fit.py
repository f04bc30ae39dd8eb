"""E3xx: plans that are right but do not fit."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E301": entry(
        "does not fit into the memory of a rank",
        """
The fullest rank needs more than hardware.memory_gib: weights, gradients,
optimizer state, activations at their peak and receive buffers together.
The lines show the parts, and the schedules that would fit.

What helps, cheapest first: another schedule, a smaller microbatch_size, more
ranks (parallel.pp), a smaller model.
""",
    ),
    "E302": entry(
        "holds more activations than memory_limit",
        """
schedule.memory_limit bounds the activations of every rank: "1.0x" is the peak
of 1F1B, which is parallel.pp activation units; "40 GiB" counts bytes. The
hint names the limit that this schedule needs; the lines name schedules that
keep to the given one.
""",
    ),
    "E303": entry(
        "no order keeps to memory_limit",
        """
schedule.memory_limit is below what a single microbatch on its way through the
stages of one rank needs, so no order at all can keep to it. The hint names
the smallest limit that works with this placement and partition.
""",
    ),
}
