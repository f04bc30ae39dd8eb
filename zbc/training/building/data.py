"""The data of a rank, in the order in which it reads them."""

from __future__ import annotations

from functools import partial

from zbc.ir import NEXT
from zbc.plan.directory import Manifest, RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.state import BatchSource, Worker
from zbc.training.building.context import Settings, Site
from zbc.training.data.counted import Count, Counted
from zbc.training.data.data import KINDS, Batches, Tokens
from zbc.training.data.prefetch import Prefetched, Want
from zbc.training.data.split import SplitBatches, Steps
from zbc.training.data.unequal import PackedBatches


def batches_of(site: Site, phases: Phases) -> BatchSource | None:
    """The data source of a rank of the run; None if it reads no data. A user's dataset may draw random numbers, so it
    is read in the rank's thread, without prefetch."""
    settings, manifest = site.settings, site.manifest
    if site.samples is None or not site.reads:
        return None
    if site.dealer is not None:
        return PackedBatches(site.dealer, settings.lowered, site.tokens)
    if isinstance(site.samples, Steps):
        return split_batches(settings, manifest, site.samples, site.tokens)
    batches = Batches(
        site.samples,
        seed=settings.train.seed,
        microbatches=manifest.topology.batch,
        size=manifest.microbatch_size,
        phases=phases,
        lowered=settings.lowered,
        where=settings.where,
        tokens=site.tokens,
        lengths=site.lengths,
    )
    if settings.data.kind not in KINDS:
        return batches
    return Prefetched(batches, [wants(plan, site.rank) for plan in site.parts], site.device)


def split_batches(settings: Settings, manifest: Manifest, steps: Steps, tokens: Tokens | None = None) -> SplitBatches:
    return SplitBatches(
        steps,
        seed=settings.train.seed,
        count=manifest.topology.batch,
        lowered=settings.lowered,
        where=settings.where,
        tokens=tokens,
        tell=manifest.topology.along("cp"),
    )


def counted(worker: Worker, source: BatchSource, counts: Count) -> BatchSource:
    """Microbatches of a user's dataset, weighted by the number of targets that count, on ranks that compute losses."""

    def own(step: int, number: int) -> bool:
        return number in _numbers(worker, step, worker.replica)

    parts, tell = worker.layout.weighted, worker.layout.tell
    return Counted(source, counts, partial(groups_of, worker), own, parts=parts, tell=tell)


def _numbers(worker: Worker, step: int, replica: int) -> range:
    """The microbatches of a replica in a step."""
    run, here = worker.run_of(step), worker.work.count(step, replica)
    first = replica * (worker.work.most or run.count)
    return range(first, first + (run.count if here is None else here))


def groups_of(worker: Worker, step: int) -> list[list[int]]:
    """The microbatches of a step with a common mean: all, those of replicas that average weights, or of a stage's step
    without a flush."""
    run, parts = worker.run_of(step), worker.layout.weighted
    together = worker.topology.dp // worker.layout.apart
    replicas = [_numbers(worker, step, worker.apart * together + k) for k in range(together)]
    every = run.ending.every or run.count
    if parts:
        return [[number for span in replicas for number in span]]
    return [[number for span in replicas for number in span[i : i + every]] for i in range(0, run.count, every)]


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
