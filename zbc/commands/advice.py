"""`zbc advise`: its arguments. advising.py does the work and is loaded when it runs, so that help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zbc.commands.options import Out, Settings


def count(text: str) -> int:
    """`512` or `4M` as a number."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in ("k", "m") else (text, "")
    try:
        value = float(number) * {"k": 2**10, "m": 2**20, "": 1}[unit]
    except ValueError:
        value = -1.0
    if not 1 <= value < 2**40 or value != int(value):
        raise typer.BadParameter(f"{text!r} is no number; write 512 or 4M")
    return int(value)


def advise(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face config.json or its folder, or a JOB.toml.")
    ],
    gpus: Annotated[
        int | None, typer.Option(min=1, max=100_000, metavar="N", help="How many GPUs; default: the ranks of a job.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which: h100-sxm; `zbc explain gpu` lists them.")
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N", help="Sequences of a step: 512; or tokens: 4M, the default.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Tokens of a sequence; default: 8k at most.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="JOB.toml", help="Write the job of a row.")
    ] = None,
    row: Annotated[int, typer.Option(min=1, max=5, metavar="N", help="Which row -o writes.")] = 1,
    settings: Settings = None,
    *,
    out: Out,
) -> None:
    """Find the five best ways to train a model on N GPUs.

    Checks whether weights and optimizer state fit at all; then chooses ranks of the pipeline, replicas, ranks that
    share layers or experts, the schedule, recompute, and sharding. -o writes a job for `zbc plan`.
    """
    from zbc.commands.advising import advised

    advised(model, gpus, gpu, batch, seq_len, settings or (), output, row, out)
