"""`run`, the only command that needs torch."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from zbc.commands.checking import folder_of
from zbc.commands.options import Device, listed
from zbc.errors import ZbcError


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan directory.")],
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Train for N steps.")] = None,
    local: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run N ranks on this machine, without torchrun.")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="With --local: compute here; default: hardware.device of the plan.")
    ] = None,
    threads: Annotated[
        bool, typer.Option("--threads", help="With --local: ranks are threads of one process, on one device.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run directory.")] = None,
    save_hf: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the final weights as a Hugging Face folder.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="10-19", help="Record these steps, for `zbc report` and `zbc visualize`.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH|none",
            help="Continue from the newest checkpoint, or from PATH; default: only after a restart.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="With --local: restart all ranks when one fails, at most N times."),
    ] = 0,
) -> None:
    """Train with a plan: under torchrun, or --local on this machine.

    torchrun --standalone --nproc-per-node 4 -m zbc run PLAN
    """
    traced = frozenset(() if trace is None else (step - 1 for step in listed(trace, "--trace", least=1)))
    folder = folder_of(plan)
    if os.path.isfile(folder):
        first = f"zbc plan {shlex.quote(str(folder))}" if folder.suffix == ".toml" else "zbc plan JOB.toml"
        hint = f"first: {first}   then: zbc run plan"
        raise ZbcError("E401", f"run: {folder} is a file, not a plan directory", hint=hint)
    if local is not None:  # all ranks are here: look at every file before any process starts
        from zbc.plan.directory import StoredPlan

        StoredPlan.read(folder)
    from zbc.training.launch import launch

    launch.run(
        folder,
        steps=steps,
        local=local,
        out=out,
        save_hf=save_hf,
        trace=traced,
        resume=resume,
        max_restarts=max_restarts,
        device=None if device is None else device.value,
        threads=threads,
    )
