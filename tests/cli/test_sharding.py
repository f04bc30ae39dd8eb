"""`parallel.shard` from the command line."""

from __future__ import annotations

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
        ({"kind": "chimera"}, "E118"),
        ({"optimizer": {"sync": "post-validate"}}, "E118"),
        ({"parallel": {"dp": 1}}, "E115"),
    ],
)
def test_gradients_that_cannot_be_shared_out_are_refused(changes, code, job, zbc):
    parallel = {"dp": 2, "shard": "gradients", **changes.pop("parallel", {})}
    job(**{"kind": "1f1b", "pp": 2, "m": 4, "parallel": parallel, **changes})
    ran = zbc("plan", "zbc.toml", "-q")
    assert ran.code == 3 and f"error[{code}]" in ran.err, ran.err
