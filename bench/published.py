"""Published runs on real GPUs, planned again: predicted over measured times.

    python bench/published.py runs | vocabulary [--quick]

runs: published steps and throughputs, where nothing is fitted but one number per model:

    1f1b           8 A100s, 1F1B with each rank's measured op times (sail-sg/VocabularyParallelism): step
    zero bubble    8 and 16 A100s, op times of Table 9 of arXiv 2401.10241: throughput of its Table 4
    in a node      8 GPUs, AMD Primus' table and figure 15 of arXiv 2503.01328: throughput over that of 1F1B; op times
                   and messages are estimated, once with the link of the GPU and once with the assumed one
    offload        8 A100s, figure 15 of arXiv 2503.01328: throughput with half of the activations on the host, at a
                   quarter of the memory of 1F1B, over that of interleaved 1F1B; op times and bytes are estimated
    W              of Table 9 of arXiv 2401.10241, estimated with gradients added in products as Megatron-LM does
    sequence       64 to 512 A100s, Table 5 of arXiv 2205.05198: step; op times are estimated
    experts        128 and 256 H100s, Megatron-Core's mixtures of experts: step; op times are estimated

The rows and their sources are in tests/reference/published. Where op times are given, only the simulation is compared.
One number per model is fitted: what Megatron-LM's synchronous exchange of a message costs its ranks
(`costs.message`). It hardly depends on the bytes, and is no price of the runtime of this project.

vocabulary: the cost of a whole head on the last stage, in time and in memory.

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

import argparse
import csv
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.machine import Machine
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.schedules.request import Request
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.simulate import simulate
from zbc.job.spec import Job

DATA = Path(__file__).parent.parent / "tests" / "reference" / "published"
MESSAGE = {"1.5B": 400, "14.6B": 450}  # us; between messages a transfer takes no further time
KINDS = {
    "1f1b": ("1f1b", ""),
    "1f1bi": ("interleaved-1f1b", ""),
    "zb1p": ("zb-auto", "1.0x"),
    "zb2p": ("zb-auto", "2.0x"),
}


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a file."""
    with (DATA / name).open() as lines:
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def step_ms(
    kind: str, p: int, m: int, layers: int, costs: Mapping[str, object], message_us: float = 0.0, **schedule: object
) -> float:
    """ms of a step of equal layers, by the fast search."""
    tables = {
        "schedule": {"kind": kind, **schedule},
        "partition": {"layers_per_stage": "equal"},
        "costs": {**costs, "message": message_us / 1e3},
    }
    return compile_job(job(layers=layers, pp=p, m=m, **tables), suggest=False, budget=0.0).timeline.makespan


