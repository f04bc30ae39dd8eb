"""What the planner finds, and how fast: `python bench/plan.py compile | search | optima | choosers [--quick]`.

compile    CPU time and memory of `zbc plan`, interpreter start included: schedule, passes, proof, prediction, files.
           Beside it one step of it, insert-comm, and its counterpart in torch.distributed.pipelining,
           `_add_send_recv`, on the same compute order.

search     every cell of the zero bubble paper's tables; harder cases (little memory, V placement, uneven stages), each
           with a figure to reach, beside public implementations; speed. Bubbles are shares of the span (or makespan,
           if noted) in which the busiest rank is idle. `--engine plain` hides numba; `as-plain` runs only the harder
           cases, compiled, on the work that the plain engine does in its time (the same work has the same result).
           `--quick` leaves out the largest cases; `--long` adds ten minutes on a large case.

optima     how often the search, with the work that the plain engine does in two seconds, finds the optimum of random
           cases that CP-SAT proves. With `--odd` their shapes are less like models: looped placements, a W that takes
           no time, transfers longer than ops, stages a hundred times as long as others, a limit for each rank. With
           `--prove`: the fixed cases of tests/search/test_bounds.py, up to ten minutes each; writes optima.json there.

choosers   `auto` beside every named schedule, all with `--budget 0`, on drawn jobs whose steps are timed or weighed in
           a way of their own (tests/choices.py): jobs on which `auto` is more than .1% longer than a named schedule,
           or has no plan where one has.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

from record import Record

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.choices import CLASSES, NO_PLAN, compared, drawn
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search.engine import Engine, available
from zbc.compiler.search.feasible import least_of, one_by_one
from zbc.compiler.search.portfolio import COMPILED_RATE, PLAIN_RATE
from zbc.compiler.search.portfolio import search as searched
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.simulate import simulate
from zbc.exact.solve import solve
from zbc.ir import Placement

ROOT = Path(__file__).parent.parent
JOB = """[model]
family = "gpt"
layers = {layers}
hidden = 1024
heads = 16
vocab = 50257
seq_len = 1024
[parallel]
pp = {p}
[schedule]
kind = "{kind}"
microbatches = {m}
{more}[costs]
f = 18.522
b = 18.086
w = 9.337
comm = 0.601
"""
IN_ONE_RANKS = 'memory_limit = "1.0x"\nobjective = "span"\n'
# T_F, T_B, T_W, T_comm in ms and M_W/M_B: the profiles of arXiv 2401.10241, table 9, and unit times.
PROFILES = {
    "1.5B": (18.522, 18.086, 9.337, 0.601, 0.4),
    "6.2B": (29.718, 29.444, 19.927, 0.527, 0.4),
    "unit": (1.0, 1.0, 1.0, 0.0, 1.0),
}


def measured(command: list[str]) -> tuple[float, float, str]:
    """CPU seconds, peak MiB and output of a command; ends the benchmark if it fails."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text


# ---- zbc plan -----------------------------------------------------------------------------------------------

SIZES = [(8, 64, "zb-v", 5), (32, 128, "interleaved-1f1b", 3), (64, 512, "interleaved-1f1b", 2), (64, 512, "zb-v", 2)]

LOWERING = """
import sys, time
from torch.distributed.pipelining.schedules import _Action, _ComputationType as T, _add_send_recv
from zbc.compiler.sim.context import Context
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.schedules import SCHEDULES, Request
p, m, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
program = SCHEDULES[kind].make(Request(p, m, 2))
name = {"F": T.FORWARD, "B": T.BACKWARD_INPUT, "W": T.BACKWARD_WEIGHT, "BW": T.FULL_BACKWARD}
actions = {r: [_Action(o.stage, name[o.kind.value], o.mb) for o in ops] for r, ops in enumerate(program.ranks)}
began = time.process_time()
InsertComm().run(program, Context.of(program))
between = time.process_time()
_add_send_recv(actions, program.placement.rank_of, program.placement.stages)
print(between - began, time.process_time() - between)
"""


