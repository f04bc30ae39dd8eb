"""Three new kinds of op in a copy of zbc: activations parked elsewhere for a while.

They need their rows, a value, cost columns, a pass with its line in the order, and handlers; nothing else changes. Then
the proof, the clock, memory, pictures, plan files, trace and report must handle them, and agree about them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zbc

SOURCE = Path(zbc.__file__).parent

KINDS = """
    PARK = "PARK"  # copy what F keeps elsewhere
    QUIT = "QUIT"  # let go of it on the device
    FETCH = "FETCH"  # copy it back
"""
ROWS = """
VALUES["attic"] = Value("unit", "attic", text="what F keeps, in the attic")
ROWS[Kind.PARK] = Row(_UNIT, Lane.OUT, _refs("kept"), _refs("attic"), cost="park", early=True)
ROWS[Kind.QUIT] = Row(_UNIT, _COMPUTE, _refs("attic kept"), frees=_refs("kept"))
ROWS[Kind.FETCH] = Row(_UNIT, Lane.BACK, _refs("attic"), _refs("kept"), _refs("attic"), cost="fetch")

"""
PASS = '''
"""What waits for its backward through three or more compute ops goes elsewhere meanwhile."""

from dataclasses import dataclass

from zbc.ops import Kind


@dataclass(frozen=True, slots=True)
class Park:
    name = "park"

    def run(self, program, context):
        return program.with_ranks([_parked(ops) for ops in program.ranks], by=self.name)


def _parked(ops):
    work = [i for i, op in enumerate(ops) if op.kind.computes]
    before, behind = {}, {}
    for k, i in enumerate(work):
        if ops[i].kind is Kind.F:
            back = next(j for j in range(k, len(work)) if ops[work[j]].kind.row.family == "input"
                        and ops[work[j]][1:] == ops[i][1:])
            if back - k >= 4:
                behind.setdefault(i, []).append(ops[i]._replace(kind=Kind.PARK))
                behind.setdefault(work[k + 1], []).append(ops[i]._replace(kind=Kind.QUIT))
                before.setdefault(work[back - 1], []).append(ops[i]._replace(kind=Kind.FETCH))
    return [one for i, op in enumerate(ops) for one in (*before.get(i, ()), op, *behind.get(i, ()))]
'''
HANDLERS = """

HOST = {}


def park(worker: Worker, op: Op) -> None:
    HOST[id(worker), op.key] = worker.kept[op.key]


def quit(worker: Worker, op: Op) -> None:
    del worker.kept[op.key]


def fetch(worker: Worker, op: Op) -> None:
    worker.kept[op.key] = HOST.pop((id(worker), op.key))


HANDLERS |= {Kind.PARK: park, Kind.QUIT: quit, Kind.FETCH: fetch}
"""
JOB = """
[model]
family = "gpt"
layers = 4
hidden = 32
heads = 4
vocab = 256
seq_len = 16
[parallel]
pp = 2
[schedule]
kind = "gpipe"
microbatches = 6
microbatch_size = 2
[train]
steps = 3
seed = 7
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """zbc with the three kinds."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(SOURCE, folder / "zbc", ignore=shutil.ignore_patterns("__pycache__"))
    put(folder / "zbc/ops.py", '    GATHER = "GATHER"', KINDS.strip("\n") + "\n", before=True)
    put(folder / "zbc/ops.py", "UNIT_SCOPES =", ROWS, before=True)
    (folder / "zbc/compiler/passes/park.py").write_text(PASS)
    put(folder / "zbc/compiler/lowering.py", "FuseBackward()", ", Park()")
    put(folder / "zbc/compiler/lowering.py", "from zbc.ir import Program\n", IMPORT)
    (folder / "zbc/runtime/handlers.py").write_text((folder / "zbc/runtime/handlers.py").read_text() + HANDLERS)
    (folder / "job.toml").write_text(JOB)
    return folder


IMPORT = "from zbc.compiler.passes.park import Park\n"


def put(path: Path, where: str, text: str, *, before: bool = False) -> None:
    old = path.read_text()
    assert old.count(where) == 1, (path, where)
    path.write_text(old.replace(where, text + where if before else where + text))


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


CHECKS = """
import json
import zbc
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import ledger
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Program

compiled = zbc.plan(zbc.load("job.toml")).compiled
program, costs = compiled.program, compiled.costs
ops = [op for ops in program.ranks for op in ops]
assert Op.parse("PARK s0 m1") == Op(Kind.PARK, 0, 1)
plain = program.with_ranks([[op for op in ops if op.kind not in (Kind.PARK, Kind.QUIT, Kind.FETCH)]
                            for ops in program.ranks], by="plain")
check_all(program)


def code(change):
    try:
        check_all(program.with_ranks([change(list(ops)) for ops in program.ranks], by="broken"))
    except ZbcError as error:
        return error.errors[0].code
    return None


