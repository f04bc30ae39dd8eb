"""`zbc report` on plans, jobs, CSV files and stages that are no layers, with noise and without."""

import itertools

import pytest

import zbc as package
from zbc.compiler.whatif.noise import Noise

UNIT = {"costs": {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1}}


@pytest.mark.long
def test_a_plan_a_job_and_a_csv_are_simulated_alike(zbc, job):
    zbc("plan", job(**UNIT, kind="zb-h1"), "-q")
    zbc("export", "plan", "--format", "torch-csv", "-o", "order.csv")
    plan, described, sheet = (zbc("report", target).out for target in ("plan", "zbc.toml", "order.csv"))
    assert plan == described and "zb-h1: 4 ranks" in plan and "makespan" in plan and "none; --jitter" in plan
    assert "makespan 27 ms" in sheet, "without a job, F = B = W = 1 and transfers are free"
    noisy = [zbc("report", target, "--jitter", "5%", "--json").json() for target in ("plan", "zbc.toml")]
    assert noisy[0]["steps_ms"] == noisy[1]["steps_ms"] and len(noisy[0]["steps_ms"]) == 200


def test_the_numbers_are_those_of_the_python_side(zbc, job):
    options = ("--jitter", "0.1", "--straggler", "20%")
    document = zbc("report", job(**UNIT, kind="zb-v"), *options, "--json").json()
    found = package.plan("zbc.toml").noisy(Noise(0.1, 0.2))
    assert document["steps_ms"] == pytest.approx(found.steps)
    assert document["median_ms"] == pytest.approx(found.median) and document["p95_ms"] == pytest.approx(
        found.quantile(0.95)
    )
    assert document["slowdown"] == pytest.approx(found.median / found.predicted - 1, abs=1e-8)
    assert document["slow_rank_ms"] == pytest.approx(found.slow)
    assert sum(document["critical"]["ranks"]) + document["critical"]["transfers"] == pytest.approx(1)
    assert document["predicted_ms"] == document["makespan_ms"]


def test_what_is_printed_fits_eighty_columns_and_names_what_was_drawn(zbc, job):
    out = zbc("report", job(**UNIT), "--jitter", "5%", "--straggler", "10%").out
    assert max(map(len, out.splitlines())) <= 80 and "200 steps, seed 0" in out
    for word in ("predicted", "median", "95% below", "critical", "step if slow"):
        assert word in out
    assert zbc("report", "zbc.toml", "--jitter", "5%", "-q").out == ""


def test_without_the_barrier_a_step_is_one_among_others(zbc, job):
    job(**UNIT, kind="zb-h2", m=12, optimizer={"sync": "post-validate"})
    document = zbc("report", "zbc.toml", "--jitter", "1%", "--json").json()
    assert document["barrier"] is False
    assert document["predicted_ms"] < document["makespan_ms"]
    assert "without the barrier" in zbc("report", "zbc.toml", "--jitter", "1%").out


def written(folder, tokens, stages, more=""):
    rows = ", ".join(f"{{ ms = {ms}, replicas = {count} }}" for ms, count in stages)
    (folder / "serial.toml").write_text(f"[pipeline]\ntokens = {tokens}\nstages = [{rows}]\n{more}")
    return "serial.toml"


def by_hand(tokens, stages):
    """When the last token leaves, token by token."""
    free = [[0.0] * count for _, count in stages]
    for token in range(tokens):
        now = 0.0
        for (ms, count), workers in zip(stages, free, strict=True):
            now = workers[token % count] = max(now, workers[token % count]) + ms
    return max(itertools.chain(*free))


@pytest.mark.parametrize(
    ("tokens", "stages"),
    [(20, [(2.0, 3), (1.0, 1)]), (7, [(1.0, 1), (4.0, 2), (0.5, 1)]), (1, [(3.0, 4)]), (5, [(1.0, 9), (2.0, 2)])],
)
def test_times_are_those_of_tokens_followed_by_hand(zbc, folder, tokens, stages):
    found = zbc("report", written(folder, tokens, stages), "--json").json()
    assert found["makespan_ms"] == pytest.approx(by_hand(tokens, stages))
    assert found["ms_per_token"] == max(ms / count for ms, count in stages)
    busy = [tokens * ms / count / found["makespan_ms"] for ms, count in stages]
    assert [stage["busy"] for stage in found["stages"]] == pytest.approx(busy)
    assert f"ms a token, as stage {found['slowest_stage']} has it" in zbc("report", "serial.toml").out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[pipeline]\ntokens = 0\nstages = [{ ms = 1.0 }]\n", "E103"),
        ("[pipeline]\ntokens = 3\nstages = []\n", "E103"),
        ("[pipeline]\ntokens = 3\nstages = [{ ms = 1.0, speed = 2 }]\n", "E102"),
        ("[pipeline]\nstages = [{ ms = 1.0 }]\n", "E105"),
        ("[pipeline]\ntokens = 100000000\nstages = [{ ms = 1.0 }]\n", "E114"),
        ("[pipeline]\ntokens = 3\nstages = [{ ms = 1.0 }]\n[train]\nsteps = 3\n", "E102"),
    ],
)
def test_what_is_wrong_is_said(zbc, folder, text, code):
    (folder / "serial.toml").write_text(text)
    found = zbc("report", "serial.toml")
    assert found.code != 0 and f"error[{code}]" in found.err


def test_other_commands_do_not_read_it(zbc, folder):
    assert "error[E102]" in zbc("plan", written(folder, 3, [(1.0, 1)])).err
