"""`data.balance`: a plan for each number of microbatches, its gain, and the settings that it excludes."""

import json

import pytest
import torch

from zbc.compiler.shapes import load_job
from zbc.plan import directory as plans
from zbc.trace import recording as trace
from zbc.training.profiling.rig import build_rig

BASE = {
    "data": {"kind": "synthetic", "balance": "length"},
    "model": {"seq_len": 64},
    "parallel": {"dp": 2},
    "schedule": {"microbatch_size": 1},
}


@pytest.fixture
def balanced(job, zbc):
    """A plan for 1 to 6 microbatches, 3 on the mean."""
    job(**BASE, pp=2, m=3)
    return zbc("plan", "zbc.toml")


@pytest.mark.long
def test_the_plan_says_what_it_gains_and_has_every_number_of_microbatches(balanced, zbc, folder):
    assert balanced.code == 0
    assert "as fast as equal counts, by the samples of 3 steps" in balanced.out and "ramp" not in balanced.out
    assert sorted(path.name for path in (folder / "plan").iterdir() if path.is_dir()) == ["m1", "m2", "m4", "m5", "m6"]
    manifest = plans.read_manifest(folder / "plan")
    assert (manifest.balance.room, manifest.balance.most, manifest.microbatches) == (64, 6, 3)
    assert manifest.balance.quadratic == pytest.approx(8 * 32 / (8 * 12 * 32 * 32 + 32 * 256))
    assert zbc("check", "plan").code == 0
    report = zbc("plan", "zbc.toml", "-o", "again", "--json").json()
    assert [one["microbatches"] for one in report["counts"]] == [1, 2, 4, 5, 6] and report["balance"]["gain"] >= 1


@pytest.mark.long
def test_plans_that_meet_in_other_orders_are_refused(job, zbc, folder):
    job(**BASE, pp=2, m=3, kind="interleaved-1f1b")
    ran = zbc("plan", "zbc.toml", "--set", 'parallel.shard="weights"', "--set", "memory.resident=1")
    assert ran.code == 4 and "error[E209]" in ran.err and 'exchange = "one-sided"' in ran.err
    taken = '"weights"', "--set", "memory.resident=1", "--set", 'parallel.exchange="one-sided"'
    ran = zbc("plan", "zbc.toml", "--set", "parallel.shard=" + taken[0], *taken[1:], "-o", "taken")
    assert ran.code == 0 and zbc("check", "taken").code == 0, ran.err
    whole = zbc("plan", "zbc.toml", "--set", 'parallel.shard="weights"', "--set", "memory.resident=2")
    assert whole.code == 0, whole.err


def test_a_trace_of_unequal_counts_is_refused(balanced, zbc, folder):
    ran = zbc("run", "plan", "--local", 4, "--steps", 2, "--trace", "1", "-o", "run")
    assert ran.code != 0 and "error[E110]" in ran.err


DEALT = {"data": {"kind": "synthetic", "balance": "tokens"}, "model": {"seq_len": 64, "hidden": 64}}
DEALT |= {"train": {"steps": 9}}


@pytest.mark.long
def test_lengths_that_a_run_recorded_make_the_next_plan(job, zbc, folder):
    """The first plan knows nothing of them: all rows are whole."""
    job(**DEALT, pp=2, m=6, kind="zb-h1", schedule={"microbatch_size": 1, "tokens": [64] * 6})
    planned = zbc("plan", "zbc.toml")
    assert "by the samples of 9 steps, rows have at the median" in planned.out, planned.err
    assert "longer than planned in 0 of the steps" in planned.out
    ran = zbc("run", "plan", "--local", 2, "--threads", "--steps", 8, "--trace", "3-7", "-o", "run")
    assert ran.code == 0, ran.err
    recorded = trace.read(folder / "run")
    steps = [recorded.ranks[0].timings[step].tokens for step in recorded.steps]
    assert len({tuple(tokens) for tokens in steps}) > 1 and all([*t] == sorted(t, reverse=True) for t in steps)
    assert list(recorded.tokens) == [sorted(column)[2] for column in zip(*steps, strict=True)]
    reported = zbc("report", "run")
    assert reported.code == 0 and "--set schedule.tokens=recorded" in "".join(reported.out.split("\n"))
    assert zbc("profile", "run", "-o", "profile.json").code == 0
    told = json.loads((folder / "profile.json").read_text())["tokens"]
    assert told == list(recorded.tokens)
    again = zbc("plan", "zbc.toml", "--profile", "profile.json", "--set", "schedule.tokens=recorded", "-o", "next")
    assert again.code == 0, again.err
    tokens = plans.read_manifest(folder / "next").planning["schedule"]["tokens"]
    assert sorted(tokens) == sorted(told) and tokens != told
    assert zbc("check", "next").code == 0


@pytest.mark.parametrize("named", [False, True])
def test_lengths_that_nothing_recorded_are_refused_at_their_key(named, job, zbc, folder):
    job(**DEALT, pp=2, m=3, schedule={"microbatch_size": 1, "tokens": "recorded"})
    profile = []
    if named:
        assert zbc("profile", "zbc.toml", "--rounds", 3, "--set", "schedule.tokens=[64, 64, 64]").code == 0
        profile = ["--profile", "profile.json"]
    ran = zbc("plan", "zbc.toml", *profile)
    assert ran.code == 3 and "error[E110]" in ran.err and "zbc profile RUN" in ran.err
    assert ("the profile has no lengths" if named else "there is no --profile") in ran.err


@pytest.mark.long("tokens")
@pytest.mark.parametrize("balance", ["tokens", "length"])
def test_samples_of_a_user_of_unequal_length_are_looked_at_in_whole_rows(balance, job, zbc, folder):
    """By the doctor and by a profile, which deal none."""
    tokens = {"tokens": [16, 9, 16]} if balance == "tokens" else {}
    data = {"kind": "tests.runtime.test_lengths:Texts", "balance": balance}
    made = {"data": data, "model": {"seq_len": 16, "vocab": 61}, "schedule": {"microbatch_size": 2, **tokens}}
    job(**made, pp=2, m=3)
    ran = zbc("check", "--gradients", "zbc.toml")
    assert ran.code == 0 and "all right" in ran.out, ran.err
    rig = build_rig(load_job(folder / "zbc.toml"), torch.device("cpu"))
    assert {spec.shape[1] for spec in rig.inputs} == {16}
