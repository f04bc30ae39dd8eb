"""`init`: a first job file."""

from __future__ import annotations

import json as jsonlib
import os
import re
import shlex
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from zbc.commands.console import labelled, write_text
from zbc.commands.options import Out, ScheduleName
from zbc.errors import ZbcError


class Template(StrEnum):
    TINY = "tiny"
    GPT = "gpt-1.5b"
    LLAMA = "llama-8b"
    MOE16 = "moe-16b"
    MOE30 = "moe-30b"


def template_text(name: str) -> str:
    """One of zbc/job/templates."""
    return (resources.files("zbc.job") / "templates" / f"{name}.toml").read_text(encoding="utf-8")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put it.")] = Path("."),
    template: Annotated[Template, typer.Option(help="What to start from.")] = Template.TINY,
    from_hf: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Start from a Hugging Face model instead, on this machine.")
    ] = None,
    schedule: ScheduleName = None,
    *,
    out: Out,
) -> None:
    """Write a first, commented zbc.toml.

    For a model on GPUs, `zbc advise MODEL --gpus N --gpu NAME -o zbc.toml` writes one. With a CSV as --schedule the job
    has its ranks and microbatches.
    """
    path = folder if folder.suffix == ".toml" and not folder.is_dir() else folder / "zbc.toml"
    if os.path.exists(path):
        raise ZbcError("E111", f"init: {path} exists", hint="name another folder, or move the file away")
    if from_hf is None:
        text = template_text(template)
    else:
        from zbc.commands.advising import text_for

        text = text_for(from_hf)
    write_text(path, text if schedule is None else _scheduled(text, schedule, path.parent))
    named = shlex.quote(str(path))
    out.answer(
        lambda: {"format": "zbc-init", "version": 1, "job": str(path)},
        lambda: (f"wrote {path}", "", labelled("next", f"zbc plan {named}", f"zbc compare {named}")),
    )


def _scheduled(text: str, schedule: str, folder: Path) -> str:
    """The job under a schedule; for the order of a CSV with its numbers. Raises E2xx and E4xx for an order that is
    wrong."""
    if schedule.lower().endswith(".csv"):
        from zbc.api import Plan

        plan = Plan.read_csv(schedule)
        plan.check()
        placement = plan.program.placement
        counts = {"pp": placement.ranks, "microbatches": plan.program.microbatches}
        layers = re.search(r"(?m)^layers = (\d+)", text)
        counts |= {} if layers is None else {"layers": max(int(layers[1]), placement.stages)}
        for name, value in counts.items():
            text = re.sub(rf"(?m)^{name} = \d+", f"{name} = {value}", text)
        schedule = os.path.relpath(schedule, folder)
    return re.sub(r'(?m)^kind = "zb-v".*$', lambda _: f"kind = {jsonlib.dumps(schedule)}", text)


def toml_value(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, dict):
        entries = (f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return jsonlib.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML wants it escaped


def _key(text: str) -> str:
    bare = text and all(c.isascii() and (c.isalnum() or c in "-_") for c in text)
    return text if bare else jsonlib.dumps(text, ensure_ascii=False)
