"""Does a schedule, a copy or a shared optimizer change what is learned? A 4-layer GPT on the text of Python's library.

    python bench/numerics.py [--steps N]

Every run is compared step by step with one process that runs plain autograd on the unsplit model. With one pipe the
losses have to have its bits; with two, with two copies or with a tied weight gradients are sums in another order, and
what is left of that after N steps is printed. Ranks are threads, float32 on the CPU, one thread per kernel.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from record import Record

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.runtime.small_plans import make_plan, make_program, reference
from tests.threads import run_threads
from zbc.compiler.schedules import SCHEDULES
from zbc.plan.directory import StoredPlan

MODEL = {"family": "gpt", "layers": 4, "hidden": 32, "heads": 4, "vocab": 256, "seq_len": 32}
TEXT = {"kind": "text"}
OPTIMIZER = {"lr": 3e-4, "clip_grad_norm": 1.0}
RANKS, MICROBATCHES, SIZE = 2, 8, 1


def plan_of(schedule: str, ranks: int, copies: int, **changes: Any) -> StoredPlan:
    """A plan for MICROBATCHES a step, over all copies."""
    tied, zero1 = changes.get("tied", False), changes.get("zero1", False)
    how = {"copies": copies, "sharded": zero1, "tied": tied and ranks > 1}
    program = make_program(schedule, ranks, MICROBATCHES // copies, **how)
    model, optimizer = {**MODEL, "tie_embeddings": tied}, {**OPTIMIZER, "zero1": zero1}
    return make_plan(program, model=model, data=TEXT, optimizer=optimizer, size=SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Losses of many plans beside one process.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    record = Record("numerics")
    record(f"# {MODEL}, {TEXT}, {OPTIMIZER}")
    record(f"# {steps} steps of {MICROBATCHES} microbatches of {SIZE}; loss against one process, over all steps")
    record(
        f"{'copies':>6} {'ranks':>5} {'schedule':18} {'':14} {'last loss':>10} {'largest difference':>19} "
        f"{'same bits':>9}"
    )
    runs = [(1, 4, name, {}) for name in SCHEDULES]
    runs += [(1, 2, name, {"tied": True}) for name in ("1f1b", "zb-h1", "zb-v")]
    runs += [
        (2, RANKS, name, how) for name in ("1f1b", "zb-h1", "zb-v") for how in ({}, {"zero1": True}, {"tied": True})
    ]
    wanted: dict[bool, list[float]] = {}
    for copies, ranks, schedule, how in runs:
        tied = how.get("tied", False)
        if tied not in wanted:
            wanted[tied] = reference(plan_of("1f1b", 1, 1, tied=tied), steps).losses
        began = time.perf_counter()
        found = [r.loss for r in run_threads(plan_of(schedule, ranks, copies, **how), steps)[0].results]
        largest = max(abs(a - b) for a, b in zip(found, wanted[tied], strict=True))
        label = f"{copies:6} {ranks:5} {schedule:18} {', '.join(how):14}"
        same = "yes" if found == wanted[tied] else "no"
        record(f"{label} {found[-1]:10.6f} {largest:19.2e} {same:>9}   {time.perf_counter() - began:.0f} s")
    record(f"# one process: first loss {wanted[False][0]:.6f}, last {wanted[False][-1]:.6f}")
    if steps == 300:
        record.write()


if __name__ == "__main__":
    main()
