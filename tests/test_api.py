"""The Python API mirrors the commands, needs no torch, and costs nothing to import."""

import pydoc
import sys
from xml.etree import ElementTree

import pytest

import zbc
from tests.jobs import job, write_job
from tests.limits import ended
from tests.refusals import refused
from zbc.api import open_plan
from zbc.job.spec import Job

CSV = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.fixture
def path(tmp_path):
    write_job(tmp_path, kind="zb-h1")
    return tmp_path / "zbc.toml"


def test_importing_zbc_imports_nothing_else_of_it():
    script = "import sys, zbc; print([m for m in sys.modules if m.startswith(('zbc.', 'torch', 'pydantic', 'rich'))])"
    done = ended(sys.executable, "-c", script)
    assert done.stdout.strip() == "['zbc.plan']"  # a package with nothing in it, see zbc/__init__.py


@pytest.mark.long
def test_a_path_is_loaded_as_what_it_is(path, tmp_path):
    assert isinstance(zbc.load(path), Job)
    zbc.plan(path).write(tmp_path / "plan")
    (tmp_path / "order.csv").write_text(CSV)
    for name in ("plan", "plan/plan.json", "order.csv"):
        assert isinstance(zbc.load(tmp_path / name), zbc.Plan)
    assert zbc.load(path, ["schedule.microbatches=12"], "1f1b").schedule.microbatches == 12
    assert open_plan(path).compiled is not None


def test_what_was_read_is_not_written_again(tmp_path):
    (tmp_path / "order.csv").write_text(CSV)
    with refused("E407"):
        zbc.load(tmp_path / "order.csv").write(tmp_path / "plan")
    assert not (tmp_path / "plan").exists()


def test_check_raises_what_the_command_says(tmp_path):
    (tmp_path / "order.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    plan = zbc.load(tmp_path / "order.csv")
    for call in (plan.check, plan.simulate, plan.svg):
        with refused("E201") as caught:
            call()
        assert "row 1, column 2" in caught.value.where


@pytest.mark.long
def test_a_notebook_shows_the_timeline():
    plan = zbc.plan(job(kind="zb-v"))
    picture = plan._repr_html_()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture == plan.svg(width=960)


def test_what_is_printed_is_a_line(path, tmp_path):
    job = zbc.load(path)
    plan = zbc.plan(job)
    plan.write(tmp_path / "plan")
    assert repr(plan) == "<zbc.Plan zb-h1: 4 ranks, 4 stages, 8 microbatches>" == repr(zbc.Plan.read(tmp_path / "plan"))
    for one in (job, plan.program, plan.simulate()):
        assert len(repr(one)) < 200 and "4 ranks" in repr(one), repr(one)


def test_help_says_how_a_plan_is_made(path):
    text = pydoc.plain(pydoc.render_doc(zbc.plan))
    assert "function plan" in text and 'zbc.plan("job.toml")' in text and "budget" in text
    assert "zbc.compare(job, schedules" in pydoc.plain(pydoc.render_doc(zbc))
    assert "function plan" in pydoc.plain(pydoc.render_doc("zbc.plan")), "and not the package of that name"


def test_compare_ranks_schedules_and_says_why_one_has_no_plan(path):
    rows = zbc.compare(path, ["gpipe", "zb-h1", "interleaved-1f1b"])
    assert rows[0].step_ms == min(row.step_ms for row in rows if row.report)
    one = zbc.plan(zbc.load(path, schedule="zb-h1"), budget=0)
    (found,) = [row for row in rows if row.schedule == "zb-h1"]
    assert found.report.makespan_ms == one.simulate().makespan
    assert f"zb-h1: makespan {found.report.makespan_ms:.4g}"[:20] in str(found)
    swept = zbc.compare(path, ["1f1b"], sweep=["schedule.microbatches=4,8"], settings=["model.layers=8"])
    assert sorted(row.settings for row in swept) == [(("schedule.microbatches", many),) for many in "48"]
    with pytest.raises(zbc.ZbcError, match=r"settings=\['model.layer=8'\]"):
        zbc.compare(path, ["1f1b"], settings=["model.layer=8"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"settings": ["schedule.microbatchs=3"]}, "--> settings=['schedule.microbatchs=3']   did you mean"),
        ({"schedule": "zbx"}, "--> schedule='zbx'   did you mean"),
        ({"settings": ["a"]}, "cannot read settings=['a']\n   = write settings=['schedule.microbatches=16']"),
        ({"settings": ["partition.layers_per_stage=[1, 2]"]}, "settings=['partition.layers_per_stage=[1, 2]']"),
    ],
)
def test_errors_speak_of_arguments_and_the_console_of_options(path, arguments, said):
    with pytest.raises(zbc.ZbcError) as caught:
        zbc.plan(zbc.load(path, **arguments))
    assert said in str(caught.value) and "--s" not in str(caught.value)
    assert "--s" in caught.value.render()


def test_commands_in_hints_stay_as_they_are_typed():
    error = zbc.ZbcError("E1", "x", hint="`zbc plan JOB.toml --set a.b=1 --budget 5` or --budget 5, --profile f.json")
    assert error.in_python().hint == "`zbc plan JOB.toml --set a.b=1 --budget 5` or budget=5, profile='f.json'"


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda plan: plan.svg(ranks=[9]), "ranks=\\[9\\]: the plan has ranks 0 to 3"),
        (lambda plan: plan.html(ranks=[]), "the plan has ranks 0 to 3"),
        (lambda plan: plan.svg(zoom=(5, 1)), "zoom=\\(5, 1\\)"),
        (lambda plan: plan.text(steps=0), "steps=0"),
        (lambda _: zbc.plan("job.toml", budget=-1), "budget=-1"),
    ],
)
def test_arguments_that_show_nothing_are_named(path, call, said):
    with pytest.raises(ValueError, match=said):
        call(zbc.plan(path))
    with pytest.raises(zbc.ZbcError, match="no target 'nope'"):
        zbc.plan(path).export("nope")


def test_zbc_has_no_other_names():
    assert {"Plan", "ZbcError", "load", "plan"} <= set(dir(zbc))
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        zbc.plans  # noqa: B018
