"""What `doctor --model` says of a model: does each parameter get the gradient that plain autograd gives it?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zbc.commands.console import labelled, show, show_json
from zbc.commands.summary import ranges
from zbc.errors import ZbcError

if TYPE_CHECKING:
    from zbc.plan.directory import StoredPlan
    from zbc.training.probing.checkup import Checkup

_SHOWN = 8  # parameters of an error


def examine(path: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Plan the job, run two microbatches both ways and print what came out.

    Raises E510 if it is not the same, E704 if it is not finite.
    """
    from zbc.compiler.compile import compile_job, load_job
    from zbc.plan.directory import StoredPlan

    compiled = compile_job(load_job(path, overrides), budget=0.0)
    manifest, _ = compiled.assemble()
    plan = StoredPlan(manifest, compiled.program)
    from zbc.training.probing.checkup import check_up  # torch takes a second; a job that cannot be planned needs none

    found = check_up(plan)
    if not found.fine:
        raise _differs(found)
    overflowing = [one.name for one in found.parameters if not one.finite]
    if overflowing:
        text = f"model: the gradients of {len(overflowing)} of {len(found.parameters)} parameters are not finite,"
        text += " by plain autograd as through the stages"
        hint = "torch.autograd.set_detect_anomaly(True) in the factory names the operation they come from"
        raise ZbcError("E704", text, hint=hint, details=[f"loss {found.loss:.9g}", *_first(overflowing)])
    if as_json:
        show_json(found.as_json())
        return
    _report(compiled.schedule, plan, found)


def _report(schedule: str, plan: StoredPlan, found: Checkup) -> None:
    manifest = plan.manifest
    layers = sum(map(len, manifest.layers))
    show(labelled("model", f"{layers} layers, {len(found.parameters)} parameters"))
    ways: dict[str, list[int]] = {}
    for stage, way in enumerate(found.stages):
        ways.setdefault(way, []).append(stage)
    show(labelled("plan", f"{schedule}, {manifest.stages} stages", *(f"{ranges(s)}: {way}" for way, s in ways.items())))
    show(labelled("loss", f"{found.loss:.9g} through the stages, {found.plain_loss:.9g} in one piece"))
    rest = sum(one.error != 0 for one in found.parameters)
    lines = [f"bit by bit the same for {len(found.parameters) - rest} of {len(found.parameters)} parameters"]
    if rest:
        worst = max(found.parameters, key=lambda one: one.error)
        lines.append(f"{rest} differ by rounding, {worst.name} most: {worst.error:.1e}")
    show(labelled("gradients", *lines, f"tolerance {found.tolerance:g} of the largest in each: all right"))


def _differs(found: Checkup) -> ZbcError:
    wrong = sorted(found.wrong, key=lambda one: -one.error)
    count = f"{len(wrong)} of {len(found.parameters)} parameters get"
    text = f"model: {count} another gradient than from plain autograd"
    if not wrong:
        text = f"model: the loss is {found.loss:.9g} through the stages, {found.plain_loss:.9g} in one piece"
    missing = "missing on one side, or finite on one side only"
    lines = [
        f"{one.name}: {missing if math.isinf(one.error) else f'off by {one.error:.1e} of its largest'}" for one in wrong
    ]
    hint = "a layer may keep state between forwards or look at where it runs: see docs/models.md"
    return ZbcError("E510", text, hint=hint, details=_first(lines))


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return [*lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
