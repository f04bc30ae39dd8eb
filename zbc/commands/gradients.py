"""`check --gradients`: the gradients of a model through the stages of its plan, compared with plain autograd."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zbc.commands.console import labelled, show, show_json
from zbc.commands.summary import ranges
from zbc.errors import ZbcError

if TYPE_CHECKING:
    from pathlib import Path

    from zbc.commands.opening import Changes
    from zbc.plan.directory import StoredPlan
    from zbc.training.probing.checkup import Checkup

_SHOWN = 8  # parameters of an error


def examine(target: Path, changes: Changes, *, json: bool, quiet: bool) -> None:
    """Plans the job, runs two microbatches both ways and prints the comparison.

    Raises E510 if gradients differ, E704 if they are not finite.
    """
    from zbc.compiler.compile import compile_job
    from zbc.compiler.shapes import load_job
    from zbc.plan.directory import StoredPlan

    job = load_job(target, changes.settings or (), changes.schedule, changes.profile, counts=False)
    compiled = compile_job(job, budget=changes.budget or 0.0)
    manifest, _ = compiled.assemble()
    plan = StoredPlan(manifest, compiled.program)
    from zbc.training.probing.checkup import check_up  # slow: torch; after planning, which may fail

    checkup = check_up(plan)
    if not checkup.fine:
        raise _differs(checkup)
    overflowing = [parameter.name for parameter in checkup.parameters if not parameter.finite]
    if not math.isfinite(checkup.loss) and not overflowing:
        text = f"model: the loss is {checkup.loss:.9g}, by plain autograd as through the stages"
        raise ZbcError("E704", text, hint="look at the loss, and at data it is not defined for")
    if overflowing:
        text = f"model: the gradients of {len(overflowing)} of {len(checkup.parameters)} parameters are not finite,"
        text += " by plain autograd as through the stages"
        hint = "torch.autograd.set_detect_anomaly(True) in the factory names the operation they come from"
        raise ZbcError("E704", text, hint=hint, details=[f"loss {checkup.loss:.9g}", *_first(overflowing)])
    if json:
        show_json(checkup.as_json())
    elif not quiet:
        _report(compiled.schedule, plan, checkup)


def _report(schedule: str, plan: StoredPlan, found: Checkup) -> None:
    manifest = plan.manifest
    layers = sum(map(len, manifest.layers))
    show(labelled("model", f"{layers} layers, {len(found.parameters)} parameters"))
    ways: dict[str, list[int]] = {}
    for stage, way in enumerate(found.stages):
        ways.setdefault(way, []).append(stage)
    show(labelled("plan", f"{schedule}, {manifest.stages} stages", *(f"{ranges(s)}: {way}" for way, s in ways.items())))
    show(labelled("loss", f"{found.loss:.9g} through the stages, {found.plain_loss:.9g} in one piece"))
    rest = sum(parameter.error != 0 for parameter in found.parameters)
    lines = [f"bit by bit the same for {len(found.parameters) - rest} of {len(found.parameters)} parameters"]
    if rest:
        worst = max(found.parameters, key=lambda parameter: parameter.error)
        lines.append(f"{rest} differ by rounding, {worst.name} most: {worst.error:.1e}")
    show(labelled("gradients", *lines, f"tolerance {found.tolerance:g} of the largest in each: all right"))
    if found.unscaled:
        from zbc.training.probing.trials import unscaled

        show(labelled("warning", *unscaled(found.unscaled)))


def _differs(found: Checkup) -> ZbcError:
    wrong = sorted(found.wrong, key=lambda row: -row.error)
    count = f"{len(wrong)} of {len(found.parameters)} parameters get"
    text = f"model: {count} another gradient than from plain autograd"
    if not wrong:
        text = f"model: the loss is {found.loss:.9g} through the stages, {found.plain_loss:.9g} in one piece"
    missing = "missing on one side, or finite on one side only"
    lines = [
        f"{row.name}: {missing if math.isinf(row.error) else f'off by {row.error:.1e} of its largest'}" for row in wrong
    ]
    hint = "a layer may keep state between forwards or look at where it runs: see docs/models.md"
    return ZbcError("E510", text, hint=hint, details=_first(lines))


def _first(lines: list[str]) -> list[str]:
    rest = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]
