"""`zbc check --gradients`: two microbatches through the stages of a plan and through plain autograd, compared.

All stages run here, on the CPU, one after the other: with separate B and W, recompute, compilation, and types of
boundary tensors as in the plan. The reference runs the same layers, unpatched and unpartitioned, with the same data and
random numbers, and calls `loss.backward()`.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Program
from zbc.job.userobject import FAILURES
from zbc.plan.directory import RankPlan, StoredPlan, assemble
from zbc.runtime.core.bundle import Alongside, call, names_of
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import AUTOCAST, each, lower_precision
from zbc.runtime.features.added import Adding, adding_to
from zbc.runtime.features.scaling import Scale, Scaling
from zbc.runtime.seeding import seed_of, seeded
from zbc.runtime.transports.hub import Hub
from zbc.training import frames
from zbc.training.building.context import Settings, group_of, layer_plans, samples_of, split_batches, steps_of
from zbc.training.data.counted import count_of
from zbc.training.data.data import Batches, RankBatches
from zbc.training.models.model import loss_of
from zbc.training.probing.probe import overlaps, refuse_stage
from zbc.training.probing.shapes import read_by
from zbc.training.probing.trials import ROUNDING, apart, largest
from zbc.training.profiling.rig import passes
from zbc.training.worker import build_worker

CPU = torch.device("cpu")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}  # of the largest gradient of a parameter


class Compared(NamedTuple):
    """One parameter, and the distance between its gradients (trials.py)."""

    name: str
    error: float
    finite: bool = True  # whether the gradient of plain autograd is finite


@dataclass(frozen=True)
class Checkup:
    """The result; `stages` describes how each stage ran. `unscaled`: layers that add gradients in their own backward
    which do not scale with the loss."""

    stages: tuple[str, ...]
    loss: float
    plain_loss: float
    parameters: tuple[Compared, ...]
    tolerance: float
    unscaled: tuple[str, ...] = ()

    @property
    def wrong(self) -> tuple[Compared, ...]:
        return tuple(found for found in self.parameters if not found.error <= self.tolerance)

    @property
    def fine(self) -> bool:
        unlike = math.isfinite(self.loss) or math.isfinite(self.plain_loss)
        return not self.wrong and (not unlike or math.isclose(self.loss, self.plain_loss, rel_tol=self.tolerance))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": "zbc-checkup",
            "version": 1,
            "fine": self.fine,
            "tolerance": self.tolerance,
            "loss": {"plan": self.loss, "plain": self.plain_loss},
            "stages": list(self.stages),
            "unscaled": list(self.unscaled),
            "parameters": [
                {"name": found.name, "error": found.error if math.isfinite(found.error) else None}
                for found in self.parameters
            ],
        }


def check_up(plan: StoredPlan) -> Checkup:
    """Runs the first microbatches of step 0 both ways. Raises E5xx if the model, its data or its loss do not work, or
    ranks of the plan would refuse them."""
    single, worker = _alone(plan, plan.manifest.slices)
    if single.manifest.slices > 1 and any(layer.traits.random for s in worker.stages.values() for layer in s.layers):
        single, worker = _alone(plan, 1)  # slices draw other numbers than whole microbatches
    manifest, settings = single.manifest, Settings.of(single.manifest)
    for rank, ops in enumerate(plan.program.ranks):
        for s in plan.program.placement.stages_of(rank):
            refuse_stage(plan.manifest, ops, worker.stages[s])
    if (scaling := worker.features.find(Scaling)) is not None:
        scaling.scale = Scale(1.0)
    try:
        result = run_step(worker, 0)
        mine = {name: p.grad for optimizer in worker.optimizers.values() for name, p in optimizer.parameters.items()}
        loss, plain = plain_gradients(single)
    except ZbcError:
        raise
    except FAILURES as error:  # of a layer, the loss or the data of the job
        raise frames.failure(error, "model: it fails in training") from error
    rounding = ROUNDING * max(map(largest, plain.values()), default=0.0)
    least = rounding * (settings.model.compile or manifest.slices > 1)  # otherwise both have the same rounding
    found = tuple(
        Compared(name, apart(grad, mine.get(name), least), grad is None or bool(grad.isfinite().all()))
        for name, grad in plain.items()
    )
    stages, mean = _ways(single, settings), math.nan if result is None else result.loss
    tolerance, stages_of = TOLERANCE[settings.model.dtype], (worker.stages[s] for s in sorted(worker.stages))
    unscaled = tuple(layer.name for stage in stages_of for layer in stage.layers if layer.traits.adds)
    return Checkup(stages, mean, loss, found, tolerance, unscaled)


def _alone(plan: StoredPlan, slices: int) -> tuple[StoredPlan, Worker]:
    """The plan's stages on one rank, without the end of a step, for two microbatches: both in flight if the plan has
    several in flight; and its worker."""
    manifest, stages, split = plan.manifest, range(plan.manifest.stages), plan.program.split
    count = min(2, manifest.microbatches)
    together = any(overlaps(ops, s) for ops in plan.program.ranks for s in stages)
    each = [range(count)] if together else [[mb] for mb in range(count)]
    ops = [op for mbs in each for op in passes(mbs, len(stages), slices, lambda s, mb: s in split)]
    placement = replace(manifest.to_placement(), pipes=((0,) * len(stages),))
    program = Program(
        placement,
        count,
        ((*ops, *(Op(kind, 0) for kind in Kind if kind.is_barrier)),),
        ("doctor",),
        slices=slices,
        tied=manifest.tied,
        ties=tuple(manifest.ties),
    )
    whole = slices < manifest.slices
    whole_rows = {key: value for key, value in manifest.planning.get("schedule", {}).items() if key != "tokens"}
    single, _ = assemble(
        program,
        layers=manifest.layers,
        boundaries=None if whole else manifest.boundaries,
        microbatch_size=manifest.microbatch_size,
        cuts=() if whole else manifest.cuts,
        planning={**manifest.planning, "schedule": whole_rows, "optimizer": {"sync": "before-step"}},
        training={**manifest.training, "optimizer": {**manifest.training["optimizer"], "sync": "before-step"}},
    )
    return StoredPlan(single, program), build_worker(RankPlan(0, program.ranks[0], single), Hub(1).end(0), CPU)


def plain_gradients(plan: StoredPlan, device: torch.device = CPU) -> tuple[float, dict[str, Tensor | None]]:
    """Mean loss of all microbatches of step 0 and its gradients, by plain autograd of the unmodified model."""
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    seed, lowered, count = settings.train.seed, settings.lowered, manifest.microbatches
    modules = {name: module.to(device) for name, module in plain_modules(settings).items()}
    owned: dict[int, tuple[str, nn.Parameter]] = {}  # each parameter once, under the name of its first owner
    for name, module in modules.items():
        for local, parameter in module.named_parameters():
            owned.setdefault(id(parameter), (f"{name}.{local}", parameter))
    parameters = dict(owned.values())
    lower_precision(parameters.values(), lowered)
    criterion = loss_of(settings.model, None, modules.values())
    if settings.data.items == "steps":
        steps = steps_of(settings, manifest)
        batches: RankBatches = split_batches(settings, steps)
        weights, criterion = [batches.counts(0, mb)[1] for mb in range(count)], steps.cut(criterion)
    else:
        batches = Batches(
            samples_of(settings),
            seed=seed,
            microbatches=count,
            size=manifest.microbatch_size,
            lowered=lowered,
            where=settings.where,
        )
        counts = count_of(criterion, settings.model.loss, batches.targets(0, 0)) or (lambda target: 1.0)
        weights = [counts(batches.targets(0, mb)) for mb in range(count)]
    to = methodcaller("to", device)
    total, low, after = 0.0, AUTOCAST.get(settings.model.dtype), read_by(layer_plans(settings))
    *_, last = modules
    for mb, weight in enumerate(weights):
        if not weight:
            continue  # no target counts
        target = each(to, batches.targets(0, mb))
        adding = adding_to(Adding(1.0 / count))
        with adding, nullcontext() if low is None else torch.autocast(device.type, low):
            made = dict[str, Any]()
            for name, module in modules.items():
                if after[name]:
                    given = made[after[name][0]] if len(after[name]) == 1 else tuple(made[src] for src in after[name])
                else:
                    given = each(to, batches.inputs(0, mb))
                    if not isinstance(given, Tensor):
                        group = group_of(settings.model, name)
                        given = given[group] if group else Alongside((), given)
                with seeded(seed_of(seed, 0, mb, name), device):
                    x = call(module, given, names_of(module.forward), later=frozenset() if name == last else None)
                    made[name] = x
            loss = criterion(x, target) * (weight * count / sum(weights))
        if loss.requires_grad:
            (loss / count).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total / count, {name: p.grad for name, p in parameters.items()}


def plain_modules(settings: Settings) -> dict[str, nn.Module]:
    """The layers of the model by name, as plain torch modules with tied weights."""
    plans = layer_plans(settings)
    modules = {plan.name: plan.build(settings.train.seed) for plan in plans}
    for plan in plans:
        for local, target in plan.ties.items():
            owner = next(name for name in modules if target.startswith(f"{name}."))
            path, _, leaf = local.rpartition(".")
            shared = modules[owner].get_parameter(target.removeprefix(f"{owner}."))
            setattr(modules[plan.name].get_submodule(path), leaf, shared)
    return modules


def _ways(plan: StoredPlan, settings: Settings) -> tuple[str, ...]:
    split, slices = plan.program.split, plan.manifest.slices
    more = ", compiled" * settings.model.compile + f", in {slices} slices" * (slices > 1)
    return tuple(
        ("B and W apart" if s in split else "backward in one")
        + (", recomputed" * (settings.memory.of(s) != "keep"))
        + more
        for s in range(plan.manifest.stages)
    )
