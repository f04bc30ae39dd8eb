"""A job file for a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zbc.commands.jobs import template_text
from zbc.errors import ZbcError
from zbc.job import hfconfig, hfmodel

_SMALL = 2e9  # most parameters of a model that is tried on a CPU
_LONGEST = 2048  # tokens per sequence to begin with; the longest of a model can be far more than fits


def job_text(folder: Path) -> str:
    """The text of a zbc.toml that starts from the weights of `folder`, on this machine's CPU.

    Raises E520, E521, and E105 for a model too large for a CPU.
    """
    from zbc.commands import advising

    count = advising.parameters_of(folder)
    if count > _SMALL:
        text = f"init: a model of {count / 1e9:.3g}B parameters is for GPUs, and init writes jobs for this machine"
        raise ZbcError("E105", text, hint=f"zbc advise {folder} --gpus 64 --gpu h100-sxm -o zbc.toml")
    values, longest = hfmodel.described(folder, _LONGEST)
    values = {**values, "pretrained": str(folder)} if "config" not in values else values
    lines = [
        f"# Made from {folder / hfconfig.CONFIG}; weights are read when the plan runs.",
        "#   zbc plan zbc.toml  &&  zbc run plan --local 2 --save-hf trained",
        "",
        "[model]                       # what is split into stages",
        *_model_lines(hfmodel.written(values), longest),
    ]
    rest = template_text("from-hf").replace("FOLDER", str(folder))
    if data_for(values) == "synthetic":
        synthetic = 'kind = "synthetic"            # shows that all works. To train, take your own tokens:'
        rest = re.sub('kind = "text" .*', synthetic, rest)
    if values["layers"] < 4:
        rest = rest.replace("pp = 2 ", "pp = 1 ").replace("microbatches = 8 ", "microbatches = 4 ")
    return "\n".join([*lines, "", rest])


def data_for(model: Mapping[str, Any]) -> str:
    """The kind of data that any machine has: text, or for fewer words than bytes synthetic tokens."""
    return "text" if model["vocab"] >= 256 else "synthetic"


def _model_lines(values: dict[str, Any], longest: int) -> Iterator[str]:
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        yield f"{line:<29} # to train with; the model takes {longest}" if key == "seq_len" else line
