"""Keys of [schedule] that only some schedules support, and the numbers of ranks they can have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zbc import excludes
from zbc.compiler.schedules.request import ScheduleCard
from zbc.errors import ZbcError
from zbc.job.spec import Draft

OPTIONS = ("group", "early", "overlap")


def option_problems(draft: Draft, schedule: ScheduleCard, known: Iterable[ScheduleCard]) -> list[ZbcError]:
    """E110 for everything in a job that `schedule` cannot do; `known` are all schedules."""
    section, parallel = draft.sections.get("schedule"), draft.sections.get("parallel")
    if section is None or parallel is None:
        return []
    unused = [key for key in OPTIONS if key not in schedule.options]
    problems = list(_unread(draft, schedule.name, unused, list(known)))
    if section.group is not None and "group" in schedule.options:
        problems += _group(draft, schedule, section.group, parallel.pp)
    problems += excludes.of_schedule(draft.sections, draft.document.where, schedule.name, schedule.traits)
    try:
        schedule.check_ranks(parallel.pp)
    except ZbcError as error:
        where = draft.document.where(("parallel", "pp"))
        problems.append(ZbcError(error.code, error.message, where=where, hint=error.hint))
    return problems


def undecided(draft: Draft, known: Iterable[ScheduleCard]) -> list[ZbcError]:
    """E110 for keys that are not supported by an order chosen among all schedules, or read from a file."""
    section = draft.sections.get("schedule")
    if section is None or section.plugin is not None:  # which gets them
        return []
    return list(_unread(draft, section.kind if section.file is None else "an order from a file", OPTIONS, list(known)))


def _unread(draft: Draft, name: str, keys: Iterable[str], known: list[ScheduleCard]) -> Iterator[ZbcError]:
    for key in keys:
        if getattr(draft.sections["schedule"], key) is None:
            continue
        meant = [card.name for card in known if key in card.options]
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
