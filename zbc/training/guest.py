"""Callbacks of a run around its steps: metrics, evaluations, checkpoints, requests to stop."""

from __future__ import annotations

from zbc.runtime.core.progress import StepResult


class Guest:
    """Callbacks; each is called on all guests of a run in the order of their registration, on all ranks."""

    def asks(self) -> bool:
        """Whether this rank wants the run to stop."""
        return False

    def told(self, result: StepResult) -> None:
        """Receives the result of the next step. An error raised here ends the run."""

    def due(self, step: int, *, last: bool, stopping: bool = False) -> bool:
        """Whether `after` is to be called after step `step` (from 0), which has to be final then.

        `last`: the run ends with this step. `stopping`: it ends because it was asked to.
        """
        return False

    def after(self, step: int) -> None:
        """Runs the callback's work after a step."""

    def check(self) -> None:
        """Raises an error of background work; does not wait."""

    def wait(self) -> None:
        """Waits until background work has completed. Raises its error."""
