"""The job and the costs of a plan directory, recomputed from the manifest.

The manifest holds every section of the job, so the same code that predicted the plan predicts it again; the numbers
equal `manifest.predicted`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.cost import Costs, refuse_slices
from zbc.compiler.cost.estimate import Layer
from zbc.errors import ZbcError
from zbc.job import links, toml
from zbc.job import profile as profiles
from zbc.job.rules import of_a_plan
from zbc.job.spec import SECTIONS, Draft, Job
from zbc.plan.directory import MANIFEST, Manifest, read_manifest
from zbc.plan.reading import REPLAN, check_layers, sections_of


def job_of(manifest: Manifest) -> Job:
    """The job a plan was made from, without the locations of its values. Raises E404 or E142 if the manifest holds no
    such job."""
    values, sections = {**manifest.planning, **manifest.training}, sections_of(manifest)
    measured = values.get("profile")
    profile = None if measured is None else profiles.checked(measured, MANIFEST, None, REPLAN)
    document = toml.Document(MANIFEST, values)
    table = None if "links" not in values else links.checked(values["links"], document)
    problem = next(of_a_plan(Draft(toml.Document(MANIFEST, _set(values)), sections, [])), None)
    if problem is not None:
        raise ZbcError("E404", f"plan: the job in {MANIFEST}: {problem.message}", hint=REPLAN)
    job = Job(document, **sections, profile=profile, links=table)
    for name, ours in (("dp", manifest.copies), ("cp", manifest.cp), ("tp", manifest.tp)):
        if getattr(job.parallel, name) != ours:
            text = f"plan: {MANIFEST}: {name} is {ours}, its job has parallel.{name} = {getattr(job.parallel, name)}"
            raise ZbcError("E404", text, hint=REPLAN)
    return job


def document_of(folder: Path) -> toml.Document:
    """The job of a plan directory as a job file, without a profile. Raises E401 to E406 (the manifest)."""
    manifest = read_manifest(folder)
    values = {**manifest.planning, **manifest.training}
    pretrained = values.pop("pretrained", None)
    values.pop("profile", None)
    values.pop("links", None)
    values["model"] = {**values["model"], "pretrained": pretrained}
    return toml.Document(str(folder / MANIFEST), _set(values))


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _said(values[name], section) for name, section in SECTIONS.items() if name in values}


def _said(values: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """The values that differ from a section's defaults: rules ask for the values that the job itself has set."""
    fields = section.model_fields.items()
    plain = {key: info.get_default(call_default_factory=True, validated_data={}) for key, info in fields}
    dumped = json.dumps(plain, default=lambda it: it.model_dump(mode="json") if isinstance(it, BaseModel) else None)
    as_json = json.loads(dumped)  # None: a field without a default
    return {key: value for key, value in values.items() if value is not None and value != as_json.get(key)}


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