@dataclass(frozen=True)
class Step:
    """A step, or an op, as predicted and as measured, in one unit."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def one_f_one_b() -> Iterator[Step]:
    """1F1B with whole vocabularies: `base` has equal blocks, `redis` an even partition."""
    for row in rows("vocabulary_runs.csv"):
        if row["method"] in ("base", "redis"):
            f, bw = ([float(us) / 1e3 for us in row[key].split()] for key in ("f_us", "b_us"))
            costs = {"per": "rank", "f": f, "b": bw, "w": [0.0] * len(f)}
            ms = step_ms("1f1b", int(row["pp"]), int(row["m"]), 32, costs)
            yield Step(f"{row['method']} {row['seq_len']} {row['vocab']}", ms, float(row["iteration_ms"]))


@dataclass(frozen=True)
class Throughput:
    """Samples per GPU and second of each schedule."""

    name: str
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        return {key: ms / self.measured[key] for key, ms in self.predicted.items()}


def zero_bubble(
    message: Mapping[str, float] | None = None, only: Collection[str] = tuple(KINDS)
) -> Iterator[Throughput]:
    """The rows of Table 4, with us for a message by model; without an entry, with transfers alone."""
    for row in rows("zero_bubble_throughput.csv"):
        us = (MESSAGE if message is None else message).get(row["model"], 0.0)
        comm = max(0.0, float(row["comm"]) - 2 * us / 1e3)
        costs = {"f": float(row["f"]), "b": float(row["bw_b"]), "w": float(row["w"]), "comm": comm}
        p, m, v = int(row["p"]), int(row["m"]), int(row["v"])
        predicted = {}
        for key, (kind, limit) in ((key, KINDS[key]) for key in only):
            more = {"memory_limit": limit} if limit else {"chunks": v} if key == "1f1bi" else {}
            took = step_ms(kind, p, m, v * p, costs, us, **more)
            predicted[key] = int(row["b"]) * m / p / took * 1e3
        yield Throughput(f"{row['model']} m = {m}", predicted, {key: float(row[f"thr_{key}"]) for key in KINDS})


def in_a_node(*, assumed: bool = False) -> Iterator[Step]:
    """Throughput over that of 1F1B, with messages as the runtime of this project sends them; `assumed`: over the link
    that a job without `hardware.gpu` is taken to have."""
    for row in rows("schedules_in_a_node.csv"):
        numbers = {key: int(row[key]) for key in ("hidden", "ffn_hidden", "heads", "kv_heads") if row[key]}
        model = {**numbers, "family": "llama", "vocab": 32000, "seq_len": int(row["seq"])}
        model |= {"dtype": "bfloat16", "parameters": "bfloat16"}
        hardware = {"device": "cuda"} if assumed else {"gpu": row["gpu"]}
        steps = []
        for kind in ("1f1b", row["kind"]):
            chunks = {"chunks": int(row["chunks"])} if kind == "interleaved-1f1b" else {}
            tables = {"model": model, "hardware": {**hardware, "memory_gib": 1000}}
            tables["schedule"] = {"kind": kind, "microbatch_size": 1, **chunks}
            made = job(layers=int(row["layers"]), pp=8, m=int(row["m"]), **tables)
            steps.append(compile_job(made, suggest=False, budget=0.0).step_ms)
        yield Step(f"{row['model']} seq {row['seq']} {row['kind']}", steps[0] / steps[1], float(row["relative"]))


@dataclass(frozen=True)
class Offload:
    """Throughput with offload over that of interleaved 1F1B, predicted and measured."""

    name: str
    predicted: float
    measured: float


MACHINE = {"device": "cuda", "tflops": 220, "host_gbps": 15, "link_gbps": 2400, "memory_gib": 1000}


def offload() -> Iterator[Offload]:
    """Rows in which interleaved 1F1B was not out of memory."""
    for row in rows("pipeoffload_fig15.csv"):
        if row["mfu_1f1bi"] == "OOM":
            continue
        model = {"family": "llama", "hidden": int(row["hidden"]), "heads": int(row["heads"]), "kv_heads": 8}
        model |= {"vocab": 32000, "seq_len": int(row["seq"]), "dtype": "bfloat16", "parameters": "bfloat16"}
        steps = []
        for kind, more in (("interleaved-1f1b", {}), ("gis", {"memory_limit": "0.25x"})):
            schedule = {"kind": kind, "chunks": 5, "microbatch_size": 1, **more}
            memory = {"activations": "selective+offload" if more else "keep"}
            tables = {"model": model, "hardware": MACHINE, "schedule": schedule, "memory": memory}
            made = job(layers=int(row["layers"]), pp=int(row["gpus"]), m=int(row["batch"]), **tables)
            steps.append(compile_job(made, suggest=False, budget=0.0).step_ms)
        ratio = float(row["mfu_po_h"]) / float(row["mfu_1f1bi"])
        yield Offload(f"{row['model']} seq {row['seq']}", steps[0] / steps[1], ratio)


A100 = {"device": "cuda", "gpu": "a100-80g"}
GPT = {"family": "gpt", "dtype": "bfloat16", "parameters": "bfloat16"}
SHAPES = {"1.5B": (2304, 24), "14.6B": (5120, 40)}  # hidden, heads: Table 3


def weight_gradients(*, fused: bool = True) -> Iterator[Step]:
    """W of the three blocks of a rank, of each model's first row in Table 9."""
    for name, row in {row["model"]: row for row in reversed(rows("zero_bubble_throughput.csv"))}.items():
        hidden, heads = SHAPES[name]
        model = {**GPT, "hidden": hidden, "heads": heads, "vocab": 50304, "seq_len": 1024}
        tables = {"model": model, "hardware": {**A100, "memory_gib": 1000}, "train": {"fused_gradients": fused}}
        tables |= {
            "schedule": {"kind": "zb-h1", "microbatch_size": int(row["b"])},
            "partition": {"layers_per_stage": "equal"},
        }
        p = int(row["p"])
        made = compile_job(job(layers=3 * p, pp=p, m=p, **tables), suggest=False, budget=0.0)
        yield Step(name, made.costs.of("w", 1), float(row["w"]))


