"""[filler] in runs over gloo, as for a user."""

import pytest

from tests.processes.plans import metrics, run_here, write_plan
from tests.refusals import refused

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


def test_ranks_work_while_they_wait(filled, tmp_path):
    run_here(write_plan(tmp_path, **JOB), 4, tmp_path / "plain")
    lines = "\n".join(filled("filled"))
    assert all(int((tmp_path / f"rank-{rank}").read_text()) > 0 for rank in range(4))
    assert "filler  rank 0: " in lines and "rank 3: " in lines and "% of " in lines
    one, other = metrics(tmp_path / "plain"), metrics(tmp_path / "filled-out")
    assert [row["loss"] for row in one] == [row["loss"] for row in other]


def test_a_filler_that_fails_leaves_the_run_alone(filled, tmp_path):
    lines = "\n".join(filled("failing", "failing"))
    assert "rank 1 goes on without its filler, which failed: ValueError: no more of this" in lines
    assert len(metrics(tmp_path / "failing-out")) == 3


def test_a_factory_that_makes_no_task_is_refused(filled):
    with refused("E502"):
        filled("nothing", "nothing")
