"""A job file for a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zbc.job import hfconfig
from zbc.job.model_section import Model

_LONGEST = 2048  # tokens per sequence to begin with; what a model allows at most can be far more than fits

_REST = """
[parallel]
pp = {pp}                        # pipeline ranks

[schedule]                    # the order of work
kind = "zb-v"                 # any name of `zbc schedules`; `zbc compare zbc.toml` ranks them all
microbatches = {m}              # per step
microbatch_size = 1           # sequences

[hardware]                    # used to estimate times and memory
device = "cpu"                # or "cuda", with memory_gib, tflops and link_gbps of yours

[optimizer]
kind = "adamw"
lr = 2e-5
clip_grad_norm = 1.0

[train]
steps = 100
seed = 1234

[data]
kind = "text"                 # bytes as tokens: shows that all works. To train, take the model's own tokens:
# kind = "tokens"             # zbc data tokenize my-text/ -o train.bin --tokenizer {folder}/tokenizer.json
# path = "train.bin"

[log]
every = 10                    # steps between lines on the console
"""


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
    return "\n".join(lines) + "\n" + _REST.format(pp=pp, m=4 * pp, folder=folder)


def _model_lines(model: Model, folder: Path) -> Iterator[str]:
    values: dict[str, Any] = model.model_dump(mode="json", exclude_defaults=True)
    values = {"family": model.family, **values, "pretrained": str(folder)}
    longest = model.seq_len or _LONGEST
    values["seq_len"] = min(longest, _LONGEST)
    scaling = values.pop("rope_scaling", None)
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        yield f"{line:<29} # at most {longest}" if key == "seq_len" else line
    if scaling:
        yield from ("", "[model.rope_scaling]", *(f"{key} = {json.dumps(value)}" for key, value in scaling.items()))
