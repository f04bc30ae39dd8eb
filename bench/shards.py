"""Sharded weights beside weights that stay: the bits of long trainings, and how many stages' weights are there.

    python bench/shards.py [--steps N] [--quick]

Every schedule of one pipe with every `memory.resident`, in float32 and under bfloat16 autocast, on two pipelines of two
ranks, with clipping: by collectives and from each other's memory, on ranks as threads; every third also on ranks as
processes on gloo. Losses, norms and weights are compared with those of the same schedule whose weights stay.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.processes.conftest import Pool
from tests.processes.gloo_ranks import train, unpack
from tests.runtime.small_plans import GPT
from tests.runtime.test_freed_weights import CASES, plan_of, weights
from tests.runtime.test_windows import one_sided
from tests.threads import run_threads
from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.plan.directory import StoredPlan
from zbc.runtime.state import Worker

THIRD = 3
Handler = Callable[[Worker, Op], None]
Found = tuple[list[float], list[float], dict[str, torch.Tensor]]  # losses, norms, weights


def by_threads(plan: StoredPlan, steps: int) -> tuple[Found, int]:
    """What was found, and the most stages of a rank whose weights were there behind an op."""
    most = 0

    def watch(worker: Worker) -> None:
        def watched(handler: Handler) -> Handler:
            def run(worker: Worker, op: Op) -> None:
                nonlocal most
                handler(worker, op)
                most = max(most, sum(one.freeable > 0 for one in worker.frees))

            return run

        run = worker.phase_run
        run.script = [(watched(handler), op, text) for handler, op, text in run.script]

    workers = run_threads(plan, steps, setup=watch)
    results = workers[0].results
    return ([r.loss for r in results], [r.grad_norm for r in results], weights(workers)), most


def by_processes(pool: Pool, plan: StoredPlan, steps: int) -> Found:
    found = pool.run(train, plan, steps)
    losses, norms, *_ = found[0]
    return losses, norms, unpack([one[3] for one in found])


def alike(one: Found, other: Found) -> bool:
    same = one[2].keys() == other[2].keys() and all(torch.equal(one[2][name], other[2][name]) for name in one[2])
    return one[:2] == other[:2] and same


@cache
def whole(schedule: str, dtype: str, steps: int) -> Found:
    return by_threads(plan_of(schedule, 2, 4, 0, model={**GPT, "dtype": dtype}), steps)[0]


def compared(record: Record, pool: Pool, steps: int, quick: bool) -> Iterator[bool]:
    names = ("threads", "threads, one-sided", "gloo", "gloo, one-sided")
    record(f"{'schedule':<18}{'resident':>8}  {'dtype':<9}{'most':>5}  the bits of weights that stay")
    for index, (schedule, resident, dtype) in enumerate(CASES[:: 20 if quick else 1]):
        try:
            met = plan_of(schedule, 2, 4, resident, model={**GPT, "dtype": dtype})
        except ZbcError as error:
            record(f"{schedule:<18}{resident:>8}  {dtype:<9}refused: {error.code}, a group needs room for two stages")
            continue
        taken, meant = one_sided(met), whole(schedule, dtype, steps)
        runs = [by_threads(plan, steps) for plan in (met, taken)]
        fine = [alike(found, meant) for found, _ in runs]
        if index % THIRD == 0:
            fine += [alike(by_processes(pool, plan, steps), meant) for plan in (met, taken)]
        most = max(most for _, most in runs)
        told = ", ".join(f"{name}: {'yes' if good else 'NO'}" for name, good in zip(names, fine, strict=False))
        record(f"{schedule:<18}{resident:>8}  {dtype:<9}{most:>5}  {told}")
        yield all(fine) and most <= resident


def main() -> int:
    parser = argparse.ArgumentParser(description="Sharded weights beside weights that stay.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="few cases and steps; writes no file")
    options = parser.parse_args()
    record, pool, began = Record("shards"), Pool(4), time.perf_counter()
    torch.set_num_threads(1)
    steps = 3 if options.quick else options.steps
    record(f"2 x 2 ranks, 4 microbatches, {steps} steps of AdamW, norms clipped to 0.5; most: stages there at once")
    found = list(compared(record, pool, steps, options.quick))
    pool.close()
    record(f"{sum(found)} of {len(found)} alike to the bit, in {time.perf_counter() - began:.0f} s")
    if not options.quick:
        record.write()
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
