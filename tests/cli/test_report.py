"""`zbc report`, `zbc visualize RUN`, and the job of a plan planned anew."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.compiler.test_recorded import GIVEN, as_predicted, compiled, slowed
from tests.recorded_runs import record
from tests.tiers import few
from zbc.commands.reporting import replan_command
from zbc.plan.directory import StoredPlan


@pytest.fixture
def run(folder):
    """A recorded run with a slow rank 2, and one outlier op."""
    plan = compiled("zb-h1", costs={**GIVEN, "per": "layer"}, layers=12)
    usual = slowed(plan, 2, 1.5)
    world = as_predicted(
        plan, op=lambda op, rank, step: usual(op, rank, step) + 80 * (str(op) == "F s1 m3" and step == 6)
    )
    return record(plan, folder, world).folder.relative_to(folder)


def test_the_report_names_what_is_slow_and_how_to_plan_anew(run, zbc):
    ran = zbc("report", run)
    assert ran.code == 0 and ran.err == ""
    for text in (
        "rank 2: its ops take 1.50 times what was predicted, the others' 1.00",
        "step 6, rank 1: F s1 m3 took 92 ms, usually 12 ms",
        "of each rank in step 5, the median one",
        "rank 1: ",
        "all ranks read the same clock",
        "not looked at",
        f"zbc profile {run} -o profile.json && zbc plan {run}/trace/plan --profile profile.json",
    ):
        assert text in ran.out, text
    assert all(len(line) <= 80 for line in ran.out.splitlines() if "zbc profile" not in line)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cores", "said"), [(1, "4 ranks share the one core of host"), (3, "4 ranks share the 3 cores of host")]
)
def test_the_report_says_which_ranks_share_cores(run, zbc, tmp_path, cores, said):
    copy = with_cores(run, tmp_path / "copy", cores)
    told = zbc("report", copy).out
    assert said in told and "hardware.slow" not in told  # they wait for one another's cores
    assert "hardware.slow" in zbc("report", run).out
    assert zbc("report", run, "--json").json()["crowded"] == []  # of a trace that does not say
    alone = with_cores(run, tmp_path / "alone", 4)
    assert zbc("report", alone, "--json").json()["crowded"] == []
    assert zbc("report", copy, "--json").json()["crowded"] == [{"host": "host", "ranks": 4, "cores": cores}]


@pytest.mark.parametrize("cores", few([0, True, "two"], 1))
def test_a_trace_with_an_absurd_number_of_cores_is_damaged(run, zbc, tmp_path, cores):
    ran = zbc("report", with_cores(run, tmp_path / "copy", cores))
    assert ran.code == 4 and "E430" in ran.err and "rank-0000.jsonl:1" in ran.err


def with_cores(run, folder, cores):
    """A copy of a recorded run whose processes could use `count` cores."""
    shutil.copytree(run, folder)
    for path in (folder / "trace").glob("rank-*.jsonl"):
        first, _, rest = path.read_text().partition("\n")
        path.write_text(json.dumps(json.loads(first) | {"cores": cores}) + "\n" + rest)
    return folder


def test_the_report_as_json_has_stable_keys(run, zbc):
    found = zbc("report", run, "--json").json()
    assert (found["format"], found["version"], found["schedule"]) == ("zbc-run-report", 1, "zb-h1")
    assert found["steps"] == [4, 5, 6] and found["median_step"] == 5
    for name in ("step", "makespan", "span", "bubble_makespan", "bubble_span"):
        assert found[name].keys() == {"predicted", "measured", "low", "high"}
    assert [one["rank"] for one in found["slow_ranks"]] == [2]
    assert found["outliers"][0]["op"] == "F s1 m3" and found["ops"][0]["rank"] == 2
    for rank in found["ranks"]:
        causes = [value for name, value in rank["measured"].items() if name != "senders"]
        assert sum(causes) == pytest.approx(found["step"]["measured"], abs=1e-5)
    assert found["replan"]["gain"] > 0.05 and found["replan_command"].startswith("zbc profile ")


@pytest.mark.long
def test_a_phase_of_a_ramp_is_reported_beside_its_own_plan(zbc, folder):
    ramp = [{"microbatches": 2, "steps": 3}, {"microbatches": 4, "steps": 3}]
    plan = compiled("1f1b", costs={**GIVEN, "per": "layer"}, layers=12, schedule={"ramp": ramp}, train={"steps": 9})
    world = as_predicted(plan, op=slowed(plan, 2, 1.5))
    for steps, phase in (((2, 3), "m2"), ((5, 6), "m4")):
        record(plan, folder, world, steps, phase)
    found = zbc("report", "run/trace/m2", "--json").json()
    assert (found["phase"], found["microbatches"], found["steps"]) == ("m2", 2, [2, 3])
    assert found["makespan"]["predicted"] == pytest.approx(plan.ramp[0].compiled.report.makespan_ms)
    assert [one["rank"] for one in found["slow_ranks"]] == [2] and found["replan"]["changed"]
    for command in found["replan_command"].split(" && "):
        assert zbc(*shlex.split(command)[1:]).code == 0
    anew = StoredPlan.read(folder / "plan-measured").ramp[0].manifest
    assert anew.predicted["barrier_ms"] == pytest.approx(found["replan"]["planned_ms"], rel=1e-5)
    assert [*map(list, anew.layers)] == found["replan"]["cut"] != [*map(list, plan.layers)]
    latest = zbc("report", "run")
    assert (
        "the steps of m4 of a ramp, 4 microbatches each" in latest.out and "also recorded: run/trace/m2" in latest.out
    )
    missing = zbc("report", "run/trace/m3")
    assert (missing.code, missing.out) == (4, "") and "recorded phases: m2, m4\n" in missing.err
    assert "no trace of the phase m3, its ramp has m2, m4" in missing.err
    record(plan, folder, world, (8, 9), "")
    missing = zbc("report", "run/trace/m3")
    assert "recorded phases: m2, m4; and the steps after the ramp: run" in missing.err


def test_a_phase_of_a_run_without_a_ramp_is_refused_with_the_way_out(zbc, run):
    for command in (("report", "run/trace/m4"), ("profile", "run/trace/m4")):
        found = zbc(*command)
        assert (found.code, found.out) == (4, "")
        assert "run had no ramp, and so no phase m4\n   = of all of it: run" in found.err


@pytest.fixture
def unrecorded(folder):
    """The directory of a run without recorded steps."""
    predicted = compiled("1f1b").report.predicted()
    about = {"format": "zbc-run", "version": 1, "plan": "abc", "plan_folder": "plans/a b", "schedule": "1f1b"}
    about |= {"ranks": 4, "copies": 1, "device": "cpu", "predicted": predicted, "training": {"optimizer": {}}}
    (folder / "run").mkdir()
    (folder / "run/run.json").write_text(json.dumps(about))
    rows = [{"step": 1, "step_ms": 900.0, "busy_ms": [1.0] * 4, "peak_bytes": [2**20] * 4}]
    rows += [
        {"step": n, "step_ms": 100.0 + n, "busy_ms": [80.0, 81.0, 90.9, 79.0], "peak_bytes": [2**21] * 4}
        for n in (2, 3, 4)
    ]
    rows.insert(2, {"step": 2, "eval_loss": 1.0})
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "st')
    return folder / "run"


def test_a_run_without_a_trace_is_reported_as_far_as_its_log_goes(unrecorded, zbc):
    ran = zbc("report", "run")
    assert ran.code == 0
    assert "3 of 4 count" in ran.out and "103.0 ms" in ran.out and "2 MiB" in ran.out
    assert "zbc run 'plans/a b' --local 4 --trace 10-19" in ran.out
    about = json.loads((unrecorded / "run.json").read_text())
    for steps, some in ((19, "2-18"), (3, "2"), (1, "1")):
        (unrecorded / "run.json").write_text(json.dumps({**about, "steps": steps}))
        assert f"--local 4 --trace {some} " in zbc("report", "run").out
    found = zbc("report", "run", "--json").json()
    assert found["recorded"] is False and found["step"]["measured"] == 103.0
    assert found["bubble_of_step"]["measured"] == pytest.approx(1 - 90.9 / 103.0)
    busy = [one["measured"] for one in found["busy"]]
    assert busy == [80.0, 81.0, 90.9, 79.0]
    assert found["idle_rate"]["measured"] == pytest.approx(1 - sum(busy) / 4 / 103.0, abs=1e-3)
    assert "bubble" not in ran.out and "bubble" in zbc("report", "run", "-v").out
    assert zbc("visualize", "run").code == 4


STEP = '{"step": 1, "step_ms": 9, "sums_hidden": 0.5, "busy_ms": [1, 1], "peak_bytes": [7, 7]}\n'


@pytest.mark.parametrize(
    ("name", "text", "code", "says"),
    [
        ("run.json", "{", "E430", "not JSON"),
        pytest.param("run.json", 100_000 * "[", "E430", "not JSON", id="deep"),
        ("run.json", '{"format": "other"}', "E430", "format 'other'"),
        ("metrics.jsonl", '{"step": 1}\nno\n', "E430", "metrics.jsonl:2"),
        ("metrics.jsonl", STEP.replace("0.5", '"1e400x"'), "E430", "sums_hidden of a step: expected a number"),
        ("metrics.jsonl", STEP.replace("[1, 1]", "-1"), "E430", "busy_ms of a step: expected a list"),
        ("metrics.jsonl", STEP.replace('ms": 9', 'ms": 0'), "E430", "step_ms of a step: must be more than 0"),
        ("metrics.jsonl", STEP.replace("[7, 7]", "[7]"), "E430", "other numbers of ranks"),
        ("metrics.jsonl", "", "E430", "holds no step"),
    ],
)
def test_a_damaged_run_directory_is_named(unrecorded, zbc, name, text, code, says):
    (unrecorded / name).write_text(text)
    ran = zbc("report", "run")
    assert ran.code == 4 and code in ran.err and says in ran.err


@pytest.mark.long
def test_a_recorded_run_is_drawn_in_every_form(run, zbc, folder):
    text = zbc("visualize", run).out
    assert text.startswith("predicted: zb-h1") and "measured, step 5: zb-h1" in text
    for form, mark in (("svg", "<svg"), ("html", "<!doctype html>"), ("perfetto", '{"displayTimeUnit"')):
        made = zbc("visualize", run, "--format", form, "-o", f"x.{form}")
        assert made.code == 0 and (folder / f"x.{form}").read_text().startswith(mark)
    assert "steps 4-6" in zbc("visualize", run, "--steps", "3").out
    assert "steps 5-6" in zbc("visualize", run, "--steps", "5-6").out
    missing = zbc("visualize", run, "--steps", "7-7")
    assert missing.code == 4 and "E430" in missing.err and "recorded are 4, 5, 6" in missing.err


@pytest.mark.long("changes0")
@pytest.mark.parametrize("changes", few([{}, {"costs": GIVEN}, {"kind": "zb-v"}, {"parallel": {"dp": 2}}, {"m": 5}], 2))
def test_the_job_of_a_plan_makes_the_same_plan_again(job, zbc, folder, changes):
    job(**changes)
    assert zbc("plan", "zbc.toml", "-o", "one", "-q").code == 0
    assert zbc("plan", "one", "-o", "two", "-q").code == 0
    names = sorted(path.name for path in (folder / "one").iterdir())
    assert names == sorted(path.name for path in (folder / "two").iterdir())
    assert all((folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes() for name in names)
    assert zbc("plan", "one/", "-o", "three", "-q", "--set", "schedule.microbatches=3").code == 0
    assert json.loads((folder / "three/plan.json").read_text())["microbatches"] == 3


def test_the_command_for_a_new_plan_survives_a_shell():
    words = shlex.split(replan_command(Path("runs/my run")))
    assert words[:3] == ["zbc", "profile", "runs/my run"]
    assert words[words.index("plan") + 1] == "runs/my run/trace/plan"


def test_idle_time_and_throughput_are_beside_what_was_predicted_and_bubbles_under_v(run, zbc):
    """A step that takes longer by a factor has a throughput lower by the same factor."""
    found = zbc("report", run, "--json").json()
    for name in ("idle_rate", "balance", "samples_per_s", "tokens_per_s", "tokens_per_s_per_rank"):
        assert found[name].keys() == {"predicted", "measured", "low", "high"}
    assert found["mfu"] is None and 0 < found["idle_rate"]["measured"] < 1
    step, rate = found["step"], found["tokens_per_s"]
    assert rate["measured"] / rate["predicted"] == pytest.approx(step["predicted"] / step["measured"], rel=1e-4)
    assert rate["measured"] == pytest.approx(4 * found["tokens_per_s_per_rank"]["measured"], rel=1e-4)
    short, full = zbc("report", run).out, zbc("report", run, "-v").out
    assert "idle" in short and "tokens/s per rank" in short and "bubble" not in short
    assert "bubble of makespan" in full and "bubble of span" in full
    assert "links" not in short and "links" in full and full.count(" ops ") > short.count(" ops ")


def test_bubbles_of_a_run_are_the_measured_ones_and_tile_its_step(run, zbc):
    found, planned = (zbc("report", path, "--json").json() for path in (run, f"{run}/trace/plan"))
    for step, ranks in ((found["makespan"]["measured"], found["bubbles"]), (planned["makespan_ms"], planned["ranks"])):
        for rank in ranks:
            idle = sum(one["length_ms"] for one in rank["windows"])
            assert idle + rank["busy_ms"] == pytest.approx(step, rel=1e-5)
            assert all(
                set(one) == {"start_ms", "length_ms", "cause", "before", "free_bytes"} for one in rank["windows"]
            )
    assert max(found["bubbles"], key=lambda rank: rank["busy_ms"])["rank"] == 2, "rank 2 is slow"
    assert "longest" in zbc("report", f"{run}/trace/plan").out and zbc("report", run, "-v").out.count("of rank") == 4
