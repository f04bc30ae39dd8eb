"""The data of a rank, in the order in which it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zbc.ir import NEXT
from zbc.plan.directory import RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.state import BatchSource, PhaseRun
from zbc.runtime.core.tensors import Loss
from zbc.training.building.context import Settings, Site
from zbc.training.data.counted import Count, Weights, count_of, counting, no_mean, rows_of
from zbc.training.data.data import KINDS, Batches, RankBatches, Tokens
from zbc.training.data.prefetch import Prefetched, Want
from zbc.training.data.split import SplitBatches, Steps
from zbc.training.data.unequal import PackedBatches
from zbc.training.models import model
from zbc.training.probing.trials import unscaled


def batches_of(site: Site, phases: Phases, runs: Sequence[PhaseRun], count: Count | None) -> BatchSource | None:
    """The data source of a rank of the run; None if it reads no data. On ranks that compute losses microbatches have
    weights, by the targets that count, or as steps of a dataset say."""
    source = _source(site, phases)
    weighs = count is not None or isinstance(source, SplitBatches)
    if not weighs or not isinstance(source, RankBatches) or not (site.last or site.manifest.vocabulary is not None):
        return source
    source.weights = Weights(runs, site.work, site.topology, site.rank, count or counting)
    return source


def _source(site: Site, phases: Phases) -> BatchSource | None:
    """A user's dataset may draw random numbers, so it is read in the rank's thread, without prefetch."""
    settings, manifest = site.settings, site.manifest
    if site.samples is None or not site.reads:
        return None
    if site.dealer is not None:
        return PackedBatches(site.dealer, settings.lowered, site.tokens)
    if isinstance(site.samples, Steps):
        return split_batches(settings, site.samples, site.tokens)
    order = [wants(plan, site.rank) for plan in site.parts]
    how: dict[str, Any] = {
        "seed": settings.train.seed,
        "microbatches": manifest.topology.batch,
        "size": manifest.microbatch_size,
        "phases": phases,
        "lowered": settings.lowered,
        "where": settings.where,
        "tokens": site.tokens,
        "lengths": site.lengths,
        "order": [[*dict.fromkeys(mb for _, mb in step)] for step in order],
    }
    if settings.data.kind in KINDS:
        return Prefetched(site.samples, order, site.device, **how)
    return Batches(site.samples, **how)


def split_batches(settings: Settings, steps: Steps, tokens: Tokens | None = None) -> SplitBatches:
    lowered, where = settings.lowered, settings.where
    return SplitBatches(steps, seed=settings.train.seed, lowered=lowered, where=where, tokens=tokens)


def count_of_targets(site: Site) -> Count | None:
    """Counts the targets of a microbatch that count; None if all microbatches have equal weights, or those of steps."""
    settings = site.settings
    if site.samples is None or isinstance(site.samples, Steps) or settings.data.kind in KINDS or not site.reads:
        return None
    return count_of(model.loss(settings.model.loss), settings.model.loss, site.samples.targets([0]))


def warnings_of(site: Site, loss: Loss) -> tuple[str, ...]:
    """Remarks on a loss that is no mean, and on layers whose gradients do not scale with it."""
    chosen, found = site.settings.model, list[str | None]()
    if site.some_targets is not None:
        found.append(no_mean(chosen.loss, loss, site.made_up(rows_of(site.some_targets)), site.some_targets))
    adds = [name for name, traits in site.shapes.traits.items() if traits.adds]
    if adds and site.last and (site.topology.batch > 1 or chosen.dtype == "float16"):
        found.append(" ".join(unscaled(adds)))
    return tuple(text for text in found if text is not None)


def wants(plan: RankPlan, rank: int) -> list[Want]:
    """The inputs and targets that a step of `plan` reads on a rank of the run, in order."""
    manifest = plan.manifest
    first = manifest.topology.of(rank).dp * manifest.microbatches  # of the microbatches of this replica
    if manifest.vocabulary is not None:
        return [(op.kind.row.data, first + op.mb) for op in plan.ops if op.kind.row.data and not op.slice]
    # Without a flush, microbatches of the next step come first, as in that step's own order.
    listed = [op._replace(mb=op.mb - NEXT) for op in plan.ops if op.mb >= NEXT]
    listed += [op for op in plan.ops if op.mb < NEXT]
    forwards = [op for op in listed if op.kind.is_forward and not op.slice]
    placement = manifest.to_placement()
    ends = (("inputs", placement.sources), ("targets", placement.sinks))
    return [(kind, first + op.mb) for op in forwards for kind, others in ends if not others(op.stage)]
