"""Optional features of a plan: hooks that the executor calls around the ops of a step.

A feature that only adds ops needs no hooks: a row in zbc/ops.py and a handler in the table of handlers.py. A feature
that has state between ops, acts at the start or end of every step, around ops of other features or on their routes is a
`Feature` of the worker. It builds itself from the `Context` of its rank (features/__init__.py); no other code names it
for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from zbc.errors import ZbcError
from zbc.ir import Op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zbc.plan.directory import Manifest, RankPlan
    from zbc.runtime.core.optimizer import StageOptimizer
    from zbc.runtime.core.route import Route
    from zbc.runtime.core.stage import Ports, Stage
    from zbc.runtime.core.state import PhaseRun, Worker
    from zbc.runtime.core.tensors import Part
    from zbc.runtime.features.tensor_parallel import Shared
    from zbc.runtime.features.words.vocabulary_state import Words
    from zbc.runtime.transports.transport import Transport


Answer = TypeVar("Answer")


class Site(Protocol):
    """A rank of a run, as far as features ask before its stages are built (training/building/context.py)."""

    transport: Transport
    device: torch.device
    manifest: Manifest
    rank: int  # of the run
    settings: Any  # the sections of the plan
    shares_sequence: bool | str


@dataclass(frozen=True)
class Context:
    """The arguments from which a rank's features are built: `plans` has one per phase, the last one's is the final
    phase; `shared` holds objects shared with other ranks; `tied` maps each weight that stages share to these stages,
    the owner's first; `slices` of a microbatch, if it has some, and `specs` of a stage in each; `words`: the rows of a
    parallel vocabulary; `unequal`: rows of microbatches differ in length."""

    plans: Sequence[RankPlan]
    stages: Mapping[int, Stage]
    optimizers: Mapping[int, StageOptimizer]
    rank: int
    device: torch.device
    shared: Shared
    tied: Mapping[str, tuple[int, ...]]
    slices: Sequence[Part]
    specs: Mapping[int, Sequence[Ports]]
    words: Words | None
    unequal: bool

    @property
    def manifest(self) -> Manifest:
        return self.plans[-1].manifest


class Pause(NamedTuple):
    """What a task between steps needs: `means`: averages of weights in their place; `whole`: all weights resident;
    `equal`: replicas that train apart made equal."""

    means: bool = False
    whole: bool = False
    equal: bool = False


class Feature:
    """Hooks, all of them optional."""

    meets = False  # whether there are collectives inside the ops that run layers
    kept: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({})
    """Additional tensors of stages for checkpoints, by the feature's own names; the same on all replicas."""

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        """A phase or an evaluation has its script: may wrap handlers, and decide how its steps end."""

    def routes(self, worker: Worker, run: PhaseRun, op: Op, route: Route) -> Route:
        """The route of an op that computes, given the one that it has without this feature."""
        return route

    def opens(self, worker: Worker) -> None:
        """A step begins."""

    def reduces(self, worker: Worker, op: Op) -> None:
        """The gradients of an owner are about to be all-reduced over its replicas."""

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        """The gradients of these stages are about to be read: once per step."""

    def answers(self, worker: Worker, found: dict[str, Answer]) -> dict[str, Answer]:
        """Filters `found`, by parameter, to the entries that this rank reports in the norm or writes as weights."""
        return found

    def closes(self, worker: Worker) -> None:
        """All ops of a step have run; blocks until the work that they started has completed."""

    def repeats(self, worker: Worker) -> None:
        """The forwards of a step are about to run again: drops their outputs."""

    def leftovers(self, worker: Worker) -> list[str]:
        """Values that a finished step should have consumed but did not; see `ending.leftovers`."""
        return []

    def pauses(self, worker: Worker, pause: Pause) -> None:
        """A task between steps begins."""

    def resumes(self, worker: Worker) -> None:
        """It has ended, and steps follow."""

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
