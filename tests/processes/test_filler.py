"""[filler] in runs over gloo, as for a user; `train.hook`."""

from types import SimpleNamespace

import pytest

from tests.processes.plans import metrics, run_here, write_plan
from tests.refusals import refused
from zbc.runtime.core.progress import StepResult
from zbc.training.hook import Hook

ARGS = {"count": 4, "f": 8.0, "b": 8.0, "w": 8.0}
LAYERS = {"model": {"family": "bench.sleeping:layers", "loss": "mse", "layers": 4, "args": ARGS}}
JOB = {**LAYERS, "data": {"kind": "bench.sleeping:Points"}, "schedule": {"kind": "1f1b", "microbatch_size": 1}}


@pytest.fixture
def filled(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # ranks look there, too

    def run(name, task="make"):
        text = f"from tests.processes.fillers import *\n\nfillers.FOLDER = {str(tmp_path)!r}\n"
        (tmp_path / f"{name}_task.py").write_text("from tests.processes import fillers\n" + text)
        filler = {"filler": {"task": f"{name}_task:{task}"}}
        return run_here(write_plan(tmp_path, name, **JOB, **filler), 4, tmp_path / f"{name}-out")

    return run


@pytest.mark.long
def test_ranks_work_while_they_wait(filled, tmp_path):
    run_here(write_plan(tmp_path, **JOB), 4, tmp_path / "plain")
    lines = "\n".join(filled("filled"))
    assert all(int((tmp_path / f"rank-{rank}").read_text()) > 0 for rank in range(4))
    assert "filler  rank 0: " in lines and "rank 3: " in lines and "% of " in lines
    one, other = metrics(tmp_path / "plain"), metrics(tmp_path / "filled-out")
    assert [row["loss"] for row in one] == [row["loss"] for row in other]


@pytest.mark.long
def test_a_filler_that_fails_leaves_the_run_alone(filled, tmp_path):
    lines = "\n".join(filled("failing", "failing"))
    assert "rank 1 goes on without its filler, which failed: ValueError: no more of this" in lines
    assert len(metrics(tmp_path / "failing-out")) == 3


@pytest.mark.long
def test_a_factory_that_makes_no_task_is_refused(filled):
    with refused("E502"):
        filled("nothing", "nothing")


HERE = "tests.processes.test_filler"
seen = []


def watches(step):
    seen.append(step)
    return step.number == 2


def fails(step):
    raise ValueError(f"at {step.number}")


def ends(step):
    return step.number == 3 and step.rank == step.ranks - 1


@pytest.fixture
def made():
    layers = [SimpleNamespace(name=name, module=object()) for name in ("embed", "layers.0")]
    stage, asked = SimpleNamespace(layers=layers), []
    evaluation = SimpleNamespace(results=[SimpleNamespace(loss=2.5, metric=0.5)])
    worker = SimpleNamespace(stages={0: stage}, rank=1, topology=SimpleNamespace(world=4), evaluation=evaluation)
    board = SimpleNamespace(ask_stop=asked.append)
    seen.clear()
    return lambda name: Hook(f"{HERE}:{name}", worker, board), asked


def test_a_hook_is_told_of_each_step_asks_once_when_it_answers_and_is_named_where_it_fails(made):
    make, asked = made
    hook = make("watches")
    for number in range(3):
        assert hook.asks() is (number == 2)
        hook.told(StepResult(4.0 - number, 1.0, False, (), (), number, 0.5, skipped=number == 1))
    told = [(1, 4.0, False, 1, 4), (2, 3.0, True, 1, 4), (3, 2.0, False, 1, 4)]
    assert [(s.number, s.loss, s.skipped, s.rank, s.ranks) for s in seen] == told
    assert list(seen[0].layers) == ["embed", "layers.0"] and (seen[0].eval_loss, seen[0].eval_metric) == (2.5, 0.5)
    assert asked == [f"train.hook = {HERE}:watches of rank 1"]
    with refused("E502", f"train.hook = {HERE}:fails failed"):
        make("fails").told(StepResult(4.0, 1.0, False, (), (), 0))


@pytest.mark.repeats
def test_a_hook_of_one_rank_ends_the_run_of_all_behind_the_next_step(tmp_path, out):
    plan = write_plan(tmp_path, parallel={"pp": 2}, train={"steps": 50, "hook": f"{HERE}:ends"})
    *_, last = run_here(plan, 2, out)
    assert last.startswith(f"ended after step 4 (asked by train.hook = {HERE}:ends of rank 1)")
    assert [row["step"] for row in metrics(out)] == [1, 2, 3, 4]
