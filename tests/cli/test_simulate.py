"""`zbc simulate` on plans, jobs and CSV files, with noise and without."""

import pytest

import zbc as package
from zbc.compiler.whatif.noise import Noise

UNIT = {"costs": {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1}}


def test_a_plan_a_job_and_a_csv_are_simulated_alike(zbc, job):
    zbc("plan", job(**UNIT, kind="zb-h1"), "-q")
    zbc("export", "plan", "--to", "torch-csv", "-o", "order.csv")
    plan, described, sheet = (zbc("simulate", target).out for target in ("plan", "zbc.toml", "order.csv"))
    assert plan == described and "zb-h1: 4 ranks" in plan and "makespan" in plan and "none; --jitter" in plan
    assert "makespan 27 ms" in sheet, "without a job, F = B = W = 1 and transfers are free"
    noisy = [zbc("simulate", target, "--jitter", "5%", "--json").json() for target in ("plan", "zbc.toml")]
    assert noisy[0]["steps_ms"] == noisy[1]["steps_ms"] and len(noisy[0]["steps_ms"]) == 200


def test_the_numbers_are_those_of_the_python_side(zbc, job):
    options = ("--jitter", "0.1", "--straggler", "20%", "--trials", "12", "--seed", "5")
    document = zbc("simulate", job(**UNIT, kind="zb-v"), *options, "--json").json()
    found = package.plan("zbc.toml").noisy(Noise(0.1, 0.2, 12, 5))
    assert document["steps_ms"] == pytest.approx(found.steps)
    assert document["median_ms"] == pytest.approx(found.median) and document["p95_ms"] == pytest.approx(
        found.quantile(0.95)
    )
    assert document["slowdown"] == pytest.approx(found.median / found.predicted - 1, abs=1e-8)
    assert document["slow_rank_ms"] == pytest.approx(found.slow)
    assert sum(document["critical"]["ranks"]) + document["critical"]["transfers"] == pytest.approx(1)
    assert document["predicted_ms"] == document["makespan_ms"]


def test_what_is_printed_fits_eighty_columns_and_names_what_was_drawn(zbc, job):
    out = zbc("simulate", job(**UNIT), "--jitter", "5%", "--straggler", "10%", "--trials", "8", "--seed", "7").out
    assert max(map(len, out.splitlines())) <= 80 and "8 steps, seed 7" in out
    for word in ("predicted", "median", "95% below", "critical", "step if slow"):
        assert word in out
    assert zbc("simulate", "zbc.toml", "--jitter", "5%", "-q").out == ""


def test_without_the_barrier_a_step_is_one_among_others(zbc, job):
    job(**UNIT, kind="zb-h2", m=12, optimizer={"sync": "post-validate"})
    document = zbc("simulate", "zbc.toml", "--jitter", "1%", "--trials", "20", "--json").json()
    assert document["barrier"] is False
    assert document["predicted_ms"] < document["makespan_ms"]
    assert "without the barrier" in zbc("simulate", "zbc.toml", "--jitter", "1%", "--trials", "4").out


@pytest.mark.parametrize("wrong", ["five", "-5%", "5%%", "nan"])
def test_a_share_that_is_none_is_refused(zbc, job, wrong):
    ran = zbc("simulate", job(), f"--jitter={wrong}")
    assert ran.code == 2 and "write 5% or 0.05" in " ".join(ran.err.split())
