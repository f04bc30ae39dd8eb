"""The cost model against published numbers: the cost of a whole head on the last stage, in time and in memory.

    python bench/vocabulary.py

tests/reference/vocabulary_parallelism.csv holds Table 5 of arXiv 2411.05288 (8 A100, 32 layers, h = 3072, 24 heads, 128
microbatches of one sequence, 1F1B) as its authors print it with their code: MFU and GB on the fullest rank, with whole
vocabulary layers on the first and the last stage ("baseline") and with them shared evenly by all ranks ("Vocab-1").

    naive      1F1B of the job, cut into equal blocks
    balanced   the same, with an eighth of embedding and head on each stage. Vocab-1 puts the passes of the vocabulary
               between those of two later microbatches, so a step has two intervals more (its figure 10), and corrects
               its share of the softmax once it knows the others': one more read and write in float32 (its algorithm 1)

    shared     zbc's plan with parallel.vocabulary = "shared", 1 sum; the link is fast, as published

The ratio is between naive and balanced makespans; times are of a step, the paper's from its MFU. One number is fitted
to the table: `tflops`, so that a balanced step takes about as long as published. It is a factor of all times, and moves
the ratios by less than a point; the last lines show other values.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from zbc.compiler.compile import compile_job, load_job
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.machine import Kernel, Machine
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.schedules.request import Request
from zbc.compiler.sim.simulate import simulate
from zbc.job.spec import Job

REFERENCE = Path(__file__).parent.parent / "tests" / "reference" / "vocabulary_parallelism.csv"
P, MICROBATCHES, EXTRA_INTERVALS = 8, 128, 2
SUSTAINED = (230.0, 1750.0)  # TFLOPS of bfloat16 products, GB/s of plain kernels: 74% and 86% of an A100's peak
OTHERS = ((156.0, 1750.0), (200.0, 1500.0), (200.0, 1750.0), (250.0, 1750.0), (312.0, 2039.0))  # last: the data sheet
PEAK = 312e12  # FLOPS for MFU
ODD = (2048, 262144)  # half the speed and 8 GB more than its neighbours, which no model can explain

JOB = """\
zbc = 1
[model]
family = "gpt"
layers = 32
hidden = 3072
heads = 24
vocab = {vocab}
seq_len = {seq_len}
dtype = "bfloat16"
parameters = "bfloat16"
[parallel]
pp = 8
[schedule]
kind = "1f1b"
microbatches = 128
[partition]
layers_per_stage = "equal"
[hardware]
device = "cuda"
tflops = {tflops}
memory_gbps = {memory_gbps}
link_gbps = 2400
"""


class Case(NamedTuple):
    """A published row and the cost model's numbers; GB are of the fullest rank of the baseline."""

    seq_len: int
    vocab: int
    published: float
    ratio: float
    published_s: tuple[float, float]  # of a step, naive and balanced
    seconds: tuple[float, float]
    published_gb: float
    gb: float
    shared: tuple[float, float]  # a step of zbc's own order with parallel.vocabulary = "shared": s, GB

    @property
    def error(self) -> float:
        return self.ratio / self.published - 1

    @property
    def memory_error(self) -> float:
        return self.gb / self.published_gb - 1

    @property
    def odd(self) -> bool:
        return (self.seq_len, self.vocab) == ODD


def cases(tflops: float = SUSTAINED[0], memory_gbps: float = SUSTAINED[1]) -> Iterator[Case]:
    """Every published row, predicted."""
    with REFERENCE.open(newline="") as file:
        for row in csv.DictReader(file):
            sizes = {"seq_len": int(row["seq_len"]), "vocab": int(row["vocab"])}
            job = _job(**sizes, tflops=tflops, memory_gbps=memory_gbps)
            naive, balanced = compile_job(job, suggest=False).report, balanced_ms(job)
            mfu = float(row["baseline_mfu"]) / 100, float(row["vocab1_mfu"]) / 100
            counted = _counted_flops(**sizes)
            ours = compile_job(job.with_vocabulary("shared"), suggest=False).report
            yield Case(
                **sizes,
                published=mfu[0] / mfu[1],
                ratio=balanced / naive.makespan_ms,
                published_s=(counted / (mfu[0] * P * PEAK), counted / (mfu[1] * P * PEAK)),
                seconds=(naive.makespan_ms / 1e3, balanced / 1e3),
                published_gb=float(row["baseline_gb"]),
                gb=naive.peak_bytes / 2**30,
                shared=(ours.makespan_ms / 1e3, ours.peak_bytes / 2**30),
            )


