"""Estimated op times beside measured ones, on one core of this machine: python bench/estimates.py

The estimate is that of `[hardware]`'s defaults for a CPU (docs/costs.md); nothing is fitted to this machine. Times are
CPU times of one thread, the least of some repetitions, of one layer of each kind by itself with plain autograd: F, and
the whole backward against B + W. What the runtime adds around a layer, and other cores do meanwhile, is not in them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from record import Record
from torch import Tensor

from zbc.compiler import estimate
from zbc.compiler.compile import load_job
from zbc.runtime import model
from zbc.spec import Job

JOB = """\
zbc = 1
[model]
layers = 4
{model}
[parallel]
pp = 2
[schedule]
kind = "1f1b"
microbatches = 4
microbatch_size = 4
[data]
kind = "synthetic"
"""
MODELS = {
    "small": 'hidden = 64\nheads = 4\nseq_len = 64\nvocab = 256\npositions = "rotary"',
    "tiny": "hidden = 128\nheads = 4\nseq_len = 128\nvocab = 256",
    "wide": "hidden = 512\nheads = 8\nseq_len = 256\nvocab = 8000",
    "long": "hidden = 128\nheads = 4\nseq_len = 2048\nvocab = 512",
    "words": "hidden = 128\nheads = 4\nseq_len = 128\nvocab = 50257",
    "llama": 'family = "llama"\nhidden = 256\nheads = 8\nkv_heads = 2\nseq_len = 512\nvocab = 4000',
    "bf16": 'hidden = 512\nheads = 8\nseq_len = 256\nvocab = 8000\ndtype = "bfloat16"',
}


class Times(NamedTuple):
    """ms of F and of the whole backward."""

    f: float
    bw: float


def measured(job: Job, index: int, rounds: int) -> Times:
    """One layer by itself; the last one is the head, with its loss."""
    layer = model.layers(job.model, 7)[index].build(0)
    tokens = (job.schedule.microbatch_size, job.model.seq_len or 0)
    x = torch.randn(*tokens, job.model.hidden or 0, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)
    best = [float("inf")] * 2
    for _ in range(rounds):
        began = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.model.dtype == "bfloat16"):
            y: Tensor = layer(x)
            if index == -1:
                y = model.cross_entropy(y, targets)
        grad, middle = torch.ones_like(y), time.process_time()
        y.backward(grad)  # type: ignore[no-untyped-call]
        best = [min(best[0], middle - began), min(best[1], time.process_time() - middle)]
    return Times(1e3 * best[0], 1e3 * best[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimated op times beside measured ones.")
    parser.add_argument("--quick", action="store_true", help="two models, few repetitions; writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record("estimates")
    record(
        f"{'model':6} {'layer':6} {'F ms':>8} {'estimate':>8} {'error':>7} {'BW ms':>8} {'estimate':>8} {'error':>7}"
    )
    for name in ("small", "tiny") if options.quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.toml"
            path.write_text(JOB.format(model=MODELS[name]))
            job = load_job(path)
        table = estimate.layers(job)
        for index, kind in ((1, "block"), (-1, "head")):
            found = measured(job, index, 5 if options.quick else 15)
            told = Times(table[index].f, table[index].b + table[index].w)
            cells = (f"{a:8.2f} {b:8.2f} {100 * (b / a - 1):+6.1f}%" for a, b in zip(found, told, strict=True))
            record(f"{name:6} {kind:6} {' '.join(cells)}")
    record()
    for name, text in MODELS.items():
        record(f"# {name}: {text.replace(chr(10), ', ')}")
    record(JOB.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
