"""`kind = "auto"` among schedules that the job's other settings exclude."""

import pytest

from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError

EXCLUDING = {
    "weights averaged": {"parallel": {"dp": 2, "average": {"every": 1}}},
    "one-sided": {"parallel": {"dp": 2, "shard": "weights", "exchange": "one-sided"}},
    "layers frozen": {"freeze": {"most": 0.5}},
}


@pytest.mark.parametrize("changes", EXCLUDING.values(), ids=EXCLUDING)
def test_auto_takes_the_best_of_the_schedules_that_the_job_leaves(changes):
    with pytest.raises(ZbcError):
        compile_job(job(kind="chimera-zb", **changes), budget=0.0)
    found = compile_job(job(kind="auto", **changes), budget=0.0)
    assert found.step_ms <= compile_job(job(kind="zb-h1", **changes), budget=0.0).step_ms
    assert len(found.program.placement.pipes) == 1
