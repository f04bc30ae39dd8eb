"""What the optimizer's barrier costs, on four gloo processes with ops that sleep, beside torch.distributed.pipelining.

    python bench/postval.py [--rounds N] [--schedule NAME ...]

Each contestant trains ten steps in a row, then the next one does, and so on for some rounds. The period is the time
between the ends of two steps, the mean over the last seven of the ten on the slowest rank. With its barrier ours agrees
on the norm by VALIDATE; without it, by NORM and VERDICT while the next step warms up. Torch has no such thing: behind
each of its steps ranks sum their squares (an all-reduce) and step, as a training loop does.

The transfer time that the prediction takes is measured first: half of a message to a neighbour and back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from fidelity import RANKS, SAME_ORDER, busy_seconds, measure, over_ranks
from record import Record

JOB = """\
zbc = 1
[model]
family = "sleeping:layers"
layers = {layers}
loss = "mse"
[model.args]
count = {layers}
f = {each}
b = {each}
w = {each}
[parallel]
pp = 4
[schedule]
kind = "{kind}"
microbatches = 8
[costs]
f = 20.0
b = 20.0
w = 20.0
comm = {comm:.3f}
[optimizer]
lr = 1e-6
clip_grad_norm = 1e9
sync = "{sync}"
[data]
kind = "sleeping:Points"
"""
CASES = {"zb-v": (8, "ScheduleZBVZeroBubble"), "zb-h2": (4, SAME_ORDER)}
BARRIER, AHEAD = "zbc, barrier", "zbc, no barrier"
STEPS, SKIPPED = 10, 3
PINGS = 200


class Outcome(NamedTuple):
    """Of one schedule: ms of a period per contestant and round; what else ran meanwhile."""

    periods: Mapping[str, list[float]]
    others: float
    load: tuple[float, float]  # average number of running processes, before and after


# ---- on each rank --------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, kinds: list[str], rounds: int, results: Connection) -> None:
    """One rank's process. Rank 0 sends the transfer time, then (schedule, `Outcome`) for each."""
    import sleeping
    import torch.distributed as dist

    with _joined(rank, folder):
        sleeping.calibrate()
        if kinds == ["ping"]:
            found = ping(rank)
            if rank == 0:
                results.send(("ping", found))
            return
        for kind in kinds:
            outcome = take_turns(contestants(kind, rank, folder), rounds)
            if rank == 0:
                results.send((kind, outcome))
        dist.barrier()


@contextmanager
def _joined(rank: int, folder: Path) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    yield
    dist.barrier()
    dist.destroy_process_group()


def ping(rank: int) -> float:
    """ms of a small message to a neighbour."""
    import torch
    import torch.distributed as dist

    number, times = torch.zeros(1), []
    for _ in range(PINGS):
        time.sleep(0.005)  # receivers are asleep when a message comes, as between two ops
        began = time.perf_counter()
        if rank == 0:
            dist.send(number, 1)
            dist.recv(number, 1)
        elif rank == 1:
            dist.recv(number, 0)
            dist.send(number, 0)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / 2 * 1e3


def contestants(kind: str, rank: int, folder: Path) -> dict[str, Callable[[int], list[float]]]:
    """What trains `STEPS` steps from a given one on, and returns when each ended."""
    import ours
    import peer

    from zbc.plan.directory import StoredPlan

    limit = timedelta(seconds=60)
    plans = {name: StoredPlan.read(folder / f"{kind}-{sync}") for name, sync in SYNCS.items()}
    mine = {name: ours.build(plan, rank, limit) for name, plan in plans.items()}
    torch_name = CASES[kind][1]
    other = peer.build(torch_name, plans[BARRIER], rank, folder / f"{kind}-before-step")

    def run_ours(name: str, step: int) -> list[float]:
        ends = []
        for k in range(STEPS):
            mine[name].step(step + k)
            ends.append(time.perf_counter())
        mine[name].finish()
        return ends

    def run_peer(step: int) -> list[float]:
        ends = []
        for k in range(STEPS):
            other.step(step + k)
            other.agree()
            other.clear()
            ends.append(time.perf_counter())
        return ends

    return {
        BARRIER: lambda step: run_ours(BARRIER, step),
        AHEAD: lambda step: run_ours(AHEAD, step),
        torch_name: run_peer,
    }


SYNCS = {BARRIER: "before-step", AHEAD: "post-validate"}