def _counted_flops(seq_len: int, vocab: int) -> float:
    """Operations of a step as Megatron-LM counts them for MFU, with the full square of attention."""
    return MICROBATCHES * seq_len * (32 * (72 * 3072**2 + 12 * seq_len * 3072) + 6 * 3072 * vocab)


def _job(**options: float) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(JOB.format(**options))
        return load_job(path)


def balanced_ms(job: Job) -> float:
    """ms of a step in which every stage has its share of embedding and head."""
    table = estimate.layers(job)
    card = SCHEDULES["1f1b"]
    placement = card.placement(P, 1)
    cuts = [1 + stage * (len(table) - 2) // P for stage in range(P + 1)]
    costs = pricing.build(job, placement, [tuple(range(a, b)) for a, b in pairwise(cuts)], table)
    ends = [(layer.f / P, layer.b / P, layer.w / P) for layer in (table[0], table[-1])]
    f, b, w = (sum(column) for column in zip(*ends, strict=True))
    again = 2 * 4 * (job.model.vocab or 0) / P * (job.model.seq_len or 0)
    b += Machine.of(job).ms([Kernel(0, again)])
    more = {"f": f, "b": b, "w": w}
    costs = costs.with_ms(**{name: tuple(x + ms for x in costs.column(name)) for name, ms in more.items()})
    program = card.make(Request(P, MICROBATCHES))
    interval = costs.of("f") + costs.of("b") + costs.of("w")
    return simulate(program, costs).makespan + EXTRA_INTERVALS * interval


def main() -> None:
    from record import Record  # next to this file; tests import the rest

    record = Record("vocabulary")
    tflops, bandwidth = SUSTAINED
    record(f"# naive over balanced placement of the vocabulary, {tflops:g} TFLOPS and {bandwidth:g} GB/s sustained")
    record(
        "#             ratio                 naive step s    balanced step s  GB on the fullest rank      zbc, shared"
    )
    pair = f"{'paper':>7} {'model':>7}"
    record(f" seq  vocab  paper  model   error {pair} {pair}  paper  model   error   step s    GB")
    found = list(cases())
    for one in found:
        ratio = f"{one.published:6.3f} {one.ratio:6.3f} {100 * one.error:+6.1f}%"
        steps = " ".join(f"{a:7.2f} {b:7.2f}" for a, b in zip(one.published_s, one.seconds, strict=True))
        memory = f"{one.published_gb:6.2f} {one.gb:6.2f} {100 * one.memory_error:+6.1f}%"
        ours = f"{one.shared[0]:7.2f} {one.shared[1]:6.2f}"
        record(f"{one.seq_len:4} {one.vocab:6} {ratio} {steps} {memory} {ours}{'  odd' if one.odd else ''}")
    record(f"# within 6%: {_within(found)} of {len(found)}")
    record()
    for tflops, bandwidth in OTHERS:
        others = list(cases(tflops, bandwidth))
        errors = " ".join(f"{100 * one.error:+.1f}%" for one in others)
        record(f"# {tflops:g} TFLOPS, {bandwidth:g} GB/s: {errors}; within 6%: {_within(others)}")
    record()
    record(JOB.rstrip())
    record.write()


def _within(found: list[Case]) -> int:
    return sum(abs(one.error) <= 0.06 for one in found)


if __name__ == "__main__":
    main()
