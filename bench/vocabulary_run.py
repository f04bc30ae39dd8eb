"""A vocabulary that all ranks share beside one at the ends of the pipeline, on four ranks as processes.

    python bench/vocabulary_run.py [--steps N] [--quick]

The proportions of a Gemma with 2 billion parameters: 26 layers, and an output layer of 256,000 words that takes as long
as 7.6 of them. A small model of as many layers runs on gloo, really trains, and each of its ops is made to take as long
as it would there (`MS` for the forward of a layer): what one machine can compute is not measured, but what waits for
what is, and all messages and collectives are real. Blocks are cut evenly, 7 7 6 6; at the ends the output layer comes
on top of the last 6. The step beside the simulated one, whose costs are those times and 0 for messages; and the gain of
sharing, measured and simulated. Losses are those of the same training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import joined, results
from record import Record
from sleeping import sleep_until

from tests.runtime.small_plans import make_plan
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Op, Program
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.state import Worker

RANKS, MICROBATCHES, WARM_UP = 4, 16, 1
BLOCKS, HEAD = (7, 7, 6, 6), 7.6  # layers of each stage; the output layer in layers
MS = 5.0  # forward of a layer, and each half of its backward
MODEL = {"family": "gpt", "layers": sum(BLOCKS), "hidden": 32, "heads": 2, "vocab": 512, "seq_len": 16}
WAYS = {"ends": 0, "shared, 1 sum": 1, "shared, 2 sums": 2}


class Way(NamedTuple):
    """A program, and what its ops take: ms by kind and stage, of ops of every rank by kind and rank."""

    program: Program
    ms: Mapping[tuple[Kind, int], float]
    step_ms: float  # simulated


def way(kind: str, sums: int) -> Way:
    """The head is FLOPs of three equal products: logits, the gradient of their input, that of their weights. With 1 sum
    S makes the first two, with 2 sums the first alone."""
    order = find(kind).make(Request(p=RANKS, m=MICROBATCHES))
    last = HEAD if sums == 0 else 0.0
    stage = tuple(MS * (count + (last if s == RANKS - 1 else 0.0)) for s, count in enumerate(BLOCKS))
    third = MS * HEAD / RANKS
    s, t = ((2 * third, third), (third, 2 * third))[sums == 2]
    tiny = MS / 50  # of a look-up: no arithmetic
    each = {"s": s, "t": t, "i": tiny, "e": tiny} if sums else {}
    both = tuple(2 * ms for ms in stage)
    costs = Costs.uniform(order.placement).with_ms(
        f=stage, b=stage, w=stage, bw=both, **{name: (ms,) * RANKS for name, ms in each.items()}
    )
    program = order if sums == 0 else Weave(sums).run(order, Context.of(order, costs))
    program = Lowering("before-step").lower(Context.of(program, costs)).program
    check_all(program)
    found = {(k, s): getattr_ms(costs, k, s) for k in Kind if k.computes for s in range(RANKS)}
    return Way(program, found, simulate(program, costs).makespan)


def getattr_ms(costs: Costs, kind: Kind, stage: int) -> float:
    column = costs.ms.get(kind.row.cost, ())
    found = column[stage] if stage < len(column) else 0.0
    return float(found if isinstance(found, int | float) else found[0])


class Paced:
    """A `Clock` under which the op that runs takes at least so long from when it has its inputs."""

    def __init__(self, worker: Worker, ms: Mapping[tuple[Kind, int], float]) -> None:
        self._inner, self._worker, self._ms = worker.clock, worker, ms
        self._began = 0.0
        self.read = self._inner.read

    def start(self) -> float:
        self._began = time.perf_counter()
        return self._inner.start()

    def stop(self, began: float) -> None:
        op = Op.parse(self._worker.progress.op)
        place = self._worker.rank if op.kind.unit_wide else op.stage
        sleep_until(self._began + self._ms[op.kind, place] / 1e3)
        self._inner.stop(began)


def rank_main(rank: int, port: int, plan: StoredPlan, ms: Any, steps: int, sender: Any) -> None:
    with joined(rank, port, plan) as worker:
        worker.clock = Paced(worker, ms)
        found = []
        for step in range(steps + WARM_UP):
            dist.barrier()
            began = time.perf_counter()
            result = run_step(worker, step)
            found.append((1e3 * (time.perf_counter() - began), result.loss if result else float("nan")))
    if rank == 0:
        sender.send(found[WARM_UP:])


def run(one: Way, steps: int, port: int) -> tuple[float, list[float]]:
    """Median ms of a step, and the losses."""
    starts = [0, *(1 + sum(BLOCKS[: s + 1]) for s in range(RANKS - 1)), sum(BLOCKS) + 2]
    plan = make_plan(one.program, model=MODEL, cuts=starts, optimizer={"lr": 1e-3})
    (found,) = results(
        rank_main, (port, plan, one.ms, steps), ranks=RANKS, count=1, preload=("zbc.training.worker",), limit=120
    )
    return statistics.median(ms for ms, _ in found), [loss for _, loss in found]


def compare(record: Record, kind: str, steps: int, port: int) -> None:
    record(f"# {kind}: ms of a step on {RANKS} ranks, {MICROBATCHES} microbatches")
    wanted: Sequence[float] = ()
    base = (0.0, 0.0)
    for number, (name, sums) in enumerate(WAYS.items()):
        one = way(kind, sums)
        middle, losses = run(one, steps, port + number)
        base = base if sums else (one.step_ms, middle)
        wanted = wanted or losses
        far = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
        gains = f"gain simulated {base[0] / one.step_ms:.3f} measured {base[1] / middle:.3f}"
        off = one.step_ms / middle - 1
        times = f"simulated {one.step_ms:7.1f}  measured {middle:7.1f}  off by {off:+.1%}"
        record(f"{name:14}  {times}  {gains}  losses {far:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A shared vocabulary beside one at the ends, on four ranks.")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one schedule, two steps; writes no file")
    options = parser.parse_args()
    record = Record("vocabulary-run")
    for number, kind in enumerate(("1f1b", "zb-h1")[: 1 if options.quick else None]):
        compare(record, kind, 2 if options.quick else options.steps, 29500 + 10 * number + os.getpid() % 1000 * 20)
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
