"""The optimizers of a rank, and the reductions of its gradients over the replicas of a stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import nn

from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.job import spec
from zbc.ops import MAKER, TIED, experts_of
from zbc.plan.directory import averaging, meeting
from zbc.plan.lateness import lateness
from zbc.runtime.core.bucket import Bucket, GradientSum, absent
from zbc.runtime.core.muon import Whole
from zbc.runtime.core.optimizer import StageOptimizer, build_optimizer
from zbc.runtime.core.precision import AUTOCAST
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Worker
from zbc.runtime.features.averaging import Averages, Averaging
from zbc.runtime.features.expert_parallel import split
from zbc.runtime.features.feedback import Feedback
from zbc.runtime.features.gathers import Gathers
from zbc.runtime.features.moving import with_mean
from zbc.runtime.features.sharded import Sharded
from zbc.runtime.features.tensor_parallel import Shared, SharedLayers
from zbc.runtime.features.ties import Ties
from zbc.runtime.features.versions import OneVersion, TwoVersions
from zbc.training.building.context import Site, section
from zbc.training.probing.shapes import Shapes


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
    site: Site, stages: Mapping[int, Stage], tied: Collection[str], shared: Shared
) -> dict[int, StageOptimizer]:
    """The optimizers by owner: stages, and the experts of each stage with some that are sharded. Raises E506 for
    experts in a stage that has none by the plan."""
    late = lateness(site.plan.ops) if site.manifest.flushless else {}
    wholes = {
        name: Whole(partial(cut.collect, group=group), cut.of)
        for name, cut in shared.cuts.items()
        if (group := shared.group) is not None
    }
    found = dict[int, StageOptimizer]()
    for s in site.mine:
        of = dict(zip((s, experts_of(s)), split(stages[s].parameters, shared.experts), strict=True))
        experts = {id(parameter) for parameter in of[experts_of(s)].values()}
        if (not site.manifest.ep or s in site.manifest.dense) and of.pop(experts_of(s)):
            raise ZbcError("E506", f"run: the plan has no experts in stage {s}, the model has", hint="plan again")
        for owner, own in of.items():
            trained = [cast for cast in stages[s].casts if cast.module.weight.requires_grad]
            casts = [cast for cast in trained if (id(cast.module.weight) in experts) == (owner != s)]
            found[owner] = _optimizer_of(site, own, casts, tied, late.get(s, 0), owner, wholes)
    return found


def _optimizer_of(
    site: Site,
    parameters: Mapping[str, nn.Parameter],
    casts: Sequence[SplitLinear],
    tied: Collection[str],
    late: int,
    owner: int,
    wholes: Mapping[str, Whole],
) -> StageOptimizer:
    """The optimizer of the `parameters` of `owner`, a stage or its experts, and of their `casts`; `late`: the delay of
    its gradients in steps of the stage, in asynchronous training."""
    manifest, settings = site.manifest, site.settings
    ranks, own = (meeting(manifest, Op(kind, owner), site.rank) for kind in (MAKER["total"], MAKER["weights"]))
    own = ranks if manifest.one_sided else own  # copies of two pipes take from each other, without meeting
    options, lowered, masters = settings.optimizer, settings.lowered, settings.model.master
    ahead = options.sync == "post-validate"
    if manifest.sharded and len(own) > 1:
        found: StageOptimizer = Sharded(
            options,
            parameters,
            casts,
            wholes,
            ranks=own,
            rank=site.rank,
            among=ranks,
            whole=frozenset(parameters.keys() & tied),
            lowered=lowered,
            masters=masters,
            ahead=ahead,
            frees=bool(manifest.resident),
            low=AUTOCAST.get(settings.model.dtype) if settings.model.builtin else None,
            scatters=manifest.scatters,
            cycles=manifest.flushless,
        )
    else:
        found = build_optimizer(options, parameters, casts, wholes, lowered=lowered, masters=masters, ahead=ahead)
    found = with_mean(options, found)
    if not manifest.flushless:
        return found
    if options.sync == "asynchronous":
        return OneVersion(found, casts, late if options.lookahead else 0)
    return TwoVersions(Feedback(found, options.feedback) if options.feedback else found, casts)


def averages_of(site: Site, optimizers: Mapping[int, StageOptimizer], tied: Collection[str]) -> Averages | None:
    """The averages of weights over replicas; `tied` weights belong to several stages. None if replicas do not average.

    Raises E406 if the plan has no settings for them.
    """
    if not site.manifest.averages:
        return None
    given = site.manifest.planning.get("parallel", {}).get("average")
    if given is None:
        raise ZbcError("E406", "plan: replicas average their weights, and parallel.average does not say how")
    asked, ranks = section(spec.Average, given), averaging(site.manifest, site.rank)
    owned = {
        owner: {name: p for name, p in opt.parameters.items() if p.requires_grad} for owner, opt in optimizers.items()
    }
    shared = {name: mine.pop(name) for mine in owned.values() for name in tied if name in mine}
    owned |= {TIED: shared} if shared else {}
    return Averages(
        {owner: Averaging([p for _, p in sorted(mine.items())], ranks, asked) for owner, mine in owned.items()}
    )


def sums_of(worker: Worker, shapes: Shapes) -> dict[Op, GradientSum]:
    """The gradient reduction of each REDUCE of the plan; `shapes` has all parameters of the model."""
    sizes = dict(zip(shapes.parameters, shapes.sizes, strict=True))
    manifest, found = worker.plan.manifest, dict[Op, GradientSum]()
    tied = worker.features.of(Ties).homes
    for op in dict.fromkeys(op for run in worker.phase_runs for op in run.plan.ops if op.kind.sums):
        if op.stage == TIED:
            mine = {n: p for s in worker.stages.values() for n, p in s.parameters.items() if n in tied}
            summed = [
                mine[n] if n in mine else absent(_share_of(worker, sizes[n]), shapes.gradients[n], worker.device)
                for n in sorted(tied)
                if n in shapes.gradients  # otherwise it is frozen, on every rank
            ]
            found[op] = Bucket(summed, meeting(manifest, op, worker.rank))
            continue
        if op.stage in (dealt := worker.features.of(Gathers).stages):
            found[op] = dealt[op.stage]
            continue
        own = [p for name, p in worker.optimizers[op.stage].parameters.items() if name not in tied]
        found[op] = Bucket(own, meeting(manifest, op, worker.rank))
    return found


def _share_of(worker: Worker, size: int) -> int:
    """Elements of a tied weight on this rank: its rows of the embedding, the only weight that built-in models tie."""
    group = worker.features.of(SharedLayers).group
    if group is None:
        return size
    words = worker.plan.manifest.planning["model"]["vocab"]
    low, high = group.bounds(words)
    return size // int(words) * (high - low)
