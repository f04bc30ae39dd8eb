"""Microbatches in slices beside whole ones, on four ranks as processes: memory, losses and steps.

    python bench/slices_run.py [--steps N] [--quick] [--only memory|steps]

A small GPT on sequences of 4,096 tokens runs whole and in 4 and 8 slices: the most activations of a rank as predicted
and as weighed in a step behind the others (`zbc report`), and how far losses are from those of whole microbatches. Then
layers that sleep (sleeping.py), with ops of 20 ms at 8 slices and of 160 ms whole, so the same work: the median step
beside the simulated one, whose costs have for each op and message what a profile of such layers says that the runtime
and the link add; and beside the same order simulated with the times that its own ops had in that run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from predict import steps_of, zbc
from record import Record

from zbc.compiler.recorded.report import build
from zbc.trace import recording as trace

GPT = """\
zbc = 1
[model]
layers = 4
hidden = 32
heads = 1
vocab = 128
seq_len = 4096
[parallel]
pp = 4
[schedule]
kind = "{kind}"
microbatches = 4
slices = {k}
[data]
kind = "synthetic"
[train]
seed = 3
"""
SLEEPING = """\
zbc = 1
[model]
family = "sleeping:calibrated"
layers = 4
loss = "mse"
seq_len = 64
[model.args]
count = 4
f = {ms}
b = {ms}
w = {ms}
[parallel]
pp = 4
[schedule]
kind = "{kind}"
microbatches = 4
slices = {k}
[costs]
f = {f}
b = {b}
w = {w}
comm = {comm}
[data]
kind = "sleeping:Points"
args = {{width = 64}}
"""
SLICES = (1, 4, 8)
KINDS = ("1f1b", "zb-h1")
OP, WARM_UP = 20.0, 2  # ms of an op of one of 8 slices; first steps that do not count


def run(folder: Path, name: str, job: str, steps: int) -> Path:
    """Run a job for so many steps, and one that is recorded, and one that is weighed; the folder of the run."""
    (folder / f"{name}.toml").write_text(job)
    options = ["--local", "4", "--steps", str(steps + 2), "--trace", str(steps + 1), "--out", name]
    zbc(folder, "run", f"{name}.toml", *options)
    return folder / name


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def memory(record: Record, folder: Path, kind: str, steps: int) -> None:
    record(f"# {kind}: MiB of activations on each rank, predicted / weighed; losses of {steps} steps beside whole ones")
    wanted: list[float] = []
    for k in SLICES:
        out = run(folder, f"gpt-{kind}-{k}", GPT.format(kind=kind, k=k), steps)
        ranks = [(one.predicted or {}, one.measured) for one in build(trace.read(out), again=False).memory]
        both = [(told["activations"] / 2**20, found["activations"] / 2**20) for told, found in ranks]
        worst = max((a / b - 1 for a, b in both), key=abs)
        found = losses(out)[:steps]
        wanted = wanted or found
        far = max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
        text = "  ".join(f"{a:6.1f} / {b:6.1f}" for a, b in both)
        record(f"k={k}  {text}  off by {worst:+.1%} at most; losses {found[0]:.4f} to {found[-1]:.4f}, apart {far:.1e}")


def added(folder: Path) -> dict[str, float]:
    """ms that an op takes beside its work, and a message; of a stage in the middle, which has two messages for each."""
    short = 2.0
    (folder / "job.toml").write_text(SLEEPING.format(kind="zb-h1", k=1, ms=short, f=1, b=1, w=1, comm=0))
    zbc(folder, "profile", "job.toml", "-o", "profile.json", "--rounds", "20")
    profile = json.loads((folder / "profile.json").read_text())
    host, layer = profile["host"], profile["layers"]["Sleeper"]
    messages = {"f": 2, "b": 2, "w": 0}
    found = {
        name: layer[name]["ms"] - short + (host[f"{name}_us"] + count * host["transfer_us"]) / 1e3
        for name, count in messages.items()
    }
    return {**found, "comm": profile["link"]["latency_us"] / 1e3}


def steps(record: Record, folder: Path, kind: str, count: int) -> None:
    more = added(folder)
    record(f"# {kind}: ms of a step, the same work in ops of {8 * OP:g} ms and of {OP:g} ms")
    record("# added, ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in more.items()))
    for k in (1, 8):
        whole = 8 * OP
        costs = {name: whole + k * ms for name, ms in more.items() if name != "comm"} | {"comm": more["comm"]}
        job = SLEEPING.format(kind=kind, k=k, ms=whole / k, **costs)
        (folder / "job.toml").write_text(job)
        told = json.loads(zbc(folder, "plan", "job.toml", "-o", f"plan-{k}", "--json"))
        out = run(folder, f"sleep-{kind}-{k}", job, count + WARM_UP)
        predicted, middle = told["barrier_ms"], statistics.median(steps_of(out)[WARM_UP : WARM_UP + count])
        seen = build(trace.read(out))
        own = seen.replan.present_ms / seen.step.measured - 1 if seen.replan else float("nan")
        text = f"predicted {predicted:8.1f}  measured {middle:8.1f}  off by {predicted / middle - 1:+.1%}"
        record(f"k={k}  {text}; with the run's own op times by {own:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Slices beside whole microbatches, on four ranks.")
    parser.add_argument("--steps", type=int, default=50, help="steps of the GPT whose losses are compared")
    parser.add_argument("--quick", action="store_true", help="one schedule, few steps; writes no file")
    parser.add_argument("--only", choices=("memory", "steps"), help="one half of it")
    options = parser.parse_args()
    record = Record("slices-run")
    with tempfile.TemporaryDirectory() as name:
        for kind in KINDS[: 1 if options.quick else None]:
            if options.only != "steps":
                memory(record, Path(name), kind, 2 if options.quick else options.steps)
            if options.only != "memory":
                steps(record, Path(name), kind, 3 if options.quick else 5)
    for job in (GPT, SLEEPING):
        record()
        record(job.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
