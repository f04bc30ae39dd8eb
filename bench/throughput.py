"""Steps per second beside torch.distributed.pipelining: the same model, order and microbatches on two gloo processes.

    python bench/throughput.py [--steps N] [--case NAME ...] [--quick]

Both runtimes run in the same processes and take turns, step by step, so that a busy machine slows both; one thread per
kernel. The peer is torch's general runtime with our order of ops and its own split of backward; with recompute its
layers are checkpointed as torch does it. Ours includes VALIDATE and STEP; the peer sums the norm of all gradients over
the ranks after its step, as torch does it, and runs the same optimizer. A ratio above 1 says that ours is faster; `cpu`
is the same for processor time, of both ranks and all their threads, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranks import results
from record import Record

if TYPE_CHECKING:
    pass

RANKS, WARM_UP, LIMIT = 2, 3, 600.0
PATIENCE = timedelta(seconds=120)
JOB = """\
zbc = 1
[model]
layers = {layers}
hidden = {hidden}
heads = 4
vocab = {vocab}
seq_len = {seq_len}
[parallel]
pp = 2
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = {size}
[memory]
activations = "{activations}"
[data]
kind = "synthetic"
"""
SMALL = {"layers": 2, "hidden": 16, "vocab": 256, "seq_len": 8, "size": 1, "m": 16, "activations": "keep"}
MEDIUM = {"layers": 4, "hidden": 128, "vocab": 512, "seq_len": 64, "size": 2, "m": 8, "activations": "keep"}
CASES: dict[str, dict[str, Any]] = {
    "small 1f1b": {**SMALL, "kind": "1f1b"},
    "small zb-h1": {**SMALL, "kind": "zb-h1"},
    "small zb-v": {**SMALL, "kind": "zb-v"},
    "medium 1f1b": {**MEDIUM, "kind": "1f1b"},
    "medium zb-h1": {**MEDIUM, "kind": "zb-h1"},
    "recompute 1f1b": {**MEDIUM, "kind": "1f1b", "activations": "recompute"},
    "recompute zb-h1": {**MEDIUM, "kind": "zb-h1", "activations": "recompute"},
}


# ---- on each rank --------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, cases: list[str], steps: int, results: Connection) -> None:
    """One rank's process: every case, both runtimes in turn. Rank 0 sends what it measured."""
    with meeting(rank, folder / "meet"):
        for number, case in enumerate(cases):
            found = take_turns(runtimes(CASES[case], rank, folder / str(number)), steps)
            if rank == 0:
                results.send(found)


@contextmanager
def meeting(rank: int, place: Path) -> Iterator[None]:
    """A process group of all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS, timeout=PATIENCE)
    yield
    dist.barrier()
    dist.destroy_process_group()


def runtimes(case: dict[str, Any], rank: int, folder: Path) -> dict[str, Callable[[int], None]]:
    import ours
    import torch_runtime

    from zbc.plan.directory import StoredPlan

    plan = StoredPlan.read(folder)
    mine = ours.build(plan, rank, PATIENCE)
    theirs = torch_runtime.build(plan, rank, folder, recompute=case["activations"] == "recompute")
    return {"zbc": lambda step: mine.step(step) and None, "torch": theirs}


def take_turns(runs: dict[str, Callable[[int], None]], steps: int) -> dict[str, list[float]]:
    """ms of every step of each runtime, from a moment that all ranks agreed on to the end of the last one.

    Under "NAME cpu" the ms of processor time that all ranks spent on it together.
    """
    times: dict[str, list[float]] = {key: [] for name in runs for key in (name, f"{name} cpu")}
    for step in range(WARM_UP + steps):
        for name, run in runs.items():
            over_ranks(0.0)
            began, spent = time.perf_counter(), time.process_time()
            run(step)
            took, used = time.perf_counter() - began, time.process_time() - spent
            took, used = over_ranks(took), over_ranks(used, "SUM")
            if step >= WARM_UP:
                times[name].append(took * 1e3)
                times[f"{name} cpu"].append(used * 1e3)
    return times


def over_ranks(number: float, how: str = "MAX") -> float:
    """The largest of all ranks' numbers, or their sum; waits for all of them."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
    return tensor.item()


# ---- in the process that was called --------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps per second beside torch.distributed.pipelining.")
    parser.add_argument("--steps", type=int, default=60, help="steps of each runtime; the median counts")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one (repeatable); writes no file")
    parser.add_argument("--quick", action="store_true", help="few steps of one case; writes no file")
    options = parser.parse_args()
    if options.quick:
        options.case, options.steps = options.case or ["small 1f1b"], min(options.steps, 5)
    cases = options.case or list(CASES)
    record = Record("throughput")
    record(f"# {RANKS} gloo processes, one thread each; ms per step, median of {options.steps} in turns")
    record(f"{'case':16} {'ops':>5} {'zbc ms':>9} {'torch ms':>9} {'ratio':>7} {'cpu':>7}   quartiles of the ratio")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = [write_plan(JOB.format(**CASES[case]), folder / str(i)) for i, case in enumerate(cases)]
        found = measure(run_rank, (folder, cases, options.steps), len(cases))
        for case, count, times in zip(cases, counts, found, strict=True):
            report(record, case, count, times)
    record()
    record("# the cases: " + json.dumps(CASES))
    record(JOB.rstrip())
    if not options.case:
        record.write()


def report(record: Record, case: str, count: int, times: dict[str, list[float]]) -> None:
    ratios = [theirs / mine for mine, theirs in zip(times["zbc"], times["torch"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    mine, theirs, our_cpu, their_cpu = (
        statistics.median(times[name]) for name in ("zbc", "torch", "zbc cpu", "torch cpu")
    )
    ratio = f"{theirs / mine:7.3f} {their_cpu / our_cpu:7.3f}"
    record(f"{case:16} {count:5} {mine:9.2f} {theirs:9.2f} {ratio}   {low:.2f} to {high:.2f}")


def write_plan(job: str, folder: Path) -> int:
    """Plan a job into `folder`; the number of its ops."""
    from zbc.compiler.compile import compile_job, load_job

    path = folder.with_suffix(".toml")
    path.write_text(job)
    compiled = compile_job(load_job(path))
    compiled.write(folder)
    return compiled.program.size


def measure(target: Callable[..., None], arguments: tuple[Any, ...], count: int) -> Iterator[Any]:
    """The `count` things that rank 0 sends."""
    return results(target, arguments, ranks=RANKS, count=count, preload=("torch_runtime", "ours"), limit=LIMIT)


if __name__ == "__main__":
    main()
