"""Groups whose ops run in turns, on 2 x 2 ranks as processes: what a step saves beside one op after the other.

    python bench/braids_run.py [--kind dualpipe-v] [--steps N] [--quick]

Layers are one unit that takes `F`, `B` and `W` ms and meets once in F and once in B, over gloo; a sum that is over
sooner is held back until it has taken `A` ms. So what one machine can compute is not measured, but what waits for what.
Both ways run in the same processes, a step of one beside a step of the other. A group of f and b with sums of a_f and
a_b is predicted to take pair(f, b) = f + b + max(0, a_f + a_b - f - b) instead of f + b + a_f + a_b (where both have
their own weight gradients beside their sums: less of these), the step so much less as two simulations of the plan say.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

import shared_run
from ranks import results
from record import Record
from sleeping import Sleeper, calibrate

import zbc
from zbc.ir import Kind, Op
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.execute import run_step
from zbc.runtime.network import Network, bind_loopback
from zbc.training.worker import build_worker

RANKS, LAYERS, MICROBATCHES, WARM_UP = 4, 8, 8, 1
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
    torch.set_num_threads(1)
    bind_loopback()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    cpu, seat = torch.device("cpu"), plan.manifest.topology.of(rank).pp
    network = Network(plan.manifest, cpu, timedelta(seconds=60))
    worker = build_worker(RankPlan(seat, plan.program.ranks[seat], plan.manifest), network, cpu)
    calibrate()
    found: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * (steps + WARM_UP)):
        worker.one_by_one = step % 2 == 0
        dist.barrier()
        began = time.perf_counter()
        run_step(worker, step)
        dist.barrier()
        found[worker.one_by_one].append(1e3 * (time.perf_counter() - began))
    worker.close()
    dist.destroy_process_group()
    if rank == 0:
        sender.send((found[True][WARM_UP:], found[False][WARM_UP:]))


def plan_of(kind: str, folder: Path) -> StoredPlan:
    """A plan with groups."""
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
[optimizer]
kind = "sgd"
lr = 0.0
[data]
kind = "sleeping:Points"
"""
    path = folder / "zbc.toml"
    path.write_text(text)
    zbc.plan(zbc.load(path)).write(folder / kind)
    return StoredPlan.read(folder / kind)


def alone(plan: StoredPlan, op: Op) -> tuple[float, float]:
    """ms that an op computes, and ms of sums that it waits for where nothing else runs meanwhile."""
    layers = len(plan.manifest.layers[op.stage])
    if op.kind is Kind.BW:  # each sum beside the weight gradient of its layer
        return layers * (B + W), layers * max(0.0, A - W)
    return layers * {Kind.F: F, Kind.B: B, Kind.W: W}[op.kind], 0.0 if op.kind is Kind.W else layers * A


def predicted(plan: StoredPlan, *, in_turns: bool) -> float:
    """ms from the first op to the last where transfers take no time and only compute ops do."""
    placement, ended = plan.manifest.to_placement(), dict[tuple[bool, int, int], float]()
    todo = [[op for op in ops if op.kind.computes or op.kind.is_mark] for ops in plan.program.ranks]
    clocks, moved = [0.0] * len(todo), True

    def ready(op: Op) -> float | None:
        if op.kind is Kind.W:
            return 0.0
        forward = op.kind is Kind.F
        before = placement.sources(op.stage) if forward else placement.sinks(op.stage)
        needs = [(forward, stage, op.mb) for stage in before] or ([] if forward else [(True, op.stage, op.mb)])
        return None if any(one not in ended for one in needs) else max((ended[one] for one in needs), default=0.0)

    while moved:
        moved = False
        for rank, ops in enumerate(todo):
            while ops:
                some = ops[1:3] if ops[0].kind.is_mark else ops[:1]
                begins = [ready(op) for op in some]
                if any(one is None for one in begins):
                    break
                times = [alone(plan, op) for op in some]
                work, sums = (sum(column) for column in zip(*times, strict=True))
                rest = max(0.0, sums - work) if in_turns and len(some) > 1 else sums
                clocks[rank] = max(clocks[rank], *(one or 0.0 for one in begins)) + work + rest
                for op in some:
                    if op.kind is not Kind.W:
                        ended[op.kind is Kind.F, op.stage, op.mb] = clocks[rank]
                del ops[: len(some) + (len(some) > 1)]
                moved = True
    return max(clocks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="dualpipe-v", help="a schedule with groups")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="two steps, and write no file")
    given = parser.parse_args()
    record = Record("braids-run")
    record(f"# layers of {F} + {B} + {W} ms and two sums of {A} ms; 2 ranks of a pipeline, 2 that share their layers")
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(given.kind, Path(folder))
    counts = [sum(op.kind.is_mark for op in ops) for ops in plan.program.ranks]
    if not max(counts):
        sys.exit(f"{given.kind} has no groups")
    record(f"# {given.kind}, {MICROBATCHES} microbatches, {' and '.join(map(str, counts))} groups")
    meant = [predicted(plan, in_turns=way) for way in (False, True)]
    steps = 2 if given.quick else given.steps
    arguments = (29640, plan, steps)
    (found,) = results(rank_main, arguments, ranks=RANKS, count=1, preload=("zbc.training.worker",), limit=240)
    measured = [statistics.median(some) for some in found]
    record("                     predicted ms  measured ms  ratio")
    for name, want, got in zip(("one after the other", "in turns"), meant, measured, strict=True):
        record(f"{name:19}  {want:12.1f}  {got:11.1f}  {got / want:5.3f}")
    gains = [a - b for a, b in (meant, measured)]
    record(f"{'gain':19}  {gains[0]:12.1f}  {gains[1]:11.1f}  {gains[1] / gains[0]:5.3f}")
    if not given.quick:
        record.write()


if __name__ == "__main__":
    main()
