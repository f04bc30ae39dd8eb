"""Where in the data every step of a training is: a pure function of the step, so there is nothing to remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from zbc.job.learning_rate import RateSchedule, rate_after
from zbc.plan.directory import Manifest


class PhaseStart(NamedTuple):
    """Steps that take equally many samples, over all replicas of the pipeline."""

    first: int  # step, from 0
    position: int  # samples that the steps before it took
    samples: int  # that each of its steps takes


@dataclass(frozen=True)
class Phases:
    """The phases of a training, the last of which has no end.

    `shift` is what a training that began with other batches has taken more than these phases say.
    """

    starts: tuple[PhaseStart, ...]
    shift: int = 0

    @classmethod
    def of(cls, manifest: Manifest) -> Phases:
        """That of a plan: its ramp, then its own batches; of samples of unequal length, as if rows were samples."""
        if manifest.balance is not None:
            return cls.even(manifest.microbatches * manifest.topology.dp * manifest.microbatch_size)
        per = manifest.topology.dp * manifest.microbatch_size
        parts = [(part.microbatches * per, part.steps) for part in manifest.ramp]
        return cls.made([*parts, (manifest.microbatches * per, 0)])

    @classmethod
    def even(cls, samples: int) -> Phases:
        """Every step takes as many samples."""
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
        """How many samples a step takes."""
        return self.starts[self.index(step)].samples

    def position(self, step: int) -> int:
        """How many samples the steps before `step` took: where in the data it begins."""
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
        """The learning rate of a step of a training of `steps`, by steps or by samples as `schedule` has it."""
        if schedule.by == "steps":
            return rate_after(lr, schedule, steps, step + 1)
        return rate_after(lr, schedule, self.full(steps), self.full(step + 1))

    def full(self, step: int) -> float:
        """How many steps of the last phase's size the samples before `step` make."""
        return self.position(step) / self.starts[-1].samples
