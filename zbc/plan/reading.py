"""Reads the files of a plan; each is verified before it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.ir import NEXT, Kind, Op, parse_line
from zbc.job import links, toml
from zbc.job import profile as profiles
from zbc.job.rules import of_a_plan
from zbc.job.section import RANKS
from zbc.job.sections import PLANNING
from zbc.job.spec import SECTIONS, Draft, Job
from zbc.job.wording import sentence
from zbc.ops import UNIT_SCOPES
from zbc.plan.manifest import (
    FORMAT,
    FROZEN,
    MANIFEST,
    OPTIONAL,
    SLICES,
    STEPS,
    VERSION,
    Manifest,
    RankPlan,
    digest_of,
    rank_file,
    sha,
)
from zbc.topology import Topology

_KINDS = frozenset(kind.value for kind in Kind)
REPLAN = "make it again with `zbc plan JOB.toml`"


def is_plan(folder: Path) -> bool:
    """Whether a folder has the manifest of a plan, damaged or not."""
    return os.path.isfile(folder / MANIFEST)  # is_file() of a path raises if a folder is locked


def read_manifest(folder: Path, *, verify: bool = True) -> Manifest:
    """Reads `plan.json`. Raises E401 (missing), E402 (edited), E403 (other version), E404 (damaged) or E406 (unknown op
    kinds)."""
    path = folder / MANIFEST
    data = _load_json(path)
    if data.get("format") != FORMAT:
        raise ZbcError("E404", f"plan: {path} is not a zbc plan (format {data.get('format')!r})", hint=REPLAN)
    if data.get("version") != VERSION:
        text = f"plan: {path} has plan version {data.get('version')!r}, this zbc reads {VERSION}"
        raise ZbcError("E403", text, hint=REPLAN)
    if verify or data.keys() - Manifest.model_fields.keys():
        _refuse_other_fields(path, data)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ZbcError("E404", f"plan: {path}: {place}: {sentence(first)}", hint=REPLAN) from None
    _check_shape(path, manifest)
    unknown = [name for name in manifest.capabilities if name not in _KINDS and name not in (SLICES, FROZEN, STEPS)]
    if unknown:
        text = f"plan: {path} needs op kinds this zbc does not have: {', '.join(unknown)}"
        raise ZbcError("E406", text, hint="use the zbc that made the plan, or plan again with this one")
    if verify and manifest.sha256 != manifest.digest():
        raise ZbcError("E402", f"plan: {path} was edited after planning (sha256 differs)", hint=REPLAN)
    return manifest


def _refuse_other_fields(path: Path, data: Mapping[str, Any]) -> None:
    """Raises E403 for an unedited manifest of a zbc whose manifests have other fields."""
    written = data.keys() - {"sha256"}
    known = Manifest.model_fields.keys() - {"sha256", *(OPTIONAL - written)}
    if written == known or data.get("sha256") != digest_of({key: data[key] for key in written}):
        return
    differ = [
        f"{word} {', '.join(sorted(names))}"
        for word, names in (("without", known - written), ("with", written - known))
        if names
    ]
    text = f"plan: {path} was made by another version of zbc, {' and '.join(differ)}"
    raise ZbcError("E403", text, hint=REPLAN)


def _check_shape(path: Path, manifest: Manifest) -> None:
    """Raises E404 unless the lists of the manifest agree with its counts."""
    stages, ranks = manifest.stages, manifest.ranks
    world = ranks * manifest.copies * manifest.cp * manifest.tp
    node, cuts, order, copies = manifest.node, manifest.cuts, manifest.order, manifest.copies
    # Of slices of a sequence whose length is not known there are no cuts.
    rising = len(cuts) == manifest.slices + 1 > 2 and cuts[0] == 0 and all(a < b for a, b in pairwise(cuts))
    tiles = len(node) == 2 and ranks % node[0] == 0 and copies % node[1] == 0
    numbers = len(order) == ranks * copies and sorted(order) == [*range(len(order))]
    files = len(manifest.files) == ranks and sorted(manifest.files) == [rank_file(r) for r in range(ranks)]
    problems = [
        (len(manifest.placement) == stages, f"placement has {len(manifest.placement)} stages, not {stages}"),
        (len(manifest.layers) == stages, f"layers has {len(manifest.layers)} stages, not {stages}"),
        (len(manifest.boundaries) == stages - 1, f"boundaries has {len(manifest.boundaries)}, not {stages - 1}"),
        (len({len(holders) for holders in manifest.placement}) == 1, "placement lists differ in length"),
        (all(r < ranks for holders in manifest.placement for r in holders), f"placement names a rank beyond {ranks}"),
        (all(holders for holders in manifest.placement), "a stage has no rank"),
        (_ascend(manifest), f"edges {manifest.edges} do not lead from stages to later ones, each to the last"),
        (all(stage < stages for stage in manifest.ties), f"ties {manifest.ties} name a stage beyond {stages}"),
        (world <= RANKS, f"a run of it has {world} ranks, zbc plans for {RANKS}"),
        (not cuts or rising, f"cuts {cuts} are not where {manifest.slices} slices begin, and their end"),
        (not node or tiles, f"node {node} does not divide {ranks} ranks and {copies} copies"),
        (not order or numbers, f"order {order} does not name each rank of the run once"),
        (files, f"files lists {len(manifest.files)} rank files, not {ranks}"),
    ]
    for fine, text in problems:
        if not fine:
            raise ZbcError("E404", f"plan: {path}: {text}", hint=REPLAN)


def _ascend(manifest: Manifest) -> bool:
    """Whether edges lead to later stages, each once, and from all stages but the last; () for a chain."""
    edges = manifest.edges
    if not all(len(edge) == 2 and edge[0] < edge[1] < manifest.stages for edge in edges):
        return False
    pairs = {tuple(edge) for edge in edges}
    return not edges or (len(pairs) == len(edges) and 1 + len({a for a, _ in pairs}) == manifest.stages)


def job_of(manifest: Manifest) -> Job:
    """The job a plan was made from, without the locations of its values. Raises E404 or E142 if the manifest holds no
    such job."""
    values, sections = {**manifest.planning, **manifest.training}, _sections(manifest)
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


def _sections(manifest: Manifest) -> dict[str, Any]:
    """The sections of the job that a plan was made from. Raises E404 if one is missing or cannot be read."""
    sections = {}
    for name, section in SECTIONS.items():
        kept = manifest.planning if name in PLANNING else manifest.training
        values = kept.get(name, {} if name in ("freeze", "adapter") else None)  # which old plans lack
        try:
            sections[name] = section.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in (name, *first["loc"]))
            text = f"plan: the job in {MANIFEST} cannot be read: {place}: {sentence(first)}"
            raise ZbcError("E404", text, hint=REPLAN) from None
    return sections


def check_layers(manifest: Manifest, names: Sequence[str]) -> None:
    """Raises E404 unless the stages have the layers of the model, `names`, each once and in their order."""
    placed = [name for layers in manifest.layers for name in layers]
    if placed == list(names):
        return
    unknown = [name for name in placed if name not in names]
    what = f"the layer {unknown[0]!r:.24}, which its model has not" if unknown else "other layers than its model has"
    raise ZbcError("E404", f"plan: {MANIFEST} places {what}", hint=REPLAN)


def read_ramp(folder: Path, manifest: Manifest) -> list[tuple[Path, Manifest]]:
    """Folders and manifests of the plans of a training's first steps. Raises E401 to E406."""
    plans = [(folder / part.folder, read_manifest(folder / part.folder)) for part in manifest.ramp]
    for part, (below, ramp_manifest) in zip(manifest.ramp, plans, strict=True):
        if ramp_manifest.sha256 != part.sha256:
            raise ZbcError("E402", f"plan: {below} is not the plan that {folder} was made with", hint=REPLAN)
        same = ("placement", "layers", "boundaries", "slices", "cuts", "microbatch_size", "traits")
        if (
            any(getattr(ramp_manifest, key) != getattr(manifest, key) for key in same)
            or ramp_manifest.microbatches != part.microbatches
            or ramp_manifest.ramp
        ):
            raise ZbcError("E404", f"plan: {below} does not go with {folder / MANIFEST}", hint=REPLAN)
    return plans


