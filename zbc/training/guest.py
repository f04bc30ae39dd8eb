"""Callbacks of a run around its steps: metrics, evaluations, checkpoints, requests to stop, counts of skipped steps.

A step with gradients that are not finite changes nothing on any rank (the verdict is to skip it). `[train]` determines
whether the run goes on, and all ranks decide the same, since they have the same results.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbc.errors import ZbcError
from zbc.job.spec import Train
from zbc.plan.directory import Manifest
from zbc.runtime.core.progress import StepResult
from zbc.text import listed, nth


class Guest:
    """Callbacks; each is called on all guests of a run in the order of their registration, on all ranks."""

    def asks(self) -> bool:
        """Whether this rank wants the run to stop."""
        return False

    def told(self, result: StepResult) -> None:
        """Receives the result of the next step. An error raised here ends the run."""

    def due(self, step: int, *, last: bool, stopping: bool = False) -> bool:
        """Whether `after` is to be called after step `step` (from 0), which has to be final then. `last`: the run ends
        with this step. `stopping`: it ends because it was asked to."""
        return False

    def after(self, step: int) -> None:
        """Runs the callback's work after a step."""

    def check(self) -> None:
        """Raises an error of background work; does not wait."""

    def wait(self) -> None:
        """Waits until background work has completed. Raises its error."""


_SHOWN = 4  # parameters that are named


class Skips(Guest):
    """Counts skipped steps in a row."""

    def __init__(self, manifest: Manifest) -> None:
        train = Train.model_validate(manifest.training["train"], strict=False)
        self._manifest = manifest
        self._limit, self._row = train.skip_limit, 0

    def told(self, result: StepResult) -> None:
        """Raises E704 if the step was skipped and the run may not go on."""
        if not result.skipped:
            self._row = 0
            return
        if result.scale > 1.0 and not result.bad_losses:
            return  # an overflow of float16, after which the scale is halved
        self._row += 1
        if self._row >= self._limit:
            raise self._error(result, "" if self._limit == 1 else f", the {nth(self._row)} in a row")

    def _error(self, result: StepResult, counted: str) -> ZbcError:
        text = f"run: step {result.step + 1} has gradients that are not finite{counted}"
        hint = "a lower lr, a longer warm-up, optimizer.clip_grad_norm; train.skip_limit decides"
        details = [*_losses(result), *_gradients(self._manifest.layers, result.bad_gradients)]
        return ZbcError("E704", text, hint=hint, details=details)


def origin(layers: Sequence[Sequence[str]], names: Sequence[str]) -> tuple[int, list[str]] | None:
    """The last layer with parameters in `names`, which backward reached first: its stage and these parameters."""
    for stage in reversed(range(len(layers))):
        for layer in reversed(layers[stage]):
            found = [name for name in names if name == layer or name.startswith(f"{layer}.")]
            if found:
                return stage, found
    return None


def _losses(result: StepResult) -> list[str]:
    if not result.bad_losses:
        return ["every loss is finite, so it happened in backward"]
    which = f"microbatch{'es' * (len(result.bad_losses) > 1)} {listed(result.bad_losses, _SHOWN)}"
    return [f"the loss is not finite for {which}, so it happened in forward"]


def _gradients(layers: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    first = origin(layers, names)
    if first is None:
        return []
    stage, found = first
    where = f"backward met it first in stage {stage}: {listed(found, _SHOWN)}"
    return [where, f"{len(names)} parameters have gradients that are not finite"]
