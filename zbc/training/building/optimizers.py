"""The optimizers of a rank, and the reductions of its gradients over the replicas of a stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.ops import TIED, WORDS, experts_of
from zbc.plan.directory import meeting
from zbc.plan.lateness import lateness
from zbc.runtime import features
from zbc.runtime.core.bucket import Bucket, GradientSum, absent
from zbc.runtime.core.feature import Context
from zbc.runtime.core.muon import Whole
from zbc.runtime.core.optimizer import StageOptimizer, inside
from zbc.runtime.core.stage import Stage
from zbc.training.building.context import Site

if TYPE_CHECKING:
    from zbc.runtime.features.tensor_parallel import Shared
    from zbc.runtime.features.words.vocabulary_state import Words


def tied_weights(site: Site) -> dict[str, tuple[int, ...]]:
    """The weights that stages share, each with its stages, the owner's first."""
    found: dict[str, tuple[int, ...]] = {}
    if not (site.manifest.tied or site.settings.adapter.rank) or site.manifest.vocabulary is not None:
        return found
    home = {name: stage for stage, names in enumerate(site.manifest.layers) for name in names}
    for plan in site.layers:
        for target in plan.ties.values():
            owner = next(home[other.name] for other in site.layers if target.startswith(f"{other.name}."))
            found[target] = (*dict.fromkeys((*found.get(target, (owner,)), home[plan.name])),)
    return found


def optimizers_of(
    site: Site, stages: Mapping[int, Stage], tied: Collection[str], shared: Shared, words: Words | None
) -> dict[int, StageOptimizer]:
    """The optimizers by owner: stages, the experts of each stage with some that are sharded, and `words`. Raises E505
    for experts in a stage that has none by the plan."""
    late = lateness(site.plan.ops) if site.manifest.flushless else {}
    wholes = {
        name: Whole(partial(cut.collect, group=group), cut.of)
        for name, cut in shared.cuts.items()
        if (group := shared.group) is not None
    }
    found = dict[int, StageOptimizer]()
    for s in site.mine:
        of = dict(zip((s, experts_of(s)), shared.apart(stages[s].parameters), strict=True))
        experts = {id(parameter) for parameter in of[experts_of(s)].values()}
        if (not site.manifest.ep or s in site.manifest.dense) and of.pop(experts_of(s)):
            raise ZbcError("E505", f"run: the plan has no experts in stage {s}, the model has", hint="plan again")
        for owner, own in of.items():
            trained = [cast for cast in stages[s].casts if cast.module.weight.requires_grad]
            casts = [cast for cast in trained if (id(cast.module.weight) in experts) == (owner != s)]
            found[owner] = features.optimizer_of(site, owner, own, casts, wholes, tied=tied, late=late.get(s, 0))
    return found if words is None else {**found, WORDS: words.optimizer(site)}


def sums_of(site: Site, stages: Mapping[int, Stage], context: Context) -> dict[Op, GradientSum]:
    """The gradient reduction of each REDUCE of the plan."""
    sizes = dict(zip(site.shapes.parameters, site.shapes.sizes, strict=True))
    gradients, tied, found = site.shapes.gradients, context.tied, dict[Op, GradientSum]()
    for op in dict.fromkeys(op for plan in site.parts for op in plan.ops if op.kind.sums):
        ranks = meeting(site.manifest, op, site.rank)
        if op.stage == TIED:
            mine = {n: p for s in stages.values() for n, p in s.parameters.items() if n in tied}
            summed = [
                mine[n] if n in mine else absent(_share_of(site, context.shared, sizes[n]), gradients[n], site.device)
                for n in sorted(tied)
                if n in gradients  # otherwise it is frozen, on every rank
            ]
            found[op] = Bucket(summed, ranks)
            continue
        optimizer = context.optimizers[op.stage]
        own = [p for name, p in optimizer.parameters.items() if name not in tied]
        found[op] = inside(optimizer, GradientSum) or Bucket(own, ranks)
    return found


def _share_of(site: Site, shared: Shared, size: int) -> int:
    """Elements of a tied weight on this rank: its rows of the embedding, the only weight that built-in models tie."""
    if shared.group is None:
        return size
    words = site.manifest.planning["model"]["vocab"]
    low, high = shared.group.bounds(words)
    return size // int(words) * (high - low)
