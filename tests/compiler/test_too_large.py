"""E301 names the settings with which the fullest rank needs less, those that may remove most first; the reserve."""

import re
from dataclasses import replace

import pytest

from tests.jobs import write_job
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.order import order
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.job.job import RESERVE
from zbc.job.profile import Profile
from zbc.plan.reading import job_of
from zbc.text import GIB

WAY = re.compile(r'([\w.]+ = (?:"\w+"|\d+)(?: with [\w.]+ = \d+)?)')
MODEL = {"family": "llama", "hidden": 256, "heads": 8, "seq_len": 512, "vocab": 1024}
BASE = {"layers": 8, "pp": 2, "m": 4, "kind": "1f1b", "model": MODEL, "hardware": {"memory_gib": 0.01}}


def job_with(folder, tables):
    return write_job(folder, **{**BASE, **tables, "model": {**MODEL, **tables.get("model", {})}})


def advised(folder, tables):
    """The settings that E301 advises, in order."""
    with refused("E301") as caught:
        compile_job(load_job(job_with(folder, tables)), budget=0.0)
    found = [way.replace("microbatch", "schedule.microbatch") for way in WAY.findall(caught.value.hint)]
    return [way for way in found if not way.startswith("memory_gib")]


def needed(folder, tables, *ways):
    """Bytes of the fullest rank with these settings."""
    settings = [one.replace(" = ", "=") for way in ways for one in way.split(" with ")]
    made = load_job(job_with(folder, tables), settings)
    return max(rank.bytes for rank in order(made, 0.0).memory)


AGAIN = {"memory": {"activations": "recompute"}}
EQUAL = {"partition": {"layers_per_stage": "equal"}, "schedule": {"microbatch_size": 1}}
WORDS = {"model": {"vocab": 64000}, **AGAIN}
JOBS = {
    "words": (WORDS, "model.loss_chunk"),
    "rows": ({"schedule": {"microbatch_size": 6}, "kind": "gpipe"}, "schedule.microbatch_size"),
    "experts": (
        {"schedule": {"microbatch_size": 1}, "model": {"experts": 16, "top_k": 2}, "parallel": {"dp": 8, "ep": 2}},
        "parallel.ep",
    ),
    "state": ({"model": {"hidden": 1024}, "parallel": {"dp": 4}, "schedule": {"microbatch_size": 1}}, "parallel.shard"),
    "first stage": (EQUAL | AGAIN | {"model": {"vocab": 1024, "seq_len": 510}, "pp": 4, "m": 16, "kind": "1f1b"}, ""),
    "adapters": ({"adapter": {"rank": 4}, "schedule": {"microbatch_size": 2}}, "schedule.microbatch_size"),
    "shared words": ({"parallel": {"vocabulary": "shared"}, "model": {"vocab": 32000}}, "schedule.microbatch_size"),
    "slices": ({"schedule": {"slices": 2, "microbatch_size": 2}}, "schedule.microbatch_size"),
    "two pipes": ({"kind": "chimera", "schedule": {"microbatch_size": 2}}, "schedule.microbatch_size"),
}

LARGEST = ("words", "experts")  # whose setting is for the largest part, and named first


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_with_each_setting_that_is_advised_the_fullest_rank_needs_less(name, tmp_path):
    tables, among = JOBS[name]
    found = advised(tmp_path, tables)
    assert not among or any(way.startswith(among) for way in (found[:1] if name in LARGEST else found)), found
    before = needed(tmp_path, tables)
    for way in found:
        assert needed(tmp_path, tables, way) < before, way


@pytest.mark.long
def test_what_is_at_its_most_or_not_there_is_not_advised(tmp_path):
    every = advised(tmp_path, {"model": {"experts": 4, "top_k": 2, "loss_chunk": 64}, "parallel": {"dp": 8, "ep": 4}})
    assert not [way for way in every if way.startswith(("parallel.ep", "model.loss_chunk"))]
    every = advised(tmp_path, {"schedule": {"microbatch_size": 1}, "memory": {"activations": "auto"}})
    assert not [
        way for way in every if way.startswith(("schedule.microbatch_size", "memory.activations", "parallel.shard"))
    ]


@pytest.mark.long
def test_a_loss_is_cut_where_its_logits_decide_and_the_plan_says_so(tmp_path):
    whole, cut = (needed(tmp_path, WORDS, *ways) for ways in ((), ["model.loss_chunk = 512"]))
    for room, chunk in (((whole + cut) / 2, 512), (whole * 1.01, None)):
        hardware = {"memory_gib": room / GIB}
        made = compile_job(load_job(job_with(tmp_path, {**WORDS, "hardware": hardware})), budget=0.0)
        said = '"loss_chunk": 512' in made.assemble()[0].dumps()
        assert chunk == made.job.model.loss_chunk and said is bool(chunk)


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


@pytest.mark.long
def test_the_memory_that_a_refusal_names_is_the_least_that_fits(job):
    with refused("E301", "less a reserve of") as caught:
        compile_job(job(kind="gpipe", memory_gib=1e-4, device="cuda"), suggest=False)
    named = float(caught.value.hint.rpartition("= ")[2])
    compile_job(job(kind="gpipe", memory_gib=named, device="cuda"))
    with pytest.raises(ZbcError, match="does not fit"):
        compile_job(job(kind="gpipe", memory_gib=0.9 * named, device="cuda"), suggest=False)


@pytest.mark.long
def test_what_fits_all_memory_but_not_the_rest_is_refused_and_searches_keep_to_the_rest(job, tmp_path):
    free = compile_job(job(device="cuda"), budget=0.0)
    most = max(rank.bytes for rank in free.memory)
    found = compile_job(job(memory_gib=0.9 * most / GIB, device="cuda"), budget=0.0)
    assert max(rank.bytes for rank in found.memory) <= 0.9 * (1 - RESERVE) * most + 1
    assert found.report.limits.device_bytes == pytest.approx(0.9 * (1 - RESERVE) * most)
    assert job_of(found.write(tmp_path / "plan")).room == pytest.approx(found.job.room)
