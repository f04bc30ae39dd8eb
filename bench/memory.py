"""Memory per rank by category: what a plan predicts beside what its ranks hold, on the CPU with ranks as threads.

    python bench/memory.py [--model NAME ...]

Measured with zbc/runtime/measure.py in steps 2 and 3: in the first the optimizer makes its state. A category counts as
wrong by the share of its own measured bytes; tensors on their way depend on when the neighbour takes them, so `buffers`
differs a little from run to run, the more the busier the machine is. `all` is the sum of the categories beside the sum
of the measured ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Record

from zbc.compiler.compile import compile_job, load_job
from zbc.compiler.memory import RankMemory, peaks
from zbc.plan import Plan
from zbc.runtime.hub import Hub
from zbc.runtime.measure import CATEGORIES, Held, Scale
from zbc.runtime.state import Worker
from zbc.runtime.threads import run_threads

JOB = """\
zbc = 1
[model]
family = "{family}"
layers = {layers}
hidden = {hidden}
heads = {heads}
vocab = {vocab}
seq_len = {seq_len}
{positions}
dtype = "{dtype}"
parameters = "{parameters}"
[parallel]
pp = {pp}
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = {size}
[memory]
activations = "{activations}"
[hardware]
link_us = 0
[data]
kind = "synthetic"
"""
ROTARY = 'positions = "rotary"'
BASE: dict[str, Any] = {
    "family": "gpt",
    "layers": 6,
    "hidden": 64,
    "heads": 4,
    "vocab": 512,
    "seq_len": 64,
    "positions": "",
    "dtype": "float32",
    "parameters": "float32",
    "pp": 2,
    "m": 6,
    "size": 4,
}
# The formulas of footprint.py were counted on a block alone, width 64; none of these sizes was looked at before.
MODELS: dict[str, dict[str, Any]] = {
    "base": {},
    "bf16": {"dtype": "bfloat16"},
    "masters": {"dtype": "bfloat16", "parameters": "bfloat16"},
    "rotary": {"positions": ROTARY},
    "llama": {"family": "llama", "hidden": 96, "heads": 6},
    "wide": {"hidden": 192, "heads": 6, "seq_len": 32, "size": 3, "pp": 4, "layers": 10, "m": 8},
    "long": {"seq_len": 256, "heads": 2, "size": 1},
    "vocabulary": {"vocab": 8000, "layers": 4, "dtype": "bfloat16", "positions": ROTARY},
}
RECORDED = ("base", "wide", "vocabulary")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-v")


class Row(NamedTuple):
    predicted: RankMemory
    measured: Held

    def error(self, name: str) -> float:
        """How far the prediction is from what was measured, as a share of that."""
        found, told = getattr(self.measured, name), getattr(self.predicted, name)
        return (told - found) / found if found else 0.0 if told == 0 else float("inf")

    @property
    def whole(self) -> float:
        found = sum(getattr(self.measured, name) for name in CATEGORIES)
        return (self.predicted.bytes - found) / found


def rows(options: dict[str, Any]) -> Iterator[Row]:
    """Plan a job, run three steps of it, and give each rank's prediction and measurement."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "job.toml"
        path.write_text(JOB.format(**options))
        compiled = compile_job(load_job(path))
        compiled.write(Path(name) / "plan")
        plan = Plan.read(Path(name) / "plan")
    scales: list[Scale] = []

    def weigh(worker: Worker) -> None:
        scales.append(Scale(worker))

    run_threads(plan, 3, setup=weigh, hub=Hub(plan.manifest.world, prompt=True))
    for scale, memory in zip(scales, peaks(compiled.program, compiled.costs), strict=True):
        yield Row(memory, scale.held)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted memory beside measured memory.")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one (repeatable); writes no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record("memory")
    record("# (predicted - measured) / measured of the worst rank, in %; measured MiB of all ranks together")
    names = " ".join(f"{name:>11}" for name in CATEGORIES)
    record(f"{'model':10} {'schedule':8} {'activations':11} {names} {'all':>7} {'MiB':>8}")
    worst = dict.fromkeys(CATEGORIES, 0.0)
    for model in options.model or RECORDED:
        for kind in SCHEDULES:
            for activations in ("keep", "recompute"):
                settings = {**BASE, **MODELS[model], "kind": kind, "activations": activations}
                report(record, (model, kind, activations), list(rows(settings)), worst)
    record("# worst of all: " + ", ".join(f"{name} {100 * value:+.1f}%" for name, value in worst.items()))
    record()
    record("# the base job")
    record(JOB.format(**BASE, kind="KIND", activations="ACTIVATIONS").rstrip())
    record("# changes: " + "; ".join(f"{name} {changes}" for name, changes in MODELS.items()))
    if not options.model:
        record.write()


def report(record: Record, labels: tuple[str, str, str], found: list[Row], worst: dict[str, float]) -> None:
    cells = []
    for name in CATEGORIES:
        error = max((row.error(name) for row in found), key=abs)
        worst[name] = max(worst[name], error, key=abs)
        cells.append(f"{100 * error:+11.1f}")
    whole = max((row.whole for row in found), key=abs)
    total = sum(getattr(row.measured, name) for row in found for name in CATEGORIES) / 2**20
    model, kind, activations = labels
    record(f"{model:10} {kind:8} {activations:11} {' '.join(cells)} {100 * whole:+7.1f} {total:8.2f}")


if __name__ == "__main__":
    main()
