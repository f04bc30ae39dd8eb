"""What a job asks for is in its complete program, or is said to be missing."""

import pytest

from tests.jobs import job
from zbc.compiler.check.asked import missing_problems
from zbc.compiler.compile import compile_job

TWO = {"dp": 2}
ASKED = {
    "schedule.slices": {"schedule": {"slices": 2}},
    "parallel.tp": {"parallel": {"tp": 2}},
    "parallel.dp": {"parallel": TWO},
    "parallel.average": {"parallel": {**TWO, "average": {"every": 1}}},
    "parallel.shard": {"parallel": {**TWO, "shard": "optimizer"}},
    "parallel.shard: weights": {"parallel": {**TWO, "shard": "weights"}},
    "parallel.shard: gradients": {"parallel": {**TWO, "shard": "gradients"}},
    "parallel.exchange": {"parallel": {**TWO, "shard": "weights", "exchange": "one-sided"}},
    "parallel.vocabulary": {"parallel": {"vocabulary": "shared"}},
    "optimizer.sync": {"optimizer": {"sync": "post-validate"}},
    "optimizer.sync: no flush": {"optimizer": {"sync": "two-versions"}},
}
PLAIN = compile_job(job(layers=8, m=8), budget=0.0).program


@pytest.mark.parametrize("key", ASKED)
def test_what_a_job_asks_for_is_in_its_program_and_missed_in_one_without(key):
    asked = job(layers=8, m=8, **ASKED[key])
    assert list(missing_problems(asked, compile_job(asked, budget=0.0).program)) == []
    errors = list(missing_problems(asked, PLAIN))
    assert {error.code for error in errors} == {"E202"}
    assert any(f"the job has {key}," in error.message for error in errors)


def test_a_plain_job_misses_nothing():
    assert list(missing_problems(job(layers=8, m=8), PLAIN)) == []
