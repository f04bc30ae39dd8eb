"""The optimizers of a rank, and what sums its gradients over the copies of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.job import spec
from zbc.plan.directory import Manifest, meeting
from zbc.runtime.core.bucket import Bucket, GradientSum, absent
from zbc.runtime.core.optimizer import StageOptimizer, build_optimizer
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Worker
from zbc.runtime.features.averaging import Averages, Averaging
from zbc.runtime.features.sharded import Sharded
from zbc.runtime.features.versions import OneVersion, TwoVersions
from zbc.runtime.features.vocabulary_state import Vocabulary
from zbc.training.building.context import LOWERED, Settings, section
from zbc.training.models import model
from zbc.training.probing.shapes import Shapes


def tied_weights(manifest: Manifest, plans: Sequence[model.LayerPlan]) -> dict[str, tuple[int, ...]]:
    """The weights that stages share, with those stages, the owner's first."""
    found: dict[str, tuple[int, ...]] = {}
    if not manifest.tied or manifest.vocabulary is not None:
        return found
    home = {name: stage for stage, names in enumerate(manifest.layers) for name in names}
    for plan in plans:
        for target in plan.ties.values():
            owner = next(home[other.name] for other in plans if target.startswith(f"{other.name}."))
            found[target] = (*dict.fromkeys((*found.get(target, (owner,)), home[plan.name])),)
    return found


def optimizer_of(
    settings: Settings,
    stage: Stage,
    manifest: Manifest,
    rank: int,
    plans: Sequence[model.LayerPlan],
    late: int,
) -> StageOptimizer:
    """`late`: by how many steps of the stage its gradients come late, where it steps on its own."""
    ranks = meeting(manifest, Op(Kind.REDUCE, stage.index), manifest.topology.of(rank).tp)
    options, lowered = settings.optimizer, LOWERED[settings.model.parameters]
    ahead = options.sync == "post-validate"
    seat = manifest.topology.of(rank)
    own = manifest.topology.ranks((seat.pp,), seat.tp) if manifest.resident else ranks
    if manifest.sharded and len(own) > 1:
        tied = {target for plan in plans for target in plan.ties.values()} if manifest.tied else set[str]()
        whole = frozenset(tied & stage.parameters.keys())
        return Sharded(
            options,
            stage.parameters,
            stage.casts,
            ranks=own,
            rank=rank,
            among=ranks,
            whole=whole,
            lowered=lowered,
            ahead=ahead,
            frees=bool(manifest.resident),
            low=torch.bfloat16 if settings.model.builtin and settings.model.dtype == "bfloat16" else None,
            scatters=manifest.scatters,
        )
    if manifest.flushless and options.sync == "asynchronous":
        return OneVersion(options, stage.parameters, late if options.lookahead else 0)
    if manifest.flushless:
        return TwoVersions(options, stage.parameters)
    return build_optimizer(options, stage.parameters, stage.casts, lowered=lowered, ahead=ahead)


def averages_of(manifest: Manifest, optimizers: Mapping[int, StageOptimizer], rank: int) -> Averages:
    """The weights that replicas average, on a rank of the run. Raises E406 if the plan does not say how."""
    given = manifest.planning.get("parallel", {}).get("average")
    if given is None:
        raise ZbcError("E406", "plan: replicas average their weights, and parallel.average does not say how")
    asked, run, placement = section(spec.Average, given), manifest.topology, manifest.to_placement()

    def one(stage: int) -> Averaging:
        ranks = run.ranks(placement.holders(stage), run.of(rank).tp)
        return Averaging([p for _, p in sorted(optimizers[stage].parameters.items())], ranks, asked)

    return Averages({stage: one(stage) for stage in optimizers})


def sums_of(worker: Worker, shapes: Shapes) -> dict[Op, GradientSum]:
    """What each REDUCE and TIE of the plan sums; `shapes` of all parameters of the model."""
    sizes = dict(zip(shapes.parameters, shapes.sizes, strict=True))
    manifest, found, tp = worker.plan.manifest, dict[Op, GradientSum](), worker.share
    for op in dict.fromkeys(op for run in worker.phase_runs for op in run.plan.ops if op.kind.sums):
        if op.kind is Kind.REDUCE_V:
            shared = worker.features.of(Vocabulary)
            rows = shared.optimizer
            found[op] = rows.dealt or Bucket(list(rows.parameters.values()), shared.replicas)
            continue
        if op.kind is Kind.TIE:
            mine = {n: p for s in worker.stages.values() for n, p in s.parameters.items() if n in worker.tied}
            summed = [
                mine[n] if n in mine else absent(_share_of(worker, sizes[n]), shapes.gradients[n], worker.device)
                for n in sorted(worker.tied)
                if n in shapes.gradients  # else it is frozen, on every rank
            ]
            found[op] = Bucket(summed, meeting(manifest, op, tp))
            continue
        optimizer = worker.optimizers[op.stage]
        own = [p for name, p in optimizer.parameters.items() if name not in worker.tied]
        found[op] = optimizer if isinstance(optimizer, Sharded) else Bucket(own, meeting(manifest, op, tp))
    return found


def _share_of(worker: Worker, size: int) -> int:
    """Elements of a shared weight on this rank: of the words of an embedding, which is what built-in models share."""
    if worker.group is None:
        return size
    words = worker.plan.manifest.planning["model"]["vocab"]
    low, high = worker.group.bounds(words)
    return size // int(words) * (high - low)
