"""bench/gpu.py needs a GPU; this tests without one that it works and finds errors."""

import sys
from pathlib import Path

import pytest
import torch

from tests.limits import ended

pytestmark = pytest.mark.long

BENCH = Path(__file__).parents[2] / "bench"
CPU = torch.device("cpu")


@pytest.fixture
def job(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import experiments.job

    yield experiments.job
    for name in [name for name in sys.modules if name.partition(".")[0] == "experiments"]:
        sys.modules.pop(name)


@pytest.fixture
def bench(job):
    return job.Bench(CPU, lambda line="": None)


def test_halves_have_the_gradients_of_plain_autograd_and_times_of_their_own(bench, job):
    from zbc.training.probing.checkup import plain_gradients

    case = bench.case(apart=True, pp=2, kind="1f1b", activations="recompute")
    # ranks are threads of their own, for which torch may cut sums into other parts
    assert job.apart_by(case.gradients(), plain_gradients(case.plan)[1]) < 1e-6
    assert {"F", "B", "W", "VALIDATE", "STEP"} <= case.timed().keys()
    assert case.held()["activations"] > 0


def test_an_optimizer_without_a_barrier_has_its_ops_timed(bench):
    case = bench.case(pp=2, kind="zb-h1", optimizer='sync = "post-validate"')
    assert {"TENTATIVE", "COMMIT", "NORM", "VERDICT"} <= case.timed().keys()


def test_an_experiment_stops_where_something_is_wrong(bench, job, monkeypatch):
    from experiments import right

    monkeypatch.setattr(job.Case, "told", lambda case, steps=3, hub=None: [(float(case.job.count("pp = 4")), 1.0)])
    with pytest.raises(job.FoundError, match=r"1f1b .*float32 keep: \[\(1.0, 1.0\)\], expected \[\(0.0, 1.0\)\]"):
        right.schedules(bench)


@pytest.mark.repeats
@pytest.mark.limit(400)
@pytest.mark.parametrize(("part", "count"), [("1", 6), ("2", 10), ("3", 4)])
def test_every_experiment_runs_on_a_cpu(part, count):
    command = [sys.executable, str(BENCH / "gpu.py"), "all", "--part", part, "--device", "cpu", "--quick"]
    done = ended(*command, seconds=400, cwd=BENCH.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.count("= as expected") == count