def without(kind):
    def change(ops):
        first = next((i for i, op in enumerate(ops) if op.kind is kind), None)
        return ops if first is None else ops[:first] + ops[first + 1:]
    return change


def later(kind):
    def change(ops):
        i = next((i for i, op in enumerate(ops) if op.kind is kind), None)
        if i is None:
            return ops
        return [*ops[:i], *ops[i + 1:-2], ops[i], *ops[-2:]]
    return change


broken = {kind.value: [code(without(kind)), code(later(kind))] for kind in (Kind.PARK, Kind.QUIT, Kind.FETCH)}


def timed(out, back):
    slow = costs.with_ms(park=(out,) * costs.stages, fetch=(back,) * costs.stages)
    return simulate(program, slow), slow


free, _ = timed(0.0, 0.0)
slow, slow_costs = timed(1.0, 50.0)
copies = [(e, slow.graph.ops[ops[0]]) for e, ops in slow.graph.met.items()]
reloads = [(e, op) for e, op in copies if op.kind is Kind.FETCH]
where = {op: i for i, op in enumerate(slow.graph.ops)}
waits = all(slow.start[where[op._replace(kind=Kind.BW)]] >= slow.end[e] - 1e-9 for e, op in reloads)
queued = sorted(slow.end[e] for e, op in reloads if op.stage == 0)
units = [rank.units for rank in peaks(program, costs)]
changes = [[one for entry in entries for one in (*entry.begin, *entry.end)] for entries in ledger(free, costs)]
drawn = [max(held.units for held in over_time(free, rank, costs)) for rank in range(2)]
bytes_peak = [rank.activations for rank in peaks(program, costs)]
counters = [max(held.activations for held in over_time(free, rank, costs)) for rank in range(2)]
print(json.dumps({
    "kinds": sorted({op.kind.value for op in ops}),
    "broken": broken,
    "makespan": [simulate(plain, costs).makespan, free.makespan, slow.makespan],
    "waits": waits, "reloads": len(reloads), "gaps": [b - a for a, b in zip(queued, queued[1:])],
    "units": [units, [rank.units for rank in peaks(plain, costs)], drawn],
    "bytes": [bytes_peak, [rank.activations for rank in peaks(plain, costs)], counters],
    "empty": [abs(sum(e.units for e in rank if e.category == "activations")) < 1e-9 for rank in changes],
}))
"""


def test_proof_clock_and_memory_know_the_kinds_by_their_rows(copy):
    found = json.loads(run(copy, "-c", CHECKS))
    assert {"PARK", "QUIT", "FETCH"} <= set(found["kinds"])
    assert found["broken"]["FETCH"] == ["E202", "E206"]
    assert found["broken"]["PARK"][0] == "E202", "too late: what it copies is gone by then"
    assert found["broken"]["QUIT"][0] == "E202"
    plain, free, slow = found["makespan"]
    assert free == pytest.approx(plain) and slow > plain + 50.0
    assert found["waits"] and found["reloads"] >= 4
    assert min(found["gaps"]) >= 50.0 - 1e-9, "one copy at a time"
    units, before, drawn = found["units"]
    assert units == pytest.approx(drawn) and max(units) < max(before) - 0.9
    sizes, more, counters = found["bytes"]
    assert sizes == pytest.approx(counters) and max(sizes) < max(more)
    assert all(found["empty"])


@pytest.mark.repeats
def test_a_plan_with_the_kinds_is_written_drawn_run_and_reported(copy):
    run(copy, "-m", "zbc", "plan", "job.toml", "-o", "plan")
    assert "PARK s0 m0" in (copy / "plan/rank-0000.json").read_text()
    assert "deadlock-free" in run(copy, "-m", "zbc", "check", "plan")
    run(copy, "-m", "zbc", "visualize", "plan", "-o", "plan.html")
    assert '"more":[[' in (copy / "plan.html").read_text(), "the page has what QUIT and FETCH do to memory"
    run(copy, "-m", "zbc", "visualize", "plan")
    shown = run(copy, "-m", "zbc", "run", "plan", "--local", "2", "--trace", "1-2", "-o", "with")
    assert "PARK" in run(copy, "-m", "zbc", "export", "plan", "--format", "json", "-o", "-") or shown
    run(copy, "-m", "zbc", "report", "with")
    plain = copy / "zbc/compiler/lowering.py"
    changed = plain.read_text()
    plain.write_text(changed.replace("    Park(),\n", ""))
    try:
        run(copy, "-m", "zbc", "plan", "job.toml", "-o", "without-copies")
        run(copy, "-m", "zbc", "run", "without-copies", "--local", "2", "-o", "without")
    finally:
        plain.write_text(changed)
    assert losses(copy / "with") == losses(copy / "without")


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in lines if re.search(r"step", str(line.keys())) and "loss" in line]
    assert len(found) == 3
    return found
