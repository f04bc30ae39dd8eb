"""Activations on the host, held against published orders and the tables of the design.

    python bench/offload.py reference          # 2,154 cases of tests/reference/offload_orders.csv
    python bench/offload.py least              # the least peak that adds no time, v = 1 to 4
    python bench/offload.py table [MODEL]      # order and offload together: 1.5B or 6.2B, three limits, three speeds

`reference`: every published case that moves activations, at its own limit: is a step longer than published, and how
much moves; the same with two ranks on a link; and each case that the published pass refuses: is there a legal plan of a
lower peak. `table`: the best of two schedules, each searched as with `--budget 10s`, by the bubble of the makespan: 1 -
work/makespan of the microbatches without recompute. A cell is `-` where no order is found.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job, load_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.offload import Offload
from zbc.compiler.passes.offload_view import View
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Kind, Program

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "tests" / "reference" / "offload_orders.csv"
EVERY = frozenset(range(1000))
ALONE = 0.7  # of its time, what a copy of the reference takes while nothing goes the other way on its link
LATE, ABOVE = 1e-4, 1e-6  # rounding of the published numbers, and of ours
Row = dict[str, str]


# ---- published orders ------------------------------------------------------------------------------------------------


def case(row: Row) -> Context:
    """The order of a row without copies, with what copies cost."""
    p, m, v, group = (int(row[key]) for key in ("p", "m", "v", "group"))
    program = SCHEDULES["gis"].make(Request(p, m, v, group=group))
    return Context(program, costs_of(program, row, float(row["k"])))


def costs_of(program: Program, row: Row, k: float) -> Costs:
    f, b, w, comm = (float(row[key]) for key in ("T_F", "T_B", "T_W", "T_comm"))
    v = program.placement.stages / program.placement.ranks
    each = (k * (f + b + w) / v,) * program.placement.stages
    return Costs.uniform(program.placement, f, b, w, comm).with_ms(out=each, back=each)


def moved(context: Context, limit: float) -> Context:
    """With copies that keep every rank to a limit; proven, and weighed."""
    offload = Offload((limit,) * len(context.program.ranks), EVERY)
    found = Context(offload.run(context.program, context), context.costs)
    check_all(found.program)
    most = max(rank.units for rank in peaks(found.program, found.costs))
    assert most <= limit + ABOVE, (most, limit)
    return found


def share(program: Program) -> float:
    kinds = [op.kind for ops in program.ranks for op in ops]
    return kinds.count(Kind.OFFLOAD) / kinds.count(Kind.F)


def reference(record: Record) -> None:
    with REFERENCE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["k"]]
    published = [row for row in rows if row["status"] == "ok"]
    _published(record, published)
    _refused(record, [row for row in rows if row["status"] != "ok"])


def _published(record: Record, rows: Sequence[Row]) -> None:
    late, shares = list[float](), list[tuple[float, float]]()
    for row in rows:
        found = moved(case(row), float(row["peak_after"]))
        late.append(found.timeline.makespan / float(row["makespan_after"]) - 1)
        shares.append((share(found.program), float(row["moved_share"])))
    ours, theirs = (sum(each) / len(rows) for each in zip(*shares, strict=True))
    record(f"{len(rows)} published cases at their own peaks: {sum(x > LATE for x in late)} take longer")
    record(f"moved of all activations: {ours:.3f}, published {theirs:.3f}")
    late = []
    for row in rows:
        plain = case(row)
        context = Context(plain.program, replace(plain.costs, shared=2, alone=ALONE))
        found = moved(context, float(row["peak_after"]))
        late.append(found.timeline.makespan / float(row["makespan_replayed"]) - 1)
    fine = sum(one <= LATE for one in late)
    record(f"two ranks on a link: {fine} ({fine / len(rows):.1%}) as fast as the published lists replayed, the others")
    record(f"take {max(late):.1%} longer at most")


def _refused(record: Record, rows: Sequence[Row]) -> None:
    """A peak a unit below, or at the floor where that is more; half a unit, or a quarter, where no plan has that."""
    lower, added, none = 0, list[float](), list[str]()
    for row in rows:
        context = case(row)
        before = max(rank.units for rank in peaks(context.program, context.costs))
        ranks = range(len(context.program.ranks))
        floor = max(View.of(context.program, r, context.costs, EVERY).floor for r in ranks)
        limit = max(floor, before - 1.0)
        if limit >= before - ABOVE:
            none.append(",".join(list(row.values())[:7]))
            continue
        found = moved(context, limit)
        lower += 1
        added.append(found.timeline.makespan / context.timeline.makespan - 1)
    free = sum(one <= LATE for one in added)
    record(
        f"{len(rows)} cases that the published pass refuses: {lower} have a legal plan of a lower peak, {free} of them"
    )
    record(f"at no added time (a unit lower, or at the floor); the mean adds {sum(added) / (lower or 1):.1%}")
    for text in none:
        record(f"  none: {text}")


# ---- the least peak that adds no time --------------------------------------------------------------------------------

# p = 8, m = 24, unit costs: (v, g) -> the peaks of the design at k = 0.25, 0.5 and 1, of shares of an activation there
LEAST = {
    (1, 8): (2.00, 3.00, 6.00), (2, 4): (1.00, 1.50, 4.00), (2, 6): (1.00, 2.00, 4.75), (2, 8): (1.00, 2.38, 5.38),
    (3, 4): (0.67, 1.00, 3.33), (3, 6): (0.67, 1.33, 3.67), (3, 8): (0.67, 2.33, 4.58), (4, 4): (0.50, 0.75, 3.00),
    (4, 6): (0.50, 1.25, 4.00), (4, 8): (0.50, 2.50, 4.50),
}  # fmt: skip


def least(record: Record) -> None:
    record("least peak at no added time, p = 8, m = 24, unit costs; in brackets that of the design")
    for (v, group), bars in LEAST.items():
        cells = []
        for k, bar in zip((0.25, 0.5, 1.0), bars, strict=True):
            program = SCHEDULES["gis"].make(Request(8, 24, v, group=group))
            unit = {"T_F": "1", "T_B": "1", "T_W": "1", "T_comm": "0"}
            context = Context(program, costs_of(program, unit, k))
            cells.append(f"k={k:g} {_least(context, 1 / v):.2f} ({bar:.2f})")
        record(f"v={v} g={group}  " + "  ".join(cells))


def _least(context: Context, step: float) -> float:
    """The least multiple of a stage's activation that is a peak without added time, from the top down."""
    limit = max(rank.units for rank in peaks(context.program, context.costs))
    plain = context.timeline.makespan
    while True:
        try:
            found = moved(context, limit - step)
        except ZbcError:
            return limit
        if found.timeline.makespan > plain * (1 + LATE):
            return limit
        limit -= step


