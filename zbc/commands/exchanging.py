"""`export`: plans in the forms of other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from zbc.commands.console import refuse_unwritable, show, show_json, tell, write_text
from zbc.commands.opening import Changes, opened_plan
from zbc.commands.options import Out, PlanJobOrCsv


class Target(StrEnum):
    """The forms a plan can be exported to: the keys of zbc.api.EXPORTS."""

    TORCH_CSV = "torch-csv"
    TORCHTITAN = "torchtitan"
    MEGATRON = "megatron"
    JSON = "json"
    DOT = "dot"
    GRAPHML = "graphml"
    PERFETTO = "perfetto"


class Dialect(StrEnum):
    """The forms of a torch CSV, and the versions of torchtitan: the values of zbc.api.DIALECTS."""

    COMPUTE_ONLY = "compute_only"
    COMPUTE_COMMS = "compute_comms"
    COMPUTE_COMMS_2_15 = "compute_comms-2.15"
    TORCHTITAN_0_2 = "0.2"
    TORCHTITAN_0_3 = "0.3"


def export(
    target: PlanJobOrCsv,
    to: Annotated[Target, typer.Option("--format", help="The format to write.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a file instead of printing.")
    ] = None,
    dialect: Annotated[
        Dialect | None,
        typer.Option(
            "--dialect",
            help="For torch-csv: compute ops only, or with transfers (up to torch 2.14, or since). "
            "For torchtitan: its version.",
            show_default="compute_only; 0.2",
        ),
    ] = None,
    *,
    changes: Changes,
    out: Out,
) -> None:
    """Export a plan to another tool's format.

    Plans that the tool cannot express are refused. torchtitan also needs a CSV file; -o writes it next to the settings,
    which name it by its absolute path.
    """
    if output is not None:
        refuse_unwritable(output)
    csv_name = "order.csv" if output is None else str(output.with_suffix(".csv"))
    files = opened_plan(target, changes).export(
        to.value, csv_name=csv_name, dialect=None if dialect is None else dialect.value
    )
    main, *extra = files
    if out.json and output is None:
        show_json({"format": "zbc-export", "version": 1, "to": to.value, "texts": files})
        return
    if output is None:
        show(files[main].rstrip("\n"))
        if extra:
            tell(f"not printed: {csv_name}, which this names; -o FILE writes both")
        return
    if main == ".py" and output.suffix != main:
        raise typer.BadParameter(f"this is Python, to be imported: choose {output.with_suffix(main)}", param_hint="-o")
    written: list[str] = []
    for suffix in files:
        path = output if suffix == main else output.with_suffix(suffix)
        if suffix != main and path == output:
            raise typer.BadParameter(f"{output} ends like the file beside it; choose FILE{main}", param_hint="-o")
        write_text(path, files[suffix])
        written.append(str(path))
        if not out.silent:
            tell(f"wrote {path}")
    if out.json:
        show_json({"format": "zbc-export", "version": 1, "to": to.value, "files": written})
