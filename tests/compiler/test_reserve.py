"""The memory of a rank that is kept free for uses that no plan predicts."""

from dataclasses import replace

import pytest

from tests.jobs import write_job
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.recall import job_of
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.job.job import RESERVE
from zbc.job.profile import Profile
from zbc.text import GIB


@pytest.fixture
def job(tmp_path):
    def load(kind="zb-v", **hardware):
        return load_job(write_job(tmp_path, kind=kind, layers=24, hardware=hardware))

    return load


def test_a_gpu_keeps_6_percent_free_or_what_a_profile_found(job):
    assert job(memory_gib=80).room == 80 * GIB
    assert job(memory_gib=80, device="cuda").room == pytest.approx((1 - RESERVE) * 80 * GIB)
    assert job(device="cuda").room is None
    made = Profile.model_construct(reserve_bytes=6 * GIB)
    on_gpu = replace(job(memory_gib=80, device="cuda"), profile=made)
    assert on_gpu.room == 74 * GIB
    assert replace(on_gpu, profile=Profile.model_construct(reserve_bytes=GIB)).room == pytest.approx(75.2 * GIB)
    assert replace(job(memory_gib=80), profile=made).room == 80 * GIB


def test_the_memory_that_a_refusal_names_is_the_least_that_fits(job):
    with refused("E301", "less a reserve of") as caught:
        compile_job(job(kind="gpipe", memory_gib=1e-4, device="cuda"), suggest=False)
    named = float(caught.value.hint.rpartition("= ")[2])
    compile_job(job(kind="gpipe", memory_gib=named, device="cuda"))
    with pytest.raises(ZbcError, match="does not fit"):
        compile_job(job(kind="gpipe", memory_gib=0.9 * named, device="cuda"), suggest=False)


def test_what_fits_all_memory_but_not_the_rest_is_refused_and_searches_keep_to_the_rest(job, tmp_path):
    free = compile_job(job(device="cuda"), budget=0.0)
    most = max(rank.bytes for rank in free.memory)
    found = compile_job(job(memory_gib=0.9 * most / GIB, device="cuda"), budget=0.0)
    assert max(rank.bytes for rank in found.memory) <= 0.9 * (1 - RESERVE) * most + 1
    assert found.report.limits.device_bytes == pytest.approx(0.9 * (1 - RESERVE) * most)
    assert job_of(found.write(tmp_path / "plan")).room == pytest.approx(found.job.room)