def take_turns(runs: Mapping[str, Callable[[int], list[float]]], rounds: int) -> Outcome:
    """Each contestant's ten steps, then each one's next ten; the first round does not count."""
    from sleeping import sleep_until

    periods: dict[str, list[float]] = {name: [] for name in runs}
    load = os.getloadavg()[0]
    for turn in range(1 + rounds):
        if turn == 1:
            began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        for name, run in runs.items():
            sleep_until(over_ranks(time.perf_counter() + 0.005, "MAX"))
            ends = run(turn * STEPS)
            period = over_ranks((ends[-1] - ends[SKIPPED - 1]) / (STEPS - SKIPPED), "MAX")
            if turn:
                periods[name].append(period * 1e3)
    own = over_ranks(time.process_time() - own, "SUM")
    others = (busy_seconds() - busy - own) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return Outcome(periods, max(0.0, others), (load, os.getloadavg()[0]))


# ---- in the process that was called --------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Periods with and without the optimizer's barrier.")
    parser.add_argument("--rounds", type=int, default=5, help="of ten steps of each contestant; the median counts")
    parser.add_argument("--schedule", choices=CASES, action="append", help="only this one (repeatable); writes no file")
    options = parser.parse_args()
    kinds = options.schedule or list(CASES)
    record = Record("postval")
    record(f"# {RANKS} gloo processes, F = B = W = 20 ms per rank, p = 4, m = 8; {STEPS} steps in a row,")
    record(f"# ms from the end of a step to the end of the next; median of {options.rounds} rounds")
    record(f"# {priority()}")
    comm = transfer_ms()
    record(f"# a message to a neighbour takes {comm:.3f} ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        predicted = {kind: write_plans(kind, folder, comm) for kind in kinds}
        limit = 60.0 + 25.0 * len(kinds) * (1 + options.rounds)

        def tell(kind: str, outcome: Outcome) -> None:
            report(record, kind, predicted[kind], outcome)

        measure(folder, kinds, options.rounds, tell, target=run_rank, limit=limit)
    for kind in kinds:
        record()
        record(f"# the job of {kind}; sync is before-step or post-validate")
        record(job(kind, "post-validate", comm).rstrip())
    if not options.schedule:
        record.write()


def priority() -> str:
    """How this process is scheduled; sleeping ops need little of a core, but that at once."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return f"scheduled before all others (real-time priority {os.sched_getparam(0).sched_priority})"
    return f"scheduled like others (nice {os.nice(0)})"


def transfer_ms() -> float:
    found: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), ["ping"], PINGS, lambda _, ms: found.append(ms), target=run_rank)
    return found[0]


def job(kind: str, sync: str, comm: float) -> str:
    count = CASES[kind][0]
    return JOB.format(kind=kind, layers=count, each=20.0 * RANKS / count, sync=sync, comm=comm)


def write_plans(kind: str, folder: Path, comm: float) -> dict[str, float]:
    """Plan a schedule with and without the barrier; the predicted period of each."""
    from zbc.compiler.compile import compile_job, load_job

    found = {}
    for name, sync in SYNCS.items():
        path = folder / f"{kind}-{sync}.toml"
        path.write_text(job(kind, sync, comm))
        compiled = compile_job(load_job(path))
        compiled.write(folder / f"{kind}-{sync}")
        found[name] = compiled.settled_ms
    return found


def report(record: Record, kind: str, predicted: Mapping[str, float], outcome: Outcome) -> None:
    record()
    record(f"{kind:6} {'contestant':22} {'predicted ms':>12} {'median ms':>10} {'ratio':>6}   rounds, ms")
    for name, rounds in outcome.periods.items():
        median = statistics.median(rounds)
        shown = " ".join(f"{ms:.1f}" for ms in rounds)
        wanted = predicted.get(name)
        numbers = f"{'-':>12} {median:10.1f} {'-':>6}"
        if wanted is not None:
            numbers = f"{wanted:12.1f} {median:10.1f} {median / wanted:6.3f}"
        record(f"{'':6} {name:22} {numbers}   {shown}")
    gains = [a - b for a, b in zip(outcome.periods[BARRIER], outcome.periods[AHEAD], strict=True)]
    gain, wanted_gain = statistics.median(gains), predicted[BARRIER] - predicted[AHEAD]
    record(
        f"{'':6} shorter without the barrier by {gain:.1f} ms, predicted {wanted_gain:.1f}: {gain / wanted_gain:.0%}"
    )
    before, after = outcome.load
    record(
        f"{'':6} # other programs used {outcome.others:.0%} of the machine; load {before:.1f} before, {after:.1f} after"
    )


if __name__ == "__main__":
    main()
