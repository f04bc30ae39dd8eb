"""Jobs with microbatches cut into slices: keys, costs, memory, plans and refusals."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.compiler.test_lengths import planned
from tests.jobs import FREE, job, write_job
from tests.profiles import profile_of
from tests.refusals import error_of, refused
from tests.tiers import few
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.ledger import ledger
from zbc.compiler.schedules.lagged import one_f_one_b
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.whatif.compare import Asked
from zbc.errors import ZbcError
from zbc.ir import Kind
from zbc.job.cuts import SliceTimes, cuts_of
from zbc.job.profile import SliceTime
from zbc.plan.directory import MANIFEST, StoredPlan

LONG = {"model": {"seq_len": 2048, "hidden": 64}}
GIVEN = {"costs": {"f": 1.0, "b": 1.0, "w": 1.0}}


def sliced(count=4, **changes):
    return {**LONG, **changes, "schedule": {"slices": count, **changes.pop("schedule", {})}}


def test_slices_stand_in_the_manifest_and_cost_the_same_when_it_is_read_again(tmp_path):
    compiled = planned(**sliced(kind="zb-h1"))
    manifest = compiled.write(tmp_path / "plan")
    assert manifest.slices == 4 and "slices" in manifest.capabilities
    assert manifest.cuts == [0, *manifest.cuts[1:4], 2048] and sorted(set(manifest.cuts)) == manifest.cuts
    longest = max(b - a for a, b in pairwise(manifest.cuts))
    assert {tuple(boundary.shape) for boundary in manifest.boundaries} == {(2, longest, 64)}
    assert recall.costs_of(StoredPlan.read(tmp_path / "plan").manifest) == compiled.costs
    assert len(manifest.predicted["slices"]) == 4


def test_cuts_that_do_not_ascend_are_damage(tmp_path):
    manifest, _ = planned(**sliced()).assemble()
    for cuts in ([0, 5, 5, 6, 2048], [0, 2048], [1, 2, 3, 4, 2048]):
        broken = manifest.model_copy(update={"cuts": cuts})
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / MANIFEST).write_text(broken.dumps())
        with refused("E404", match="cuts"):
            StoredPlan.read(folder)


SHORT, GPU = {"seq_len": 16}, {"hardware": {"device": "cuda"}, "model": {"seq_len": 1024}}
OWN = {"model": {"family": "tests.jobs:layers", "seq_len": None}, "data": {"kind": "tests.jobs:data"}}  # no sequences
UNCUT = [  # changes, code, words of the message and of the hint
    (sliced(17, model=SHORT), "E103", "schedule.slices = 17", "16 or fewer"),
    (sliced(3, model=SHORT, schedule={"cuts": [10, 6]}), "E103", "2 lengths, schedule.slices is 3", ""),
    (sliced(3, model=SHORT, schedule={"cuts": [10, 4, 4]}), "E103", "to 18, model.seq_len is 16", ""),
    (sliced(3, model=SHORT, schedule={"cuts": [10, 3, 2]}), "E103", "to 15", ""),
    (sliced(2, schedule={"cuts": [500, 524]}, **GPU), "E103", "multiples of 128", "[512, 512]"),
    (sliced(9, **GPU), "E103", "", ""),
    ({"schedule": {"cuts": "even"}}, "E110", "", ""),
    (sliced("auto", schedule={"cuts": [1024, 1024]}), "E110", "", ""),
    ({**OWN, "schedule": {"slices": 2}}, "E110", "model.seq_len", ""),
]


@pytest.mark.parametrize(("changes", "code", "words", "hint"), UNCUT)
def test_what_cannot_be_cut_so_is_refused_with_its_place(changes, code, words, hint):
    error = error_of(job, **changes)
    assert error.code == code and words in error.message and hint in error.hint and ":" in error.where


def test_cuts_that_are_hinted_at_and_those_of_a_gpu_are_right():
    for cuts in ([10, 4, 4], [10, 3, 2]):
        error = error_of(job, **sliced(3, model=SHORT, schedule={"cuts": cuts}))
        near = json.loads(error.hint.partition("= ")[2].partition(", or")[0])
        assert cuts_of(job(**sliced(3, model=SHORT, schedule={"cuts": near})))[-1] == 16
    assert all(place % 128 == 0 for place in cuts_of(job(**sliced(3, **GPU))))


@pytest.mark.long("cuts2")
@pytest.mark.parametrize("cuts", ["balanced", "even", [1024, 512, 256, 256]])
def test_shares_of_given_times_add_up_to_the_whole(cuts):
    compiled = planned(**sliced(schedule={"cuts": cuts}), **GIVEN)
    costs, places = compiled.costs, cuts_of(compiled.job)
    for name in ("f", "b", "w"):
        assert costs.column(name) == pytest.approx([1.0] * 4)
    rows = [(b - a) / 2048 for a, b in pairwise(places)]
    assert costs.ms["w"][0] == pytest.approx(rows)
    if cuts == "balanced":
        assert costs.ms["f"][0] == pytest.approx([0.25] * 4, rel=2e-3)
        assert rows == sorted(rows, reverse=True)
    if cuts == "even":
        assert list(costs.ms["f"][0]) == sorted(costs.ms["f"][0])


def test_keys_and_values_stay_from_the_first_forward_to_the_last_backward():
    """And their gradients from the first backward on, of the last slice."""
    compiled = planned(**sliced(kind="zb-h1"))
    begins, ends = ((Kind.F, 0), (Kind.B, 3), (Kind.BW, 3)), ((Kind.B, 0), (Kind.BW, 0))
    for kv, entries in zip(compiled.costs.bytes_of("kv"), ledger(compiled.timeline, compiled.costs), strict=True):
        assert kv == 2 * 2 * 64 * 4 * 2 * 2048  # K and V, 2 layers, width 64, float32, 2 sequences
        for entry in entries:
            op = compiled.timeline.graph.ops[entry.op]
            change = sum(one.bytes for one in (*entry.begin, *entry.end) if one.category == "kv")
            assert change == pytest.approx(kv * (((op.kind, op.slice) in begins) - 2 * ((op.kind, op.slice) in ends)))


def test_recompute_keeps_keys_and_values_beside_the_inputs_of_layers():
    again = planned(**sliced(memory={"activations": "recompute"}, costs=FREE)).costs
    plain = planned(**sliced(costs=FREE)).costs
    assert again.bytes_of("kv") == plain.bytes_of("kv")
    assert again.bytes_of("kept")[1] < plain.bytes_of("kept")[1] / 3
    twice = plain.column("b")[1] + plain.column("f")[1]  # but keys and values are in their buffers by then
    assert 0.99 * twice < again.column("b")[1] <= twice


def test_bounds_of_equal_slices_are_those_of_as_many_microbatches():
    compiled = planned(**sliced(4, kind="zb-h1", schedule={"cuts": "even"}), **GIVEN)
    costs = replace(compiled.costs, ms={**compiled.costs.ms, **{name: ((0.25,) * 4,) * 4 for name in "fbw"}})
    assert bounds(compiled.program.placement, costs, 8).makespan == pytest.approx(24 + 3 / 4)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["zb-auto", "v-auto", "v-half", "looped-zb"], 2))
def test_searches_keep_to_bytes_that_slices_need(kind):
    roomy = max(rank.activations for rank in planned(**sliced(kind="1f1b")).memory)
    compiled = planned(**sliced(kind=kind, schedule={"memory_limit": f"{0.9 * roomy / 1024:.3f} KiB"}))
    assert max(rank.activations for rank in compiled.memory) <= 0.9 * roomy + 1
    with refused("E303"):
        planned(**sliced(kind=kind, schedule={"memory_limit": "1 KiB"}))


@pytest.mark.long
def test_auto_takes_the_number_with_the_shortest_step_that_fits():
    found = planned(**sliced("auto"))
    count = found.program.slices
    assert count > 1 and found.job.schedule.slices == count
    steps = {k: planned(**sliced(k)).timeline.makespan for k in (1, count // 2, count, 2 * count)}
    assert steps[count] < steps[count // 2] <= steps[1]
    assert steps[2 * count] > 0.99 * steps[count]
    whole = max(rank.activations for rank in planned(**LONG).memory)
    limit = {"memory_limit": f"{0.5 * whole / 1024:.3f} KiB"}
    with pytest.raises(ZbcError):
        planned(**LONG, schedule=limit)
    assert planned(**sliced("auto", schedule=limit)).program.slices > 1


@pytest.mark.long
def test_rows_of_a_comparison_name_the_number(tmp_path):
    path = write_job(tmp_path, **sliced("auto"))
    row = Asked(path, budget=0.0)("1f1b", ())
    assert row.name == f"1f1b k={len(row.report.slices)}" and len(row.report.slices) > 1
    assert Asked(path, budget=0.0)("dualpipe", ()).name == "dualpipe"  # with "auto" it stays whole
    swept = Asked(path, budget=0.0)("1f1b", (("schedule.slices", "2"),))
    assert swept.name == "1f1b" and len(swept.report.slices) == 2


def test_the_best_of_all_schedules_is_one_with_slices():
    compiled = planned(**sliced(2, kind="auto", m=3))
    assert compiled.program.slices == 2 and compiled.schedule not in ("chimera-zb", "bitpipe-zb")


def whole_order(request):
    return one_f_one_b(replace(request, slices=1))


def test_a_plugin_is_asked_for_slices():
    assert compile_job(with_plugin(4, "one_f_one_b"), suggest=False).program.slices == 4
    with refused("E121", hint="request.slices"):
        compile_job(with_plugin(4, "whole_order"), suggest=False)


def with_plugin(count, name):
    made = job(**sliced(count))
    chosen = {"kind": f"{__name__}:{name}"}
    return replace(made, schedule=made.schedule.model_copy(update=chosen))


def timed(rows, past, floor, linear, attend):
    """A block whose W has no attention."""
    seen = rows * (past + rows / 2)
    f = floor + linear * rows + attend * seen
    return SliceTime(rows=rows, past=past, f=f, b=2 * f, w=floor + linear * rows)


@pytest.mark.long
def test_a_profile_with_times_of_slices_says_where_to_cut_and_what_slices_take():
    points = [timed(rows, past, 0.05, 1e-3, 4e-6) for rows, past in ((2048, 0), (1024, 1024), (512, 1536), (256, 0))]
    given = job(**sliced(kind="1f1b"))
    plain = profile_of(given)
    layers = {**plain.layers, "block": plain.layers["block"].model_copy(update={"slices": points})}
    described = replace(given, profile=plain.model_copy(update={"layers": layers}))
    times = SliceTimes.of(described.profile)
    assert times is not None and SliceTimes.of(plain) is None
    assert times.fits[0] == pytest.approx((0.05, 1e-3, 4e-6), rel=1e-6)
    assert times.fits[2] == pytest.approx((0.05, 1e-3, 0.0), rel=1e-6, abs=1e-12)
    places = cuts_of(described)
    each = [sum(times.each(a, b)) for a, b in pairwise(places)]
    assert max(each) * 4 / sum(each) <= 1.002
    assert places != cuts_of(given)
    compiled = compile_job(described, suggest=False, budget=0.0)
    whole = compile_job(described.in_slices(1), suggest=False, budget=0.0)
    assert compiled.costs.column("f") == pytest.approx(whole.costs.column("f"))
    assert "slices" in described.profile.plain()["layers"]["block"]
    assert "slices" not in plain.plain()["layers"]["block"]
