"""Why a plan does not fit: the schedules and the settings that would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from zbc.compiler.check.memory import RECOMPUTE, asked_of, check_memory, fullest_device, hint_of, ways
from zbc.compiler.compiled import Compiled
from zbc.compiler.deciding import chunked
from zbc.compiler.order import glance, order, under
from zbc.compiler.partition.setup import Ordered
from zbc.compiler.reading import job_of
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.host.until import Until
from zbc.job import spec, toml
from zbc.job.spec import Job
from zbc.text import GIB, at_least, change, short, size, wrap


def added(error: ZbcError, compiled: Compiled, budget: float | None, until: Until) -> ZbcError:
    """The error with the schedules that would fit, the fastest first, with their steps relative to this one: as many as
    there is time to test. None would where bytes are limited that are not known."""
    left, job = list[str](), compiled.job
    if compiled.costs.bytes is None and asked_of(job)[1] is not None:
        return error
    found = sorted(_fitting(job, compiled.schedule, until, left), key=lambda other: other[0])
    words = [f"{o.name} ({_need(o, job, error)}, step {change(ms, compiled.step_ms)})" for ms, o in found]
    lines = wrap([f"= would fit: {words[0]}", *words[1:]], 90, between=", ") if words else []
    details = [f"  {line}" if k else line for k, line in enumerate(lines)]
    details = details or ["= no other schedule would fit, by the fast search"][: not left]
    if left:
        most = f"{', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
        details.append(f"= not asked for lack of time (a larger --budget): {most}")
    last = error.errors[-1]
    if last.code == "E301" and compiled.job.rooms is not None:
        worst = compiled.memory[fullest_device(compiled.job.rooms, compiled.memory)]
        helping = (way for way in ways(compiled.job, worst) if _helps(compiled, way))
        last.hint = hint_of(compiled.job, worst, [*islice(helping, 2)])
        if not until.over(compiled.report.compile_seconds):
            last.hint = _enough(compiled, last.hint, budget)
    last.details = (*last.details, *details)
    return error


def _need(other: Ordered, job: Job, error: ZbcError) -> str:
    """The plan's need of the memory that `error` found too small."""
    if error.code == "E301":
        return size(max(rank.bytes for rank in other.memory))
    if asked_of(job)[1] is not None:
        return size(max(rank.activations for rank in other.memory))
    return f"{short(max(rank.units for rank in other.memory))} units"


def _fitting(job: Job, failed: str, until: Until, left: list[str]) -> Iterator[tuple[float, Ordered]]:
    """Yields ms of a step and the order of every other schedule that keeps to the job's limits, those without a search
    first; predicted, not proven. `left` gets the ones there is no time for."""
    jobs = [one for one in (job, chunked(job)) if one is not None]
    for name in sorted(SCHEDULES, key=lambda name: SCHEDULES[name].searched):
        if name == failed:
            continue
        if until.over():
            left.append(name)
            continue
        for one in jobs:  # whole logits first, as plans have them
            with suppress(ZbcError):
                found = glance(under(one, name))
                if found is not None:
                    yield found.step_ms(one), found
                    break


def _helps(compiled: Compiled, way: str) -> bool:
    """Whether the fullest rank needs less with these settings, by the fastest search; recompute has to make enough
    room."""
    document = compiled.job.document
    try:
        for setting in way.split(" with "):
            document = toml.merge(document, spec.override(setting.replace(" = ", "="), document.source))
        other = job_of(document, (compiled.job.profile, compiled.job.links))
        other = (chunked(other) if way == RECOMPUTE else None) or other
        found = order(other, 0.0)
        if way == RECOMPUTE:
            check_memory(other, found.memory, found.costs)
    except ZbcError:
        return False
    return max(rank.bytes for rank in found.memory) < max(rank.bytes for rank in compiled.memory)


def _enough(compiled: Compiled, hint: str, budget: float | None) -> str:
    """The hint with a sufficient amount of memory: with more room a search may find an order that needs more."""
    head, key, amount = hint.rpartition("memory_gib = ")
    for _ in range(4):
        job = replace(compiled.job, hardware=compiled.job.hardware.model_copy(update={"memory_gib": float(amount)}))
        try:
            found = order(job, budget)
        except ZbcError:
            return hint
        most = max(rank.bytes for rank in found.memory) / GIB
        if most <= float(amount):
            break
        amount = at_least(most * 1.01)
    return f"{head}{key}{amount}"
