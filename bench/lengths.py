"""Orders that know how long each microbatch is, beside orders for equal ones: of many drawn lengths, and measured.

    python bench/lengths.py [--draws N] [--steps N] [--quick] [--only drawn|measured|computed] [--seed N]

Drawn: log-normal lengths of the microbatches of a step, at times that are estimated or given, under several schedules.
The planned step, with microbatches numbered as the plan likes, beside the order that is planned for equal microbatches
as it runs with the lengths as they were drawn. Measured: four ranks on gloo that really train, where each op takes as
long as its microbatch does; the gain of the plan that knows the lengths beside the one that is simulated. Computed: two
ranks on gloo whose ops take what their rows do, by the times of a profile of this machine; the same plan as well with
all rows padded to whole ones.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import meeting, results
from record import Record
from sleeping import Paced

from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.numbering import numbered
from zbc.compiler.order import order
from zbc.compiler.partition.setup import Ordered
from zbc.compiler.sim.context import Context
from zbc.ir import Op
from zbc.job.spec import Job
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.training.profiling.session import effort, measure

RANKS, WARM_UP, LONGEST, SAME = 4, 1, 2048, 1e-9
CORES, ROW = 2, 1024  # ranks that compute, and tokens of their whole rows
SHORT = 64  # tokens of whole rows where samples are dealt
KINDS = ("1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved-1f1b", "gis", "chimera", "zb-auto")
MEASURED = ("1f1b", "zb-h1", "zb-auto", "interleaved-1f1b")
MS = 100.0  # forward, and each half of the backward, of a rank's stages and the longest microbatch
GIVEN = {"f": MS, "b": MS, "w": MS, "comm": 0.0}


def step_of(made: Job, found: Ordered) -> tuple[float, Costs]:
    """ms of a step in an order that was made for equal microbatches, and what its ops take."""
    costs = pricing.build(made, found.program.placement, found.stages, estimate.layers(made))
    return Context(found.complete.program, costs).step_ms(made.objective), costs


def lengths(source: random.Random, count: int, sigma: float) -> list[int]:
    return [max(16, min(LONGEST, round(LONGEST / 6 * math.exp(source.gauss(0, sigma))))) for _ in range(count)]


def both(**changes: Any) -> tuple[Job, Job]:
    """The job of some lengths, and of equal microbatches; `changes` as for `tests.jobs.job`."""
    return job(**changes), job(**{**changes, "schedule": {**changes["schedule"], "tokens": None}})


# ---- drawn ---------------------------------------------------------------------------------------------------


def drawn(record: Record, draws: int, seed: int) -> None:
    record(f"# the order for equal microbatches over the planned one, {draws} draws, seed {seed}: ms of a step")
    record("  schedule          draws    mean    best   longer  numbers alone")
    source, all_longer = random.Random(seed), 0
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    numbers: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(draws):
        kind, p, m = KINDS[number % len(KINDS)], source.choice((2, 4)), source.choice((4, 8))
        tokens = lengths(source, m, source.choice((0.3, 0.6, 1.1)))
        estimated = {"model": {"family": "llama", "seq_len": LONGEST, "hidden": source.choice((64, 512))}}
        given = {**estimated, "costs": {**GIVEN, "b": source.choice((MS, 2 * MS)), "comm": source.choice((0.0, 1.0))}}
        made, even = both(pp=p, m=m, kind=kind, schedule={"tokens": tokens}, **source.choice((estimated, given)))
        _, _, said = numbered(made, estimate.layers(made), 0.0)
        plain, _ = step_of(made, order(even, estimate.layers(even), 0.0))
        assert said is not None
        found[kind].append(plain / said.ms)
        numbers[kind].append(said.given_ms / said.ms)
        if number % 200 == 199:
            print(f"# {number + 1} draws", file=sys.stderr, flush=True)
    for kind in KINDS:
        each = found[kind]
        longer = sum(ratio < 1 - SAME for ratio in each)
        all_longer += longer
        means = f"{statistics.mean(each):7.3f} {max(each):7.3f}  {longer:7}  {statistics.mean(numbers[kind]):13.3f}"
        record(f"  {kind:16} {len(each):6} {means}")
    record(f"longer than the order for equal ones: {all_longer} of {draws}")


# ---- measured ------------------------------------------------------------------------------------------------


def rank_main(
    rank: int, folder: Path, ranks: int, sides: Sequence[tuple[StoredPlan, Costs | None]], steps: int, sender: Any
) -> None:
    """The plans step by step in turns, so that a busy machine slows all; with costs ops take what these say."""
    import ours

    with meeting(rank, ranks, folder / "meet"):
        workers = [ours.build(plan, rank).worker for plan, _ in sides]
        for worker, (_, costs) in zip(workers, sides, strict=True):
            if costs is not None:
                worker.clock = Paced(worker, functools.partial(_ms_of, costs))
        took: list[list[float]] = [[] for _ in sides]
        losses: list[list[float]] = [[] for _ in sides]
        for step in range(steps + WARM_UP):
            for k, worker in enumerate(workers):
                dist.barrier()
                began = time.perf_counter()
                result = run_step(worker, step)
                dist.barrier()
                took[k].append(1e3 * (time.perf_counter() - began))
                losses[k].append(result.loss if result else float("nan"))
    if rank == 0:
        sender.send([(each[WARM_UP:], lost) for each, lost in zip(took, losses, strict=True)])


def _ms_of(costs: Costs, op: Op) -> float:
    return costs.duration(op) if op.kind.computes else 0.0


def measured(record: Record, steps: int, kinds: Sequence[str], seed: int) -> None:
    record(f"# {RANKS} ranks on gloo, ops of {MS:g} ms at most: the least of {steps} steps, in turns")
    source, model = random.Random(seed), {"family": "gpt", "layers": 8, "hidden": 16, "heads": 2, "vocab": 256}
    for kind in kinds:
        tokens = [*lengths(source, 7, 1.1), LONGEST]
        schedule, sized = {"tokens": tokens, "microbatch_size": 1}, {**model, "seq_len": LONGEST}
        jobs = both(kind=kind, schedule=schedule, costs=GIVEN, model=sized, data={"kind": "synthetic"})
        known, plain = (compile_job(one, suggest=False, budget=0.0) for one in jobs)
        other, costs_of_plain = step_of(jobs[0], plain.found)
        wanted, sides = (known.found.step_ms(known.job), other), list[tuple[StoredPlan, Costs]]()
        with tempfile.TemporaryDirectory() as folder:
            for name, compiled, costs in (("known", known, known.costs), ("plain", plain, costs_of_plain)):
                compiled.write(Path(folder) / name)
                sides.append((short(StoredPlan.read(Path(folder) / name)), costs))
            (found,) = results(rank_main, (Path(folder), RANKS, sides, steps), ranks=RANKS)
        real, losses = [min(took) for took, _ in found], [lost for _, lost in found]
        gains = wanted[1] / wanted[0], real[1] / real[0]
        same = "alike" if losses[0] == losses[1] else f"{max(abs(a - b) for a, b in zip(*losses, strict=True)):.1e} off"
        record(f"{kind}: {' '.join(map(str, known.job.tokens))}; losses {same}")
        ms = f"{wanted[0]:.1f} and {wanted[1]:.1f} ms, measured {real[0]:.1f} and {real[1]:.1f}"
        record(f"  simulated {ms}; gain {gains[0]:.3f}, measured {gains[1]:.3f}: off by {gains[0] / gains[1] - 1:+.1%}")


def with_tokens(plan: StoredPlan, tokens: Sequence[int]) -> StoredPlan:
    """The same order for microbatches of these lengths; none: for whole rows."""
    planning = plan.manifest.planning
    schedule = {key: value for key, value in planning["schedule"].items() if key != "tokens"}
    schedule |= {"tokens": list(tokens)} if tokens else {}
    changed = {"planning": {**planning, "schedule": schedule}}
    return StoredPlan(plan.manifest.model_copy(update=changed), plan.program, plan.ramp)


def computed(record: Record, steps: int, kinds: Sequence[str], seed: int) -> None:
    record(f"# {CORES} ranks on gloo that compute rows of these lengths: the least of {steps} steps, in turns")
    source = random.Random(seed)
    model = {"family": "llama", "layers": 6, "hidden": 192, "heads": 4, "vocab": 256, "seq_len": ROW}
    for kind in kinds:
        tokens = [max(16, n * ROW // LONGEST) for n in [*lengths(source, 5, 1.1), LONGEST]]
        schedule, told = {"tokens": tokens, "microbatch_size": 1}, {"kind": "synthetic"}
        jobs = both(kind=kind, pp=CORES, m=6, schedule=schedule, model=model, data=told)
        how = effort(jobs[1], device="cpu", threads=1, together=CORES, rounds=9)
        profile = measure(jobs[1], how)
        known, plain = (compile_job(replace(one, profile=profile), suggest=False, budget=0.0) for one in jobs)
        other, _ = step_of(replace(jobs[0], profile=profile), plain.found)
        wanted = (known.found.step_ms(known.job), other, plain.found.step_ms(plain.job))
        with tempfile.TemporaryDirectory() as folder:
            for name, compiled in (("known", known), ("plain", plain)):
                compiled.write(Path(folder) / name)
            stored = [StoredPlan.read(Path(folder) / name) for name in ("known", "plain")]
            sides = [stored[0], with_tokens(stored[1], tokens), with_tokens(stored[1], ())]
            told_to = (Path(folder), CORES, [(side, None) for side in sides], steps)
            (found,) = results(rank_main, told_to, ranks=CORES)
        real = [min(took) for took, _ in found]
        record(f"{kind}: {' '.join(map(str, known.job.tokens))} of {ROW}")
        for what, ms, took in zip(("planned for them", "for equal ones", "rows padded"), wanted, real, strict=True):
            gains = f"gain {ms / wanted[0]:.3f}, measured {took / real[0]:.3f}" if ms is not wanted[0] else ""
            record(f"  {what:16} simulated {ms:7.1f} ms, measured {took:7.1f}  {gains}".rstrip())


def short(plan: StoredPlan) -> StoredPlan:
    """The same for rows of few tokens: what ops take is said, and what they compute is to take less."""
    plan = with_tokens(plan, ())
    planning = plan.manifest.planning
    model = {**planning["model"], "seq_len": 16}
    boundaries = [
        one and one.model_copy(update={"shape": [one.shape[0], 16, one.shape[2]]}) for one in plan.manifest.boundaries
    ]
    changed = {"planning": {**planning, "model": model}, "boundaries": boundaries}
    return StoredPlan(plan.manifest.model_copy(update=changed), plan.program, plan.ramp)


def main() -> None:
    parser = argparse.ArgumentParser(description="Orders that know how long each microbatch is.")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few draws and steps; writes no file")
    parser.add_argument("--only", choices=("drawn", "measured", "computed"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    record = Record("lengths")
    if options.only in (None, "drawn"):
        drawn(record, 16 if options.quick else options.draws, options.seed)
    if options.only in (None, "measured"):
        measured(
            record, 3 if options.quick else options.steps, MEASURED[:1] if options.quick else MEASURED, options.seed
        )
    if options.only in (None, "computed"):
        computed(record, 2 if options.quick else options.steps, MEASURED[: 1 if options.quick else 3], options.seed)
    if not options.quick and options.only is None:
        record.write()


if __name__ == "__main__":
    main()
