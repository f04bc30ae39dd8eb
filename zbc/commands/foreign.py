"""`report` of a log of Megatron-LM or torchtitan, compared with the plan of the same job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zbc.commands.console import labelled, show, show_json, table
from zbc.commands.opening import NO_CHANGES, opened
from zbc.commands.quantities import QUANTITY, rates, throughput, times
from zbc.text import aligned, short, size, wrap

if TYPE_CHECKING:
    from zbc.interop.logs import Log
    from zbc.plan.directory import Manifest

_WORDS = {
    "ranks": "ranks",
    "microbatch_size": "sequences per microbatch",
    "sequences": "sequences per step",
    "seq_len": "tokens per sequence",
}


def report(path: Path, plan: Path | None, *, json: bool, quiet: bool) -> None:
    """Prints the report. Raises E430 for a file that is no such log, E1xx to E4xx for a plan that cannot be read."""
    from zbc.compiler.recorded import beside
    from zbc.compiler.recorded.log import as_numbers
    from zbc.interop import logs

    log, manifest = logs.read(path), None if plan is None else _manifest(plan)
    quantities = beside.quantities(log, manifest)
    differs = {} if manifest is None else beside.differences(log, manifest)
    peaks = _peaks(log, manifest)
    if json:
        about: dict[str, Any] = {"format": "zbc-log-report", "version": 1, "tool": log.tool, "steps": len(log.counted)}
        about |= {"settings": log.settings, **as_numbers(quantities)}
        about["memory"] = [{"rank": rank, "predicted": meant, "measured": held} for rank, meant, held in peaks]
        about["differs"] = {name: {"log": ours, "plan": theirs} for name, (ours, theirs) in differs.items()}
        show_json(about)
        return
    if quiet:
        return
    steps = sorted(log.steps)
    show(labelled("log", f"{path}: {log.tool}, steps {steps[0]} to {steps[-1]}, {len(log.counted)} lines count"))
    show(labelled("", *wrap([f"{_WORDS.get(name, name)} {short(value)}" for name, value in log.settings.items()], 69)))
    show("", table(QUANTITY, _rows(quantities, log.tool)))
    if peaks:
        unit = "allocated, at most"
        rows = [(str(rank), "-" if meant is None else size(meant), size(held)) for rank, meant, held in peaks]
        show("", table(("rank", "predicted", unit), rows))
    if differs:
        words = [
            f"{_WORDS.get(name, name)} {short(ours)}, not {short(theirs)}" for name, (ours, theirs) in differs.items()
        ]
        show("", labelled("differs", "the log is of another job than the plan:", *wrap(words, 69, between="; ")))
    if plan is None:
        show("", labelled("next", f"zbc report {path} --plan JOB.toml   predicted beside measured"))


def _manifest(plan: Path) -> Manifest:
    from zbc.api import as_plan

    opened_plan = as_plan(opened(plan, NO_CHANGES))
    if opened_plan.manifest is not None:
        return opened_plan.manifest
    if opened_plan.compiled is None:
        text = f"{plan} is an order without a job; name a plan directory or a job"
        raise typer.BadParameter(text, param_hint="--plan")
    return opened_plan.compiled.assemble()[0]


def _peaks(log: Log, manifest: Manifest | None) -> list[tuple[int, float | None, float]]:
    """(rank of the pipeline, predicted peak bytes, peak bytes in the log)."""
    pp, ranks = log.settings.get("pp"), log.settings.get("ranks")
    if manifest is not None:
        pp, ranks = pp or manifest.topology.pp, ranks or manifest.topology.world
    held = log.by_pp(int(pp or 1), int(ranks or pp or 1))
    rows = [] if manifest is None else manifest.predicted.get("per_rank", [])
    return [(rank, rows[rank]["peak_bytes"] if rank < len(rows) else None, most) for rank, most in held.items()]


def _rows(found: dict[str, Any], tool: str) -> Iterator[tuple[str, ...]]:
    if "step" in found:
        yield "step", *times(found["step"])
    for row in throughput(found):
        yield tuple(row)
    if "tool_mfu" in found:
        yield f"MFU by {tool}", *rates(found["tool_mfu"])
    if "tool_tflops" in found:
        quantity = found["tool_tflops"]
        middle, low, high = aligned([quantity.measured, quantity.low, quantity.high])
        yield f"TFLOP/s by {tool}", "-", middle, "" if quantity.low == quantity.high else f"{low}-{high}", ""