# ---- order and offload together --------------------------------------------------------------------------------------


class Model(NamedTuple):
    """ms of a rank's share of a microbatch, and what B leaves of what F keeps: Tables 9 and 10 of arXiv 2401.10241."""

    f: float
    b: float
    w: float
    comm: float
    left: float


MODELS = {
    "1.5B": Model(18.522, 18.086, 9.337, 0.601, 0.3664),
    "6.2B": Model(29.718, 29.444, 19.927, 0.527, 0.4324),
}
SCHEDULES_TRIED = (("looped-zb", 3), ("v-auto", 2))
SECONDS = 10.0
LIMITS = (0.25, 0.375, 0.5)
COLUMNS = {  # name: activations, and k of copies
    "no copies": ("keep", None),
    "recompute": ("auto", None),
    "k=1": ("offload", 1.0),
    "k=1 + recompute": ("auto", 1.0),
    "k=0.5": ("offload", 0.5),
    "k=0.25": ("offload", 0.25),
}
BARS = {  # of the design: by limit and column, 1.5B and 6.2B
    0.25: ((0.566, 0.541), (0.363, 0.320), (0.434, 0.426), (0.310, 0.268), (0.086, 0.075), (0.086, 0.075)),
    0.375: ((0.411, 0.369), (0.262, 0.234), (0.213, 0.193), (0.243, 0.215), (0.086, 0.075), (0.077, 0.066)),
    0.5: ((0.274, 0.222), (0.235, 0.218), (0.104, 0.092), (0.243, 0.215), (0.082, 0.075), (0.071, 0.061)),
}