@dataclass(frozen=True)
class Large:
    """A step, and GiB of the fullest rank."""

    step: Step
    gib: float


def sequence_parallel() -> Iterator[Large]:
    """Tensor and sequence parallel over 8 GPUs, gathering again for W; attention keeps no scores anyway."""
    for row in rows("sequence_parallel_steps.csv"):
        model = {**GPT, "hidden": int(row["hidden"]), "heads": int(row["heads"]), "vocab": 51200, "seq_len": 2048}
        v, p = int(row["v"]), int(row["p"])
        kind = {"kind": "interleaved-1f1b", "chunks": v} if v > 1 else {"kind": "1f1b"}
        tables = {"model": model, "hardware": {**A100, "ranks_per_node": 8}, "train": {"fused_gradients": True}}
        tables |= {"schedule": {**kind, "microbatch_size": 1}, "parallel": {"tp": 8, "tp_sequence": "regather"}}
        tables |= {"partition": {"layers_per_stage": "equal"}}
        made = compile_job(job(layers=int(row["layers"]), pp=p, m=int(row["m"]), **tables), suggest=False, budget=0.0)
        held = max(rank.bytes for rank in made.memory)
        yield Large(Step(row["model"], made.step_ms / 1e3, float(row["seconds"])), held / 2**30)


LOW = {"family": "llama", "dtype": "bfloat16", "parameters": "bfloat16", "head_size": 128}
MIXTURES = {  # layers, and the model
    "qwen3": (
        94,
        {"variant": "qwen3", "hidden": 4096, "heads": 64, "kv_heads": 4, "vocab": 151936, "experts": 128}
        | {"top_k": 8, "ffn_hidden": 1536},
    ),
    "mixtral": (
        56,
        {"hidden": 6144, "heads": 48, "kv_heads": 8, "vocab": 32768, "experts": 8} | {"top_k": 2, "ffn_hidden": 16384},
    ),
}


def _flops(model: Mapping[str, object], layers: int, seq: int) -> float:
    """Operations per token as Megatron-Core counts them: of the weights that it meets, and half of the scores."""
    hidden, heads, groups, k, width, vocab = (
        int(str(model[key])) for key in ("hidden", "heads", "kv_heads", "top_k", "ffn_hidden", "vocab")
    )
    weights = layers * hidden * (256 * (heads + groups) + 3 * k * width + int(str(model["experts"]))) + hidden * vocab
    return 6.0 * weights + 6.0 * layers * heads * 128 * seq


def mixtures(only: Collection[str] = ()) -> Iterator[Step]:
    """Seconds of steps; `only`: names of rows, else all."""
    for row in rows("experts_steps.csv"):
        if only and row["name"] not in only:
            continue
        layers, sizes = MIXTURES[row["model"]]
        tp, cp, ep, pp, v, dp, m, seq = (int(row[key]) for key in ("tp", "cp", "ep", "pp", "v", "dp", "m", "seq"))
        kind = {"kind": "interleaved-1f1b", "chunks": v} if v > 1 else {"kind": "1f1b"}
        kind |= {"overlap": True, "early": 1} if row["overlap"] else {}
        tables = {"model": {**LOW, **sizes, "seq_len": seq}, "schedule": {**kind, "microbatch_size": 1}}
        tables |= {"hardware": {"gpu": "h100", "memory_gib": 1000}, "train": {"fused_gradients": True}}
        kept = {"attention": "keep"} if row["activations"] == "selective" else {}
        tables |= {"memory": {"activations": row["activations"], **kept}}
        axes = {"tp": tp, "cp": cp, "dp": dp, "ep": ep, "shard": "optimizer", "tp_sequence": "regather"}
        made = compile_job(job(layers=layers, pp=pp, m=m, parallel=axes, **tables), suggest=False, budget=0.0)
        work = _flops(sizes, layers, seq) * m * dp * seq / (pp * tp * cp * dp)
        yield Step(f"{row['model']} {row['name']}", made.step_ms / 1e3, work / (float(row["tflops"]) * 1e12))


def table(record: Record, title: str, columns: Sequence[str], found: Sequence[tuple[str, Sequence[float]]]) -> None:
    """A line for each row, with its numbers."""
    record(f"{title:32}" + "".join(f"{column:>22}" for column in columns))
    for name, numbers in found:
        record(f"{name:32}" + "".join(f"{number:22.3f}" for number in numbers))
    record()


