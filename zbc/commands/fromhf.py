"""A job file for a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zbc.commands.jobs import template_text
from zbc.job import hfconfig
from zbc.job.model_section import Model

_LONGEST = 2048  # tokens per sequence to begin with; what a model allows at most can be far more than fits


def job_text(folder: Path) -> str:
    """The text of a zbc.toml that starts from the weights of `folder`. Raises E520, E521."""
    source = folder / hfconfig.CONFIG
    model = hfconfig.model_of(hfconfig.read_config(folder), str(source))
    lines = [
        f"# Made from {source}; the weights are read when the plan runs.",
        "#   zbc plan zbc.toml  &&  zbc run plan --local 2 --save-hf trained",
        "zbc = 1                       # version of this file",
        "",
        "[model]                       # what is split into stages",
        *_model_lines(model, folder),
    ]
    pp = 2 if model.layers >= 4 else 1
    rest = template_text("from-hf").replace("FOLDER", str(folder))
    if pp == 1:
        rest = rest.replace("pp = 2 ", "pp = 1 ").replace("microbatches = 8 ", "microbatches = 4 ")
    return "\n".join([*lines, "", rest])


def _model_lines(model: Model, folder: Path) -> Iterator[str]:
    values: dict[str, Any] = model.model_dump(mode="json", exclude_defaults=True)
    values = {"family": model.family, **values, "pretrained": str(folder)}
    longest = model.seq_len or _LONGEST
    values["seq_len"] = min(longest, _LONGEST)
    scaling = values.pop("rope_scaling", None)
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        yield f"{line:<29} # to train with; the model takes {longest}" if key == "seq_len" else line
    if scaling:
        yield from ("", "[model.rope_scaling]", *(f"{key} = {json.dumps(value)}" for key, value in scaling.items()))
