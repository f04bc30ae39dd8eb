"""The position in the data of every step of a training: a pure function of the step, without state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from zbc.job.learning_rate import RateSchedule, rate_after
from zbc.plan.directory import Manifest


class PhaseStart(NamedTuple):
    """The start of a run of steps with the same number of samples, over all replicas of the pipeline."""

    first: int  # step, from 0
    position: int  # samples of all steps before it
    samples: int  # of each of its steps


@dataclass(frozen=True)
class Phases:
    """The phases of a training; the last one has no end. `shift`: additional samples of a training that began with
    other batches than these phases."""

    starts: tuple[PhaseStart, ...]
    shift: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Phases:
        """The phases of a plan: its ramp, then its own batches; for samples of unequal length rows count as samples."""
        if manifest.balance is not None:
            return cls.even(manifest.microbatches * manifest.topology.dp * manifest.microbatch_size)
        per = manifest.topology.dp * manifest.microbatch_size
        parts = [(part.microbatches * per, part.steps) for part in manifest.ramp]
        return cls.made([*parts, (manifest.microbatches * per, 0)])

    @classmethod
    def even(cls, samples: int) -> Phases:
        """The phases if every step takes `samples` samples."""
        return cls((PhaseStart(0, 0, samples),))

    @classmethod
    def made(cls, parts: Sequence[tuple[int, int]]) -> Phases:
        """From (samples of a step, steps) of every phase; the steps of the last one do not matter."""
        firsts = accumulate((steps for _, steps in parts[:-1]), initial=0)
        positions = accumulate((samples * steps for samples, steps in parts[:-1]), initial=0)
        sizes = (samples for samples, _ in parts)
        return cls(tuple(map(PhaseStart, firsts, positions, sizes)))

    def index(self, step: int) -> int:
        """The number of the phase that a step is in."""
        starts = self.starts
        number = len(starts) - 1
        while number and starts[number].first > step:
            number -= 1
        return number

    def samples(self, step: int) -> int:
        return self.starts[self.index(step)].samples

    def position(self, step: int) -> int:
        """The number of samples of all steps before `step`: its position in the data."""
        phase = self.starts[self.index(step)]
        return self.shift + phase.position + (step - phase.first) * phase.samples

    def resumed(self, step: int, position: int) -> Phases:
        """The same phases in a training whose steps before `step` took `position` samples."""
        return replace(self, shift=position - replace(self, shift=0).position(step))

    @property
    def most(self) -> int:
        """Samples of the largest step."""
        return max(phase.samples for phase in self.starts)

    def rate(self, lr: float, schedule: RateSchedule, steps: int, step: int) -> float:
        """The learning rate of a step of a training of `steps`, by steps or by samples (`schedule.by`)."""
        if schedule.by == "steps":
            return rate_after(lr, schedule, steps, step + 1)
        return rate_after(lr, schedule, self.full(steps), self.full(step + 1))

    def full(self, step: int) -> float:
        """The samples before `step` in steps of the last phase's size."""
        return self.position(step) / self.starts[-1].samples
