"""What a plan may ask for beside the pipeline itself, as the executor sees it: hooks around the ops of a step.

A feature that only adds ops needs none of this: a row in ops.py and a handler. One that has state between ops, or does
something where every step begins and ends, is a `Feature` of the worker; one that does something around ops of other
features wraps their handlers when the script is made (handlers.py: `with_weights`, `in_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbc.runtime.progress import StepResult
    from zbc.runtime.state import Worker


class Feature:
    """Every hook may be left out."""

    def opens(self, worker: Worker) -> None:
        """A step begins."""

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        """The gradients of these stages are about to be asked for: once per step."""

    def closes(self, worker: Worker) -> None:
        """All ops of a step have run; blocks until what they started is over."""

    def tells(self, worker: Worker, result: StepResult) -> StepResult:
        """What else is to be said of a step."""
        return result

    def repeats(self, worker: Worker) -> None:
        """The forwards of a step are about to run again: drop what they have made."""

    def leftovers(self, worker: Worker) -> list[str]:
        """What a finished step should have used up and did not."""
        return []

    def gathers(self, worker: Worker) -> None:
        """Something between steps needs whole weights."""
