"""Limits in units and limits in bytes hold beside each other."""

from pathlib import Path

import pytest

from tests.search.limited import wrong_limits
from tests.tiers import few
from zbc.compiler.compile import compile_job, load_job
from zbc.text import GIB

PAPER = Path(__file__).parent.parent.parent / "plans" / "paper-1.5b.toml"


@pytest.mark.parametrize("seed", few(range(48), 16))
def test_plans_keep_to_units_and_to_bytes(seed):
    assert wrong_limits(seed) is None


@pytest.mark.parametrize("kind", few(["zb-v", "v-half", "v-min"], ("v-half",)))
def test_a_device_with_room_changes_no_plan(kind):
    free, roomy = (
        compile_job(load_job(PAPER, more, kind), budget=0.0) for more in ((), ("hardware.memory_gib=100000",))
    )
    assert roomy.program == free.program
    assert roomy.report.limits.activation_units == free.report.limits.activation_units
    assert (free.report.limits.device_bytes, roomy.report.limits.device_bytes) == (None, roomy.job.room)


def test_a_search_for_given_op_times_keeps_to_a_device():
    """Units by [costs], so that the device says nothing about them: it used to be left to the check."""
    free = compile_job(load_job(PAPER, (), "zb-v"), budget=0.0)
    most = max(rank.bytes for rank in free.memory) / GIB
    tight = compile_job(load_job(PAPER, (f"hardware.memory_gib={0.8 * most:.3f}",), "zb-v"), budget=0.0)
    assert max(rank.bytes for rank in tight.memory) <= 0.8 * most * GIB
    assert tight.report.makespan_ms < 1.1 * free.report.makespan_ms