def table(record: Record, only: str) -> None:
    found = dict[tuple[str, float, str], float]()
    record(f"bubble of the makespan, p = 8, m = 24, the best of {_names()}, {SECONDS:g} s each; in brackets the design")
    for name, model in MODELS.items() if not only else [(only, MODELS[only])]:
        for limit in LIMITS:
            cells = []
            for column, bars in zip(COLUMNS, BARS[limit], strict=True):
                began = time.process_time()
                bubble, best = min(_cell(model, limit, column, *each) for each in SCHEDULES_TRIED)
                found[name, limit, column] = bubble
                bar = bars[list(MODELS).index(name)]
                cells.append(bubble <= bar + 0.0005)
                verdict = "reached" if cells[-1] else f"missed by {bubble - bar:.4f}"
                took = time.process_time() - began
                record(f"{name} {limit:g}x {column:<16} {bubble:.4f} ({bar:.3f}) {verdict:<16} {best}   # {took:.0f} s")
    record(f"monotone in the limit: {_monotone(found, by_limit)}; in k: {_monotone(found, by_speed)}")


def _names() -> str:
    return ", ".join(f"{name} with {chunks} stages a rank" for name, chunks in SCHEDULES_TRIED)


def _cell(model: Model, limit: float, column: str, kind: str, chunks: int) -> tuple[float, str]:
    """The bubble of one schedule, and its name with its peak."""
    activations, k = COLUMNS[column]
    work = model.f + model.b + model.w
    given = {"f": model.f, "b": model.b, "w": model.w, "comm": model.comm, "act_w": model.left}
    settings = [f"costs.{key}={value}" for key, value in given.items()]
    settings += [f"schedule.memory_limit={limit}x", f"memory.activations={activations}", f"schedule.chunks={chunks}"]
    settings += [] if k is None else [f"costs.offload={k * work}"]
    try:
        compiled = compile_job(load_job(ROOT / "plans/paper-1.5b.toml", settings, kind), suggest=False, budget=SECONDS)
    except ZbcError:
        return 1.0, "-"
    peak = max(rank.units for rank in compiled.memory)
    assert peak <= 8 * limit + ABOVE, (peak, limit)
    again = sum(stage.recompute for stage in compiled.report.cut.stages)
    bubble = 1 - compiled.program.microbatches * work / compiled.timeline.makespan
    return bubble, f"{kind} {chunks}, peak {peak:.3f}, moved {compiled.report.moved:.2f}, {again} stages recompute"


def by_limit(key: tuple[str, float, str]) -> tuple[tuple[object, ...], float]:
    """What stays the same, and what should not be slower as it grows."""
    return (key[0], key[2]), key[1]


def by_speed(key: tuple[str, float, str]) -> tuple[tuple[object, ...], float]:
    activations, k = COLUMNS[key[2]]
    return (key[0], key[1], activations == "offload"), -(k or 0.0)


def _monotone(
    found: dict[tuple[str, float, str], float], by: Callable[[tuple[str, float, str]], tuple[tuple[object, ...], float]]
) -> str:
    groups = dict[tuple[object, ...], list[tuple[float, float]]]()
    for key, bubble in found.items():
        if by is by_limit or COLUMNS[key[2]][0] == "offload":
            group, size = by(key)
            groups.setdefault(group, []).append((size, bubble))
    wrong = [
        (*group, a)
        for group, cells in groups.items()
        for (a, x), (_, y) in zip(sorted(cells), sorted(cells)[1:], strict=False)
        if y > x + LATE
    ]
    return "yes" if not wrong else f"no: {wrong}"


def main() -> None:
    what, *rest = sys.argv[1:] or ["reference"]
    record, began = Record("-".join(["offload", what, *rest])), time.process_time()
    if what == "table":
        table(record, *rest[:1] or [""])
    else:
        {"reference": reference, "least": least}[what](record)
    record(f"# {time.process_time() - began:.0f} s of CPU time")
    record.write()


if __name__ == "__main__":
    main()
