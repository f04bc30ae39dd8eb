"""A job file for a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zbc.commands.jobs import template_text
from zbc.errors import ZbcError
from zbc.job import hfconfig, hfplanned
from zbc.job.model_section import Model

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
    source = folder / hfconfig.CONFIG
    model, differences = hfplanned.model_of(hfconfig.read_config(folder), str(source))
    lines = [
        *(
            [f"# Made from {source}, to plan with: a run refuses it.", *advising.told_of(differences)]
            if differences
            else [
                f"# Made from {source}; the weights are read when the plan runs.",
                "#   zbc plan zbc.toml  &&  zbc run plan --local 2 --save-hf trained",
            ]
        ),
        "zbc = 1                       # version of this file",
        "",
        "[model]                       # what is split into stages",
        *_model_lines(model, None if differences else folder),
    ]
    pp = 2 if model.layers >= 4 else 1
    rest = template_text("from-hf").replace("FOLDER", str(folder))
    if data_for(model) == "synthetic":
        rest = re.sub(
            'kind = "text" .*',
            'kind = "synthetic"            # shows that all works. To train, take your own tokens:',
            rest,
        )
    if pp == 1:
        rest = rest.replace("pp = 2 ", "pp = 1 ").replace("microbatches = 8 ", "microbatches = 4 ")
    return "\n".join([*lines, "", rest])


def data_for(model: Model) -> str:
    """The kind of data that any machine has: text, or for fewer words than bytes synthetic tokens."""
    return "text" if (model.vocab or 0) >= 256 else "synthetic"


def model_values(model: Model, longest: int) -> dict[str, Any]:
    """`[model]` for sequences of `longest` tokens, or the model's longest if that is less."""
    values: dict[str, Any] = {"family": model.family, **model.model_dump(mode="json", exclude_defaults=True)}
    return {**values, "seq_len": min(model.seq_len or longest, longest)}


def _model_lines(model: Model, folder: Path | None) -> Iterator[str]:
    values = model_values(model, _LONGEST) | ({} if folder is None else {"pretrained": str(folder)})
    longest = model.seq_len or _LONGEST
    scaling = values.pop("rope_scaling", None)
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        yield f"{line:<29} # to train with; the model takes {longest}" if key == "seq_len" else line
    if scaling:
        yield from ("", "[model.rope_scaling]", *(f"{key} = {json.dumps(value)}" for key, value in scaling.items()))
