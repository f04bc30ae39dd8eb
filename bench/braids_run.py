"""Groups whose ops run in turns, on 2 x 2 ranks as processes: what a step saves beside one op after the other.

    python bench/braids_run.py [--kinds braid-v,dualpipe-v] [--steps N] [--quick]

Stages have four units, as two blocks have; a layer is one unit that takes `F`, `B` and `W` ms and meets once in F and
once in B, over gloo; a sum that is over sooner is held back until it has taken `A` ms. So what one machine can compute
is not measured, but what waits for what.
Both ways run in the same processes, a step of one beside a step of the other. What is predicted is what zbc simulates:
a group of f and b ms with sums of a_f and a_b takes max(f + b, a_f + a_b), and without groups ops wait for their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zbc.runtime.features.units import Braids

sys.path.insert(0, str(Path(__file__).parent.parent))

import shared_run
from ranks import joined, results
from record import Record
from sleeping import Sleeper

import zbc
from zbc.compiler.sim.simulate import simulate
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step

RANKS, LAYERS, MICROBATCHES, WARM_UP = 4, 16, 6, 1
F, B, W, A = 25.0, 25.0, 25.0, 20.0  # ms of a layer, and of each of its two sums


class Unit(shared_run.Shared):
    """A layer of which each rank of a group has a part, with the times of this bench."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Sleeper(F, B, W, 1)


def layers(count: int) -> list[nn.Module]:
    shared_run.A = A
    return [Unit() for _ in range(count)]


def rank_main(rank: int, port: int, plan: StoredPlan, steps: int, sender: Any) -> None:
    with joined(rank, port, plan) as worker:
        found: dict[bool, list[float]] = {True: [], False: []}
        for step in range(2 * (steps + WARM_UP)):
            worker.features.of(Braids).one_by_one = step % 2 == 0
            dist.barrier()
            began = time.perf_counter()
            run_step(worker, step)
            dist.barrier()
            found[worker.features.of(Braids).one_by_one].append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        sender.send((found[True][WARM_UP:], found[False][WARM_UP:]))


def plan_of(kind: str, folder: Path) -> tuple[StoredPlan, zbc.Plan]:
    """A plan with groups, as it is stored and as it was made."""
    text = f"""
[model]
family = "braids_run:layers"
layers = {LAYERS}
loss = "mse"
args = {{count = {LAYERS}}}
[parallel]
pp = 2
tp = 2
[schedule]
kind = "{kind}"
microbatches = {MICROBATCHES}
microbatch_size = 1
{"overlap = true" if kind.startswith("dualpipe") else ""}
[costs]
per = "layer"
f = {F}
b = {B}
w = {W}
comm = 0.0
tp = {A * LAYERS / 4}
[partition]
mode = "uniform"
[optimizer]
kind = "sgd"
lr = 0.0
[data]
kind = "sleeping:Points"
"""
    path = folder / "zbc.toml"
    path.write_text(text)
    made = zbc.plan(zbc.load(path))
    made.write(folder / kind)
    return StoredPlan.read(folder / kind), made


def predicted(made: zbc.Plan) -> tuple[float, float]:
    """ms of a step if the ops of a group run one after the other, each when it can; and in turns, both together."""
    found = made.compiled
    assert found is not None
    ranks = [[op for op in ops if not op.kind.is_mark] for ops in found.program.ranks]
    return simulate(found.program.with_ranks(ranks, by="apart"), found.costs).makespan, found.timeline.makespan


def measure(record: Record, kind: str, steps: int, port: int) -> None:
    """A row for each way to run the groups of a schedule, and one for what is gained."""
    with tempfile.TemporaryDirectory() as folder:
        plan, made = plan_of(kind, Path(folder))
    counts = [sum(op.kind.is_mark for op in ops) for ops in plan.program.ranks]
    if not max(counts):
        sys.exit(f"{kind} has no groups")
    record(f"# {kind}, {MICROBATCHES} microbatches, {' and '.join(map(str, counts))} groups")
    meant = predicted(made)
    arguments = (port, plan, steps)
    (found,) = results(rank_main, arguments, ranks=RANKS, count=1, preload=("zbc.training.worker",), limit=300)
    measured = [statistics.median(some) for some in found]
    record("                     predicted ms  measured ms  ratio")
    for name, want, got in zip(("one after the other", "in turns"), meant, measured, strict=True):
        record(f"{name:19}  {want:12.1f}  {got:11.1f}  {got / want:5.3f}")
    gains = [a - b for a, b in (meant, measured)]
    record(f"{'gain':19}  {gains[0]:12.1f}  {gains[1]:11.1f}  {gains[1] / gains[0]:5.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="braid-v,dualpipe-v", help="schedules with groups")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="two steps, and write no file")
    given = parser.parse_args()
    record = Record("braids-run")
    record(f"# {LAYERS} units of {F} + {B} + {W} ms and two sums of {A} ms; 2 ranks of a pipeline, 2 that share layers")
    for number, kind in enumerate(given.kinds.split(",")):
        measure(record, kind, 2 if given.quick else given.steps, 29640 + number)
    if not given.quick:
        record.write()


if __name__ == "__main__":
    main()
