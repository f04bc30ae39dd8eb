"""How much longer than simulated a step takes, on four gloo processes, beside torch.distributed.pipelining.

    python bench/fidelity.py [--steps N] [--schedule NAME ...]

The ops sleep (see sleeping.py), so a step lasts as long as the simulator says plus what the runtime adds. Both runtimes
run the same layers in the same processes and take turns, so that a busy machine slows both. A step lasts from a moment
that all ranks agreed on to the end of its last rank. Ours includes VALIDATE and STEP, where the ranks agree on the
gradient norm and the optimizer runs; the peer's ends with the last gradient.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ranks import results
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
comm = 0.0
[data]
kind = "sleeping:Points"
"""

# Schedule -> layers, and who runs it beside us: torch's own schedule of that name, and torch's general runtime with
# our order. Torch has no class for ZB-H1, and its ZB-V is that runtime with an order equal to ours.
OURS, SAME_ORDER = "zbc", "torch, our order"
CASES = {
    "1f1b": (4, ("Schedule1F1B", SAME_ORDER)),
    "zb-h1": (4, (SAME_ORDER,)),
    "zb-v": (8, ("ScheduleZBVZeroBubble",)),
}
RANKS = 4
WARM_UP = 2  # first steps that do not count
LIMIT = 170.0  # seconds for everything; what takes longer hangs


class Outcome(NamedTuple):
    """Of one schedule."""

    steps: Mapping[str, list[float]]  # runtime -> ms of each step
    others: float | None  # share of all cores that other programs used meanwhile, where the system tells
    late: float  # how much later than asked a sleep ended on average, ms


class Runtime(Protocol):
    def step(self, step: int) -> object:
        """Train one step on this rank."""

    def clear(self) -> None:
        """Tidy up behind it; not timed."""


# ---- on each rank --------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, kinds: list[str], steps: int, results: Connection) -> None:
    """One rank's process: every schedule, all runtimes in turn. Rank 0 sends (schedule, `Outcome`) after each."""
    import sleeping
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    sleeping.calibrate()
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit)
    for kind in kinds:
        outcome = take_turns(runtimes(kind, rank, folder / kind, limit), steps)
        if rank == 0:
            results.send((kind, outcome))
    dist.barrier()  # nobody leaves while another still listens
    dist.destroy_process_group()


def runtimes(kind: str, rank: int, folder: Path, limit: timedelta) -> dict[str, Runtime]:
    import ours
    import peer

    from zbc.plan.directory import StoredPlan

    plan = StoredPlan.read(folder)
    result: dict[str, Runtime] = {OURS: ours.build(plan, rank, limit)}
    for name in CASES[kind][1]:
        result[name] = peer.build(name, plan, rank, folder)
    return result


def take_turns(runs: Mapping[str, Runtime], steps: int) -> Outcome:
    """Run each runtime for one step, then each for the next, and so on."""
    import sleeping

    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            sleeping.late.clear()
            began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        for name, run in runs.items():
            took = timed(run, step)
            run.clear()
            if step >= WARM_UP:
                times[name].append(took * 1e3)
    own = over_ranks(time.process_time() - own, "SUM")
    others = (busy_seconds() - busy - own) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    late = over_ranks(statistics.fmean(sleeping.late), "SUM") / RANKS
    return Outcome(times, max(0.0, others) if busy else None, late * 1e3)


def timed(run: Runtime, step: int) -> float:
    """Seconds from a moment that all ranks agree on to the end of the last one."""
    from sleeping import sleep_until

    start = over_ranks(time.perf_counter() + 0.005, "MAX")  # processes of one machine share this clock
    sleep_until(start)
    run.step(step)
    return over_ranks(time.perf_counter() - start, "MAX")


def over_ranks(number: float, how: str) -> float:
    """The sum or the largest of all ranks' numbers; waits for all of them."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
    return tensor.item()


def busy_seconds() -> float:
    """What all programs of this machine have computed so far; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks


# ---- in the process that was called --------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Measured steps beside simulated ones and beside torch's pipelining.")
    parser.add_argument("--steps", type=int, default=5, help="steps of each runtime; the median counts")
    parser.add_argument("--schedule", choices=CASES, action="append", help="only this one (repeatable); writes no file")
    options = parser.parse_args()
    kinds = options.schedule or list(CASES)
    record = Record("fidelity")
    record(f"# {RANKS} gloo processes, F = B = W = 20 ms per rank, p = 4, m = 8; median of {options.steps} steps")
    record(f"{'schedule':9} {'runtime':22} {'simulated ms':>12} {'median ms':>10} {'ratio':>6}   steps, ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulated = {kind: write_plan(kind, folder) for kind in kinds}
        measure(folder, kinds, options.steps, lambda kind, outcome: report(record, kind, simulated[kind], outcome))
    for kind in kinds:
        record()
        record(f"# the job of {kind}")
        record(job(kind).rstrip())
    if not options.schedule:
        record.write()


def job(kind: str) -> str:
    count = CASES[kind][0]
    return JOB.format(kind=kind, layers=count, each=20.0 * RANKS / count)


def write_plan(kind: str, folder: Path) -> float:
    """Plan the job of a schedule into `folder`; what one step should take, in ms."""
    from zbc.compiler.compile import compile_job, load_job

    path = folder / f"{kind}.toml"
    path.write_text(job(kind))
    compiled = compile_job(load_job(path))
    compiled.write(folder / kind)
    return compiled.report.makespan_ms


def report(record: Record, kind: str, simulated: float, outcome: Outcome) -> None:
    for name, steps in outcome.steps.items():
        median = statistics.median(steps)
        shown = " ".join(f"{ms:.1f}" for ms in steps)
        record(f"{kind:9} {name:22} {simulated:12.1f} {median:10.1f} {median / simulated:6.3f}   {shown}")
    others = "" if outcome.others is None else f"; other programs used {outcome.others:.0%} of the machine"
    record(f"{'':9} # a sleep ended {outcome.late:.3f} ms late on average{others}")


def measure(
    folder: Path,
    kinds: list[str],
    steps: int,
    tell: Callable[[str, Any], None],
    *,
    target: Callable[..., None] = run_rank,
    limit: float = LIMIT,
) -> None:
    """Hand on what rank 0 sends of each schedule: its name and what was measured."""
    arguments = (folder, kinds, steps)
    for found in results(target, arguments, ranks=RANKS, count=len(kinds), preload=("peer", "ours"), limit=limit):
        tell(*found)


if __name__ == "__main__":
    main()
