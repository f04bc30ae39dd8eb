"""From a document to a job: all that the schedule, its limit and the files beside say, too."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from zbc import excludes
from zbc.compiler.cost.cards import with_card
from zbc.compiler.schedules import AUTO, LIMITS, SCHEDULES, find
from zbc.compiler.schedules.request import ScheduleCard
from zbc.errors import ZbcError
from zbc.job import gpu, spec, tokens, toml
from zbc.job.links import LinkTable
from zbc.job.profile import Profile
from zbc.job.sections import is_name
from zbc.job.spec import Draft, Job

Measured = tuple[Profile | None, LinkTable | None]  # contents of the files that a plan's job named

UNMEASURED: Measured = (None, None)
OPTIONS = ("group", "early", "overlap")  # keys of [schedule] that only some schedules have


def job_of(document: toml.Document, measured: Measured = UNMEASURED, *, counts: bool = True) -> Job:
    """The job of a document whose shape is known, or all its problems, the schedule's too; `measured` if it has no
    profile."""
    draft = spec.drafted(document)
    draft.profile, draft.links = draft.profile or measured[0], draft.links or measured[1]
    if draft.profile is not None and draft.profile.link is not None and "hardware" in draft.sections:
        draft.sections["hardware"] = gpu.measured(draft.sections["hardware"])
    draft.problems += _schedule_problems(draft)
    draft.problems += _set_limit(draft)
    tokens.settle(draft)
    draft.problems += _pretrained(draft)
    return with_card(draft.finish()) if counts else draft.finish()


def _pretrained(draft: Draft) -> list[ZbcError]:
    """E520 for a missing folder of weights; a run reads it, and should not be the first to find out."""
    model = draft.sections.get("model")
    if model is None or model.pretrained is None or os.path.isdir(model.pretrained):
        return []
    text = f"model: {model.pretrained} is not a folder"
    hint = "name a folder with config.json and *.safetensors; a relative name starts in the current directory"
    return [ZbcError("E520", text, where=draft.document.where(("model", "pretrained")), hint=hint)]


def _set_limit(draft: Draft) -> list[ZbcError]:
    """Sets the limit that the name of the job's schedule implies; E110 if it has another one."""
    section = draft.sections.get("schedule")
    meant = None if section is None else LIMITS.get((section.kind or "").lower())
    if section is None or meant is None:
        return []
    if section.memory_limit is None:
        draft.sections["schedule"] = section.model_copy(update={"memory_limit": meant})
    elif spec.parse_limit(section.memory_limit) != spec.parse_limit(meant):
        text = f'config: {section.kind} has memory_limit = "{meant}", schedule.memory_limit is "{section.memory_limit}"'
        where = draft.document.where(("schedule", "memory_limit"))
        return [ZbcError("E110", text, where=where, hint='drop it, or use kind = "zb-auto"')]
    return []


def _schedule_problems(draft: Draft) -> list[ZbcError]:
    """Problems with the schedule's name and chunks, read even if the rest of [schedule] is wrong as well."""
    section = draft.document.values.get("schedule")
    kind, chunks = (section.get("kind"), section.get("chunks")) if isinstance(section, dict) else (None, None)
    where = draft.document.where
    if not isinstance(kind, str) or kind.lower() == AUTO or not is_name(kind):
        return undecided(draft)
    try:
        found = find(kind)
    except ZbcError as error:
        return [ZbcError("E104", error.message, where=where(("schedule", "kind")), hint=error.hint)]
    problems = option_problems(draft, found)
    if not isinstance(chunks, int) or chunks < 1:  # not given, or reported by itself
        return problems
    try:
        found.stages_per_rank(chunks)
    except ZbcError as error:
        problems.append(ZbcError(error.code, error.message, where=where(("schedule", "chunks")), hint=error.hint))
    return problems


def option_problems(draft: Draft, schedule: ScheduleCard) -> list[ZbcError]:
    """E110 for everything in a job that `schedule` cannot do."""
    section, parallel = draft.sections.get("schedule"), draft.sections.get("parallel")
    if section is None or parallel is None:
        return []
    problems = list(_unread(draft, schedule.name, [key for key in OPTIONS if key not in schedule.options]))
    if section.group is not None and "group" in schedule.options:
        problems += _group(draft, schedule, section.group, parallel.pp)
    problems += excludes.of_schedule(draft.sections, draft.document.where, schedule.name, schedule.traits)
    try:
        schedule.check_ranks(parallel.pp)
    except ZbcError as error:
        where = draft.document.where(("parallel", "pp"))
        problems.append(ZbcError(error.code, error.message, where=where, hint=error.hint))
    return problems


def undecided(draft: Draft) -> list[ZbcError]:
    """E110 for keys that are not supported by an order chosen among all schedules, or read from a file."""
    section = draft.sections.get("schedule")
    if section is None or section.plugin is not None:  # which gets them
        return []
    return list(_unread(draft, section.kind if section.file is None else "an order from a file", OPTIONS))


def _unread(draft: Draft, name: str, keys: Iterable[str]) -> Iterator[ZbcError]:
    for key in keys:
        if getattr(draft.sections["schedule"], key) is None:
            continue
        meant = [card.name for card in SCHEDULES.values() if key in card.options]
        text = f"schedule: schedule.{key} is for {', '.join(meant)}, not for {name}"
        yield ZbcError("E110", text, where=draft.document.where(("schedule", key)), hint="leave it out")


def _group(draft: Draft, schedule: ScheduleCard, group: int, p: int) -> Iterator[ZbcError]:
    """A unit has to give every pipe equally many microbatches, and some schedules support only some groups."""
    where = draft.document.where(("schedule", "group"))
    groups = schedule.groups(p) if schedule.groups else None
    if groups is not None and group not in groups:
        text = f"schedule: schedule.group = {group}; {schedule.name} on {p} ranks takes {groups[0]} to {groups[-1]}"
        yield ZbcError("E110", text, where=where, hint=f"{groups[-1]} is fastest, {groups[0]} holds least")
        return
    pipes = len(schedule.placement(p, schedule.default_chunks).pipes)
    if group % pipes:
        text = f"schedule: schedule.group = {group} cannot be dealt evenly to the {pipes} pipes of {schedule.name}"
        near = [str(n) for n in (group - group % pipes, group + -group % pipes) if n > 0]
        yield ZbcError("E110", text, where=where, hint=f"set it to {' or '.join(near)}, or leave it out")
