"""`report` of a plan, a job or a CSV: the predicted cost of a step, its spread under noise, and when ranks idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zbc.commands.console import indented, labelled, progress, table
from zbc.commands.opening import Changes, is_job, opened_plan
from zbc.commands.options import Out
from zbc.text import aligned, counted, percent, short, size, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.api import Plan
    from zbc.compiler.whatif.noise import Noise, Spread
    from zbc.compiler.whatif.serial import Serial
    from zbc.compiler.whatif.windows import Bubbles, Window


def report(target: Path, changes: Changes, jitter: float | None, straggler: float | None, out: Out) -> None:
    """Prints the report. The order stays as planned under noise; only op times change."""
    from zbc.compiler.whatif import serial
    from zbc.compiler.whatif.noise import Noise

    if is_job(target) and not changes.settings and (found_serial := serial.read(target)) is not None:
        if jitter or straggler or changes != Changes():
            raise typer.BadParameter("a file with [pipeline] has neither noise nor schedules: leave out the options")
        return out.answer(lambda: _serial_json(found_serial), lambda: _serial(found_serial))
    plan = opened_plan(target, changes)
    noise = Noise(jitter or 0.0, straggler or 0.0)
    spread = None
    if noise.jitter or noise.straggler:
        with progress("simulating", None, quiet=out.quiet):
            spread = plan.noisy(noise)
    out.answer(
        lambda: {**_as_json(plan, noise, spread), "ranks": idle_json(plan.bubbles())},
        lambda: _told(plan, noise, spread, verbose=out.verbose),
    )


def _told(plan: Plan, noise: Noise, spread: Spread | None, *, verbose: bool) -> Iterator[RenderableType]:
    from zbc.compiler.steps import period_of
    from zbc.viz.words import title, verdict

    step = verdict(plan.timeline, bubbles=verbose).split("; ")
    if plan.program.flushless:
        step = [f"{short(period_of(plan.program, plan.costs))} ms with its optimizer, without a flush"]
    yield from (title(plan.program), "", labelled("step", *step))
    if spread is None:
        yield labelled("noise", "none; --jitter 5% or --straggler 10% says how far it spreads the step")
    else:
        yield from _spread(plan, noise, spread)
    yield from idle_parts(plan.bubbles(), verbose=verbose)


def _serial(found: Serial) -> Iterator[RenderableType]:
    """Time of a pipeline whose stages are no layers, and how busy each stage is."""
    tokens, stages = found.pipeline.tokens, found.pipeline.stages
    makespan, per = aligned([found.timeline.makespan, found.period], 3)
    yield labelled("pipeline", f"{len(stages)} stages, {tokens} tokens, {makespan} ms")
    yield labelled("full", f"{per} ms a token, as stage {found.slowest} has it")
    cells = zip(aligned([stage.ms for stage in stages], 3), _busy(found), strict=True)
    rows = [(str(s), ms, str(stages[s].replicas), percent(busy)) for s, (ms, busy) in enumerate(cells)]
    yield labelled("stages", "ms of a token on one replica; busy: of all its replicas, over the whole run")
    yield indented(table(("stage", "ms", "replicas", "busy"), rows))


def _busy(found: Serial) -> list[float]:
    whole, tokens = found.timeline.makespan or 1.0, found.pipeline.tokens
    return [tokens * stage.ms / stage.replicas / whole for stage in found.pipeline.stages]


def _serial_json(found: Serial) -> dict[str, Any]:
    stages = [
        {"ms": stage.ms, "replicas": stage.replicas, "busy": round(busy, 9)}
        for stage, busy in zip(found.pipeline.stages, _busy(found), strict=True)
    ]
    head = {"format": "zbc-serial-pipeline", "version": 1, "tokens": found.pipeline.tokens}
    times = {"makespan_ms": round(found.timeline.makespan, 9), "ms_per_token": round(found.period, 9)}
    return {**head, **times, "slowest_stage": found.slowest, "stages": stages}


def _spread(plan: Plan, noise: Noise, found: Spread) -> Iterator[RenderableType]:
    parts = [f"each op and transfer {percent(noise.jitter)}"] if noise.jitter else []
    parts += [f"one rank {percent(noise.straggler)} slower"] if noise.straggler else []
    yield labelled("noise", f"{', '.join(parts)}; {counted(len(found.steps), 'step')}, seed {noise.seed}")
    what = "makespan" if plan.barrier else "a step among others, without the barrier"
    quantiles = [found.quantile(0.05), found.median, found.quantile(0.95), max(found.steps)]
    names = ["predicted", "5% below", "median", "95% below", "longest"]
    times = aligned([found.predicted, *quantiles])
    width = max(map(len, times))
    lines = [f"{name:<9}  {time:>{width}} ms" for name, time in zip(names, times, strict=True)]
    changes = ["", *(f"  {_change(found, ms)}" for ms in quantiles)]
    yield labelled("spread", f"{what}:", *(line + change for line, change in zip(lines, changes, strict=True)))
    kinds = [f"{kind} {percent(part)}" for kind, part in found.by_kind.items() if part > 0]
    kinds += [f"transfers {percent(found.transfers)}"] if found.transfers > 0 else []
    yield labelled("critical", "where the time of each step's longest chain goes:", *wrap(kinds, 65, between=", "))
    yield indented(_ranks(found))


def _change(found: Spread, ms: float) -> str:
    return f"{100 * found.slower(ms):+.1f}%"


def _ranks(found: Spread) -> RenderableType:
    """Each rank's share of the longest chain and, with a straggler, the step time if that rank is slow."""
    heads = ["rank", "of the longest chain"]
    columns = [[str(rank) for rank in range(len(found.by_rank))], [percent(part) for part in found.by_rank]]
    if found.slow:
        heads += ["step if slow, ms", "change"]
        times = iter(aligned([ms for ms in found.slow if ms == ms]))
        columns += [["?" if ms != ms else next(times) for ms in found.slow]]
        columns += [["?" if ms != ms else _change(found, ms) for ms in found.slow]]
    return table(heads, zip(*columns, strict=True))


