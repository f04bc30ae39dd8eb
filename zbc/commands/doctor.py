"""`doctor`: the abilities of this machine, and a comparison of a model's gradients with those of plain autograd."""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from zbc import __version__
from zbc.commands.console import labelled, show, show_json
from zbc.commands.options import AsJson, Quiet, Settings, Verbose
from zbc.commands.summary import ranges
from zbc.errors import ZbcError
from zbc.host.cores import cores
from zbc.host.torch_version import OLDEST, release
from zbc.text import size

if TYPE_CHECKING:
    from zbc.plan.directory import StoredPlan
    from zbc.training.probing.checkup import Checkup

_SHOWN = 8  # parameters of an error


def doctor(
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="JOB.toml", help="Compare the gradients of this job's stages with autograd's."),
    ] = None,
    settings: Settings = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what zbc can do on this machine, or check your model.

    With --model one microbatch runs on the CPU through the stages of the job's plan and through plain autograd. Fails
    with E510 if a gradient differs.
    """
    if model is not None:
        examine(model, settings or (), as_json=json, quiet=quiet)
        return
    if settings:
        raise typer.BadParameter("works with --model JOB.toml, whose values it overrides", param_hint="--set")
    report = inspect()
    if json:
        show_json({"format": "zbc-doctor", "version": 1, **report})
    elif not quiet:
        for label, lines in report.items():
            show(labelled(label, *lines))


# ---- a model ---------------------------------------------------------------------------------------------


def examine(path: Path, overrides: Sequence[str], *, as_json: bool, quiet: bool = False) -> None:
    """Plans the job, runs microbatches both ways and prints the comparison.

    Raises E510 if gradients differ, E704 if they are not finite.
    """
    from zbc.compiler.compile import compile_job, load_job
    from zbc.plan.directory import StoredPlan

    compiled = compile_job(load_job(path, overrides, counts=False), budget=0.0)
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
    if as_json:
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


# ---- this machine ----------------------------------------------------------------------------------------


def inspect() -> dict[str, list[str]]:
    """Label -> lines."""
    lines, torch = {"zbc": [__version__], "python": [f"{platform.python_version()} on {platform.system()}"]}, None
    try:
        import torch as module

        torch, lines["torch"] = module, [_torch_version(module)]
    except (ImportError, OSError) as error:  # OSError: a library torch needs is missing or damaged
        lines["torch"] = [f"cannot be imported: {error}"]
    lines["cpu"] = [f"{cores()} cores"]
    lines["devices"] = _devices(torch)
    lines["transports"] = _transports(torch)
    lines["folder"] = [f"{Path.cwd()}: {'can' if _writable() else 'cannot'} be written"]
    lines["can"] = _abilities(torch)
    return lines


def _torch_version(torch: ModuleType) -> str:
    old = "" if release(torch.__version__) >= OLDEST else f"; zbc run needs {'.'.join(map(str, OLDEST))} or newer"
    return f"{torch.__version__}{old}"


def _devices(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    if not torch.cuda.is_available():
        seen = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
        if seen:
            return [f"no CUDA device that this torch can use, though the system has {', '.join(seen)}"]
        return ["no CUDA device"]
    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index} {device.name}, {size(device.total_memory)}")
    return lines


def _transports(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    import torch.distributed as dist

    if not dist.is_available():
        return ["this torch has no torch.distributed: one process only"]
    yes = {True: "yes", False: "no"}
    return [f"gloo (CPU): {yes[dist.is_gloo_available()]}; NCCL (CUDA): {yes[dist.is_nccl_available()]}"]


def _writable() -> bool:
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()):
            return True
    except OSError:
        return False


def _abilities(torch: ModuleType | None) -> list[str]:
    """The possible uses of this machine, one line per command."""
    lines = ["plan, check, compare and draw any job"]
    if torch is None:
        return [*lines, "not run plans: install torch first"]
    lines.append("run plans on this machine's CPU: zbc run PLAN --local N --device cpu")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        lines.append(f"run plans of up to {devices} ranks on its GPUs: torchrun --nproc-per-node N -m zbc run PLAN")
    elif devices == 0:
        lines.append("not run plans on GPUs: there is none")
    return lines
