"""Compares B and W apart with the fused backward: the same stage, in turns per microbatch, on one CPU thread.

    python bench/split.py [--steps N] [--compile]

The fused side runs torch's own layers (under autocast our linear layers, which keep one cast of a weight for all
microbatches). Times are of the processor, so that other programs of the machine count less. For recompute both sides
run each forward a second time in backward. With --compile: forward and backward, with and without `model.compile`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from gpu_job import halved, job_text, planned
from record import Record

from zbc.ir import Kind
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.hub import Hub
from zbc.training.worker import build_worker

STAGE = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512, "seq_len": 128, "size": 2, "m": 4}


class Timed:
    """A worker of one rank that measures ops of `kinds` in each step."""

    def __init__(self, plan: StoredPlan, kinds: tuple[Kind, ...] = (Kind.B, Kind.W, Kind.BW)) -> None:
        self.kinds = kinds
        ops = plan.program.ranks[0]
        self.worker = build_worker(RankPlan(0, ops, plan.manifest), Hub(1).end(0), torch.device("cpu"))
        self.seconds = 0.0
        self.worker.script[:] = [(self._clocked(handler), op, text) for handler, op, text in self.worker.script]

    def _clocked(self, handler: Any) -> Any:
        def run(worker: Worker, op: Any) -> None:
            began = time.thread_time()
            handler(worker, op)
            if op.kind in self.kinds:
                self.seconds += time.thread_time() - began

        return run

    def step(self, step: int) -> float:
        self.seconds = 0.0
        run_step(self.worker, step)
        return self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="B and W apart beside the fused backward.")
    parser.add_argument("--steps", type=int, default=15, help="steps of each side; the median counts")
    parser.add_argument("--compile", action="store_true", help="what model.compile gains, instead")
    parser.add_argument("--no-file", action="store_true", help="write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = Record("split-compile" if options.compile else "split")
    (_compile if options.compile else _split)(record, options.steps)
    record()
    record(_job("float32", "keep").rstrip())
    if not options.no_file:
        record.write()


def _split(record: Record, steps: int) -> None:
    record(f"# {STAGE}; ms of backward per microbatch, median of {steps} steps in turns")
    record(f"{'':9} {'':10} {'BW':>8} {'B + W':>8} {'ratio':>7}   quartiles")
    for dtype in ("float32", "bfloat16"):
        for activations in ("keep", "recompute"):
            plan = planned(_job(dtype, activations))
            sides = Timed(plan), Timed(StoredPlan(plan.manifest, halved(plan.program)))
            record(f"{dtype:9} {activations:10} {_compared(sides, steps)}")


def _compile(record: Record, steps: int) -> None:
    record(f"# {STAGE}; ms of forward and backward per microbatch, median of {steps} steps in turns")
    record(f"{'':7} {'':9} {'':6} {'as is':>8} {'compiled':>8} {'ratio':>7}   quartiles")
    kinds = (Kind.F, Kind.B, Kind.W, Kind.BW)
    for family in ("gpt", "llama"):
        for dtype in ("float32", "bfloat16"):
            job = _job(dtype, "keep").replace("[model]", f'[model]\nfamily = "{family}"')
            plans = [planned(text) for text in (job, job.replace("compile = false", "compile = true"))]
            for name, pair in (
                ("BW", plans),
                ("B + W", [StoredPlan(one.manifest, halved(one.program)) for one in plans]),
            ):
                compared = _compared((Timed(pair[0], kinds), Timed(pair[1], kinds)), steps)
                record(f"{family:7} {dtype:9} {name:6} {compared}")


def _job(dtype: str, activations: str) -> str:
    return job_text(**STAGE, pp=1, kind="1f1b", dtype=dtype, activations=activations)


def _compared(sides: tuple[Timed, Timed], steps: int) -> str:
    """ms per microbatch of both sides, in turns step by step, and the ratio of the second to the first."""
    pairs = [(sides[0].step(step), sides[1].step(step)) for step in range(steps + 2)][2:]
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    times = [statistics.median(column) * 1e3 / STAGE["m"] for column in zip(*pairs, strict=True)]
    return f"{times[0]:8.2f} {times[1]:8.2f} {middle:7.3f}   {low:.3f} to {high:.3f}"


if __name__ == "__main__":
    main()
