"""Compares unequal with equal numbers of microbatches, for samples of log-normal lengths: simulated, and measured.

    python bench/balance.py [--draws N] [--steps N] [--quick] [--only balancer|simulated|measured|windows] [--seed N]

Balancer: the largest load of several ranks over its lower bound, compared with longest processing time first.
Simulated: steps of many draws, each replica's pipeline with microbatches as long as their rows and samples cost; a step
lasts as long as its slowest replica. Equal counts: the same number of samples for each replica, in as many microbatches
as the fullest needs. Measured: two pipelines of two ranks on gloo that really train, where each op takes as long as its
microbatch would; the gain of unequal counts is compared with the simulated one. Windows: the same with weights that are
unsharded and resharded, at most one stage at a time, in an order that gathers per microbatch: with collective gathers,
or one-sided ones from the memory of other replicas.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import meeting, results
from record import Record
from sleeping import Paced

from tests.runtime.small_plans import make_program
from tests.runtime.test_unequal import unequal
from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.compiler.sim.simulate import lengths as durations
from zbc.compiler.sim.simulate import replay
from zbc.ir import Op
from zbc.plan.balancing import Microbatch, Shape, balanced, deal, dealt_evenly, fullest, least, longest_first
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.state import Worker
from zbc.training.data import unequal as unequal_data

RANKS, WARM_UP, PP = 4, 1, 2
MS = 12.0  # forward, and each half of the backward, of a rank's stages and a microbatch of one row without attention
QUADRATIC = 0.02  # of rows of 64 tokens: a sample that fills one takes 2.3 times as long as the row


# ---- the balancer --------------------------------------------------------------------------------------------


def balancer(record: Record, draws: int) -> None:
    record("# the fullest rank over what it has at least: mean, and how often above longest processing time first")
    source = random.Random(1)
    for each in (2, 4, 8, 16):
        ours, plain, worse = list[float](), list[float](), 0
        for _ in range(draws):
            ranks = source.choice((2, 4, 8, 16))
            costs = [n + n * n / 16384 for n in drawn(source, each * ranks, 8192, 1.1)]
            bound = least(costs, ranks)
            found, other = fullest(costs, balanced(costs, ranks)), fullest(costs, longest_first(costs, ranks))
            ours.append(found / bound)
            plain.append(other / bound)
            worse += found > other * (1 + 1e-9)
        means = f"{statistics.mean(ours):.4f}, longest first alone {statistics.mean(plain):.4f}"
        record(f"{each:2} samples per rank: {means}; above it in {worse} of {draws}")


# ---- simulated -----------------------------------------------------------------------------------------------


def drawn(source: random.Random, count: int, longest: int, sigma: float) -> list[int]:
    return [max(1, min(longest, round(source.lognormvariate(0, sigma) * longest / 6))) for _ in range(count)]


@functools.cache
def pipeline(schedule: str, p: int, m: int) -> Any:
    """The graph of a schedule, its ms with microbatches of 1, and the nodes of each microbatch's ops."""
    program = make_program(schedule, p, m)
    costs = Costs.uniform(program.placement)
    graph = build(program)
    nodes: list[list[int]] = [[] for _ in range(m)]
    for i, op in enumerate(graph.ops):
        if op.kind.computes:
            nodes[op.mb].append(i)
    return graph, costs, durations(graph, costs), nodes


def step_ms(schedule: str, shape: Shape, replicas: Sequence[Sequence[Microbatch]], lengths: Sequence[int]) -> float:
    """The time of the slowest replica, if a stage takes 1 for F, B and W of rows without attention."""
    found = []
    for mbs in replicas:
        graph, costs, each, nodes = pipeline(schedule, shape.ranks, len(mbs))
        each = each[:]
        for mb, mine in zip(mbs, nodes, strict=True):
            factor = shape.factor(mb, lengths)
            for i in mine:
                each[i] *= factor
        found.append(replay(graph, costs, each).makespan)
    return max(found)