def compiled(record: Record, asked: argparse.Namespace) -> None:
    zbc = [sys.executable, "-m", "zbc"]
    help_seconds = statistics.median(measured([*zbc, "--help"])[0] for _ in range(5))
    record(f"zbc --help: {help_seconds:.2f} CPU s (median of 5)")
    record("  p    m schedule             CPU s    peak MiB  insert-comm s  torch's s")
    with tempfile.TemporaryDirectory() as folder:
        for p, m, kind, times in SIZES[: 1 if asked.quick else None]:
            job = Path(folder) / f"{kind}-{p}-{m}.toml"
            job.write_text(JOB.format(layers=2 * p, p=p, m=m, kind=kind, more=""))
            runs = [measured([*zbc, "plan", str(job), "-o", f"{folder}/plan"]) for _ in range(times)]
            seconds, peak = statistics.median(r[0] for r in runs), max(r[1] for r in runs)
            text = measured([sys.executable, "-c", LOWERING, str(p), str(m), kind])[2]
            ours, theirs = map(float, text.splitlines()[-1].split())
            record(f"{p:3} {m:4} {kind:18} {seconds:10.2f} {peak:9.0f} {ours:14.2f} {theirs:10.2f}")
    record()
    record("the job:")
    record(JOB.format(layers="2*p", p="p", m="m", kind="schedule", more="").rstrip())


# ---- search -------------------------------------------------------------------------------------

TABLE = ROOT / "tests" / "reference" / "zero_bubble_paper.csv"
P, M = 8, 24


class Found(NamedTuple):
    """The bubbles of the result and of the bound, and the CPU seconds of the search."""

    bubble: float
    bound: float
    seconds: float


def find(kind: str, costs: Costs, p: int, m: int, units: float | None, objective: str, seconds: float) -> Found:
    """Runs a schedule by name; ends the benchmark if it exceeds its limit."""
    schedule = SCHEDULES[kind]
    v = schedule.default_chunks
    where = schedule.placement(p, v)
    began = time.process_time()
    request = Request(p, m, v, costs=costs, memory_limit=units, objective=objective, budget=seconds)
    program = schedule.make(request)
    took = time.process_time() - began
    if units is not None and max(rank.units for rank in peaks(program, costs)) > units + 1e-5:
        sys.exit(f"{kind} exceeds {units} units")
    timeline = simulate(program, costs)
    step, least = getattr(timeline, objective), getattr(bounds(where, costs, m, units), objective)
    work = max(timeline.busy(r) for r in range(p))
    return Found(1 - work / step, max(0.0, 1 - work / least), took)


# ---- the paper's tables --------------------------------------------------------------------------------------

NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
SEARCHED = {"ZB-1p": ("zb-auto", 1.0), "ZB-2p": ("zb-auto", 2.0), "ZB-V": ("zb-v", 1.0)}
TOLERANCE = {"1F1B-I": 0.006}  # the paper's own time model exceeds its printed figures by up to this


def paper(record: Record, quick: bool) -> None:
    record("(a) bubble on the span, ours / printed; ! above the printed one")
    columns = [*NAMES, *SEARCHED]
    record(f"{'':17}" + "".join(f"{name:>15}" for name in columns))
    with TABLE.open(newline="") as file:
        cells = list(csv.DictReader(file))
    settings = dict.fromkeys((c["table"], c["model"], int(c["p"]), int(c["m"])) for c in cells)
    began, busy, above = time.perf_counter(), time.process_time(), 0
    for table, model, p, m in settings:
        if quick and p > 16:
            continue
        mine = [c for c in cells if (c["table"], c["model"], int(c["p"]), int(c["m"])) == (table, model, p, m)]
        line = f"{model:5} {p:2} x {m:3} {table[-1]}  "
        for name in columns:
            cell = next((c for c in mine if c["schedule"] == name), None)
            if cell is None:
                line += f"{'':15}"
                continue
            ours, printed = _cell(cell, p, m), float(cell["bubble_rate_span"])
            high = ours > printed + TOLERANCE.get(name, 0.5e-4)
            above += high
            line += f"{ours:8.4f}/{printed:.4f}" + ("!" if high else " ")
        record(line)
    took, busy = time.perf_counter() - began, time.process_time() - busy
    record(f"{above} cells above the printed value; the whole table took {took:.1f} s, {busy:.1f} s of CPU time")
    record()


