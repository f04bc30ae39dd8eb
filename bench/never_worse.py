"""What is promised of `auto`, on random jobs: never worse than any schedule by name, or than itself with less.

    python bench/never_worse.py [JOBS] [FIRST] [--minutes N]

Each job has up to 8 ranks and 32 microbatches and its own time and memory for every layer. Under a few limits and
budgets, every schedule by name and `auto` plan it; counted is each time that `auto` takes longer than a schedule with
the same budget whose plan fits, or than `auto` with a smaller limit or budget, exceeds its limit, or beats a bound.
Budgets are op visits, so every number here is the same on every machine. What is wrong is printed and recorded at once.
What several plans of a job ask alike is searched once: a search is the same each time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from random import Random
from typing import Any

from record import Record, commit

from zbc.compiler.compile import load_job
from zbc.compiler.cost import estimate
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.order import order
from zbc.compiler.partition.limits import smallest
from zbc.compiler.partition.setup import start_of
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.schedules.request import Generator
from zbc.compiler.search import ladder, portfolio
from zbc.compiler.search.engine import Engine
from zbc.compiler.search.portfolio import COMPILED_RATE, Effort, SearchResult
from zbc.compiler.search.problem import Problem
from zbc.errors import ZbcError
from zbc.ir import Placement, Program

SAME = 1e-9
BUDGETS = (0, 1_500_000)  # op visits; within those for which more memory is never worse
OBJECTIVES = ("makespan", "span", "period")
CARDS = dict(SCHEDULES)
EACH = 20  # jobs between two lines of the record


@dataclass(frozen=True)
class Answer:
    """What a plan costs, holds and cannot beat."""

    step: float
    units: float
    bound: float


def text(rng: Random) -> str:
    """A random job without schedule.kind and memory_limit."""
    p, m = rng.randint(1, 8), rng.randint(1, 32)
    layers = 4 * p + rng.randint(0, 8)
    spread = rng.choice((0.0, 0.3, 0.9))
    base = rng.choice(((1.0, 1.0, 1.0, 0.0), (18.5, 18.1, 9.3, 0.6), (29.7, 29.4, 19.9, 0.5), (1.0, 2.0, 0.5, 0.2)))
    share = rng.choice((0.0, 0.4, 0.9, 1.0))

    def column(mean: float) -> list[float]:
        return [round(mean * (1 + spread * rng.uniform(-1, 1)), 3) for _ in range(layers)]

    act_b = column(1.0)
    lines = ["zbc = 1", "[model]", 'family = "gpt"', f"layers = {layers}", "hidden = 32", "heads = 4", "vocab = 256"]
    lines += ["seq_len = 16", "[parallel]", f"pp = {p}", "[schedule]", 'kind = "auto"', f"microbatches = {m}"]
    lines += [f'objective = "{rng.choice(OBJECTIVES)}"', "[partition]", f'mode = "{rng.choice(("auto", "uniform"))}"']
    lines += ["[costs]", 'per = "layer"', *(f"{key} = {column(mean)}" for key, mean in zip("fbw", base, strict=False))]
    lines += [f"comm = {base[3]}", f"act_b = {act_b}", f"act_w = {[round(a * share, 4) for a in act_b]}"]
    return "\n".join(lines) + "\n"


def answer(path: Path, limit: float | None, visits: int, kind: str) -> Answer | None:
    """The plan of one schedule under `limit`, a multiple of what 1F1B holds; None if there is none that fits."""
    settings = [] if limit is None else [f'schedule.memory_limit="{limit:.6f}x"']
    try:
        job = load_job(path, settings, kind)
        found = order(job, estimate.layers(job), visits / COMPILED_RATE)
    except ZbcError:
        return None
    units = max(rank.units for rank in peaks(found.program, found.costs))
    if limit is not None and units > limit * job.parallel.pp + 1e-5 and kind != "auto":
        return None
    return Answer(found.step_ms(job), units, found.bounds.of(job.objective))


def limits(path: Path, rng: Random) -> list[float | None]:
    """From the least that works for some placement up; None for no limit."""
    job = load_job(path)
    p, table = job.parallel.pp, estimate.layers(job)
    least = min(
        smallest(job, where, start_of(job, where, table)[1]) for where in (Placement.linear(p), Placement.vshape(p, 2))
    )
    some = sorted(least * rng.uniform(1.0, rng.choice((1.2, 2.0, 1.5 * p))) for _ in range(2))
    return [*(round(limit + 5e-7, 6) for limit in some), None]


def remembering() -> None:
    """Have schedules and searches answer at once what they were asked before."""
    for name, card in CARDS.items():
        SCHEDULES[name] = replace(card, make=_once(card.make))
    done: dict[tuple[object, ...], SearchResult] = {}

    def search(problem: Problem, objective: str, effort: Effort, engine: Engine, **more: Any) -> SearchResult:
        key = (repr(problem), objective, effort, engine.compiled, more["target"])
        if key not in done:
            done[key] = portfolio.search(problem, objective, effort, engine, **more)
        return done[key]

    ladder.search = search  # type: ignore[assignment]


def _once(make: Generator) -> Generator:
    """A generator that remembers: requests hold costs, which have no hash, and say all of themselves."""
    done: dict[str, Program] = {}

    def made(request: Request) -> Program:
        key = repr(request)
        if key not in done:
            done[key] = make(request)
        return done[key]

    return made


def check(seed: int, folder: Path, wrong: Counter[str], plans: Counter[str]) -> None:
    rng = Random(seed)
    path = folder / f"{seed}.toml"
    path.write_text(text(rng))
    asked = limits(path, rng)
    best: dict[tuple[float, int], float] = {}
    for limit in asked:
        for visits in BUDGETS:
            found = answer(path, limit, visits, "auto")
            room = float("inf") if limit is None else limit
            if found is None:
                wrong[f"{seed}: no plan at {limit}"] += limit is not None and limit > asked[0]  # type: ignore[operator]
                continue
            plans["auto"] += 1
            p = load_job(path).parallel.pp
            wrong[f"{seed}: exceeds its limit {limit}"] += found.units > room * p + 1e-5
            wrong[f"{seed}: beats its bound at {limit}"] += found.step < found.bound * (1 - SAME)
            for (less, fewer), step in best.items():
                if less <= room and fewer <= visits:
                    wrong[f"{seed}: worse at {limit}, {visits} than at {less}, {fewer}"] += found.step > step * (
                        1 + SAME
                    )
            best[room, visits] = found.step
            # Compiled kernels make the same plans, but are loaded only where there is something to search for.
            for name in SCHEDULES if visits and limit == asked[seed % len(asked)] else ():
                other = answer(path, limit, visits, name)
                if other is not None:
                    plans["named"] += 1
                    wrong[f"{seed}: worse than {name} at {limit}, {visits}"] += found.step > other.step * (1 + SAME)
                    wrong[f"{seed}: {name} beats its bound at {limit}"] += other.step < other.bound * (1 - SAME)


def one(seed: int) -> tuple[Counter[str], Counter[str], float]:
    """What is wrong with one job, how many plans were made for it, and the seconds of its core."""
    wrong: Counter[str] = Counter()
    plans: Counter[str] = Counter()
    began = time.process_time()
    remembering()
    with tempfile.TemporaryDirectory() as folder:
        check(seed, Path(folder), wrong, plans)
    return wrong, plans, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether `auto` keeps its promises on random jobs.")
    parser.add_argument("jobs", type=int, nargs="?", default=500)
    parser.add_argument("first", type=int, nargs="?", default=0, help="the seed of the first job")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job later than this")
    options = parser.parse_args()
    first, last = options.first, options.first + options.jobs - 1
    record = Record("never-worse" if not first else f"never-worse-from-{first}")
    record(f"# {commit()}")
    wrong, took, done, stop = 0, 0.0, 0, time.monotonic() + 60 * options.minutes
    plans: Counter[str] = Counter()
    with Pool() as pool:
        jobs = pool.imap(one, range(first, last + 1))
        while done < options.jobs and time.monotonic() < stop:
            found, made, seconds = jobs.next()
            for what in (what for what, times in found.items() if times):
                record(what)
                wrong += 1
            plans.update(made)
            done, took = done + 1, took + seconds
            if done % EACH == 0 or done == options.jobs:
                _sum_up(record, first, done, plans, wrong, took)
        pool.terminate()
    if done % EACH and done < options.jobs:
        _sum_up(record, first, done, plans, wrong, took)
    record.write()


def _sum_up(record: Record, first: int, done: int, plans: Counter[str], wrong: int, took: float) -> None:
    made = f"{plans['auto']} plans of auto, {plans['named']} of schedules by name"
    record(f"{done} jobs, {first} to {first + done - 1}: {made}: {wrong} wrong ({took:.0f} s of one core)")


if __name__ == "__main__":
    main()
