"""Jobs with some of the features in zbc/excludes.py, and the reference jobs without features that keep a training."""

import re
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.jobs import text_of, tiny_tensors_move
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.shapes import load_job
from zbc.plan.directory import StoredPlan

Tables = dict[str, dict[str, Any]]
STEPS, TOLERANCE = 3, 2e-5  # float32
GPT = {"family": "gpt", "layers": 8, "hidden": 32, "heads": 4, "vocab": 256, "seq_len": 32}
# The settings that give a job a trait: (key, value), several if it needs more than one.
SETTINGS: dict[str, tuple[tuple[str, Any], ...]] = {
    "compile": (("model.compile", True),),
    "tied embeddings": (("model.ties", True),),
    "bfloat16 weights": (("model.parameters", "bfloat16"),),
    "autocast": (("model.dtype", "bfloat16"),),
    "loss by chunks": (("model.loss_chunk", 7), ("model.z_loss", 0.01), ("model.label_smoothing", 0.1)),
    "cp": (("parallel.cp", 2),),
    "tp": (("parallel.tp", 2),),
    "tp_sequence": (("parallel.tp", 2), ("parallel.tp_sequence", True)),
    "replicas": (("parallel.replicas", [1, 2, 1]), ("schedule.kind", "replicated-1f1b")),
    "average": (("parallel.average", {"every": 1}), ("parallel.dp", 2)),
    "one-sided": (("parallel.exchange", "one-sided"), ("parallel.shard", "weights"), ("parallel.dp", 2)),
    "sharded optimizer": (("parallel.shard", "optimizer"), ("parallel.dp", 2)),
    "sharded weights": (("parallel.shard", "weights"), ("parallel.dp", 2)),
    "sharded gradients": (("parallel.shard", "gradients"), ("parallel.dp", 2)),
    "sharded all": (("parallel.shard", "all"), ("parallel.dp", 2)),
    "shared vocabulary": (("parallel.vocabulary", "shared"),),
    "open kind": (("schedule.kind", "auto"),),
    "slices": (("schedule.slices", 2),),
    "ramp": (("schedule.ramp", [{"microbatches": 2, "steps": 1}]),),
    "overlap": (("schedule.overlap", True), ("schedule.kind", "dualpipe-v")),
    "group": (("schedule.group", 4), ("schedule.kind", "interleaved-1f1b")),
    "memory limit": (("schedule.memory_limit", "1x"),),
    "offload": (("memory.activations", "offload"), ("schedule.memory_limit", "0.7x"), ("hardware.host_gbps", 20.0)),
    "post-validate": (("optimizer.sync", "post-validate"),),
    "two versions": (("optimizer.sync", "two-versions"),),
    "asynchronous": (("optimizer.sync", "asynchronous"), ("optimizer.every", 2)),
    "freeze": (("freeze.most", 0.5),),
    "copies": (("schedule.kind", "chimera"),),
    "fused gradients": (("train.fused_gradients", True),),
}
CHANGES = (
    "average",
    "two versions",
    "asynchronous",
    "freeze",
    "bfloat16 weights",
    "autocast",
    "ramp",
    "tied embeddings",
    "loss by chunks",
)


def settings(*traits: str, **changes: Any) -> Tables:
    """The tables of a job with these settings, and further ones, as `model__dtype`."""
    tables: Tables = {
        "model": dict(GPT),
        "parallel": {"pp": 4},
        "schedule": {"kind": "1f1b", "microbatches": 8, "microbatch_size": 2},
        "optimizer": {"lr": 0.01},
        "train": {"steps": STEPS, "seed": 3},
        "data": {"kind": "synthetic"},
    }
    said = [pair for trait in traits for pair in SETTINGS[trait]]
    if ("parallel.dp", 2) in said:
        tables["schedule"]["microbatches"] = 4
    for key, value in (*said, *changes.items()):
        table, name = re.split(r"\.|__", key, maxsplit=1)
        tables.setdefault(table, {})[name] = value
    return tables


def compiled(tables: Tables, kind: str | None = None, budget: float = 0.0) -> Compiled:
    """What is compiled of a job, by its own schedule or another one."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "zbc.toml").write_text(text_of(tables))
        return compile_job(load_job(path, (), kind), budget=budget, suggest=False)


def written(tables: Tables, folder: Path, budget: float = 0.0, *, tiny: bool = True) -> tuple[Compiled, StoredPlan]:
    """What is compiled of a job, and its plan in a folder; unless `tiny`, with the real limit of sizes that move."""
    with tiny_tensors_move() if tiny else nullcontext():
        made = compiled(tables, budget=budget)
    made.write(folder / "plan")
    return made, StoredPlan.read(folder / "plan")


def planned(tables: Tables, *, budget: float = 0.0) -> StoredPlan:
    with tempfile.TemporaryDirectory() as folder:
        return written(tables, Path(folder), budget)[1]


def trained(tables: Tables, *, budget: float = 0.0, steps: int = STEPS) -> list[tuple[float, float]]:
    """Trains a job; returns (loss, norm) of each step."""
    from tests.threads import numbers, run_threads

    with tiny_tensors_move():
        return numbers(run_threads(planned(tables, budget=budget), steps))


def beside(*traits: str, **changes: Any) -> tuple[Tables, Tables]:
    """The tables of a job with these traits, and of one without those traits that must not change the training.

    `changes` are further settings of both, as `model__dtype`; settings of [schedule] apply to the first job only.
    """
    alike = {key: value for key, value in changes.items() if not key.startswith("schedule__")}
    both, plain = settings(*traits, **changes), settings(*(one for one in traits if one in CHANGES), **alike)
    plain["parallel"]["dp"] = both["parallel"].get("dp", 1)
    plain["schedule"]["microbatches"] = both["schedule"]["microbatches"]
    return both, plain


def apart(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """The largest relative difference of losses and norms; nan if one is nan."""
    pairs = [(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)]
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
