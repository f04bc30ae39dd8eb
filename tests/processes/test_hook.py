"""`train.hook`: the arguments of a user's function after each step, and its end of a run."""

from types import SimpleNamespace

import pytest

from tests.processes.plans import metrics, run_here, write_plan
from tests.refusals import refused
from zbc.runtime.core.progress import StepResult
from zbc.training.hook import Hook

HERE = "tests.processes.test_hook"
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
