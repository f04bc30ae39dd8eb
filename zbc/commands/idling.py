"""`bubbles`: the windows in which ranks idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zbc.commands.console import indented, labelled, show, show_json, table
from zbc.commands.opening import Changes, opened
from zbc.commands.options import AsJson, Budget, PlanJobCsvOrRun, ProfileFile, Quiet, ScheduleName, Settings, Verbose
from zbc.text import aligned, percent, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.whatif.windows import Bubbles, Window


def bubbles(
    target: PlanJobCsvOrRun,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List when ranks idle, why, and how much memory is free then.

    For a plan as predicted, for a recorded run as measured. Busy time and windows add up to the makespan on each rank.
    """
    idle = opened(target, Changes(settings, schedule, profile, budget)).bubbles()
    if json:
        show_json(_as_json(idle))
    elif not quiet:
        show(*_summary(idle, verbose=verbose))


def _as_json(found: Bubbles) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "busy_ms": round(busy, 9),
            "windows": [
                {**window._asdict(), "start_ms": round(window.start_ms, 9), "length_ms": round(window.length_ms, 9)}
                for window in windows
            ],
        }
        for rank, (busy, windows) in enumerate(zip(found.busy_ms, found.windows, strict=True))
    ]
    head = {"format": "zbc-bubbles", "version": 1, "of": found.name, "makespan_ms": round(found.makespan_ms, 9)}
    return {**head, "ranks": ranks}


def _summary(found: Bubbles, *, verbose: bool) -> Iterator[RenderableType]:
    from zbc.compiler.sim.simulate import Idle

    yield labelled("step", f"{found.name}: makespan {aligned([found.makespan_ms])[0]} ms")
    heads = ("rank", "idle ms", "of it", "windows", "longest", *(cause.replace("_", "-") for cause in Idle._fields))
    idle = [sum(window.length_ms for window in windows) for windows in found.windows]
    longest = [max((window.length_ms for window in windows), default=0.0) for windows in found.windows]
    causes = [_by_cause(windows) for windows in found.windows]
    columns = [aligned(idle), [percent(ms / found.makespan_ms if found.makespan_ms else 0.0) for ms in idle]]
    columns += [[str(len(windows)) for windows in found.windows], aligned(longest)]
    columns += [aligned([ms[cause] for ms in causes]) for cause in Idle._fields]
    yield labelled("ranks", "ms of idle time, and by cause" + ("" if verbose else "; -v lists the windows"))
    yield indented(table(heads, zip(map(str, range(len(idle))), *columns, strict=True)))
    if verbose:
        for rank, windows in enumerate(found.windows):
            yield labelled("windows", f"of rank {rank}")
            yield indented(_listed(windows))


def _by_cause(each: Sequence[Window]) -> dict[str, float]:
    by_cause: dict[str, float] = defaultdict(float)
    for window in each:
        by_cause[window.cause] += window.length_ms
    return by_cause


def _listed(each: Sequence[Window]) -> RenderableType:
    starts, lengths = aligned([window.start_ms for window in each]), aligned([window.length_ms for window in each])
    free = ["" if window.free_bytes is None else size(window.free_bytes) for window in each]
    causes = [window.cause.replace("_", "-") for window in each]
    return table(
        ("before", "cause", "from ms", "ms", "free"),
        zip([window.before or "the end" for window in each], causes, starts, lengths, free, strict=True),
        left=2,
    )