def read_rank(folder: Path, rank: int, manifest: Manifest, *, verify: bool = True) -> RankPlan:
    """Reads the ops of one rank. Raises E401 (missing), E402 (edited), E404 (damaged)."""
    path = folder / rank_file(rank)
    raw = _read_bytes(path)
    if verify and sha(raw) != manifest.files[path.name]:
        raise ZbcError("E402", f"plan: {path} was edited after planning (sha256 differs)", hint=REPLAN)
    data = _load_json(path, raw)
    wanted = {"format": FORMAT, "version": VERSION, "plan": manifest.id, "rank": rank}
    wanted["stages"] = list(manifest.to_placement().stages_of(rank))
    for key, value in wanted.items():
        if data.get(key) != value:
            text = f"plan: {path}: {key} is {data.get(key)!r}, plan.json says {value!r}"
            raise ZbcError("E404", text, hint=REPLAN)
    lines = data.get("ops")
    if not isinstance(lines, list) or data.keys() - {*wanted, "ops"}:
        raise ZbcError("E404", f"plan: {path}: not a rank file", hint=REPLAN)
    return RankPlan(rank, tuple(_parse_ops(lines, path, manifest)), manifest)


def _parse_ops(lines: Iterable[Any], path: Path, manifest: Manifest) -> list[Op]:
    placement, topology = manifest.to_placement(), manifest.topology
    peers: dict[tuple[Kind, int, int, int], int | None] = {}
    ops = []
    for step, line in enumerate(lines):
        where = f"{path} op {step}"
        if not isinstance(line, str):
            raise ZbcError("E404", f"plan: not an op: {line!r}", where=where, hint=REPLAN)
        try:
            op, peer = parse_line(line)
        except ZbcError as error:
            raise ZbcError("E404", error.message, where=where, hint=error.hint) from None
        if _out_of_range(op, manifest, topology):
            raise ZbcError("E404", f"plan: {line} is outside this plan's stages or microbatches", where=where)
        edge = (op.kind, op.stage, op.pipe, op.other)
        if edge not in peers:
            peers[edge] = placement.peer(op)
        if peer != peers[edge]:
            text = f"plan: {line} names another peer than the placement (rank {peers[edge]})"
            raise ZbcError("E404", text, where=where, hint=REPLAN)
        ops.append(op)
    return ops


def _out_of_range(op: Op, manifest: Manifest, topology: Topology) -> bool:
    stages, mb = manifest.stages, op.mb - NEXT if manifest.flushless and op.mb >= NEXT else op.mb
    beyond = mb >= topology.microbatches or op.pipe >= topology.pipes or op.slice >= topology.slices
    return op.stage >= stages or (op.kind.row.scope in UNIT_SCOPES and beyond)


def _read_bytes(path: Path) -> bytes:
    try:
        return contents(path)
    except OSError as error:
        hint = "`zbc plan JOB.toml -o DIR` writes a plan directory"
        raise ZbcError("E401", f"plan: cannot read {path}: {error.strerror}", hint=hint) from None


def _load_json(path: Path, raw: bytes | None = None) -> dict[str, Any]:
    try:
        data = json.loads(_read_bytes(path) if raw is None else raw)
    except (ValueError, RecursionError) as error:
        raise ZbcError("E404", f"plan: {path} is damaged or cut off", details=[str(error)], hint=REPLAN) from None
    if not isinstance(data, dict):
        raise ZbcError("E404", f"plan: {path} is not a JSON object", hint=REPLAN)
    return data
