"""Bidirectional schedules on four gloo processes: measured against predicted, and what eager sums of gradients hide.

    python bench/mirrored.py [--steps N] [--ms MS] [--schedule NAME ...] [--name RECORD]

The ops sleep, as in fidelity.py, F, B and W of a rank for MS (20) each, and a sum over two replicas takes as long
beside them: the ranks meet, then wait on a thread of their own, one sum after the other, as a link would be busy.
Three plans of a schedule take turns: without sums that take time, with the sums where the plan puts them, and with all
sums behind the last op. On a busy machine sleeps end late, which counts less the longer they are.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fidelity import JOB, RANKS, Outcome, take_turns
from ranks import results
from record import Record

PLAIN, EAGER, LATE = "no sums", "eager sums", "sums at the end"
KINDS = {"chimera": 4, "bitpipe": 8, "dualpipe-v": 8}  # schedule -> layers
TWO_PIPES = ("chimera", "bitpipe")
LIMIT = 1200.0  # seconds for everything


class Slow:
    """A transport whose sums take a given time, one after the other."""

    def __init__(self, network: Any, ms: float) -> None:
        self._network, self._seconds, self._queue = network, ms / 1e3, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def start_sum(self, tensor: Any, ranks: tuple[int, ...]) -> Wait:
        return Wait(self._queue.submit(self._sum, tensor, ranks))

    def _sum(self, tensor: Any, ranks: tuple[int, ...]) -> None:
        self._network.start_sum(tensor, ranks).wait()
        time.sleep(self._seconds)


class Wait:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Run:
    def __init__(self, folder: Path, rank: int, ms: float, limit: timedelta) -> None:
        import torch

        from zbc.plan.directory import RankPlan, StoredPlan
        from zbc.runtime.network import Network
        from zbc.training.worker import build_worker

        plan, cpu = StoredPlan.read(folder), torch.device("cpu")
        network = Network(plan.manifest, cpu, limit)
        transport = Slow(network, ms) if ms else network
        self._worker = build_worker(RankPlan(rank, plan.program.ranks[rank], plan.manifest), transport, cpu)

    def step(self, step: int) -> object:
        from zbc.runtime.execute import run_step

        return run_step(self._worker, step)

    def clear(self) -> None:
        """Nothing is left behind."""


def run_rank(rank: int, folder: Path, kinds: list[str], steps: int, ms: float, results: Connection) -> None:
    import sleeping
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sleeping.calibrate()
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit)
    for kind in kinds:
        ways = (PLAIN, EAGER, LATE) if kind in TWO_PIPES else (PLAIN,)
        runs = {way: Run(folder / f"{kind}, {way}", rank, 0.0 if way == PLAIN else ms, limit) for way in ways}
        outcome = take_turns(runs, steps)
        if rank == 0:
            results.send((kind, outcome))
    dist.barrier()
    dist.destroy_process_group()


# ---- in the process that was called --------------------------------------------------------------------------


def write_plan(kind: str, way: str, folder: Path, ms: float) -> tuple[float, str]:
    """The predicted ms of a step and the job; the plan goes into a folder of that name."""
    from zbc.compiler.check import check_all
    from zbc.compiler.compile import compile_job, load_job
    from zbc.compiler.sim.simulate import simulate

    count = KINDS[kind]
    text = JOB.replace("20.0", f"{ms:g}").format(kind=kind, layers=count, each=ms * RANKS / count)
    text = text.replace("comm = 0.0", f"comm = 0.0\nreduce = {0.0 if way == PLAIN else ms:g}")
    path = folder / f"{kind}.toml"
    path.write_text(text)
    compiled = compile_job(load_job(path))
    if way == LATE:
        program = compiled.program
        program = program.with_ranks([late(ops) for ops in program.ranks], by="late-sums")
        check_all(program)
        compiled = replace(compiled, program=program, timeline=simulate(program, compiled.costs))
    compiled.write(folder / f"{kind}, {way}")
    return compiled.timeline.makespan, text


def late(ops: tuple[Any, ...]) -> list[Any]:
    """All REDUCEs behind the last compute, in the order they have."""
    from zbc.ir import Kind

    sums = [op for op in ops if op.kind is Kind.REDUCE]
    rest = [op for op in ops if op.kind is not Kind.REDUCE]
    place = next(i for i, op in enumerate(rest) if op.kind is Kind.VALIDATE)
    return [*rest[:place], *sums, *rest[place:]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Bidirectional schedules, measured against predicted.")
    parser.add_argument("--steps", type=int, default=5, help="steps of each plan; the median counts")
    parser.add_argument("--ms", type=float, default=20.0, help="of F, B and W of a rank, and of a sum")
    parser.add_argument("--schedule", choices=KINDS, action="append", help="only this one (repeatable)")
    parser.add_argument("--name", default="mirrored", help="of the record")
    options = parser.parse_args()
    kinds = options.schedule or list(KINDS)
    record, texts, ms = Record(options.name), {}, options.ms
    record(f"# {RANKS} gloo processes, F = B = W = {ms:g} ms per rank, p = 4, m = 8, a sum takes {ms:g} ms")
    record(f"{'schedule':11} {'sums':16} {'simulated ms':>12} {'median ms':>10} {'ratio':>6} {'best':>6}   steps, ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        predicted = {}
        for kind in kinds:
            for way in (PLAIN, EAGER, LATE) if kind in TWO_PIPES else (PLAIN,):
                predicted[kind, way], texts[kind] = write_plan(kind, way, folder, ms)
        measure(folder, kinds, options.steps, ms, lambda kind, outcome: report(record, kind, predicted, outcome, ms))
    for text in texts.values():
        record()
        record(text.rstrip())
    record.write()


def report(record: Record, kind: str, predicted: dict[tuple[str, str], float], outcome: Outcome, each: float) -> None:
    medians = {way: statistics.median(steps) for way, steps in outcome.steps.items()}
    best = {way: min(steps) for way, steps in outcome.steps.items()}
    for way, steps in outcome.steps.items():
        ms = predicted[kind, way]
        shown = " ".join(f"{x:.1f}" for x in steps)
        record(
            f"{kind:11} {way:16} {ms:12.1f} {medians[way]:10.1f} {medians[way] / ms:6.3f} {best[way] / ms:6.3f}"
            f"   {shown}"
        )
    if LATE in medians:
        sums = 2 * KINDS[kind] // RANKS
        hidden, most = best[LATE] - best[EAGER], (sums - 1) * each
        record(f"{'':11} # {sums} sums of {each:g} ms per rank; the first stage's begins when all else is over")
        record(
            f"{'':11} # of the {most:g} ms of all others, {hidden:.1f} are hidden: {hidden / most:.0%} (fastest steps)"
        )
    others = "" if outcome.others is None else f"; other programs used {outcome.others:.0%} of the machine"
    record(f"{'':11} # a sleep ended {outcome.late:.3f} ms late on average{others}")


def measure(folder: Path, kinds: list[str], steps: int, ms: float, tell: Callable[[str, Outcome], None]) -> None:
    arguments = (folder, kinds, steps, ms)
    for found in results(run_rank, arguments, ranks=RANKS, count=len(kinds), preload=(), limit=LIMIT):
        tell(*found)


if __name__ == "__main__":
    main()
