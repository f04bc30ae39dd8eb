"""The Python API mirrors the commands, needs no torch, and costs nothing to import."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

import zbc
from tests.jobs import job, toml_text
from zbc.api import open_plan
from zbc.compiler.lowering import Lowering
from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Placement, Program
from zbc.job.spec import Job

CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "zbc.toml").write_text(toml_text(kind="zb-h1"))
    return tmp_path / "zbc.toml"


def test_importing_zbc_imports_nothing_else_of_it():
    script = "import sys, zbc; print([m for m in sys.modules if m.startswith(('zbc.', 'torch', 'pydantic', 'rich'))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['zbc.plan']"  # a package with nothing in it, see zbc/__init__.py


def test_planning_drawing_and_exporting_need_no_torch(path, tmp_path):
    script = (
        "import sys, zbc\n"
        f"plan = zbc.plan(zbc.load({str(path)!r}))\n"
        "plan.check(); plan.simulate(); plan.svg(); plan.html(); plan.text(); plan.export('torch-csv')\n"
        f"plan.write({str(tmp_path / 'plan')!r})\n"
        f"zbc.Plan.read({str(tmp_path / 'plan')!r}).check()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_a_path_is_loaded_as_what_it_is(path, tmp_path):
    assert isinstance(zbc.load(path), Job)
    zbc.plan(path).write(tmp_path / "plan")
    (tmp_path / "order.csv").write_text(CSV)
    for name in ("plan", "plan/plan.json", "order.csv"):
        assert isinstance(zbc.load(tmp_path / name), zbc.Plan)
    assert zbc.load(path, ["schedule.microbatches=12"], "1f1b").schedule.microbatches == 12
    assert open_plan(path).compiled is not None


def test_a_plan_read_back_is_the_plan_that_was_written(path, tmp_path):
    made = zbc.plan(zbc.load(path))
    made.write(tmp_path / "plan")
    read = zbc.Plan.read(tmp_path / "plan")
    assert read.program.ranks == made.program.ranks
    assert read.simulate().makespan == made.simulate().makespan
    assert read.text() == made.text()
    assert read.export("torch-csv") == made.export("torch-csv")
    assert read.barrier and made.barrier


def test_what_was_read_is_not_written_again(tmp_path):
    (tmp_path / "order.csv").write_text(CSV)
    with pytest.raises(zbc.ZbcError) as caught:
        zbc.load(tmp_path / "order.csv").write(tmp_path / "plan")
    assert caught.value.code == "E415"
    assert not (tmp_path / "plan").exists()


def test_check_raises_what_the_command_says(tmp_path):
    (tmp_path / "order.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    plan = zbc.load(tmp_path / "order.csv")
    for call in (plan.check, plan.simulate, plan.svg):
        with pytest.raises(zbc.ZbcError) as caught:
            call()
        assert caught.value.code == "E201"
        assert "row 1, column 2" in caught.value.where


def test_a_notebook_shows_the_timeline():
    plan = zbc.plan(job(kind="zb-v"))
    picture = plan._repr_html_()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture == plan.svg(width=960)


def test_steps_without_a_barrier_are_drawn_without_one():
    plan = zbc.plan(job(kind="zb-h2", costs={"f": 1.0, "b": 1.0, "w": 1.0}))
    assert plan.barrier
    assert plan.strip(3).length == pytest.approx(3 * plan.simulate().makespan)


def test_zbc_has_no_other_names():
    assert {"Plan", "ZbcError", "load", "plan"} <= set(dir(zbc))
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        zbc.plans  # noqa: B018


def test_an_order_of_slices_is_checked_and_not_priced():
    """Costs are of whole microbatches: each slice would be charged one."""
    ops = [(Kind.F, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0)]
    ranks = tuple(tuple(Op(kind, r, 0, slice=part) for kind, part in ops) for r in range(2))
    compute = Context.of(Program(Placement.linear(2), 1, ranks, ("mine",), slices=2))
    mine = zbc.Plan("mine", Lowering().lower(compute).program)
    mine.check()
    with pytest.raises(zbc.ZbcError, match="mine cuts microbatches into 2 slices") as caught:
        mine.simulate()
    assert caught.value.code == "E124" and "slices = 1" in caught.value.hint
