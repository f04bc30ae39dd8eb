"""What recording costs: steps that are recorded, steps that are not, and steps of a runtime that knows of no recording.

    python bench/tracing.py [--steps N] [--quick]

First one rank alone in this process: processor time of its thread per op where layers compute nothing. What differs is
what recording adds to every op, whatever that op does. Then two gloo processes, one thread per kernel; the three take
turns step by step in the same worker, so that a busy machine slows all of them. `cpu` is the processor time of both
ranks and all their threads, which other programs disturb less. "never" is the loop as it was before there was any
recording, copied here; "on" has each step written to its file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from per_op import NOTHING
from ranks import results
from record import Record
from throughput import JOB, MEDIUM, RANKS, SMALL, take_turns, write_plan

LIMIT = 600.0
SLEEPING = (
    NOTHING.replace("{m}", "32")
    .replace('"idle:layers"', '"sleeping:layers"')
    .replace("layers = 4", "layers = 4\nargs = {args}")
)
CASES = {
    "idle zb-h1": NOTHING.format(kind="zb-h1", m=32),
    "1 ms ops zb-h1": SLEEPING.replace("{kind}", "zb-h1").replace("{args}", "{ count = 4, f = 0.5, b = 0.5, w = 0.5 }"),
    "small zb-h1": JOB.format(**{**SMALL, "kind": "zb-h1"}),
    "medium 1f1b": JOB.format(**{**MEDIUM, "kind": "1f1b"}),
    "medium zb-h1": JOB.format(**{**MEDIUM, "kind": "zb-h1"}),
}
HOW = ("never", "off", "on")


def contestants(worker: Any, folder: Path) -> dict[str, Callable[[int], None]]:
    """The three ways to run a step of one worker."""
    from zbc.runtime.execute import run_step
    from zbc.trace import recording as trace
    from zbc.training.recording.scribe import Scribe
    from zbc.training.recording.tracing import Recorder

    head = trace.Head(worker.plan.manifest.id, worker.rank, "cpu", "here:1", len(worker.script))
    writer, recorder, scribe = trace.Writer(folder / "run", head), Recorder(worker), Scribe()

    def on(step: int) -> None:
        _, stamped = recorder.record(step, stop=False)
        scribe.add(lambda: writer.step(stamped.timing()))

    return {"never": lambda step: before(worker, step), "off": lambda step: run_step(worker, step) and None, "on": on}


def before(worker: Any, step: int) -> None:
    """`run_step` of a plan with a barrier as it was when nothing could be recorded."""
    from zbc.runtime.execute import _close, _enter, _verdict
    from zbc.runtime.validate import reset_peak

    worker.stop, _ = False, _enter(worker, step)
    progress, script, now = worker.progress, worker.script, time.monotonic
    worker.step, worker.verdict = step, None
    reset_peak(worker.device)
    progress.step, progress.total = step, len(script)
    began = now()
    for index, (handler, op, text) in enumerate(script):
        progress.index, progress.op, progress.since = index, text, now()
        handler(worker, op)
    verdict = _verdict(worker)
    _close(worker, drain=True)
    verdict.result(step, now() - began)


# ---- one rank alone ------------------------------------------------------------------------------------------


def alone(folder: Path, steps: int) -> tuple[int, dict[str, float]]:
    """Ops of a step of one rank whose layers compute nothing, and us of its thread per op."""
    import torch

    from zbc.plan.directory import RankPlan, StoredPlan
    from zbc.runtime.hub import Hub
    from zbc.training.worker import build_worker

    torch.set_num_threads(1)
    write_plan(NOTHING.format(kind="1f1b", m=32).replace("pp = 2", "pp = 1"), folder / "alone")
    plan = StoredPlan.read(folder / "alone")
    worker = build_worker(RankPlan(0, plan.program.ranks[0], plan.manifest), Hub(1).end(0), torch.device("cpu"))
    runs, spent = contestants(worker, folder), {name: list[float]() for name in HOW}
    for step in range(20 + steps):
        for name, run in runs.items():
            began = time.thread_time()
            run(step)
            spent[name].append((time.thread_time() - began) * 1e6)
    ops = len(worker.script)
    return ops, {name: statistics.median(values[20:]) / ops for name, values in spent.items()}


# ---- two ranks -----------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, cases: list[str], steps: int, sender: Connection) -> None:
    """One rank's process: every case, the three in turn. Rank 0 sends what it measured."""
    import ours
    import torch
    import torch.distributed as dist

    from zbc.plan.directory import StoredPlan

    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit)
    for case in cases:
        plan = StoredPlan.read(folder / str(list(CASES).index(case)))
        found = take_turns(contestants(ours.build(plan, rank, limit).worker, folder), steps)
        if rank == 0:
            sender.send((len(plan.program.ranks[rank]), found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording costs.")
    parser.add_argument("--steps", type=int, default=60, help="steps of each; the median counts")
    parser.add_argument("--quick", action="store_true", help="few steps of two cases; writes no file")
    options = parser.parse_args()
    cases, steps = (["1 ms ops zb-h1", "medium zb-h1"], 12) if options.quick else (list(CASES), options.steps)
    record = Record("tracing")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ops, each = alone(folder, 10 * steps)
        told = ", ".join(f"{how} {each[how]:.2f}" for how in HOW)
        record(f"one rank alone, {ops} ops that compute nothing, us of its thread per op: {told}")
        more = each["on"] - each["off"]
        record(f"recording adds {more:.2f} us to an op: {0.1 * more:.2f}% of one that takes 1 ms")
        record()
        record(f"# {RANKS} gloo processes, one thread each; median of {steps} steps in turns; ratios to `never`")
        record(f"{'case':16} {'ops':>5} {'never ms':>9} {'off':>7} {'on':>7} {'off cpu':>8} {'on cpu':>8}")
        for number, text in enumerate(CASES.values()):
            write_plan(text, folder / str(number))
        preload = ("ours", "idle", "sleeping", "throughput", "zbc.training.recording.tracing")
        found = results(run_rank, (folder, cases, steps), ranks=RANKS, count=len(cases), preload=preload, limit=LIMIT)
        for case, (count, times) in zip(cases, found, strict=True):
            report(record, case, count, times)
    if not options.quick:
        record.write()


def report(record: Record, case: str, ops: int, times: dict[str, list[float]]) -> None:
    def ratio(name: str, suffix: str = "") -> str:
        pairs = zip(times[name + suffix], times["never" + suffix], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.3f}"

    never = statistics.median(times["never"])
    shown = f"{case:16} {ops:5} {never:9.2f} {ratio('off'):>7} {ratio('on'):>7}"
    record(f"{shown} {ratio('off', ' cpu'):>8} {ratio('on', ' cpu'):>8}")


if __name__ == "__main__":
    main()
