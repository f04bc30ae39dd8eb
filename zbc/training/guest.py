"""What takes part in a run beside its steps: numbers, evaluations, checkpoints, whoever asks it to stop."""

from __future__ import annotations

from zbc.runtime.core.progress import StepResult


class Guest:
    """Every hook is called on all guests of a run, in the order in which they came, by all ranks alike."""

    def asks(self) -> bool:
        """Whether this rank wants the run to stop."""
        return False

    def told(self, result: StepResult) -> None:
        """Take the result of the next step. What is raised here ends the run."""

    def due(self, step: int, *, last: bool, stopping: bool = False) -> bool:
        """Whether `after` is to be called after step `step` (from 0), which has to be final then.

        `last`: the run ends with it. `stopping`: it ends with it because it was asked to.
        """
        return False

    def after(self, step: int) -> None:
        """Do what is due after a step."""

    def check(self) -> None:
        """Raise what has gone wrong beside the steps; does not wait."""

    def wait(self) -> None:
        """Wait until nothing goes on beside the steps any more. Raises what went wrong with it."""
