"""Layer freezing: the layers of a stage that are frozen in each microbatch, and the scaling of a step's gradients.

An op `W s1 m3 75%` freezes a quarter of the stage's layers: whole layers, whose parameters get no gradient from that
microbatch. Layers take turns in a ring: each op, in the order of the microbatches of all replicas, freezes its number
of layers, starting after the last one frozen by the previous op, also across steps. So within a step the layers of a
stage are frozen equally often, up to one, and the first layer changes from step to step. The turns depend on
(seed, step, stage, microbatch) alone.

The gradient of a layer is the mean over the microbatches in which it was trained: the sum of terms weighted 1/m that
backward accumulates is scaled by m over their number. A layer that was trained in none has no gradient, and its weights
and optimizer state stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import WHOLE, Op
from zbc.job.sections import Freeze
from zbc.ops import owners_among
from zbc.plan.directory import Manifest, RankPlan
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.optimizer import StageOptimizer
from zbc.runtime.core.route import KEEPS, Keeps, Made, Route
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Finish, Stage
from zbc.runtime.core.state import PhaseRun, Worker
from zbc.runtime.seeding import seed_of


class Turns:
    """The turns of one stage in the steps of one plan.

    `frozen` is the number of its `layers` that each microbatch of a replica freezes; layers are given by their index in
    the stage. The first `after` steps freeze none. Groups of `together` neighbouring replicas freeze the same layers:
    the gradient of a sharded expert is made from the rows of all of them.
    """

    def __init__(
        self, frozen: Sequence[int], layers: Sequence[int], *, replicas: int, after: int, seed: int, together: int = 1
    ) -> None:
        self._frozen, self._layers, self._after, self._together = frozen, layers, after, together
        # By number of a microbatch over all replicas, counting one replica of each group that freezes the same.
        self._before = [0, *accumulate(list(frozen) * (replicas // together))]
        self._first = seed % len(layers)
        self.microbatches = len(frozen) * replicas

    def resting(self, step: int, number: int) -> frozenset[int]:
        """The layers that are frozen in microbatch `number` of a step."""
        replica, mb = divmod(number, len(self._frozen))
        count, number = self._frozen[mb], replica // self._together * len(self._frozen) + mb
        if step < self._after or not count:
            return frozenset()
        start, ring = self._first + (step - self._after) * self._before[-1] + self._before[number], self._layers
        return frozenset(ring[(start + turn) % len(ring)] for turn in range(count))

    def trained(self, step: int) -> dict[int, int]:
        """For each layer the number of microbatches of a step, over all replicas, in which it is trained."""
        rests = Counter(layer for number in range(self.microbatches) for layer in self.resting(step, number))
        return {layer: self.microbatches - rests[layer] for layer in self._layers}


def turns_of(ops: Iterable[Op], stage: Stage, manifest: Manifest, after: int) -> Turns | None:
    """The turns of a stage of which this rank runs `ops`; None if nothing is frozen."""
    shares = {op.mb: op.share for op in ops if op.kind.makes_part and op.stage == stage.index}
    layers = [i for i, layer in enumerate(stage.layers) if any(p.requires_grad for p in layer.module.parameters())]
    frozen = [round(len(layers) * (WHOLE - shares.get(mb, WHOLE)) / WHOLE) for mb in range(manifest.microbatches)]
    if not any(frozen):
        return None
    seed = seed_of(stage.seed, "freeze", stage.index)
    # Replicas without common means, or that exchange rows of experts.
    together = manifest.copies if manifest.averages else manifest.topology.span
    return Turns(frozen, layers, replicas=manifest.copies, after=after, seed=seed, together=together)


def scale(stage: Stage, optimizer: StageOptimizer, turns: Turns, step: int) -> None:
    """Scales a stage's gradients, summed over all replicas, to means over the microbatches that trained each layer.
    Raises E509 for a layer that has gradients although none trained it."""
    of = {
        f"{layer.name}.{name}": i for i, layer in enumerate(stage.layers) for name, _ in layer.module.named_parameters()
    }
    trained, m = turns.trained(step), turns.microbatches
    for name, grad in optimizer.gradients():
        count = trained.get(of[name], m)
        if not count:
            text = f"model: layer {stage.layers[of[name]].name} computes weight gradients although it is frozen"
            hint = "in the backward of a torch.autograd.Function ask ctx.needs_input_grad"
            raise ZbcError("E509", text, hint=hint)
        if count < m:
            grad.mul_(m / count)


@dataclass(frozen=True, slots=True)
class Rests(Keeps):
    turns: Turns

    def forward(self, stage: Stage, x: Tensor, step: int, number: int, finish: Finish, slot: Slot | None) -> Made:
        with stage.resting(self.turns.resting(step, number)) as frozen:
            slot = Slot(frozen) if frozen else slot  # it drops gradients that users' layers compute for frozen ones
            return KEEPS.forward(stage, x, step, number, finish, slot)


class Resting(Feature):
    """The turns by plan and stage; scales gradients of layers that were frozen in some microbatches to means over the
    others."""

    def __init__(self, turns: Mapping[int, Mapping[int, Turns]]) -> None:
        self._turns = turns  # by the id of a plan

    def of(self, run: PhaseRun) -> Mapping[int, Turns]:
        return self._turns.get(id(run.plan), {})

    def routes(self, worker: Worker, run: PhaseRun, op: Op, route: Route) -> Route:
        turns = self.of(run).get(op.stage)
        return route if turns is None else route._replace(keeps=Rests(turns))

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        for stage, turns in self.of(worker.phase_run).items():
            for owner in owners_among(stage, worker.optimizers):
                scale(worker.stages[stage], worker.optimizers[owner], turns, worker.step)


def build(context: Context) -> Resting:
    after = Freeze.model_validate(context.manifest.planning.get("freeze", {}), strict=False).after

    def of(plan: RankPlan) -> dict[int, Turns]:
        found = {s: turns_of(plan.ops, stage, plan.manifest, after) for s, stage in context.stages.items()}
        return {s: turns for s, turns in found.items() if turns is not None}

    return Resting({id(plan): of(plan) for plan in context.plans})
