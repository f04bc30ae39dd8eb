"""The costs of a plan directory, recomputed from the manifest.

The manifest holds every section of the job, so the same code that predicted the plan predicts it again; the numbers
equal `manifest.predicted`.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.cost import Costs, refuse_slices
from zbc.compiler.cost.estimate import Layer
from zbc.job.spec import Job
from zbc.plan.directory import MANIFEST, Manifest
from zbc.plan.reading import check_layers, job_of


def costs_of(manifest: Manifest) -> Costs:
    """Costs of a plan's ops. Raises E110 for slices of microbatches."""
    return costs_for(job_of(manifest), manifest)


def costs_for(job: Job, manifest: Manifest) -> Costs:
    """Costs of a plan's ops for the job `job`, with the partition of the plan. Raises E110."""
    if manifest.slices != job.slices:  # a plan of foreign origin
        refuse_slices("plan: the order", manifest.slices, where=MANIFEST)
    return pricing.build(job, manifest.to_placement(), stages_of(manifest, estimate.layers(job)))


def stages_of(manifest: Manifest, table: Sequence[Layer]) -> list[tuple[int, ...]]:
    """The partition of a plan as indices into its model's layers. Raises E404 if these are not the model's."""
    index = {layer.name: i for i, layer in enumerate(table)}
    check_layers(manifest, list(index))
    return [tuple(index[name] for name in names) for names in manifest.layers]
