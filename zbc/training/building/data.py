"""What a rank reads, in its order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zbc.ir import NEXT, Kind
from zbc.plan.directory import Manifest, RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.state import BatchSource, Worker
from zbc.training.building.context import LOWERED, Settings
from zbc.training.data.counted import Count, Counted
from zbc.training.data.data import KINDS, Batches, Samples, build_samples, place
from zbc.training.data.prefetch import Prefetched, Want
from zbc.training.data.unequal import Dealer, PackedBatches, Padded, build_documents, shape_of


def work_of(settings: Settings, manifest: Manifest) -> Dealer | None:
    """What deals samples of unequal length to replicas. Raises E117, E501 to E505, E530 to E532."""
    shape = shape_of(manifest)
    if shape is None:
        return None
    documents = build_documents(settings.data, settings.model, settings.train.seed)
    where = place(settings.data, settings.model)
    return Dealer(documents, shape, manifest.microbatches, settings.train.seed, where)


def samples_of(settings: Settings, manifest: Manifest, work: Dealer | None, rank: int) -> Samples | None:
    """The data, where a rank of the pipeline reads them; a factory's everywhere: it knows the model's input."""
    if work is not None:
        return Padded(work.documents, work.shape.room)
    if not reads_data(manifest, rank) and settings.data.kind in KINDS:
        return None
    placement = manifest.to_placement()
    both = len(placement.pipes) == 1 and set(placement.ends) <= set(placement.stages_of(rank))
    return build_samples(settings.data, settings.model, settings.train.seed, both=both)


def reads_data(manifest: Manifest, rank: int) -> bool:
    """Whether a rank of the pipeline reads data."""
    placement = manifest.to_placement()
    return manifest.vocabulary is not None or bool(set(placement.ends) & set(placement.stages_of(rank)))


def batches_of(
    settings: Settings,
    plans: Sequence[RankPlan],
    phases: Phases,
    samples: Samples | None,
    rank: int,
    work: Dealer | None,
    device: torch.device,
) -> BatchSource | None:
    """What a rank of the run reads, in its order; None where it reads nothing. A user's dataset may draw random
    numbers, so it stays in the rank's thread."""
    if samples is None or not reads_data(plans[-1].manifest, plans[-1].rank):
        return None
    if work is not None:
        return PackedBatches(work, LOWERED[settings.model.parameters])
    manifest = plans[-1].manifest
    batches = Batches(
        samples,
        seed=settings.train.seed,
        microbatches=manifest.topology.batch,
        size=manifest.microbatch_size,
        phases=phases,
        lowered=LOWERED[settings.model.parameters],
        where=place(settings.data, settings.model),
    )
    if settings.data.kind not in KINDS:
        return batches
    return Prefetched(batches, [wants(plan, rank) for plan in plans], device)


def counted(worker: Worker, source: BatchSource, counts: Count) -> BatchSource:
    """Microbatches of a user's dataset, weighed by the targets that count, where the rank computes losses."""
    work = worker.work

    def numbers(step: int, replica: int) -> range:
        run = worker.run_of(step)
        most, here = (run.count, run.count) if work is None else (work.most, work.count(step, replica))
        return range(replica * most, replica * most + here)

    def groups(step: int) -> list[list[int]]:
        run = worker.run_of(step)
        of = [worker.replica] if worker.layout.apart > 1 else range(worker.topology.dp)
        replicas = [numbers(step, r) for r in of]
        every = run.ending.every or run.count
        if work is not None:
            return [[number for one in replicas for number in one]]
        return [[number for one in replicas for number in one[i : i + every]] for i in range(0, run.count, every)]

    def own(step: int, number: int) -> bool:
        return number in numbers(step, worker.replica)

    return Counted(source, counts, groups, own, parts=work is not None)


def wants(plan: RankPlan, rank: int) -> list[Want]:
    """What a step of `plan` reads on a rank of the run, in its order."""
    manifest = plan.manifest
    first = manifest.topology.of(rank).dp * manifest.microbatches  # of the microbatches of this replica
    if manifest.vocabulary is not None:
        read = {Kind.I: "inputs", Kind.S: "targets"}
        return [(read[op.kind], first + op.mb) for op in plan.ops if op.kind in read and not op.slice]
    # Of steps without a flush, those of the next one come first: that is their place in its own order.
    listed = [op._replace(mb=op.mb - NEXT) for op in plan.ops if op.mb >= NEXT]
    listed += [op for op in plan.ops if op.mb < NEXT]
    forwards = [op for op in listed if op.kind is Kind.F and not op.slice]
    placement = manifest.to_placement()
    ends = (("inputs", placement.sources), ("targets", placement.sinks))
    return [(kind, first + op.mb) for op in forwards for kind, others in ends if not others(op.stage)]