def _as_json(plan: Plan, noise: Noise, found: Spread | None) -> dict[str, Any]:
    from zbc.viz.words import step_costs

    head = {"format": "zbc-simulation", "version": 1, "plan": plan.name}
    document: dict[str, Any] = {**head, **step_costs(plan.timeline)}
    if found is None:
        return document
    return {
        **document,
        "barrier": plan.barrier,
        "jitter": noise.jitter,
        "straggler": noise.straggler,
        "trials": noise.trials,
        "seed": noise.seed,
        "predicted_ms": round(found.predicted, 9),
        "median_ms": round(found.median, 9),
        "mean_ms": round(found.mean, 9),
        "p5_ms": round(found.quantile(0.05), 9),
        "p95_ms": round(found.quantile(0.95), 9),
        "slowdown": round(found.slower(found.median), 9),
        "critical": {
            "kinds": {kind: round(part, 9) for kind, part in found.by_kind.items()},
            "ranks": [round(part, 9) for part in found.by_rank],
            "transfers": round(found.transfers, 9),
        },
        "slow_rank_ms": [None if ms != ms else round(ms, 9) for ms in found.slow],
        "steps_ms": [round(ms, 9) for ms in found.steps],
    }


# ---- windows in which ranks idle ----------------------------------------------------------------------------


def idle_json(found: Bubbles) -> list[dict[str, Any]]:
    """Busy time and idle windows of each rank, which add up to the makespan."""
    return [
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


def idle_parts(found: Bubbles, *, verbose: bool) -> Iterator[RenderableType]:
    """Idle time of each rank by cause; with `verbose` its windows."""
    from zbc.compiler.sim.simulate import Idle

    heads = ("rank", "idle ms", "of it", "windows", "longest", *(cause.replace("_", "-") for cause in Idle._fields))
    idle = [sum(window.length_ms for window in windows) for windows in found.windows]
    longest = [max((window.length_ms for window in windows), default=0.0) for windows in found.windows]
    columns = [aligned(idle), [percent(ms / found.makespan_ms if found.makespan_ms else 0.0) for ms in idle]]
    columns += [[str(len(windows)) for windows in found.windows], aligned(longest)]
    columns += [
        aligned([sum((w.length_ms for w in windows if w.cause == cause), 0.0) for windows in found.windows])
        for cause in Idle._fields
    ]
    yield labelled("ranks", "ms of idle time, and by cause" + ("" if verbose else "; -v lists the windows"))
    yield indented(table(heads, zip(map(str, range(len(idle))), *columns, strict=True)))
    if verbose:
        for rank, windows in enumerate(found.windows):
            yield labelled("windows", f"of rank {rank}")
            yield indented(_listed(windows))


def _listed(each: Sequence[Window]) -> RenderableType:
    starts, lengths = aligned([window.start_ms for window in each]), aligned([window.length_ms for window in each])
    free = ["" if window.free_bytes is None else size(window.free_bytes) for window in each]
    causes = [window.cause.replace("_", "-") for window in each]
    rows = zip([window.before or "the end" for window in each], causes, starts, lengths, free, strict=True)
    return table(("before", "cause", "from ms", "ms", "free"), rows, left=2)
