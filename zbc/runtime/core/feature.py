"""What a plan may ask for beside the pipeline itself, as the executor sees it: hooks around the ops of a step.

A feature that only adds ops needs none of this: a row in zbc/ops.py and a handler in the table of handlers.py. One that
has state between ops, or does something where every step begins and ends, is a `Feature` of the worker; one that does
something around ops of other features wraps their handlers: `with_weights` (gathers.py) and `in_rows` (packing.py) when
the script is made, `with_added` (added.py) in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from zbc.errors import ZbcError
from zbc.ir import Key, Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zbc.plan.directory import Manifest, RankPlan
    from zbc.runtime.core.optimizer import StageOptimizer
    from zbc.runtime.core.progress import StepResult
    from zbc.runtime.core.route import Keeps, Source
    from zbc.runtime.core.stage import Stage
    from zbc.runtime.core.state import PhaseRun, Worker
    from zbc.runtime.features.tensor_parallel import Shared


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Context:
    """What a feature of a rank of the run is built from: `plans` are those of all phases, the last one is what the
    training comes to; `shared` is what other ranks share with this one; `tied` are weights that stages share, with
    those stages, the owner's first."""

    plans: Sequence[RankPlan]
    stages: Mapping[int, Stage]
    optimizers: Mapping[int, StageOptimizer]
    rank: int
    device: torch.device
    shared: Shared
    tied: Mapping[str, tuple[int, ...]]

    @property
    def manifest(self) -> Manifest:
        return self.plans[-1].manifest


class Feature:
    """Every hook may be left out."""

    meets = False  # whether ranks meet inside of the ops that run layers

    def opens(self, worker: Worker) -> None:
        """A step begins."""

    def begins(self, worker: Worker) -> None:
        """The first step is to come; all ranks are here."""

    def keeps(self, run: PhaseRun, stage: Stage, key: Key) -> Keeps | None:
        """What else than the graph on the device is kept between F and B; None: that."""

    def source(self, op: Op) -> Source | None:
        """Where an op of a stage that no other one feeds finds what it reads; None: in the data, or in the loss."""

    def reader(self, worker: Worker, op: Op) -> int | None:
        """Who reads what an op of a stage makes that no other one reads; None: nobody, or the loss."""

    def lays(self, run: PhaseRun, stage: int) -> Callable[[Tensor], Tensor] | None:
        """What the output of a stage is made before others read it."""

    def steps(self, worker: Worker, op: Op) -> None:
        """An owner of weights, such as a stage, has been stepped."""

    def reduces(self, worker: Worker, op: Op) -> None:
        """The gradients of an owner are about to be summed over its copies."""

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        """The gradients of these stages are about to be asked for: once per step."""

    def answers(self, worker: Worker, found: dict[str, Answer]) -> dict[str, Answer]:
        """What this rank answers for of what it has, by parameter: in the norm, and in what is written of weights."""
        return found

    def entries(self, worker: Worker, which: Callable[[Key], bool] = lambda key: True) -> Mapping[int, Tensor | float]:
        """What is told of a step beside losses and norms, by its place in the vector: of some microbatches, or all."""
        return {}

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

    def evaluates(self, worker: Worker) -> None:
        """An evaluation is about to run."""

    def trains(self, worker: Worker) -> None:
        """An evaluation is over."""

    def kept(self, stage: int) -> Mapping[str, Tensor]:
        """What checkpoints keep of a stage besides, by names of its own; all ranks with a copy have the same."""
        return {}

    def saves(self, worker: Worker) -> None:
        """A checkpoint is about to be written."""

    def ends(self) -> None:
        """The rank is done: end the threads that work for it."""


F = TypeVar("F", bound=Feature)


class Features:
    """Those of a rank, one of a kind."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self._found = {type(one): one for one in features}

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._found.values())

    def find(self, kind: type[F]) -> F | None:
        """None where the plan does not ask for it."""
        return cast("F | None", self._found.get(kind))

    def of(self, kind: type[F]) -> F:
        """Raises E703 where the plan does not ask for it."""
        found = self.find(kind)
        if found is None:
            text = f"run: an op needs what this plan was not made for: {kind.__name__.lower()}"
            raise ZbcError("E703", text, hint="plan again")
        return found
