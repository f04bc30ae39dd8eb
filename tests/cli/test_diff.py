"""`zbc diff`: numbers side by side, and the order of ops aligned."""

import shutil
from pathlib import Path

import pytest

from tests.jobs import toml_text
from zbc.compiler.compile import compile_job, load_job
from zbc.ir import Kind, Op
from zbc.plan.directory import StoredPlan


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with a job and three plans of it."""
    made = tmp_path_factory.mktemp("planned")
    (made / "zbc.toml").write_text(toml_text())
    for kind in ("1f1b", "eager-1f1b", "zb-v"):
        compile_job(load_job(made / "zbc.toml", [f"schedule.kind={kind}"])).write(made / kind)
    return made


@pytest.fixture
def plans(planned, folder):
    """These in the current folder."""
    shutil.copytree(planned, folder, dirs_exist_ok=True)


def test_a_plan_does_not_differ_from_itself(zbc, plans):
    ran = zbc("diff", "1f1b", "1f1b")
    assert ran.code == 0
    assert "the same ops in the same order on every rank" in ran.out
    changes = [line.split()[-1] for line in ran.out.split("\n") if line.startswith(("makespan", "peak", "span"))]
    assert set(changes) == {"="}
    assert zbc("diff", "1f1b", "1f1b", "--all", "--json").json()["same_order"] is True


def test_two_orders_are_aligned_op_by_op(zbc, plans):
    out = zbc("diff", "1f1b", "eager-1f1b").out
    assert "15 ops moved" in out
    assert "only in" not in out
    lines = out.split("\n")
    first = lines.index("rank 0")
    assert lines[first + 1].split() == ["3", "F", "s0", "m3", "3", "F", "s0", "m3"]
    assert lines[first + 2].split() == [">", "4", "F", "s0", "m4"]
    marks = {line.index(mark) for line in lines[first + 1 :] for mark in "<>" if mark in line}
    assert len(marks) == 1
    assert max(map(len, lines)) <= 80


def test_the_numbers_of_both_plans_and_their_change_are_there(zbc, plans):
    document = zbc("diff", "1f1b", "zb-v", "--json").json()
    assert (document["format"], document["version"]) == ("zbc-diff", 1)
    for side, name in (("first", "1f1b"), ("second", "zb-v")):
        report = zbc("check", name, "--json").json()
        metrics = document["metrics"]
        assert metrics["makespan_ms"][side] == pytest.approx(report["makespan_ms"])
        assert metrics["bubble_of_span"][side] == pytest.approx(report["bubble_rate_span"])
        most = max(rank["peak_bytes"] for rank in report["per_rank"])
        assert metrics["peak_memory_bytes"][side] == pytest.approx(most, rel=1e-6)
    assert document["same_placement"] is False
    changed = document["ranks"][0]
    assert changed["only_second"] > 0
    order = [op for op in StoredPlan.read(Path("zb-v")).program.ranks[0] if op.kind.computes]
    step = order.index(Op(Kind.F, 7, 0))
    assert {"op": "F s7 m0", "first_step": None, "second_step": step} in changed["changes"]
    assert "placement  4 stages -> 8" in zbc("diff", "1f1b", "zb-v").out


def test_long_listings_are_cut_unless_asked_for(zbc, plans):
    short, long = (zbc("diff", "1f1b", "zb-v", *more).out for more in ((), ("-v",)))
    assert "more lines: -v" in short
    assert "more lines" not in long
    assert len(long) > len(short) + 1000


def test_a_csv_and_a_job_are_compared_too(zbc, plans):
    assert zbc("export", "1f1b", "--to", "torch-csv", "-o", "order.csv").code == 0
    assert "the same ops" in zbc("diff", "1f1b", "order.csv").out
    assert "the same ops" in zbc("diff", "order.csv", "zbc.toml").out
    assert "error[E401]" in zbc("diff", "order.csv", "nothing").err
    assert Path("order.csv").exists()