def simulated(record: Record, draws: int, seed: int) -> None:
    record(f"# a step with equal counts over one with unequal ones, seed {seed}; p = 4, rows of 2,048, 12 h = 12,288")
    record("  replicas, samples each, sigma     mean   worst    best   slower")
    source, slower, count = random.Random(seed), 0, 0
    grid = [(r, n, s) for r in (2, 4, 8) for n in (4, 8, 16, 32) for s in (0.6, 1.1)]
    for replicas, each, sigma in grid:
        ratios = []
        for _ in range(draws // len(grid)):
            schedule = source.choice(("1f1b", "zb-h1"))
            lengths = drawn(source, replicas * each, 2048, sigma)
            shape = Shape(replicas, 2048, 1, 4 * each, 4, 1 / 12288)
            ours = deal(lengths, shape)
            assert ours is not None
            equal = step_ms(schedule, shape, dealt_evenly(lengths, shape), lengths)
            ratios.append(equal / step_ms(schedule, shape, ours, lengths))
        worse = sum(ratio < 1 - 1e-9 for ratio in ratios)
        slower, count = slower + worse, count + len(ratios)
        of = f"{replicas:4} {each:4} {sigma:4}"
        record(f"  {of:33} {statistics.mean(ratios):.3f}  {min(ratios):.3f}  {max(ratios):6.3f}  {worse:5}")
    record(f"slower with unequal counts: {slower} of {count}")


# ---- measured ------------------------------------------------------------------------------------------------


def ms_of(worker: Worker, dealer: unequal_data.Dealer, op: Op) -> float:
    """ms of an op of this microbatch."""
    work = dealer.step(worker.step)
    mb = work.replicas[worker.replica][op.mb]
    ms = MS / worker.placement.chunks * dealer.shape.factor(mb, work.lengths)
    return ms * (2 if op.kind.value == "BW" else 1)


def rank_main(rank: int, folder: Path, plan: StoredPlan, schedule: str, equal: bool, steps: int, sender: Any) -> None:
    if equal:
        unequal_data.deal = dealt_evenly  # type: ignore[assignment]
    import ours

    with meeting(rank, RANKS, folder / "meet"):
        worker = ours.build(plan, rank).worker
        assert isinstance(worker.work, unequal_data.Dealer)
        worker.clock = Paced(worker, functools.partial(ms_of, worker, worker.work))  # type: ignore[assignment]
        found = []
        for step in range(steps + WARM_UP):
            work = worker.work.step(step)
            ms = MS * step_ms(schedule, worker.work.shape, work.replicas, work.lengths)
            dist.barrier()
            began = time.perf_counter()
            result = run_step(worker, step)
            found.append((1e3 * (time.perf_counter() - began), ms, result.loss if result else float("nan")))
    if rank == 0:
        sender.send(found[WARM_UP:])


def measured(record: Record, steps: int) -> None:
    record(f"# {PP} x 2 ranks on gloo, 1f1b, ops of {MS:g} ms and more: {steps} steps")
    model = {"family": "gpt", "layers": 2, "hidden": 16, "heads": 2, "vocab": 61, "seq_len": 64}
    plan = unequal("1f1b", PP, 2, most=16, mean=6, model=model)
    took = {name: run(record, name, squared(plan), "1f1b", name == "equal", steps) for name in ("equal", "unequal")}
    gains = [took["equal"][k] / took["unequal"][k] for k in (1, 0)]
    record(f"gain simulated {gains[0]:.3f}, measured {gains[1]:.3f}; off by {gains[0] / gains[1] - 1:+.1%}")


def windows(record: Record, steps: int) -> None:
    schedule = "interleaved-1f1b"
    record(f"# {PP} x 2 ranks on gloo, {schedule} with two stages a rank, room for one: {steps} steps")
    model = {"family": "gpt", "layers": 2, "hidden": 16, "heads": 2, "vocab": 61, "seq_len": 64}
    taken = squared(unequal(schedule, PP, 2, most=16, mean=6, resident=1, zero1=True, one_sided=True, model=model))
    met = StoredPlan(taken.manifest.model_copy(update={"one_sided": False}), taken.program, taken.ramp)
    counts = dict[str, float]()
    for name, plan, equal in (
        ("equal, met", met, True),
        ("equal, taken", taken, True),
        ("unequal, taken", taken, False),
    ):
        counts[name] = run(record, name, plan, schedule, equal, steps)[0]
    for name in ("equal, taken", "unequal, taken"):
        record(f"{name}: {counts['equal, met'] / counts[name]:.3f} times as fast as equal counts that meet")


def squared(plan: StoredPlan) -> StoredPlan:
    """The plan with the bench's own cost of attention."""
    assert plan.manifest.balance is not None
    balance = plan.manifest.balance.model_copy(update={"quadratic": QUADRATIC})
    return StoredPlan(plan.manifest.model_copy(update={"balance": balance}), plan.program, plan.ramp)


def run(record: Record, name: str, plan: StoredPlan, schedule: str, equal: bool, steps: int) -> list[float]:
    """Measured and simulated ms, and the sum of the losses."""
    with tempfile.TemporaryDirectory() as folder:
        told = (Path(folder), plan, schedule, equal, steps)
        (found,) = results(rank_main, told, ranks=RANKS)
    took = [sum(column) for column in zip(*found, strict=True)]
    real, wanted, loss = took
    off = f"off by {wanted / real - 1:+.1%}  loss {loss / steps:.5f}"
    record(f"{name:14} simulated {wanted:8.1f} ms  measured {real:8.1f} ms  {off}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Unequal numbers of microbatches beside equal ones.")
    parser.add_argument("--draws", type=int, default=4800)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few draws and steps; writes no file")
    parser.add_argument("--only", choices=("balancer", "simulated", "measured", "windows"))
    parser.add_argument("--seed", type=int, default=2, help="of the draws that are simulated")
    options = parser.parse_args()
    record = Record("balance")
    if options.only in (None, "balancer"):
        balancer(record, 20 if options.quick else 200)
    if options.only in (None, "simulated"):
        simulated(record, 48 if options.quick else options.draws, options.seed)
    if options.only in (None, "measured"):
        measured(record, 2 if options.quick else options.steps)
    if options.only in (None, "windows"):
        windows(record, 2 if options.quick else options.steps)
    if not options.quick and options.only is None:
        record.write()


if __name__ == "__main__":
    main()
