"""What co-optimizing cut, placement and order gains, and whether small cases are solved as well as by brute force.

    python bench/partition.py [--quick] [--cases N] [--recompute N] [--others N] [--budget S]

Three parts: heads of several weights against interleaved 1F1B (v = 2) on uniform cuts, F = B = W = 1 per layer and no
transfer time, beside what perfect balance without a bubble would gain, and against the best of all schedules by name on
uniform cuts; random small jobs of one schedule against every cut there is (N of them, half under a memory limit); and
against every cut times every set of stages that recompute. All of it takes some eight minutes of one core, and is
recorded as it goes; `--quick` is `--cases 20 --recompute 6 --others 2`, half a minute, and writes no file.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from random import Random

from record import Record

from zbc.compiler.check.memory import check_memory
from zbc.compiler.compile import load_job
from zbc.compiler.cost import estimate
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.order import order
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.job.spec import Job

SAME = 1e-9
EVERY = 20  # cases between lines of the record
TARGETS = ((4, 16, 26, 7.15, 1.45), (4, 16, 32, 2.24, 1.15), (4, 16, 32, 0.0, 1.02))  # p, m, layers, head, asked for
OTHERS = ((2, 8, 14, 5.0), (8, 32, 62, 6.0), (8, 16, 48, 3.5), (4, 32, 18, 11.0), (3, 12, 28, 4.0), (6, 24, 40, 1.3))
BY_HAND = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "eager-1f1b", "dualpipe-v", "hanayo")


def job_text(layers: int, p: int, m: int, kind: str, *more: str, hidden: int = 32, seq_len: int = 16) -> str:
    lines = ["zbc = 1", "[model]", 'family = "gpt"', f"layers = {layers}", f"hidden = {hidden}", "heads = 4"]
    lines += ["vocab = 256", f"seq_len = {seq_len}", "[parallel]", f"pp = {p}", "[schedule]", f'kind = "{kind}"']
    return "\n".join([*lines, f"microbatches = {m}", *more]) + "\n"


def with_head(layers: int, head: float) -> list[str]:
    costs = f"head = {{ f = {head}, b = {head}, w = {head} }}"
    return ["[costs]", 'per = "layer"', "f = 1.0", "b = 1.0", "w = 1.0", "comm = 0.0", costs]


class Bench:
    def __init__(self, folder: Path, record: Record) -> None:
        self.path, self.record = folder / "job.toml", record

    def plan(self, text: str, settings: list[str], budget: float | None) -> tuple[float, float]:
        """ms of a step and activation units; the first is infinite where it does not fit."""
        self.path.write_text(text)
        job = load_job(self.path, settings)
        try:
            found = order(job, estimate.layers(job), budget)
        except ZbcError:
            return float("inf"), float("inf")
        memory = found.memory if job.hardware.memory_gib else peaks(found.program, found.costs)
        units = max(rank.units for rank in memory)
        return (found.step_ms(job) if fits(job, memory, found.costs) else float("inf")), units

    def bytes(self, text: str, settings: list[str]) -> float:
        """The fullest rank of a plan of the fast tier."""
        self.path.write_text(text)
        job = load_job(self.path, settings)
        return max(rank.bytes for rank in order(job, estimate.layers(job), 0.0).memory)


def fits(job: Job, memory: list, costs: object) -> bool:
    try:
        check_memory(job, memory, costs)  # type: ignore[arg-type]
    except ZbcError:
        return False
    return True


def gains(bench: Bench, cases: int, budget: float | None) -> None:
    say = bench.record
    say("p   m  layers  head   uniform i-1f1b     auto   gain  asked  perfect  best by name, uniform cut")
    others = [(*case, None) for case in OTHERS[:cases]]
    for p, m, layers, head, asked in [*TARGETS, *others]:
        more = with_head(layers, head)
        uniform = ['partition.mode="uniform"']
        base, _ = bench.plan(job_text(layers, p, m, "interleaved-1f1b", *more), uniform, 0.0)
        began = time.process_time()
        step, _ = bench.plan(job_text(layers, p, m, "auto", *more), [], budget)
        took = time.process_time() - began
        named = {}
        for name in SCHEDULES:
            try:
                named[name], _ = bench.plan(job_text(layers, p, m, name, *more), uniform, 0.0)
            except ZbcError:
                continue
        best = min(named, key=lambda name: named[name])
        perfect = base / (3 * m * (layers + head) / p)
        wanted = f"{asked:5.2f}" if asked else "    -"
        ratio = f"{named[best] / step:.3f}x {best}"
        line = f"{p}  {m:2d}  {layers:6d}  {head:4.2f}  {base:15.1f} {step:8.1f}  {base / step:.3f}  {wanted}"
        say(f"{line}  {perfect:7.3f}  {ratio} ({took:.1f} s)")
        if (asked and base / step < asked) or named[best] < step * (1 - SAME):
            say("    NOT AS ASKED")


def every_cut(layers: int, stages: int) -> list[list[int]]:
    """`layers_per_stage` of every cut of the blocks, embedding and head."""
    found = []
    for inner in itertools.combinations(range(1, layers + 2), stages - 1):
        sizes = [b - a for a, b in itertools.pairwise((0, *inner, layers + 2))]
        found.append([sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1] if stages > 1 else [layers])
    return found


def small(rng: Random) -> tuple[str, int, int, int]:
    """A job text, its stages, layers and ranks."""
    kind = rng.choice(BY_HAND)
    v = SCHEDULES[kind].default_chunks
    p = rng.choice((2, 3) if v > 1 else (2, 3, 4))
    layers = p * v + rng.randint(-1, 3)

    def column(mean: float) -> list[float]:
        return [round(mean * rng.choice((1, 1, rng.uniform(0.3, 2))), 3) for _ in range(layers)]

    head, objective = rng.choice((0, 1, 3, 6)), rng.choice(("makespan", "span", "period"))
    costs = [
        "[costs]",
        'per = "layer"',
        *(f"{key} = {column(mean)}" for key, mean in zip("fbw", (3, 3, 2), strict=True)),
    ]
    costs += [f"act_b = {[round(rng.uniform(0.5, 1.5), 2) for _ in range(layers)]}", f"comm = {rng.choice((0, 0.3))}"]
    costs.append(f"head = {{ f = {head}, b = {head}, w = {head}, act_b = {rng.choice((0, 1, 2))} }}")
    costs.append("embed = { f = 0.1, w = 0.2 }")
    return job_text(layers, p, rng.randint(2, 9), kind, f'objective = "{objective}"', *costs), p * v, layers, p


def against_all_cuts(bench: Bench, cases: int) -> None:
    worse, fitting, longest = 0, 0, 1.0
    for seed in range(cases):
        rng = Random(seed)
        text, stages, layers, p = small(rng)
        settings = []
        if seed % 2:
            free = bench.plan(text, [], 0.0)[1]
            settings = [f'schedule.memory_limit="{rng.uniform(0.5, 1.0) * free / p:.6f}x"']
        each = [
            bench.plan(text, [*settings, f"partition.layers_per_stage={sizes}"], 0.0)
            for sizes in every_cut(layers, stages)
        ]
        best, (step, units) = min(ms for ms, _ in each), bench.plan(text, settings, None)
        if best < float("inf"):
            fitting += 1
            longest = max(longest, step / best)
            worse += step > best * (1 + SAME)
        else:  # the plan that is refused is the one that needs the least
            worse += units > min(need for _, need in each) * (1 + SAME)
        if seed + 1 == cases or (seed + 1) % EVERY == 0:
            found = f"{seed + 1:3d} small jobs, {fitting} with a cut that fits: {worse} not as good as the best of all"
            bench.record(f"{found} cuts; the longest step against the best: {longest:.6f}x")


def against_all_recomputes(bench: Bench, cases: int) -> None:
    ratios = []
    for seed in range(cases):
        rng = Random(seed)
        kind, p = rng.choice((("1f1b", 2), ("1f1b", 3), ("1f1b", 4), ("zb-h1", 2), ("zb-h1", 3), ("gpipe", 3)))
        layers = p + rng.randint(-1, 2)
        model = {"hidden": rng.choice((32, 64)), "seq_len": rng.choice((64, 128))}
        text = job_text(layers, p, rng.randint(3, 8), kind, "microbatch_size = 2", **model)
        low, high = (bench.bytes(text, [f'memory.activations="{how}"']) for how in ("recompute", "keep"))
        room = [f"hardware.memory_gib={(low + (high - low) * rng.uniform(0.02, 0.95)) / 2**30:.9f}"]
        best = float("inf")
        for again in itertools.chain.from_iterable(itertools.combinations(range(p), k) for k in range(p + 1)):
            flags = "{" + ", ".join(f'"{s}" = "recompute"' for s in again) + "}"
            for sizes in every_cut(layers, p):
                settings = [*room, f"partition.layers_per_stage={sizes}", f"memory.activations={flags}"]
                best = min(best, bench.plan(text, settings, 0.0)[0])
        step, _ = bench.plan(text, [*room, 'memory.activations="auto"'], None)
        if best < float("inf"):
            ratios.append(step / best)
        if seed + 1 == cases or (seed + 1) % (EVERY // 4) == 0:
            found = f"{seed + 1:3d} jobs whose first stage overflows, {len(ratios)} with a plan that fits"
            bench.record(f"{found}: longest step {max(ratios, default=1.0):.4f}x the best of all cuts and stages")


def main() -> None:
    parser = argparse.ArgumentParser(description="Cuts against brute force, and what they gain.")
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--recompute", type=int, default=40)
    parser.add_argument("--others", type=int, default=len(OTHERS), help="jobs beside the three that have a target")
    parser.add_argument("--budget", type=float, default=None, help="seconds, for auto")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.recompute, options.others = 20, 6, 2
    record = Record("partition")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), record)
        gains(bench, options.others, options.budget)
        against_all_cuts(bench, options.cases)
        against_all_recomputes(bench, options.recompute)
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
