"""The file: the same bytes for the same measurements, and clear errors if it is damaged or for another job."""

import json
import math
from dataclasses import replace

import pytest

from tests.jobs import job, write_job
from tests.profiles import layer, profile_of
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.recorded.replan import with_profile
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.job.profile import Copy, LinkProfile, Measured, Profile, misfits, read


def test_what_is_written_is_read_again_byte_for_byte(tmp_path):
    found = profile_of(
        job(), layers={"embed": layer(1 / 3, 2 / 3, 0.1), "block": layer(1, 1, 1), "head": layer(1, 1, 1)}
    )
    (tmp_path / "a.json").write_text(found.dumps())
    again = read(tmp_path / "a.json")
    assert again.dumps() == found.dumps()
    assert again.layers["embed"].f.ms == 0.333333


def test_what_a_first_backward_needs_beyond_its_peak_is_not_read_from_older_files(tmp_path):
    data = json.loads(profile_of(job()).dumps())
    data["layers"]["block"]["bytes"] |= {"first_b": 7, "first_w": None, "first_bw": 9}
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert read(tmp_path / "a.json") == profile_of(job())


def stand_still(layer):
    layer.update(f={"ms": 0}, b={"ms": 0}, w={"ms": 0})


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda data: data.pop("layers"), "layers: field required"),
        (lambda data: data.update(format="zbc-plan"), "not a profile"),
        (lambda data: data["layers"]["block"]["f"].update(ms=-1), "layers.block.f.ms"),
        (lambda data: data["layers"]["block"].update(speed=1), "layers.block.speed"),
        (lambda data: data["link"].update(gbps=0), "link.gbps: must be more than 1e-09, found 0"),
        (lambda data: data["layers"]["block"]["f"].update(ms=1e300), r"block.f.ms: must be at most 1e\+09"),
        (lambda data: data["layers"]["block"]["f"].update(ms=math.nan), "f.ms: expected a finite number, found nan"),
        (lambda data: data["layers"]["block"]["bytes"].update(input=10**30), "bytes.input: must be at most"),
        (lambda data: [stand_still(layer) for layer in data["layers"].values()], "layers: none of them takes any time"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_place(tmp_path, edit, text):
    data = profile_of(job()).plain()
    edit(data)
    (tmp_path / "a.json").write_text(json.dumps(data))
    with refused("E142", match=text):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[]", b"3", 100_000 * b"["], ids=lambda raw: str(raw)[:5])
def test_what_is_no_profile_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with refused("E142"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model": {"hidden": 64}}, "model.hidden: 32 in the profile, 64 in the job"),
        ({"model": {"ffn_hidden": 96}}, "model.ffn_hidden: 128 in the profile, 96 in the job"),
        ({"model": {"dtype": "bfloat16"}}, 'model.dtype: "float32" in the profile, "bfloat16" in the job'),
        ({"schedule": {"microbatch_size": 4}}, "schedule.microbatch_size: 2 in the profile, 4 in the job"),
        ({"hardware": {"device": "cuda"}}, 'hardware.device: "cpu" in the profile, "cuda" in the job'),
    ],
)
def test_a_profile_of_something_else_is_refused_with_every_difference(tmp_path, changes, line):
    (tmp_path / "a.json").write_text(profile_of(job()).dumps())
    with refused("E142") as caught:
        load_job(write_job(tmp_path, **changes), profile=tmp_path / "a.json")
    assert line in caught.value.details
    assert all("in the profile" in found for found in caught.value.details)


def test_a_profile_serves_other_numbers_of_blocks_ranks_and_microbatches_and_other_names_of_the_same_widths():
    found = profile_of(job())
    for other in (job(layers=40), job(pp=2, m=32), job(model={"ffn_hidden": 128}), job(optimizer={"kind": "sgd"})):
        where = {"device": other.hardware.device, "microbatch_size": other.schedule.microbatch_size, "inner": (1, 1)}
        assert misfits(found, other.model, other.adapter, **where) == []


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (["Layer"] * 3, "order has 3 layers, model.layers is 8"),
        (["Layer"] * 7 + ["Other"], "order names Other, which layers does not have"),
    ],
)
def test_the_order_of_a_factorys_layers_has_to_be_that_of_the_job(order, text):
    other = job(model={"family": "mine:layers", "loss": "mse"}, data={"kind": "mine:Data"})
    assert misfits(
        profile_of(other, order=order), other.model, other.adapter, device="cpu", microbatch_size=2, inner=(1, 1)
    ) == [text]


