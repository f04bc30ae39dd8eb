"""`parallel.shard` from the command line."""

import csv

import pytest

from zbc.plan import directory as plans


def test_shared_out_gradients_are_planned_checked_and_trained_with(job, zbc, folder):
    job(kind="interleaved-1f1b", pp=2, m=4, parallel={"dp": 2, "shard": "gradients"})
    assert zbc("plan", "zbc.toml", "-q").code == 0 and zbc("check", "plan").code == 0
    assert plans.read_manifest(folder / "plan").scatters
    assert "SCATTER s2" in (folder / "plan" / "rank-0000.json").read_text()
    ran = zbc("run", "plan", "--local", 4, "--steps", 2, "--out", "run")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"optimizer": {"sync": "post-validate"}}, "E118"),
        ({"parallel": {"dp": 1}}, "E115"),
    ],
)
def test_gradients_that_cannot_be_shared_out_are_refused(changes, code, job, zbc):
    parallel = {"dp": 2, "shard": "gradients", **changes.pop("parallel", {})}
    job(**{"kind": "1f1b", "pp": 2, "m": 4, "parallel": parallel, **changes})
    ran = zbc("plan", "zbc.toml", "-q")
    assert ran.code == 3 and f"error[{code}]" in ran.err, ran.err


def test_plan_and_compare_say_how_often_weights_are_gathered_and_what_of_it_shows(job, zbc):
    job(kind="breadth-first", pp=2, m=4, parallel={"dp": 2})
    sweep = ["--sweep", "parallel.shard=none,weights", "--schedules", "breadth-first", "--csv"]
    rows = zbc("compare", "zbc.toml", *sweep).out.splitlines()
    found = {row["parallel.shard"]: row for row in csv.DictReader(rows)}
    assert (found["none"]["gathers"], found["none"]["gathers_exposed_ms"]) == ("", "")
    assert found["weights"]["gathers"] == "2" and float(found["weights"]["gathers_exposed_ms"]) > 0
    assert "gathers" not in zbc("compare", "zbc.toml", "--schedules", "breadth-first", "--csv").out
    planned = zbc("plan", "zbc.toml", "--set", 'parallel.shard="weights"', "--set", "memory.resident=1")
    assert "3 gathers of weights on a rank" in planned.out
    report = zbc("plan", "zbc.toml", "--set", 'parallel.shard="optimizer"', "--json", "-o", "two").json()
    assert report["gathered"]["count"] == 2 and 0 < report["gathered"]["exposed_ms"] <= report["gathered"]["ms"]
