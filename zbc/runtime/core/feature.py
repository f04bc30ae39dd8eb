"""Optional features of a plan: hooks that the executor calls around the ops of a step.

A feature that only adds ops needs no hooks: a row in zbc/ops.py and a handler in the table of handlers.py. A feature
that has state between ops, or acts at the start or end of every step, is a `Feature` of the worker; one that acts
around ops of other features wraps their handlers: `with_weights` (gathers.py) and `in_rows` (packing.py) when
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
    """The arguments from which a rank's features are built: `plans` has one per phase, the last one's is the final
    phase; `shared` holds objects shared with other ranks; `tied` maps each weight that stages share to these stages,
    the owner's first."""

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
    """Hooks, all of them optional."""

    meets = False  # whether there are collectives inside the ops that run layers

    def opens(self, worker: Worker) -> None:
        """A step begins."""

    def begins(self, worker: Worker) -> None:
        """Called before the first step, once all ranks have started."""

    def keeps(self, run: PhaseRun, stage: Stage, key: Key) -> Keeps | None:
        """How state is kept between F and B; None: as the graph on the device."""

    def source(self, op: Op) -> Source | None:
        """The source of an op's input if no other stage feeds its stage; None: the data, or the loss."""

    def reader(self, worker: Worker, op: Op) -> int | None:
        """The reader of an op's output if no other stage reads it; None: no reader, or the loss."""

    def lays(self, run: PhaseRun, stage: int) -> Callable[[Tensor], Tensor] | None:
        """A function applied to the output of a stage before its readers get it; None: unchanged."""

    def steps(self, worker: Worker, op: Op) -> None:
        """The weights of an owner, such as a stage, have been updated."""

    def reduces(self, worker: Worker, op: Op) -> None:
        """The gradients of an owner are about to be all-reduced over its replicas."""

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        """The gradients of these stages are about to be read: once per step."""

    def answers(self, worker: Worker, found: dict[str, Answer]) -> dict[str, Answer]:
        """Filters `found`, by parameter, to the entries that this rank reports in the norm or writes as weights."""
        return found

    def entries(self, worker: Worker, which: Callable[[Key], bool] = lambda key: True) -> Mapping[int, Tensor | float]:
        """Values of a step other than losses and norms, by index in the vector: of some microbatches, or all."""
        return {}

    def closes(self, worker: Worker) -> None:
        """All ops of a step have run; blocks until the work that they started has completed."""

    def tells(self, worker: Worker, result: StepResult) -> StepResult:
        """Returns the result of a step with this feature's entries added."""
        return result

    def repeats(self, worker: Worker) -> None:
        """The forwards of a step are about to run again: drops their outputs."""

    def leftovers(self, worker: Worker) -> list[str]:
        """Descriptions of values that a finished step should have consumed but did not."""
        return []

    def gathers(self, worker: Worker) -> None:
        """Makes the full weights resident for a task between steps."""

    def evaluates(self, worker: Worker) -> None:
        """An evaluation is about to run."""

    def trains(self, worker: Worker) -> None:
        """An evaluation has completed."""

    def kept(self, stage: int) -> Mapping[str, Tensor]:
        """Additional tensors of a stage for checkpoints, by the feature's own names; the same on all its replicas."""
        return {}

    def saves(self, worker: Worker) -> None:
        """A checkpoint is about to be written."""

    def ends(self) -> None:
        """The rank has finished: ends the feature's threads."""


F = TypeVar("F", bound=Feature)


class Features:
    """The features of a rank, at most one of each type."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self._found = {type(feature): feature for feature in features}

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._found.values())

    def find(self, kind: type[F]) -> F | None:
        """The feature of that type; None if the plan does not need it."""
        return cast("F | None", self._found.get(kind))

    def of(self, kind: type[F]) -> F:
        """The feature of that type. Raises E703 if the plan does not need it."""
        feature = self.find(kind)
        if feature is None:
            text = f"run: an op needs what this plan was not made for: {kind.__name__.lower()}"
            raise ZbcError("E703", text, hint="plan again")
        return feature