def _cell(cell: dict[str, str], p: int, m: int) -> float:
    name, v = cell["schedule"], int(cell["v"])
    f, b, w, comm, share = (float(cell[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms", "act_w_over_act_b"))
    if name in NAMES:
        schedule = SCHEDULES[NAMES[name]]
        costs = Costs.uniform(schedule.placement(p, v), f, b, w, comm, share)
        return simulate(schedule.make(Request(p, m, v)), costs).bubble_rate_span
    kind, limit = SEARCHED[name]
    where = SCHEDULES[kind].placement(p, SCHEDULES[kind].default_chunks)
    return find(kind, Costs.uniform(where, f, b, w, comm, share), p, m, limit * p, "span", 1.0).bubble


# ---- harder cases --------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A case of p=8, m=24 and the bubble to reach; `public` is the best of public implementations, if known."""

    placement: str
    profile: str
    limit: float  # times 1F1B's memory
    target: float
    public: float | None = None
    objective: str = "span"


CASES = [
    Case("linear", "1.5B", 1.25, 0.0951, 0.1068),
    Case("linear", "1.5B", 1.5, 0.0524, 0.0719),
    Case("linear", "1.5B", 1.5, 0.1082, 0.1137, "makespan"),
    Case("linear", "1.5B", 0.5, 0.4747, 0.7619),
    Case("linear", "6.2B", 0.75, 0.2399, 0.5901),
    Case("V", "1.5B", 0.5, 0.2993),
    Case("V", "1.5B", 0.625, 0.1695),
    Case("V", "1.5B", 0.75, 0.1371),
    Case("V", "1.5B", 1.0, 0.0703),
    Case("V", "1.5B", 1.25, 0.0282),
    Case("V", "1.5B", 1.5, 0.0052),
    Case("V", "6.2B", 0.5, 0.2410),
    Case("V", "6.2B", 0.625, 0.1447),
    Case("V", "6.2B", 0.75, 0.1112),
    Case("V", "6.2B", 1.0, 0.0403),
    Case("V", "6.2B", 1.25, 0.0041),
    Case("V", "6.2B", 1.5, 0.0001),
    Case("V", "6.2B", 1.0, 0.0567, None, "makespan"),
]
# Spans of the V placement at unit costs: p, m, limit in activation units, the span to reach.
FRONTIER = [(8, 24, 4, 83.5), (8, 24, 5, 80.5), (8, 24, 6, 77.5), (8, 24, 7, 74.5), (8, 24, 8, 72.0)]
FRONTIER += [(4, 8, 2, 29.5), (4, 8, 2.5, 28.0), (4, 8, 3, 26.5), (4, 8, 3.5, 25.5), (4, 8, 4, 24.0)]
# Uneven stages, V at 1F1B's memory: the uneven part, profile, the bubble to reach, the public one.
UNEVEN = [("head 1.5 times", "1.5B", 0.0051, 0.0225), ("head 1.5 times", "6.2B", 0.0026, 0.0098)]
UNEVEN += [("head 2 times", "1.5B", 0.0051, None), ("head 2 times", "6.2B", 0.0026, None)]
UNEVEN += [("+-20%, 5 draws", "1.5B", 0.0245, 0.049), ("+-20%, 5 draws", "6.2B", 0.0245, 0.049)]
DRAWS = 5  # of random times


def harder(record: Record, seconds: float) -> None:
    record(f"(b) p={P}, m={M}, M_W/M_B = 0.4, {seconds:g} s each; - : no figure, * : the bound is reached, so optimal")
    record("                                      to reach  public    ours   bound    CPU s")
    missed = 0
    for case in CASES:
        kind = "zb-auto" if case.placement == "linear" else "v-auto"
        costs = _uniform(kind, case.profile)
        found = find(kind, costs, P, M, case.limit * P, case.objective, seconds)
        label = f"{case.placement:6} {case.profile} {case.limit:5}x {case.objective}"
        missed += _row(record, label, case.target, case.public, found)
    for what, profile, target, public in UNEVEN:
        results = [find("v-auto", costs, P, M, float(P), "span", seconds) for costs in _uneven(what, profile)]
        mean = Found(*(sum(column) / len(results) for column in zip(*results, strict=True)))
        label = f"V      {profile}   1.0x {what}"
        missed += _row(record, label, target, public, mean)
    record()
    record("V placement, unit costs: span at a limit in activation units")
    record("                                      to reach            ours   bound    CPU s")
    for p, m, units, target in FRONTIER:
        costs = Costs.uniform(Placement.vshape(p))
        found = find("v-auto", costs, p, m, float(units), "span", seconds)
        span, least = (3 * m / (1 - bubble) for bubble in found[:2])
        missed += span > target + 1e-6
        mark = "  above" if span > target + 1e-6 else ""
        record(f"p={p} m={m:2} {units:4} units{target:28.1f}{span:16.2f}{least:8.2f}{found.seconds:9.1f}{mark}")
    record(f"{missed} figures not reached")
    record()


def _row(record: Record, label: str, target: float, public: float | None, found: Found) -> bool:
    above = found.bubble > target + 0.5e-4
    mark = "  *" if found.bubble <= found.bound + 1e-6 else ""
    mark += "  above" if above and not mark else ""
    known = "-" if public is None else f"{public:.4f}"
    record(f"{label:36} {target:9.4f}{known:>8}{found.bubble:8.4f}{found.bound:8.4f}{found.seconds:9.1f}{mark}")
    return above and "*" not in mark


def _uniform(kind: str, profile: str) -> Costs:
    return Costs.uniform(SCHEDULES[kind].placement(P, SCHEDULES[kind].default_chunks), *PROFILES[profile][:4], 0.4)


def _uneven(what: str, profile: str) -> Iterator[Costs]:
    """The last stage heavier by the factor in the name, or every time of every stage drawn within 20%."""
    even = _uniform("v-auto", profile)
    if what.startswith("head"):
        yield _scaled(even, [[1.0] * (2 * P - 1) + [float(what.split()[1])]] * 3)
        return
    for seed in range(DRAWS):
        rng = Random(seed)
        yield _scaled(even, [[rng.uniform(0.8, 1.2) for _ in range(2 * P)] for _ in range(3)])


def _scaled(costs: Costs, factors: list[list[float]]) -> Costs:
    f, b, w = (
        tuple(x * factor for x, factor in zip(times, row, strict=True))
        for times, row in zip(map(costs.column, ("f", "b", "w")), factors, strict=True)
    )
    return costs.with_ms(f=f, b=b, w=w)


# ---- speed --------------------------------------------------------------------------------------------------

HIDDEN = "import sys; sys.modules['numba'] = None; from zbc.cli import main; main()"


def speed(record: Record, plain: bool, quick: bool, long: bool) -> None:
    record("(c) speed; V placement, 1.5B, 1.0x, span")
    costs = _uniform("v-auto", "1.5B")
    found = find("v-auto", costs, P, M, float(P), "span", 0.0)
    record(f"fast tier alone, p=8 m=24: {found.seconds:.2f} s of CPU time, bubble {found.bubble:.4f} (to reach: 1 s)")
    with tempfile.TemporaryDirectory() as folder:
        zbc = [sys.executable, "-c", HIDDEN] if plain else [sys.executable, "-m", "zbc"]
        for p, m, options, wanted in ((8, 24, (), "5 s"), (64, 512, ("--budget", "0"), "8 s, 1536 MiB")):
            if quick and p > 8:
                continue
            job = Path(folder) / f"{p}.toml"
            job.write_text(JOB.format(layers=2 * p, p=p, m=m, kind="v-auto", more=IN_ONE_RANKS))
            seconds, peak, _ = measured([*zbc, "plan", str(job), "-o", f"{folder}/plan", *options])
            how = " ".join(options) or "default budget"
            took = f"{seconds:.1f} s of CPU time, {peak:.0f} MiB"
            record(f"zbc plan, p={p} m={m} v=2, {how}: {took} (to reach: {wanted})")
    record("public implementations, the order alone: 4.5 s at p=8, m=24, 150 s at p=24, m=72 (adaptive V search),")
    record("2 to 40 s at p=64, m=512; their sends and receives: 30 s at p=32, m=128; torch's: 80 s at p=64, m=512")
    if not quick:
        _anytime(record, (1.0, 3.0, 10.0, 30.0, *((600.0,) if long else ())))


def _anytime(record: Record, budgets: tuple[float, ...]) -> None:
    p, m = 32, 256
    costs = Costs.uniform(Placement.vshape(p), *PROFILES["1.5B"][:4], 0.4)
    record(f"p={p}, m={m}: bubble after seconds of search (to reach: a step after 30 s within 5% of that after 600 s)")
    for budget in budgets:
        found = find("v-auto", costs, p, m, float(p), "span", budget)
        most = 100 * ((1 - found.bound) / (1 - found.bubble) - 1)  # no search can improve by more
        rest = f"a step at most {most:.2f}% above the best there is"
        record(f"{budget:6.0f} s: {found.bubble:.4f}, {found.seconds:.1f} s of CPU time, {rest}")


def search(record: Record, asked: argparse.Namespace) -> None:
    seconds = asked.seconds or 4.0
    if asked.engine == "plain":
        sys.modules["numba"] = None  # type: ignore[assignment]
    else:
        Engine(compiled=True)
    if asked.engine == "as-plain":
        record(f"each search does as much as the plain engine does in {seconds:g} s, and finds the same")
        harder(record, seconds * PLAIN_RATE / COMPILED_RATE)
        return
    paper(record, asked.quick)
    harder(record, seconds)
    speed(record, asked.engine == "plain", asked.quick, asked.long)
    record()
    record("the job of `zbc plan`:")
    record(JOB.format(layers="2*p", p="p", m="m", kind="v-auto", more=IN_ONE_RANKS).rstrip())


# ---- optima -------------------------------------------------------------------------------------------------

FILE = ROOT / "tests" / "search" / "optima.json"
# p, m, memory as a multiple of 1F1B's, objective
LINEAR = [
    (2, 6, 0.5, "span"),
    (3, 5, 2 / 3, "span"),
    (3, 8, 1.0, "makespan"),
    (4, 5, 0.75, "span"),
    (4, 8, 0.5, "makespan"),
    (4, 8, 1.0, "span"),
    (4, 8, 1.5, "span"),
    (4, 8, 2.0, "makespan"),
]
V = [
    (2, 4, 0.5, "makespan"),
    (2, 6, 0.75, "span"),
    (2, 8, 1.0, "span"),
    (3, 5, 0.5, "makespan"),
    (3, 6, 2 / 3, "span"),
    (3, 6, 1.0, "makespan"),
    (4, 6, 0.5, "span"),
    (4, 6, 1.0, "makespan"),
    (4, 8, 0.75, "span"),
]
DRAWN = 20


def cases() -> Iterator[tuple[str, Placement, Costs, int, float, str]]:
    """Name, placement, costs, microbatches, limit in activation units, objective."""
    for profile, (f, b, w, comm, act_w) in PROFILES.items():
        for kind, sizes in (("linear", LINEAR), ("V", V)):
            for p, m, share, objective in sizes:
                where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
                name = f"{profile} {kind} p={p} m={m} {share:.3g}x {objective}"
                yield name, where, Costs.uniform(where, f, b, w, comm, act_w), m, round(share * p, 6), objective
    rng = Random(2026)
    for number in range(DRAWN):
        kind, p, m = rng.choice(("linear", "V")), rng.randint(2, 4), rng.randint(3, 6)
        where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
        costs = uneven(rng, where)
        needs = max(least_of(where, costs))
        limit = round(needs * rng.uniform(1.0, 2.5) + 0.005, 2)
        objective = rng.choice(("span", "makespan"))
        yield f"uneven {number} {kind} p={p} m={m} {objective}", where, costs, m, limit, objective


def uneven(rng: Random, where: Placement) -> Costs:
    """Costs with random numbers for every stage."""
    f, b, w, comm, act_w = PROFILES[rng.choice(("1.5B", "6.2B"))]
    n = where.stages
    v = n / where.ranks
    times = [tuple(round(x / v * rng.uniform(0.7, 1.3), 1) for _ in range(n)) for x in (f, b, w)]
    act_b = tuple(round(rng.uniform(0.7, 1.3) / v, 2) for _ in range(n))
    act_w = tuple(round(a * act_w * rng.uniform(0.7, 1.3), 2) for a in act_b)
    pipe = where.pipes[0]
    links = tuple(round(comm * rng.uniform(0.5, 2), 1) if pipe[s] != pipe[s + 1] else 0.0 for s in range(n - 1))
    return Costs.per_stage(*times, act_b, act_w, (links,))


def fresh(seed: int) -> Iterator[tuple[str, Placement, Costs, int, float, str]]:
    """Endless random cases, as `cases`."""
    rng = Random(seed)
    for number in count():
        kind, p, m = rng.choice(("linear", "V")), rng.randint(2, 4), rng.randint(2, 8)
        where = Placement.linear(p) if kind == "linear" else Placement.vshape(p)
        even = rng.random() < 0.3
        costs = Costs.uniform(where, *PROFILES[rng.choice(sorted(PROFILES))]) if even else uneven(rng, where)
        needs = max(least_of(where, costs))
        limit = round(needs * rng.uniform(1.0, 2.5) + 0.005, 2)
        objective = rng.choice(("span", "makespan"))
        name = f"new {number} {kind} p={p} m={m} {'even' if even else 'uneven'} {objective}"
        yield name, where, costs, m, limit, objective


def odd(seed: int) -> Iterator[tuple[str, Placement, Costs, int, float | tuple[float, ...], str]]:
    """Endless random cases that are not like models."""
    rng = Random(seed)
    for number in count():
        p, kind = rng.randint(2, 4), rng.choice(("linear", "V", "looped"))
        m, v = rng.randint(1, 8 if p == 2 else 6), 1 if kind == "linear" else rng.choice((2, 3)) if p == 2 else 2
        where = {"linear": Placement.linear(p), "V": Placement.vshape(p, v), "looped": Placement.looped(p, v)}[kind]
        n, pipe, spread = where.stages, where.pipes[0], rng.choice(("hundredfold", "uneven", "even"))
        stretch = {"hundredfold": (1, 1, 30, 100), "uneven": (0.3, 0.8, 1.1, 1.7), "even": (1,)}[spread]
        f, b, w = (tuple(float(mean * rng.choice(stretch)) for _ in range(n)) for mean in (2, 2, rng.choice((0, 1))))
        act_b, share = tuple(round(rng.uniform(0.5, 1.5) / v, 2) for _ in range(n)), rng.choice((0, 0.4, 1, 1.4))
        comm = rng.choice((0.0, 0.3, 3.0, 20.0))
        links = tuple(comm if pipe[s] != pipe[s + 1] else 0.0 for s in range(n - 1))
        costs = Costs.per_stage(f, b, w, act_b, tuple(round(a * share, 2) for a in act_b), (links,))
        needs = least_of(where, costs)
        limit = tuple(round(need * rng.choice((1, 1.3, 2, 3)) + 0.005, 2) for need in needs)
        objective = rng.choice(("span", "makespan"))
        yield f"odd {number} {kind} p={p} v={v} m={m} {spread} {objective}", where, costs, m, limit, objective


def optima(record: Record, asked: argparse.Namespace) -> None:
    """Records how often a search finds the optimum of a new case, and its gap for the others."""
    wanted, seconds, engine = (
        (asked.counts or [2 if asked.quick else 40])[0],
        asked.seconds or 20.0,
        Engine(available()),
    )
    gaps: list[float] = []
    tried, stop = 0, time.monotonic() + 60 * asked.minutes
    for name, where, costs, m, limit, objective in odd(2028) if asked.odd else fresh(2027):
        if len(gaps) == wanted or time.monotonic() > stop:
            break
        tried += 1
        problem = Problem.make(where, costs, m, limit)
        bound = getattr(bounds(where, costs, m, limit), objective)
        orders = [("one by one", one_by_one(problem))]
        found = searched(problem, objective, 2 * PLAIN_RATE, engine, orders=orders, target=bound)
        if found is None:
            sys.exit(f"{name}: no order")
        proof = solve(problem, objective, start=found.order, lower=bound, seconds=seconds, workers=1)
        gap = found.cost(objective) / proof.cost - 1
        outcome = "not proven" if not proof.optimal else "optimal" if gap <= 1e-6 else f"{100 * gap:.2f}% above"
        record(f"{name} {limit} units: found {found.cost(objective):.3f}, proven {proof.lower:.3f}: {outcome}")
        gaps += [gap] if proof.optimal else []
    hits = sum(gap <= 1e-6 for gap in gaps)
    record(
        f"{tried} cases, {len(gaps)} of them proven within {seconds:g} s each: the search found {hits} of these optima,"
    )
    record(f"the worst of the rest {100 * max(gaps, default=0.0):.2f}% above (to reach: 90%, 2%)")


def prove(seconds: float) -> None:
    """Writes the file of the tests."""
    engine = Engine(available())
    rows, missing = [], []
    for name, where, costs, m, limit, objective in cases():
        problem = Problem.make(where, costs, m, limit)
        found = searched(problem, objective, 20_000_000, engine, orders=[("one by one", one_by_one(problem))])
        if found is None:
            sys.exit(f"{name}: no order")
        began = time.perf_counter()
        proof = solve(problem, objective, start=found.order, seconds=seconds)
        took = time.perf_counter() - began
        print(
            f"{name}: found {found.cost(objective):.3f}, best {proof.cost:.3f}, proven {proof.lower:.3f}, {took:.0f} s"
        )
        if not proof.optimal:
            missing.append(name)
            continue
        row = {"name": name, "ranks": where.pipes[0], "m": m, "limit": limit, "objective": objective}
        row |= {key: costs.column(key) for key in ("f", "b", "w")}
        row |= {"act_b": costs.units("kept"), "act_w": costs.units("left")}
        rows.append(row | {"comm": list(costs.links[0].values()), "optimum": round(proof.cost, 6)})
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(f"{len(rows)} proven, in {FILE.name}; not proven: {', '.join(missing) or 'none'}")


# ---- auto beside named schedules ----------------------------------------------------------------------------

BEHIND = 0.001  # of a step


def choosers(record: Record, asked: argparse.Namespace) -> None:
    given = asked.counts or [1 if asked.quick else 20]
    counts = given * len(CLASSES) if len(given) == 1 else given
    for what, jobs in zip(CLASSES, counts, strict=True):
        behind, planned, began = list[float](), 0, time.process_time()
        for seed in range(asked.first, asked.first + jobs):
            tables = drawn(what, seed)
            result = compared(tables)
            planned += result.auto < NO_PLAN
            if result.behind > BEHIND:
                behind.append(result.behind)
                named = f"{result.best} takes {result.named[result.best]:.3f} ms"
                record(f"{what} {seed}: auto {result.taken} {result.auto:.3f} ms, {named}: {100 * result.behind:+.2f}%")
        if not jobs:
            continue
        took = (time.process_time() - began) / jobs
        most = f", by {100 * max(behind):.2f}% at most" if behind else ""
        record(f"{what}: {jobs} jobs, {planned} planned, auto behind in {len(behind)}{most}; {took:.2f} CPU s each")


PARTS = {"compile": compiled, "search": search, "optima": optima, "choosers": choosers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("counts", type=int, nargs="*", help="optima: of proven cases; choosers: of jobs, by class")
    parser.add_argument("--seconds", type=float, help="search, optima: for each case (4, 20; 600 with --prove)")
    parser.add_argument("--engine", choices=("plain", "as-plain", "compiled"), default="compiled", help="search")
    parser.add_argument("--long", action="store_true", help="search: with a search of ten minutes")
    parser.add_argument("--odd", action="store_true", help="optima: cases that are not like models")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="optima: begin no new case later than this")
    parser.add_argument("--prove", action="store_true", help="optima: the cases of the tests, instead")
    parser.add_argument("--first", type=int, default=0, help="choosers: the seed of the first job")
    parser.add_argument("--quick", action="store_true", help="little of it; writes no file")
    asked = parser.parse_args()
    if asked.prove:
        prove(asked.seconds or 600.0)
        return
    names = {"search": f"search-{asked.engine}", "optima": "optima-odd" if asked.odd else "optima"}
    record = Record(names.get(asked.part, asked.part))
    PARTS[asked.part](record, asked)
    if not asked.quick:
        record.write()


if __name__ == "__main__":
    main()
