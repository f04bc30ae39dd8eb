"""Schedules by name on random pipelines: proven complete and free of deadlock, within their limit, no bound beaten.

    python bench/sweep.py [--plans 400] [--limits 100] [--first 0] [--all]

Programs of any p up to 12, m up to 48 and up to 4 chunks, with uneven times and memory of stages and a limit for all
ranks or one each. Then the least limit that an error names is taken at its word: there is a plan at it, and none just
below. Fast tier only; what a budget adds keeps to the same checks. `--all`: 2000 plans and 300 limits.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from never_worse import text
from record import Record, commit

from zbc.compiler.check import check_all, check_complete
from zbc.compiler.compile import compile_job, load_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search.feasible import least_of
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Placement, Program

SEARCHED = ("zb-auto", "v-auto", "looped-zb", "1f1b-v", "zb-v", "v-half", "v-min")
NAMES = (*SEARCHED, "eager-1f1b", "interleaved-1f1b")
LIMITED = (*SEARCHED, "chimera-zb", "bitpipe-zb", "auto")
OBJECTIVES = ("makespan", "span", "period")
EACH = 50  # limits between two lines of the record


def costs(rng: Random, where: Placement) -> Costs:
    """Even or uneven stages; what W keeps is a part of what B keeps."""
    n = where.stages
    spread = rng.choice((0.0, 0.3, 0.9))

    def column(mean: float) -> tuple[float, ...]:
        return tuple(mean * where.ranks / n * (1 + spread * rng.uniform(-1, 1)) for _ in range(n))

    f, b, w, comm = rng.choice(
        ((1.0, 1.0, 1.0, 0.0), (18.5, 18.1, 9.3, 0.6), (1.0, 2.0, 0.5, 0.2), (3.0, 3.0, 0.0, 9.0))
    )
    act_b, share = column(1.0), rng.choice((0.0, 0.4, 1.0))
    pipe = where.pipes[0]
    links = tuple(comm if pipe[s] != pipe[s + 1] else 0.0 for s in range(n - 1))
    return Costs.per_stage(column(f), column(b), column(w), act_b, tuple(a * share for a in act_b), (links,))


def request(rng: Random, name: str) -> tuple[Request, Placement]:
    schedule = SCHEDULES[name]
    p, m = rng.randint(1, 12), rng.randint(1, 48)
    v = rng.randint(1, 4) if schedule.chunks[1] is None else schedule.default_chunks
    while p * v * m > 600:  # the largest take as long as all others
        m = max(1, m // 2)
    where = schedule.placement(p, v)
    given = costs(rng, where)
    limits = None
    if schedule.searched and rng.random() < 0.8:
        needs = least_of(where, given if schedule.splits_backward else given.joined())
        most = rng.choice((1.0, 1.3, 3.0, float(p)))
        each = [need * rng.uniform(1, most) for need in needs]
        limits = tuple(each) if rng.random() < 0.5 else (max(each),) * p
    group = rng.randint(p, 2 * p) if name == "interleaved-1f1b" else None
    asked = Request(p, m, v, group, costs=given, memory_limit=limits, objective=rng.choice(OBJECTIVES), compiled=True)
    return asked, where


def wrong_with(asked: Request, where: Placement, program: Program) -> str:
    """What is wrong with a program; empty if nothing is."""
    given, limits = asked.costs, asked.limits()
    if given is None:
        return "no costs"
    try:
        check_complete(program)
        check_all(Lowering().lower(Context.of(program)).program)
    except ZbcError as error:
        return error.message
    used = [rank.units for rank in peaks(program, given)]
    if limits and any(units > limit + 2e-6 for units, limit in zip(used, limits, strict=True)):
        return "over its limit"
    for objective in OBJECTIVES:
        for held in (limits, [units + 1e-6 for units in used]):
            least = bounds(where, given, asked.m, held).of(objective)
            if Context(program, given).step_ms(objective) < least * (1 - 1e-9):
                return f"beats a bound of the {objective}"
    return ""


def plans(record: Record, count: int, first: int) -> None:
    found, wrong, began = Counter[str](), 0, time.process_time()
    for seed in range(first, first + count):
        rng = Random(seed)
        name = NAMES[seed % len(NAMES)]
        asked, where = request(rng, name)
        try:
            program = SCHEDULES[name].make(asked)
        except ZbcError as error:
            found[f"refused: {name} {error.code}"] += 1
            continue
        found[name] += 1
        problem = wrong_with(asked, where, program)
        if problem:
            wrong += 1
            record(f"{seed}: {name} p={asked.p} m={asked.m} v={asked.v}: {problem}")
    made = ", ".join(f"{name} {times}" for name, times in sorted(found.items()))
    record(f"{count} requests: {made}; {wrong} wrong ({time.process_time() - began:.0f} s of one core)")


def limits(record: Record, count: int, first: int) -> None:
    """The least limit of an error, as a multiple or in bytes, for searched schedules and for `auto`."""
    wrong, tried, began = 0, Counter[str](), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for done, seed in enumerate(range(first, first + count), 1):
            name = LIMITED[seed % len(LIMITED)]
            outcome, unit = _limit(Path(folder) / "job.toml", Random(seed), name)
            tried[outcome] += 1
            if outcome not in ("right", "no limit helps"):
                wrong += 1
                record(f"{seed}: {name} {unit}: {outcome}")
            if done % EACH == 0 or done == count:
                took = f"{time.process_time() - began:.0f} s of one core"
                record(
                    f"{done} limits: {', '.join(f'{n} {what}' for what, n in tried.items())}; {wrong} wrong ({took})"
                )


def _limit(path: Path, rng: Random, name: str) -> tuple[str, str]:
    written, unit = text(rng), rng.choice(("x", "GiB"))
    if unit == "GiB":  # bytes are those of the model, not of [costs]
        written = "\n".join(line for line in written.split("\n") if not line.startswith("act_"))
    path.write_text(written)
    return _at_its_word(path, name, unit), unit


def _at_its_word(path: Path, name: str, unit: str) -> str:
    def planned(amount: float) -> ZbcError | None:
        limit = f'schedule.memory_limit="{amount:.9f}{"" if unit == "x" else " "}{unit}"'
        try:
            compile_job(load_job(path, [limit], name), suggest=False, budget=0.0)
        except ZbcError as error:
            return error
        return None

    error = planned(1e-9)
    named = re.search(r'memory_limit = "([\d.]+)', error.hint or "") if error is not None else None
    if named is None:
        return "no error" if error is None else f"names no limit: {error.message}"
    if "use v-auto" in (error.hint or ""):  # type: ignore[union-attr]
        return "no limit helps"
    enough = float(named[1])
    at = planned(enough)
    if at is not None:
        return "no limit helps" if "use v-auto" in (at.hint or "") else f"not at {enough}: {at.message}"
    return "right" if planned(enough * 0.9999) is not None else f"a plan below {enough}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Schedules by name, and the limits errors name, on random pipelines.")
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--limits", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of both")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    record = Record("sweep")
    record(f"# {commit()}")
    plans(record, 2000 if options.all else options.plans, options.first)
    limits(record, 300 if options.all else options.limits, options.first)
    record.write()


if __name__ == "__main__":
    main()
