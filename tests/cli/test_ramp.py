"""`schedule.ramp`: a plan directory with a plan for every number of microbatches, all proven, none exchangeable."""

import json

import pytest

from tests.jobs import job as made
from tests.refusals import refused
from tests.tiers import few
from zbc.api import load
from zbc.api import plan as zbc_plan
from zbc.compiler.compile import compile_job
from zbc.compiler.recall import costs_of
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.plan import directory as plans

RAMP = [{"microbatches": 1, "steps": 2}, {"microbatches": 3, "samples": 13}]
TRAIN = {"steps": 9}


@pytest.fixture
def ramped(job, zbc):
    """A plan with 1, 3, then 8 microbatches of 2 in two copies, and the output of `zbc plan`."""
    job(schedule={"ramp": RAMP}, parallel={"dp": 2}, train=TRAIN, pp=2)
    return zbc("plan", "zbc.toml")


def test_the_plan_says_what_each_batch_costs(ramped, zbc, folder):
    assert ramped.code == 0
    lines = [line.split("ramp", 1)[-1].strip() for line in ramped.out.splitlines() if "samples), " in line]
    assert lines[0].startswith("steps 1 to 2: 1 microbatch (4 samples), makespan ")
    assert lines[1].startswith("steps 3 to 4: 3 microbatches (12 samples), makespan ")
    assert lines[2] == "from step 5: 8 microbatches (32 samples), as above"
    report = zbc("plan", "zbc.toml", "-o", "again", "--json").json()
    assert [(one["steps"], one["microbatches"]) for one in report["ramp"]] == [(2, 1), (2, 3)]
    assert report["ramp"][0]["makespan_ms"] < report["ramp"][1]["makespan_ms"] < report["makespan_ms"]


def test_every_plan_in_it_is_a_plan_and_is_checked(ramped, zbc, folder):
    assert sorted(path.name for path in (folder / "plan").iterdir() if path.is_dir()) == ["m1", "m3"]
    assert "all 9 of plan are as they were written" in zbc("check", "plan").out
    assert zbc("check", "plan/m3").code == 0 and "3 microbatches" in zbc("visualize", "plan/m3").out
    whole = plans.StoredPlan.read(folder / "plan")
    assert [start.manifest.microbatches for start in whole.ramp] == [1, 3]
    for start in whole.ramp:
        assert simulate(start.program, costs_of(start.manifest)).makespan == pytest.approx(
            start.manifest.predicted["makespan_ms"]
        )
    load(folder / "plan").check()


@pytest.mark.long
def test_a_plan_in_it_that_is_missing_edited_or_another_is_refused(ramped, zbc, folder):
    rank = folder / "plan" / "m3" / "rank-0001.json"
    before = rank.read_text()
    rank.write_text(before.replace("F s1 m0", "F s1 m1", 1))
    assert zbc("check", "plan").code == 4
    rank.unlink()
    found = zbc("run", "plan", "--local", 4)
    assert found.code == 4 and "error[E401]" in found.err and "m3/rank-0001.json" in found.err
    rank.write_text(before)
    assert zbc("plan", "zbc.toml", "-o", "other", "--set", "schedule.kind=gpipe").code == 0
    (folder / "plan" / "m1").rename(folder / "aside")
    (folder / "other" / "m1").rename(folder / "plan" / "m1")
    found = zbc("check", "plan")
    assert found.code == 4 and "error[E402] plan: plan/m1 is not the plan that plan was made with" in found.err


@pytest.mark.long
def test_a_plan_with_a_ramp_replaces_one_and_nothing_else_and_names_no_folders_elsewhere(ramped, zbc, folder):
    assert zbc("plan", "zbc.toml").code == 0 and (folder / "plan" / "m1").is_dir()
    assert zbc("plan", "zbc.toml", "--set", "schedule.ramp=[]").code == 0 and not (folder / "plan" / "m1").exists()
    zbc("plan", "zbc.toml")
    (folder / "plan" / "m1" / "notes.txt").write_text("mine")
    assert "error[E407]" in zbc("plan", "zbc.toml").err
    path = folder / "plan" / "plan.json"
    data = json.loads(path.read_text())
    data["ramp"][0]["folder"] = "../plan/m1"
    path.write_text(json.dumps(data))
    with refused("E404"):
        plans.read_manifest(folder / "plan")


def test_what_goes_to_other_tools_would_not_grow():
    plan = zbc_plan(made(kind="1f1b", pp=2, schedule={"ramp": RAMP}, train=TRAIN))
    assert [start.program.microbatches for start in plan.ramp] == [1, 3]
    plan.check()
    assert plan.export("torch-csv")[".csv"].count("F7") == 2


@pytest.mark.long("zb-v")
@pytest.mark.parametrize(
    "kind", few(["auto", "zb-auto", "zb-v", "interleaved-1f1b", "chimera", "dualpipe"], lambda kind: kind != "auto")
)
def test_stages_stay_where_they_are(kind):
    compiled = compile_job(made(kind=kind, pp=2, schedule={"ramp": RAMP}, train=TRAIN), budget=0.0)
    assert [start.compiled.program.microbatches for start in compiled.ramp] == [1, 3]
    for start in compiled.ramp:
        assert start.compiled.program.placement == compiled.program.placement
        assert start.compiled.layers == compiled.layers and start.compiled.schedule == compiled.schedule


def test_a_warm_up_by_samples_is_held_against_the_samples_of_the_training():
    changes = {"pp": 2, "schedule": {"ramp": [{"microbatches": 4, "steps": 8}]}, "train": {"steps": 9}}
    optimizer = {"schedule": {"kind": "linear", "by": "samples", "warmup_steps": 5}}
    made(**changes, optimizer=optimizer)
    optimizer["schedule"]["warmup_steps"] = 6
    with pytest.raises(ZbcError, match="more than the 5 full steps that the samples of train"):
        made(**changes, optimizer=optimizer)
    optimizer["schedule"]["by"] = "steps"
    made(**changes, optimizer=optimizer)
