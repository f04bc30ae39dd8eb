"""Which layers of a stage are frozen in which microbatch, and what that does to the gradients of a step.

An op `W s1 m3 75%` leaves out a quarter of the stage's layers: whole layers, whose parameters get no gradient from that
microbatch. Layers take turns. Think of them in a ring: each op, in the order of the microbatches of all replicas,
freezes as many as it says, beginning where the one before ended, and a step goes on where the step before ended. So
within a step the layers of a stage rest equally often, give or take once, and who comes first moves on. It follows from
(seed, step, stage, microbatch) alone.

The gradient of a layer is the mean over the microbatches in which it was trained: the sum of shares 1/m that backward
leaves is scaled by m over their number. A layer that was trained in none has no gradient, and its weights, the state of
the optimizer included, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import WHOLE, Key, Op
from zbc.ops import experts_of
from zbc.plan.directory import Manifest, RankPlan
from zbc.runtime.core.feature import Feature
from zbc.runtime.core.optimizer import StageOptimizer, inside
from zbc.runtime.core.route import KEEPS, Finish, Keeps, Left
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import PhaseRun
from zbc.runtime.features.sharded import Sharded
from zbc.runtime.seeding import seed_of

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


class Turns:
    """The turns of one stage in the steps of one plan.

    `frozen` is how many of its `layers` each microbatch of a replica freezes; layers are named by their place in the
    stage. The first `after` steps freeze none. So many neighbouring replicas freeze alike as are `together`: what one
    of them leaves out of experts that they share out is of the rows of all.
    """

    def __init__(
        self, frozen: Sequence[int], layers: Sequence[int], *, replicas: int, after: int, seed: int, together: int = 1
    ) -> None:
        self._frozen, self._layers, self._after, self._together = frozen, layers, after, together
        # By number of a microbatch of all replicas, of those that freeze alike of the first.
        self._before = [0, *accumulate(list(frozen) * (replicas // together))]
        self._first = seed % len(layers)
        self.microbatches = len(frozen) * replicas

    def _start(self, step: int) -> int:
        return self._first + (step - self._after) * self._before[-1]

    def resting(self, step: int, number: int) -> frozenset[int]:
        """The layers that are frozen in microbatch `number` of a step."""
        replica, mb = divmod(number, len(self._frozen))
        count, number = self._frozen[mb], replica // self._together * len(self._frozen) + mb
        if step < self._after or not count:
            return frozenset()
        start, ring = self._start(step) + self._before[number], self._layers
        return frozenset(ring[(start + turn) % len(ring)] for turn in range(count))

    def trained(self, step: int) -> dict[int, int]:
        """In how many microbatches of a step, over all replicas, each layer is trained."""
        if step < self._after:
            return dict.fromkeys(self._layers, self.microbatches)
        start, size = self._start(step), len(self._layers)
        rounds, more = divmod(self._before[-1], size)
        rests = {layer: rounds + ((place - start) % size < more) for place, layer in enumerate(self._layers)}
        return {layer: self.microbatches - self._together * count for layer, count in rests.items()}


def turns_of(ops: Iterable[Op], stage: Stage, manifest: Manifest, after: int) -> Turns | None:
    """The turns of a stage of which this rank runs `ops`; None where nothing is frozen."""
    shares = {op.mb: op.share for op in ops if op.kind.makes_part and op.stage == stage.index}
    layers = [i for i, one in enumerate(stage.layers) if any(p.requires_grad for p in one.module.parameters())]
    frozen = [round(len(layers) * (WHOLE - shares.get(mb, WHOLE)) / WHOLE) for mb in range(manifest.microbatches)]
    if not any(frozen):
        return None
    seed = seed_of(stage.seed, "freeze", stage.index)
    together = (
        manifest.copies if manifest.averages else manifest.ep or 1
    )  # that have no means in common, or all experts
    return Turns(frozen, layers, replicas=manifest.copies, after=after, seed=seed, together=together)


def scale(stage: Stage, optimizer: StageOptimizer, turns: Turns, step: int) -> None:
    """Make the gradients of a stage, summed over all replicas, means over the microbatches in which layers trained.

    Raises E509 for a layer that has gradients from none.
    """
    of = {
        f"{layer.name}.{name}": i for i, layer in enumerate(stage.layers) for name, _ in layer.module.named_parameters()
    }
    trained, m = turns.trained(step), turns.microbatches
    for name, grad in _gradients(optimizer):
        count = trained.get(of[name], m)
        if not count:
            text = f"model: layer {stage.layers[of[name]].name} computes weight gradients although it is frozen"
            hint = "in the backward of a torch.autograd.Function ask ctx.needs_input_grad"
            raise ZbcError("E509", text, hint=hint)
        if count < m:
            grad.mul_(m / count)


@dataclass(frozen=True, slots=True)
class Rests(Keeps):
    """Some layers are frozen in turn."""

    turns: Turns

    def forward(
        self, worker: Worker, stage: Stage, x: Tensor, number: int, finish: Finish, slot: Slot | None
    ) -> tuple[Tensor, Left | None]:
        with stage.resting(self.turns.resting(worker.step, number)) as frozen:
            slot = Slot(frozen) if frozen else slot  # which sees to it that layers of users do not train either
            return KEEPS.forward(worker, stage, x, number, finish, slot)


class Resting(Feature):
    """Layers that take turns, by plan and stage; gradients of those that were frozen in some microbatches become means
    over the others."""

    def __init__(self, turns: Iterable[tuple[RankPlan, Mapping[int, Turns]]]) -> None:
        self._turns = {id(plan): found for plan, found in turns}

    def of(self, run: PhaseRun) -> Mapping[int, Turns]:
        """By stage."""
        return self._turns.get(id(run.plan), {})

    def keeps(self, run: PhaseRun, stage: Stage, key: Key) -> Keeps | None:
        turns = self.of(run).get(stage.index)
        return None if turns is None else Rests(turns)

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        for stage, turns in self.of(worker.phase_run).items():
            for owner in (stage, experts_of(stage)):
                if owner in worker.optimizers:
                    scale(worker.stages[stage], worker.optimizers[owner], turns, worker.step)


def _gradients(optimizer: StageOptimizer) -> Iterator[tuple[str, Tensor]]:
    """What this rank steps with, and of which parameter it is."""
    if (sharded := inside(optimizer, Sharded)) is not None:
        return sharded.gradients()
    return ((name, p.grad) for name, p in optimizer.parameters.items() if p.grad is not None)
