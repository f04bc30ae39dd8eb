"""Estimated op times beside measured ones, on one core of this machine: python bench/estimates.py

The estimate is that of `[hardware]`'s defaults for a CPU (docs/costs.md); nothing is fitted to this machine. Times are
CPU times of one thread, the least of some repetitions, of one layer of each kind by itself with plain autograd: F, and
the whole backward against B + W. What the runtime adds around a layer, and other cores do meanwhile, is not in them.

Below that attention is alone, and a product of large matrices, in GFLOPS of the operations that the estimate counts: in
bfloat16 what they reach hangs on the instructions of the core, which `ONEDNN_MAX_CPU_ISA` takes from it.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from record import Record
from torch import Tensor

from zbc.compiler.compile import load_job
from zbc.compiler.cost import estimate, work
from zbc.job.spec import Job
from zbc.training.models import model

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


# (sequences, heads, tokens, width of a head)
ATTENTION = ((4, 4, 64, 16), (4, 4, 128, 32), (4, 8, 256, 32), (4, 8, 256, 64), (1, 8, 512, 128), (1, 2, 2048, 64))


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


def attention(record: Record, rounds: int, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    """Rates of causal attention alone, forward and backward, beside those of a product."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA")
    record(f"# the core has {torch.backends.cpu.get_cpu_capability()}{f', oneDNN uses {most}' if most else ''}")
    record(f"{'GFLOPS':18} {'':>9} {'F':>7} {'B':>7}")
    for dtype in (torch.float32, torch.bfloat16):
        label, (a, b) = str(dtype).removeprefix("torch."), torch.randn(2, 1024, 1024).to(dtype)
        record(f"{'1024 cubed':18} {label:>9} {2e-9 * 1024**3 / least(functools.partial(torch.mm, a, b), rounds):7.1f}")
        for sequences, heads, tokens, width in shapes:
            parts = torch.randn(3, sequences, tokens, heads, width).to(dtype).transpose(2, 3).unbind()
            q, k, v = (part.detach().requires_grad_() for part in parts)
            forward = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
            y = forward()
            backward = functools.partial(torch.autograd.grad, y, (q, k, v), torch.randn_like(y), retain_graph=True)
            keys = work.keys_seen(tokens, work.TILE["cpu"])
            square = 1e-9 * sequences * heads * tokens * keys * width
            rates = 4 * square / least(forward, rounds), 10 * square / least(backward, rounds)
            shape = f"{sequences} x {heads} x {tokens} x {width}"
            record(f"{shape:18} {label:>9} {rates[0]:7.1f} {rates[1]:7.1f}")


def least(run: Callable[[], object], rounds: int) -> float:
    """Seconds of one thread that a call takes at the least."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


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
    attention(record, 2 if options.quick else 15, ATTENTION[:1] if options.quick else ATTENTION)
    record()
    for name, text in MODELS.items():
        record(f"# {name}: {text.replace(chr(10), ', ')}")
    record(JOB.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