def test_an_order_of_a_family_that_is_not_one_is_refused():
    found = profile_of(job(), order=["embed", "head", "block"])
    assert misfits(found, job().model, job().adapter, device="cpu", microbatch_size=2, inner=(1, 1))


def test_a_profile_of_parts_of_layers_serves_jobs_with_the_same_parts():
    shared = job(parallel={"tp": 2})
    found = profile_of(shared, tp=2, sums=LinkProfile(latency_us=500.0, gbps=2.0))
    assert Profile.model_validate(found.plain()) == found and "tp" not in profile_of(job()).plain()
    where = {"device": "cpu", "microbatch_size": 2}
    assert misfits(found, shared.model, shared.adapter, **where, inner=(1, 2)) == []
    assert misfits(found, shared.model, shared.adapter, **where, inner=(1, 4)) == [
        "parallel.tp: 2 in the profile, 4 in the job"
    ]


def test_only_wide_spreads_of_times_that_matter_are_named():
    kinds = profile_of(job()).layers
    noisy = layer(1.0, 2.0, 3.0).model_copy(
        update={"w": Measured(ms=3.0, spread=0.3), "f": Measured(ms=0.1, spread=0.9), "b": Measured(ms=2.0, spread=0.1)}
    )
    found = profile_of(job(), layers={**kinds, "block": noisy})
    assert [name for name, _ in found.wide()] == ["block.w"]


def test_a_profile_named_on_the_command_line_takes_the_place_of_costs_that_a_job_gives(tmp_path):
    """As with a plan; two answers in one place are still an error, and costs that no profile has are kept."""
    given = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1, "per": "layer", "act_b": 1.0, "act_w": 0.5, "overlap": 0.25}
    path, measured = write_job(tmp_path, costs=given), tmp_path / "profile.json"
    measured.write_text(profile_of(job()).dumps())
    found = load_job(path, profile=measured)
    assert found.profile is not None and found.costs.overlap == 0.25
    assert (found.costs.f, found.costs.comm, found.costs.act_b, found.costs.per) == (None, None, None, "rank")
    assert load_job(path, ["costs.comm=0.3"], profile=measured).costs.comm == 0.3
    with refused("E141", match="two answers"):
        load_job(path, [f"costs.{key}=1" for key in "fbw"], profile=measured)
    write_job(tmp_path, costs={**given, "spped": 1})
    with pytest.raises(ZbcError, match="spped"):
        load_job(path, profile=measured)


@pytest.mark.parametrize("given", [{"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1, "overlap": 0.25}, {"comm": 0.1}])
def test_a_profile_takes_the_place_of_the_same_costs_in_a_plan_and_in_the_job_it_was_made_from(tmp_path, given):
    path, measured = write_job(tmp_path, costs=given), tmp_path / "profile.json"
    measured.write_text(profile_of(job()).dumps())
    manifest = compile_job(load_job(path)).write(tmp_path / "plan")
    found = [load_job(source, profile=measured).costs for source in (path, tmp_path / "plan")]
    assert found[1] == found[0] == with_profile(manifest, read(measured, "here")).costs
    assert (found[0].comm, found[0].overlap) == ((None, 0.25) if "f" in given else (0.1, 0.0))


def test_copies_are_planned_with_as_fast_as_they_go_both_ways_beside_compute():
    alone = Copy(to_device_gbps=24.0, to_host_gbps=20.0)
    assert alone.gbps == (20.0, 24.0) and alone.alone == 1.0
    both = Copy(to_device_gbps=24.0, to_host_gbps=20.0, both_to_device_gbps=12.0, both_to_host_gbps=19.0)
    assert both.gbps == (19.0, 12.0) and both.alone == pytest.approx((19 / 20 + 12 / 24) / 2)
    busy = both.model_copy(update={"busy_to_device_gbps": 18.0, "busy_to_host_gbps": 10.0, "slower": 1.1})
    assert busy.gbps == (10.0, 12.0)
    offload = job(memory={"activations": "offload"}, model={"hidden": 512, "seq_len": 512})
    jobs = [replace(offload, profile=profile_of(offload, copies=one)) for one in (busy, alone)]
    slow, fast = (one.costs for one in map(compile_job, jobs))
    assert slow.column("out")[0] == pytest.approx(2 * fast.column("out")[0]) and fast.alone == 1.0
    assert slow.column("back")[0] == pytest.approx(2 * fast.column("back")[0]) and slow.alone == busy.alone
    assert set(profile_of(offload, copies=alone).plain()["copies"]) == {"to_device_gbps", "to_host_gbps"}