def runs(record: Record, quick: bool) -> None:
    """The tables, then the ratios of all that is predicted as a run of its own, over measured ones."""
    beside = ("predicted", "measured", "ratio")
    steps = {"1F1B on 8 A100s, ms": [*one_f_one_b()], "experts, s": [] if quick else [*mixtures()]}
    large = [] if quick else [*sequence_parallel()]
    steps["tp 8, sequence parallel, s"] = [one.step for one in large]
    ratios = [step.ratio for found in steps.values() for step in found]
    for title, found in steps.items():
        table(record, title, beside, [(step.name, (step.predicted, step.measured, step.ratio)) for step in found])
    table(record, "tp 8, GiB of the fullest rank", ("predicted",), [(one.step.name, (one.gib,)) for one in large])
    for name, message in (("transfers alone", {}), ("one number for a message", MESSAGE)):
        found = [*zero_bubble(message)]
        table(record, f"throughput, {name}", [*KINDS], [(row.name, [*row.ratios.values()]) for row in found])
    ratios += [1 / ratio for row in found for ratio in row.ratios.values()]  # of throughputs, with that number
    if not quick:
        sides = zip(in_a_node(), in_a_node(assumed=True), strict=True)
        columns = ("predicted", "by the assumed link", "measured")
        found = [(one.name, (one.predicted, other.predicted, one.measured)) for one, other in sides]
        table(record, "throughput over that of 1F1B", columns, found)
        found = [(one.name, (one.predicted, one.measured)) for one in offload()]
        table(record, "half offload over interleaved", beside[:2], found)
        ways = zip(weight_gradients(), weight_gradients(fused=False), strict=True)
        found = [(inside.name, (inside.ratio, after.ratio)) for inside, after in ways]
        table(record, "W of three blocks", ("added in the product", "after it"), found)
    off = [abs(ratio - 1) for ratio in ratios]
    record(f"# steps of {len(off)} runs: off by {statistics.median(off):.1%} at the median, {max(off):.1%} at most")


# ---- vocabulary ---------------------------------------------------------------------------------------------

REFERENCE = DATA.parent / "vocabulary_parallelism.csv"
P, MICROBATCHES, EXTRA_INTERVALS = 8, 128, 2
SUSTAINED = (230.0, 1750.0)  # TFLOPS of bfloat16 products, GB/s of plain kernels: 74% and 86% of an A100's peak
OTHERS = ((156.0, 1750.0), (200.0, 1500.0), (200.0, 1750.0), (250.0, 1750.0), (312.0, 2039.0))  # last: the data sheet
PEAK = 312e12  # FLOPS for MFU
ODD = (2048, 262144)  # half the speed and 8 GB more than its neighbours, which no model can explain

JOB = """\
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
    costs = pricing.build(job, placement, [tuple(range(a, b)) for a, b in pairwise(cuts)])
    ends = [(layer.f / P, layer.b / P, layer.w / P) for layer in (table[0], table[-1])]
    f, b, w = (sum(column) for column in zip(*ends, strict=True))
    again = 2 * 4 * (job.model.vocab or 0) / P * (job.model.seq_len or 0)
    b += Machine.of(job).ms([("", 0.0, again, 1)])
    more = {"f": f, "b": b, "w": w}
    costs = costs.with_ms(**{name: tuple(x + ms for x in costs.column(name)) for name, ms in more.items()})
    program = card.make(Request(P, MICROBATCHES))
    interval = costs.of("f") + costs.of("b") + costs.of("w")
    return simulate(program, costs).makespan + EXTRA_INTERVALS * interval


def vocabulary(record: Record, quick: bool) -> None:
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
    for tflops, bandwidth in () if quick else OTHERS:
        others = list(cases(tflops, bandwidth))
        errors = " ".join(f"{100 * one.error:+.1f}%" for one in others)
        record(f"# {tflops:g} TFLOPS, {bandwidth:g} GB/s: {errors}; within 6%: {_within(others)}")
    record()
    record(JOB.rstrip())


def _within(found: list[Case]) -> int:
    return sum(abs(one.error) <= 0.06 for one in found)


PARTS = {"runs": ("published", runs), "vocabulary": ("vocabulary", vocabulary)}  # with the names of their records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="what takes seconds; writes no file")
    asked = parser.parse_args()
    name, part = PARTS[asked.part]
    record = Record(name)
    part(record, asked.quick)
    if not asked.quick:
        record.write()


if __name__ == "__main__":
    main()
