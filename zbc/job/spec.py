"""Reads a job from TOML: collects every problem of a file with its place before it raises.

Its tables are in sections.py, checks across tables in rules.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import tomli
from pydantic import ValidationError

from zbc.errors import ZbcError
from zbc.job import gpu, hfmodel, links, spellings, toml, world
from zbc.job import profile as profiles
from zbc.job.adapter import Adapter as Adapter
from zbc.job.job import Draft as Draft
from zbc.job.job import Job as Job
from zbc.job.model_section import Model as Model
from zbc.job.rules import RULES
from zbc.job.section import Section as Section
from zbc.job.sections import SECTIONS as SECTIONS
from zbc.job.sections import Average as Average
from zbc.job.sections import Checkpoint as Checkpoint
from zbc.job.sections import Data as Data
from zbc.job.sections import Filler as Filler
from zbc.job.sections import Freeze as Freeze
from zbc.job.sections import GivenCosts as GivenCosts
from zbc.job.sections import Hardware as Hardware
from zbc.job.sections import Memory as Memory
from zbc.job.sections import Optimizer as Optimizer
from zbc.job.sections import Train as Train
from zbc.job.sections import parse_limit as parse_limit
from zbc.job.tokens import recorded
from zbc.job.wording import convert, unknown
from zbc.topology import inner_of


def draft(path: Path, overrides: Sequence[str] = ()) -> Draft:
    """Reads a job file with `overrides` (see `gathered`); collects its problems."""
    return drafted(gathered(path, overrides))


def gathered(
    path: Path,
    overrides: Sequence[str] = (),
    schedule: str | None = None,
    profile: Path | None = None,
    *,
    document: toml.Document | None = None,
) -> toml.Document:
    """The document of a job file with `overrides` (`key.path=value`), `schedule` and `profile` on top. `document`
    replaces the contents of the file."""
    document = toml.load(path) if document is None else document
    for setting in overrides:
        document = toml.merge(document, override(setting, document.source))
    if schedule is not None:
        place: dict[toml.KeyPath, str] = {("schedule", "kind"): f"--schedule {schedule}"}
        chosen = toml.Document(document.source, {"schedule": {"kind": schedule}}, place, {**place})
        document = toml.merge(document, chosen)
    if profile is not None:
        document = replace(_without_given(document), profile=profile)
    return spellings.renamed(hfmodel.filled(gpu.filled(document)))


def drafted(document: toml.Document) -> Draft:
    """The sections of a job, and all their problems."""
    result = Draft(document, {}, [])
    for name in (name for name in document.values if name not in SECTIONS):
        result.problems.append(unknown((name,), document, [*SECTIONS]))
    for name, section in SECTIONS.items():
        _read_section(result, name, section)
    _read_profile(result)
    recorded(result)
    for rule in RULES:
        result.problems.extend(rule(result))
    _read_links(result)
    return result


def _without_given(document: toml.Document) -> toml.Document:
    """Without the costs of the file that a profile replaces; costs set on the command line are kept."""
    costs = document.values.get("costs")
    if not isinstance(costs, dict):
        return document
    gone, said = GivenCosts.replaced(costs), document.where
    kept = {key: value for key, value in costs.items() if key not in gone or said(("costs", key)).startswith("--")}
    return replace(document, values={**document.values, "costs": kept})


def _read_profile(result: Draft) -> None:
    """Reads the file of --profile."""
    path = result.document.profile
    needed = [result.sections.get(name) for name in ("model", "hardware", "schedule", "parallel", "adapter")]
    if path is None or any(section is None for section in needed):
        return
    model, hardware, schedule, parallel, adapter = cast("list[Any]", needed)
    where = f"--profile {path}"
    try:
        profile = profiles.read(path, where)
    except ZbcError as error:
        result.problems.append(error)
        return
    size, inner = schedule.microbatch_size, inner_of(parallel)
    wrong = profiles.misfits(profile, model, adapter, device=hardware.device, microbatch_size=size, inner=inner)
    if wrong:
        text = f"profile: {path.name} was made for something else"
        hint = "profile this job: `zbc profile JOB.toml -o FILE`"
        result.problems.append(ZbcError("E142", text, where=where, hint=hint, details=wrong))
        return
    result.profile = profile


def _read_links(result: Draft) -> None:
    """Reads the table of hardware.links, which must have as many ranks or nodes as the run."""
    hardware, parallel, costs = (result.sections.get(name) for name in ("hardware", "parallel", "costs"))
    if hardware is None or hardware.links is None or parallel is None:
        return
    where = result.document.where(("hardware", "links"))  # a relative path starts at the folder of the file
    path = Path(hardware.links) if where.startswith("--") else Path(where.rsplit(":", 2)[0]).parent / hardware.links
    try:
        result.links = links.read(path, where)
    except ZbcError as error:
        result.problems.append(error)
        return
    wrong = links.misfit(result.links, parallel.ranks, hardware.ranks_per_node, where)
    if wrong is not None:
        result.problems.append(wrong)
    if costs is not None and costs.comm is not None:
        text = "config: costs.comm and hardware.links say both what a transfer takes"
        result.add("E141", text, "costs", "comm", hint="drop one of them")


def override(text: str, source: str) -> toml.Document:
    """The text of a `--set` as a document. Raises E109."""
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or len(parts) < 2 or not all(parts):
        hint = "write --set schedule.microbatches=16"
        raise ZbcError("E109", f"config: cannot read --set {text!r}", hint=hint)
    try:
        read = toml.parsed(f"x = {value}", f"--set {key}")
    except tomli.TOMLDecodeError:
        read = {}
    parsed = read["x"] if len(read) == 1 else value.strip()  # more than one: lines after the value
    tree: Any = parsed
    for part in reversed(parts):
        tree = {part: tree}
    toml.refuse_extreme(tree, f"--set {key}")
    places: dict[toml.KeyPath, str] = {parts: f"--set {text}"}
    if isinstance(parsed, list):
        places |= {(*parts, i): f"--set {text}" for i in range(len(parsed))}
    return toml.Document(source, tree, dict(places), places)


def _read_section(result: Draft, name: str, section: type[Section]) -> None:
    raw = result.document.values.get(name, {})
    if not isinstance(raw, Mapping):
        result.add("E103", f"config: {name} is a table, found {raw!r}", name, hint=f"write [{name}]")
        return
    required = [field for field, info in section.model_fields.items() if info.is_required()]
    if name not in result.document.values and required:
        text, hint = f"config: [{name}] is missing", f"it needs {', '.join(required)}"
        result.problems.append(ZbcError("E105", text, where=result.document.source, hint=hint))
        return
    try:
        result.sections[name] = section.model_validate(dict(raw))
    except ValidationError as error:
        problems: dict[tuple[Any, ...], ZbcError] = {}
        for problem in error.errors():
            converted, path = convert(name, section, problem, result.document)
            problems.setdefault(path, converted)  # a union reports one problem per alternative
        # A wrong item of a list is reported as the item, not as a list that should be a number.
        outer = {path[:end] for path in problems for end in range(len(path))}
        result.problems.extend(problem for path, problem in problems.items() if path not in outer)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file, for editors."""
    definitions: dict[str, Any] = {}
    required = []
    for name, section in SECTIONS.items():
        schema = section.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= schema.pop("$defs", {})
        definitions[name] = schema
        if schema.get("required"):
            required.append(name)
    for name, key in (world.GIVEN["pp"], world.MICROBATCHES):  # parallel.world and schedule.batch may replace them
        definitions[name]["required"].remove(key)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "zbc job",
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in SECTIONS},
        "required": required,
        "additionalProperties": False,
        "$defs": definitions,
    }
