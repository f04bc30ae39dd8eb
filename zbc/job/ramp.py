"""`[schedule] ramp`: a training that begins with fewer microbatches per step, hence smaller batches.

    ramp = [{ microbatches = 8, steps = 500 }, { microbatches = 16, samples = 100_000 }]

The first steps have 8 microbatches each, the next 16, and all others `schedule.microbatches`. `samples`, over all
replicas of the pipeline, is rounded up to whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.job.section import Count, Problem, Section, key


class Phase(Section):
    """One entry of `schedule.ramp`."""

    microbatches: Count = key(..., "per step and pipeline, more than in the entry before")
    steps: Count | None = key(None, "how long; or samples")
    samples: Count | None = key(None, "how long, rounded up to whole steps; or steps")

    def length(self, per_microbatch: int) -> int:
        """The number of its steps; `per_microbatch` counts the samples of a microbatch in all replicas."""
        return self.steps or -(-(self.samples or 0) // (self.microbatches * per_microbatch))


def full_steps(phases: Sequence[Phase], microbatches: int, per_microbatch: int, steps: int) -> float:
    """The number of full steps of `microbatches` with as many samples as a training of `steps` with its ramp."""
    lengths = [phase.length(per_microbatch) for phase in phases]
    small = sum(length * phase.microbatches for length, phase in zip(lengths, phases, strict=True))
    return steps - sum(lengths) + small / microbatches


def problems(phases: Sequence[Phase], microbatches: int, per_microbatch: int, steps: int) -> Iterator[Problem]:
    """E110 for entries that contradict each other or the training."""
    before, total = 0, 0
    for number, phase in enumerate(phases):
        key, of = ("schedule", "ramp", number), f"entry {number} of schedule.ramp"
        if (phase.steps is None) == (phase.samples is None):
            how = "neither" if phase.steps is None else "both"
            yield "E110", (*key, "steps"), f"{of} has {how} of steps and samples", "give one of them"
            continue
        if not before < phase.microbatches < microbatches:
            text = f"{of} has {phase.microbatches} microbatches, after {before} and before {microbatches}"
            yield "E110", (*key, "microbatches"), text, "let them grow up to schedule.microbatches"
        before = phase.microbatches
        total += phase.length(per_microbatch)
        if total >= steps:
            text = f"{of} ends after step {total}, train.steps is {steps}"
            yield "E110", (*key, "steps"), text, "a ramp ends before the training does"
            return
