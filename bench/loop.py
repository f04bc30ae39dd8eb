"""Does the loop close? Plan, run, report, plan anew with what was measured: is the step any worse, is the gain there?

    python bench/loop.py [--repetitions N] [--quick]

Each repetition has a model of its own, whose layers sleep for times drawn at random. In turns the first plan is made
with a profile (`zbc profile`) and without, which takes all layers to be alike. The plan runs with a trace, `zbc report`
says what planning anew would gain and how, and its command makes the new plan. Then steps of both plans are measured in
the same processes in turns. A repetition is fine if the new step is no longer than the old one, within the noise, and
the gain that the report predicted has the right sign; gains within the noise have none.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from predict import zbc
from ranks import results
from record import Record

JOB = """\
zbc = 1
[model]
family = "sleeping:drawn"
layers = {layers}
loss = "mse"
[model.args]
count = {layers}
seed = {seed}
least = 0.5
most = 8.0
[parallel]
pp = {ranks}
[schedule]
kind = "{kind}"
microbatches = 8
[data]
kind = "sleeping:Points"
"""
RANKS, LAYERS = 4, 16
KINDS = ("1f1b", "zb-h1", "zb-v")
NOISE = 0.01  # steps, and gains, that differ by less are the same
WARM_UP, STEPS = 2, 9
TRACED = "3-8"


class Loop(NamedTuple):
    """One repetition: ms of a step before and after, quartiles of their ratio, and the share the report promised."""

    first: float
    second: float
    low: float
    high: float
    promised: float
    same: bool  # the new plan is the old one

    @property
    def gain(self) -> float:
        return 1 - self.second / self.first

    @property
    def no_worse(self) -> bool:
        return self.same or self.gain > -NOISE

    @property
    def right_sign(self) -> bool:
        if abs(self.promised) <= NOISE:
            return self.same or abs(self.gain) <= 2 * NOISE
        return self.promised * self.gain > 0


def once(folder: Path, number: int, steps: int) -> Loop:
    """One repetition in a folder of its own."""
    (folder / "zbc.toml").write_text(
        JOB.format(layers=LAYERS, ranks=RANKS, seed=number, kind=KINDS[number % len(KINDS)])
    )
    extra: list[str] = []
    if number % 2 == 0:
        zbc(folder, "profile", "zbc.toml", "-o", "first.json", "--rounds", "6", "-q")
        extra = ["--profile", "first.json"]
    zbc(folder, "plan", "zbc.toml", "-o", "first", "-q", *extra)
    zbc(folder, "run", "first", "--local", str(RANKS), "--steps", "8", "--trace", TRACED, "--out", "run")
    told = json.loads(zbc(folder, "report", "run", "--json"))
    for command in told["replan_command"].split(" && "):
        zbc(folder, *shlex.split(command)[1:])
    pairs = in_turns(folder, ["first", "plan-measured"], steps)
    low, _, high = statistics.quantiles([b / a for a, b in pairs], n=4, method="inclusive")
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    same = orders(folder / "first") == orders(folder / "plan-measured")
    return Loop(first, second, low, high, told["replan"]["gain"], same)


def orders(plan: Path) -> tuple[Any, ...]:
    """The layers of every stage, and the ops of every rank."""
    from zbc.plan.directory import StoredPlan

    read = StoredPlan.read(plan)
    return read.manifest.layers, read.program.ranks


def in_turns(folder: Path, plans: list[str], steps: int) -> list[tuple[float, ...]]:
    """ms of each step of every plan, one after the other in the same processes."""
    (found,) = results(
        run_rank,
        (folder, plans, steps),
        ranks=RANKS,
        count=1,
        preload=("ours", "sleeping"),
        limit=120.0,
    )
    pairs: list[tuple[float, ...]] = found
    return pairs


def run_rank(rank: int, folder: Path, plans: list[str], steps: int, sender: Connection) -> None:
    import ours
    import sleeping
    import torch
    import torch.distributed as dist
    from fidelity import timed

    from zbc.plan.directory import StoredPlan

    torch.set_num_threads(1)
    sleeping.calibrate()
    limit = timedelta(seconds=60)
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=limit)
    runs: list[Any] = [ours.build(StoredPlan.read(folder / name), rank, limit) for name in plans]
    rows = [tuple(1e3 * timed(run, step) for run in runs) for step in range(WARM_UP + steps)]
    if rank == 0:
        sender.send(rows[WARM_UP:])
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan, run, report, plan anew: is the step any worse?")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each plan; the medians count")
    parser.add_argument("--quick", action="store_true", help="two repetitions; writes no file")
    options = parser.parse_args()
    record = Record("loop")
    record(f"# {RANKS} gloo ranks, {LAYERS} layers, F, B and W of 0.5 to 8 ms each; medians of {options.steps} steps")
    record(
        f"{'':3} {'schedule':9} {'first plan':11} {'first ms':>9} {'new ms':>9} {'gain':>7} {'promised':>9}   quartiles"
    )
    found, began = list[Loop](), time.perf_counter()
    for number in range(2 if options.quick else options.repetitions):
        with tempfile.TemporaryDirectory() as name:
            one = once(Path(name), number, options.steps)
        found.append(one)
        how = "equal" if number % 2 else "profiled"
        verdict = (
            "   the same plan"
            if one.same
            else ""
            if one.no_worse and one.right_sign
            else "   worse"
            if not one.no_worse
            else "   wrong sign"
        )
        record(
            f"{number:3} {KINDS[number % len(KINDS)]:9} {how:11} {one.first:9.1f} {one.second:9.1f} {one.gain:+7.1%} "
            f"{one.promised:+9.1%}   {one.low:.3f} to {one.high:.3f} of the first{verdict}"
        )
    worse, signs = sum(not one.no_worse for one in found), sum(one.right_sign for one in found)
    record(f"# no worse in {len(found) - worse} of {len(found)}, the right sign in {signs}; noise is {NOISE:.0%}")
    record(f"# took {time.perf_counter() - began:.0f} s")
    record()
    record(JOB.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
