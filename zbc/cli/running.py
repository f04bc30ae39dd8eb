"""`run`, the only command that needs torch, and `doctor`, which says what can run here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zbc.cli.console import labelled, show
from zbc.errors import ZbcError


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan directory.")],
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Train for N steps.")] = None,
    local: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run N ranks on this machine's CPU, without torchrun.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run directory.")] = None,
    save_hf: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the final weights as a Hugging Face folder.")
    ] = None,
) -> None:
    """Train with a plan: under torchrun, or with --local on this machine.

    torchrun --standalone --nproc-per-node 4 -m zbc run PLAN
    """
    from zbc.cli.checking import folder_of

    folder = folder_of(plan)
    if folder.is_file():
        first = f"zbc plan {folder}" if folder.suffix == ".toml" else "zbc plan JOB.toml"
        hint = f"first: {first}   then: zbc run plan"
        raise ZbcError("E401", f"run: {folder} is a file, not a plan directory", hint=hint)
    if local is not None:  # all ranks are here: look at every file before any process starts
        from zbc.plan import Plan

        Plan.read(folder)
    from zbc.runtime import launch

    launch.run(folder, steps=steps, local=local, out=out, save_hf=save_hf)


def doctor() -> None:
    """Look at this machine and say what zbc can do on it."""
    from zbc.cli.environment import inspect

    for label, lines in inspect().items():
        show(labelled(label, *lines))
