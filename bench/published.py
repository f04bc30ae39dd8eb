"""Published runs on real GPUs, planned again: predicted over measured times.

    python bench/published.py

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
(`hardware.message_us`). It hardly depends on the bytes, and is no price of the runtime of this project.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.jobs import job
from zbc.compiler.compile import compile_job

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
    tables = {"schedule": {"kind": kind, **schedule}, "partition": {"layers_per_stage": "equal"}, "costs": costs}
    tables["hardware"] = {"message_us": message_us}
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
        | {"top_k": 8, "expert_hidden": 1536},
    ),
    "mixtral": (
        56,
        {"hidden": 6144, "heads": 48, "kv_heads": 8, "vocab": 32768, "experts": 8}
        | {"top_k": 2, "expert_hidden": 16384},
    ),
}


def _flops(model: Mapping[str, object], layers: int, seq: int) -> float:
    """Operations per token as Megatron-Core counts them: of the weights that it meets, and half of the scores."""
    hidden, heads, groups, k, width, vocab = (
        int(str(model[key])) for key in ("hidden", "heads", "kv_heads", "top_k", "expert_hidden", "vocab")
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
        tables |= {"memory": {"activations": row["activations"]}}
        axes = {"tp": tp, "cp": cp, "dp": dp, "ep": ep, "shard": "optimizer", "tp_sequence": "regather"}
        made = compile_job(job(layers=layers, pp=pp, m=m, parallel=axes, **tables), suggest=False, budget=0.0)
        work = _flops(sizes, layers, seq) * m * dp * seq / (pp * tp * cp * dp)
        yield Step(f"{row['model']} {row['name']}", made.step_ms / 1e3, work / (float(row["tflops"]) * 1e12))


def main() -> None:
    console = Console(width=100)
    steps = list(one_f_one_b())
    table = Table("1F1B on 8 A100s", "predicted ms", "measured ms", "ratio", box=None)
    for step in steps:
        table.add_row(step.name, f"{step.predicted:.0f}", f"{step.measured:.0f}", f"{step.ratio:.3f}")
    table.add_row("mean", "", "", f"{statistics.fmean(step.ratio for step in steps):.3f}")
    console.print(table)
    for name, message in (("transfers alone", {}), ("one number for a message", MESSAGE)):
        table = Table(f"throughput, {name}", *KINDS, box=None)
        for row in zero_bubble(message):
            table.add_row(row.name, *(f"{ratio:.3f}" for ratio in row.ratios.values()))
        console.print(table)
    table = Table("throughput over that of 1F1B", "predicted", "by the assumed link", "measured", box=None)
    for step, other in zip(in_a_node(), in_a_node(assumed=True), strict=True):
        table.add_row(step.name, f"{step.predicted:.3f}", f"{other.predicted:.3f}", f"{step.measured:.2f}")
    console.print(table)
    table = Table("half offload over interleaved 1F1B", "predicted", "measured", box=None)
    for found in offload():
        table.add_row(found.name, f"{found.predicted:.3f}", f"{found.measured:.3f}")
    console.print(table)
    table = Table("W of three blocks", "added inside the product", "after it", box=None)
    for inside, after in zip(weight_gradients(), weight_gradients(fused=False), strict=True):
        table.add_row(inside.name, f"{inside.ratio:.3f}", f"{after.ratio:.3f}")
    console.print(table)
    table = Table("tp 8, sequence parallel", "predicted s", "measured s", "ratio", "GiB", box=None)
    for large in sequence_parallel():
        step = large.step
        table.add_row(
            step.name, f"{step.predicted:.2f}", f"{step.measured:.2f}", f"{step.ratio:.3f}", f"{large.gib:.1f}"
        )
    console.print(table)
    table = Table("experts", "predicted s", "measured s", "ratio", box=None)
    for step in mixtures():
        table.add_row(step.name, f"{step.predicted:.1f}", f"{step.measured:.1f}", f"{step.ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
