"""`zbc run JOB.toml` and `zbc tune JOB.toml`: commands that plan and run."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.jobs import toml_text, write_job
from tests.limits import ended
from tests.processes.plans import metrics
from tests.refusals import error_of
from zbc.commands import tuning
from zbc.commands.opening import Changes
from zbc.commands.tuning import Tuner
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.plan.directory import StoredPlan, read_manifest

ROOT = Path(__file__).parent.parent.parent
ZBC = [sys.executable, "-m", "zbc"]
DRAWN = {"family": "sleeping:drawn", "loss": "mse", "args": {"count": 4, "seed": 5, "least": 1.0, "most": 5.0}}
SLEEPING = {"model": DRAWN, "data": {"kind": "sleeping:Points"}, "checkpoint": {"every": 1}, "layers": 4, "pp": 2}


def ran(folder, *words, command=ZBC, code=0):
    path = os.pathsep.join([str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}
    done = ended(*command, *words, seconds=300, cwd=folder, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.long
def test_a_job_is_planned_and_run_in_one_go_with_the_options_of_a_job(tmp_path):
    (tmp_path / "job.toml").write_text(toml_text(pp=2, m=2, layers=4, train={"steps": 2}, optimizer={}))
    done = ran(tmp_path, "run", "job.toml", "--schedule", "zb-h1", "--set", "schedule.microbatches=3")
    (folder,) = (tmp_path / "runs" / "plans").iterdir()
    manifest = read_manifest(folder)
    assert folder.name == f"job-{manifest.id[:8]}" and (manifest.schedule, manifest.microbatches) == ("zb-h1", 3)
    assert done.stderr.startswith("zb-h1: 2 ranks") and "ms a step predicted" in done.stderr
    assert len(metrics(tmp_path / "runs" / f"{folder.name}-1")) == 2
    told = json.loads(ran(tmp_path, "run", "job.toml", "--json", "--set", "train.steps=1").stdout)
    assert told["steps"] == 1 and Path(tmp_path, told["run"]).is_dir() and told["step"]["measured"] > 0
    assert ran(tmp_path, "run", str(folder), "--local", "2", "--steps", "1", "-q").stdout == ""
    assert "change a job" in ran(tmp_path, "run", str(folder), "--local", "2", "--schedule", "1f1b", code=2).stderr


@pytest.mark.long
def test_under_torchrun_the_first_rank_plans_and_the_others_take_its_plan(tmp_path):
    (tmp_path / "job.toml").write_text(toml_text(pp=2, m=2, layers=4, train={"steps": 2}, optimizer={}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zbc"]
    for kind in ("1f1b", "zb-h1"):  # the second launch must not read the first one's word
        done = ran(tmp_path, "run", "job.toml", "--schedule", kind, command=torchrun)
        assert done.stderr.count("ms a step predicted") == 1 and f"{kind} on 2 cpu ranks" in done.stdout
    assert {read_manifest(path).schedule for path in (tmp_path / "runs/plans").glob("job-*")} == {"1f1b", "zb-h1"}


@pytest.mark.limit(240)
@pytest.mark.repeats
def test_tuning_finds_a_plan_that_is_no_slower_than_the_first(tmp_path):
    """Layers with different sleeping times, planned as GPipe with equal layers: there is much to gain."""
    write_job(tmp_path, kind="gpipe", m=4, **SLEEPING)
    done = ran(tmp_path, "tune", "zbc.toml", "--best", "1", "--steps", "4", "--json", "-o", "tuned")
    told = json.loads(done.stdout)
    first, *others = told["tried"]
    assert first["schedule"] == "gpipe" and others and told["measured_ms"] <= first["measured_ms"]
    assert told["measured_ms"] == min(one["measured_ms"] for one in told["tried"])
    manifest = read_manifest(tmp_path / "tuned")
    assert manifest.schedule == told["schedule"]
    assert manifest.training["checkpoint"]["every"] == 1, "the plan is the job's, trials leave no checkpoints"
    assert not list(tmp_path.glob("runs/tune-zbc-1/runs/*/checkpoints/*"))
    assert StoredPlan.read(tmp_path / "tuned").program.microbatches == 4


TOOK = {"gpipe": 90.0, "zb-h1": 50.0, "1f1b": 70.0}


@pytest.fixture
def pretending(tmp_path, monkeypatch):
    """A tuner whose commands take no time: a run takes the time in `TOOK` for its schedule."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zbc.compiler.schedules.SCHEDULES", {name: SCHEDULES[name] for name in TOOK})
    write_job(tmp_path, kind="gpipe", m=4)

    def make(fail=(), stop_at=None):
        said = []
        tuner = Tuner(Path("zbc.toml"), Changes(), Path("place"), 5, 2, said.append)
        runs = []

        def command(*words, before=()):
            if words[0] == "profile":
                tuner.changes = tuner.changes._replace(profile=None)
                return
            schedule = read_manifest(Path(words[1])).schedule
            runs.append(schedule)
            if len(runs) == stop_at:
                raise KeyboardInterrupt
            if schedule in fail:
                raise ZbcError("E703", "tune: it failed")
            out = Path(words[words.index("-o") + 1])
            out.mkdir(parents=True)
            (out / "run.json").write_text('{"format": "zbc-run"}')
            took = [1000.0, 1000.0, *[TOOK[schedule]] * 3]
            rows = [{"step": n, "step_ms": ms, "busy_ms": [1.0], "peak_bytes": [1]} for n, ms in enumerate(took, 1)]
            (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        monkeypatch.setattr(tuner, "_command", command)
        monkeypatch.setattr(tuner, "_profile", lambda: None)
        return tuner, runs, said

    return make


@pytest.mark.long
def test_the_plan_with_the_shortest_steps_is_kept_and_the_first_is_run_again_beside_it(pretending):
    tuner, runs, said = pretending()
    tuner.run()
    assert tuner.tried[0].compiled.schedule == "gpipe"
    assert tuner.fastest.compiled.schedule == "zb-h1" and tuner.fastest.measured == 50.0
    assert runs == ["gpipe", "zb-h1", "1f1b", "gpipe", "zb-h1"], "1f1b is far behind"
    assert [len(one.runs) for one in tuner.tried] == [2, 2, 1] and not tuner.stopped
    assert any("running 5 steps of zb-h1" in line for line in said)


@pytest.mark.long
def test_a_plan_that_fails_is_told_and_the_others_go_on(pretending):
    tuner, _, _ = pretending(fail=("zb-h1",))
    tuner.run()
    assert tuner.fastest.compiled.schedule == "1f1b"
    assert [one.error for one in tuner.tried] == [None, "tune: it failed", None]
    tuner, _, _ = pretending(fail=tuple(TOOK))
    error = error_of(tuner.run)
    assert error.code == "E703" and len(error.details) == 3


@pytest.mark.long
def test_stopping_keeps_what_was_found(pretending):
    tuner, runs, _ = pretending(stop_at=3)
    tuner.run()
    assert tuner.stopped and tuner.fastest.compiled.schedule == "zb-h1" and len(runs) == 3
    tuner, _, _ = pretending(stop_at=1)
    with pytest.raises(KeyboardInterrupt):
        tuner.run()
    assert tuning.SETTLING == 2


OWN = """import os
from torch import nn
def leaving():
    os._exit(3)
def layers():
    return [nn.Linear(8, 8) for _ in range(4)]
class Empty:
    def __len__(self):
        return 0
    def __getitem__(self, index):
        raise IndexError(index)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("factory", "code", "text"),
    [
        ("leaving", 7, "ended with exit code 3\n   it was last heard outside of a step: building its stages"),
        ("layers", 6, "error[E504] data: own:Empty returned a dataset without samples"),
    ],
    ids=["a factory that ends its process", "an empty dataset"],
)
def test_a_factory_that_ends_its_process_and_an_empty_dataset_are_told_without_lines_of_zbc(
    tmp_path, factory, code, text
):
    (tmp_path / "own.py").write_text(OWN)
    model = {"family": f"own:{factory}", "loss": "mse"}
    how = {"data": {"kind": "own:Empty"}, "costs": {"f": 1.0, "b": 1.0, "w": 1.0}}  # else planning runs the layers
    (tmp_path / "job.toml").write_text(toml_text(pp=2, m=2, layers=4, model=model, **how))
    told = ran(tmp_path, "run", "job.toml", code=code).stderr
    assert text in told and "data.py" not in told
