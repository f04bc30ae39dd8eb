"""memory.activations = "auto" if offload is possible: the fastest of keep, recompute, offload and both."""

import json

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.jobs import job, toml_text
from zbc.compiler.compile import compile_job
from zbc.compiler.partition.setup import as_ordered
from zbc.compiler.shapes import load_job
from zbc.compiler.whatif.others import kept
from zbc.errors import ZbcError
from zbc.text import GIB

pytestmark = pytest.mark.usefixtures("everything_moves")
PARTS = ("keep", "recompute", "offload", "recompute+offload")


def planned(folder, activations, *, kind="1f1b", limit="0.5x", offload=1.0, f=1.0, p=4, m=8, chunks=None, **more):
    path = folder / "zbc.toml"
    costs = {"f": f, "b": 1.0, "w": 1.0, **({} if offload is None else {"offload": offload})}
    schedule = {"memory_limit": limit, **({} if chunks is None else {"chunks": chunks})}
    changes = {"costs": costs, "schedule": schedule, "memory": {"activations": activations}, **more}
    path.write_text(toml_text(kind=kind, pp=p, m=m, layers=16, **changes))
    return compile_job(load_job(path), suggest=False, budget=0.0)


def words(activations):
    """The choices of stages."""
    return {activations} if isinstance(activations, str) else {*activations.values()}


def step(folder, activations, **job):
    """ms of a step, infinite without a plan."""
    try:
        return planned(folder, activations, **job).step_ms
    except ZbcError as error:
        assert {each.code for each in error.errors} <= {"E301", "E302", "E303"}
        return float("inf")


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["1f1b", "gis", "zb-v", "zb-auto", "looped-zb", "zb-h1", "interleaved-1f1b"]),
    limit=st.sampled_from(["0.25x", "0.4x", "0.6x", "0.9x"]),
    offload=st.sampled_from([0.3, 1.0, 2.5, 6.0]),
    f=st.sampled_from([0.4, 1.0]),
    m=st.sampled_from([4, 7]),
)
def test_auto_is_never_slower_than_one_of_its_parts(tmp_path_factory, **job):
    folder = tmp_path_factory.mktemp("auto")
    assert step(folder, "auto", **job) <= min(step(folder, part, **job) for part in PARTS) * (1 + 1e-9)


def test_each_part_is_the_fastest_somewhere(tmp_path):
    def chosen(**job):
        compiled = planned(tmp_path, "auto", **job)
        return as_ordered(compiled.job, compiled.found).memory.activations

    assert chosen(limit="1.0x") == "keep"
    assert chosen(limit="0.5x", offload=0.3) == "offload"
    assert words(chosen(limit="0.5x", offload=20.0, f=0.2)) == {"recompute"}
    both = chosen(kind="gis", limit="0.125x", offload=2.0, f=0.2, chunks=2)
    assert "recompute+offload" in words(both)


def test_without_a_known_speed_auto_weighs_keep_and_recompute_only(tmp_path):
    compiled = planned(tmp_path, "auto", offload=None)
    assert compiled.report.copied is None and compiled.found.weighed == ()


@pytest.mark.parametrize("kind", ["v-auto", "auto"])
def test_what_was_chosen_is_in_the_plan_and_plans_the_same_again(tmp_path, kind):
    compiled = planned(tmp_path, "auto", kind=kind, limit="0.4x", offload=0.5)
    assert compiled.report.copied is not None and 0 < compiled.report.moved < 1
    assert max(rank.units for rank in compiled.memory) <= 1.6 + 1e-6
    compiled.write(tmp_path / "plan")
    kept = json.loads((tmp_path / "plan/plan.json").read_text())["planning"]["memory"]["activations"]
    values = words(kept)
    assert any("offload" in one for one in values) and "auto" not in values
    again = compile_job(load_job(tmp_path / "plan"), suggest=False, budget=0.0)
    assert again.step_ms == pytest.approx(compiled.step_ms)


def test_only_the_stages_that_are_open_are_chosen_for(tmp_path):
    compiled = planned(tmp_path, {"0": "auto", "1": "recompute"}, limit="0.75x", offload=0.3)
    memory = compiled.found.activations
    assert (memory.of(0), memory.of(1), memory.of(2)) == ("offload", "recompute", "keep")


def test_a_bound_knows_nothing_of_memory_where_copies_are_possible(tmp_path):
    assert not planned(tmp_path, "auto", limit="0.5x", offload=0.3).found.bounds.memory
    tight = planned(tmp_path, "keep", limit="0.5x", kind="zb-auto")
    loose = planned(tmp_path, "offload", limit="0.5x", kind="zb-auto")
    assert loose.report.lower_bound_makespan_ms < tight.report.lower_bound_makespan_ms
    assert loose.report.lower_bound_makespan_ms <= loose.report.makespan_ms


def test_what_does_not_fit_names_the_limit_with_recompute_too(tmp_path):
    with pytest.raises(ZbcError) as caught:
        planned(tmp_path, "offload", limit="0.1x")
    (error,) = caught.value.errors
    assert error.code == "E303" and "recompute+offload" in error.hint
    with pytest.raises(ZbcError) as caught:
        planned(tmp_path, "auto", limit="0.001x")
    (lowest,) = caught.value.errors
    assert lowest.code == "E303"
    least = lowest.hint.partition('memory_limit = "')[2].partition("x")[0]
    assert float(least) < 0.1
    assert planned(tmp_path, "auto", limit=f"{least}x").step_ms > 0


def test_a_plan_that_needs_too_much_of_the_host_is_not_chosen(tmp_path):
    compiled = planned(tmp_path, "auto", limit="0.5x", offload=0.3, hardware={"host_gib": 1e-6})
    assert compiled.report.copied is None


@settings(max_examples=6, deadline=None)
@given(
    kind=st.sampled_from(["zb-h1", "zb-h2", "zb-v", "zb-auto", "v-half", "looped-zb", "auto"]),
    gib=st.sampled_from([0.3, 0.45, 0.6, 0.9, 1.4, 4.0]),
    m=st.sampled_from([4, 6]),
)
def test_auto_recomputes_nothing_where_keeping_takes_hardly_more_memory_and_is_faster(tmp_path_factory, kind, gib, m):
    path = tmp_path_factory.mktemp("auto") / "zbc.toml"
    model = {"hidden": 512, "heads": 8, "seq_len": 512, "vocab": 2000}
    changes = {"model": model, "hardware": {"memory_gib": gib}, "memory": {"activations": "auto"}}
    path.write_text(toml_text(kind=kind, pp=4, m=m, layers=14, **changes))
    try:
        compiled = compile_job(load_job(path), suggest=False, budget=0.0)
    except ZbcError as error:
        assert {each.code for each in error.errors} <= {"E301", "E302", "E303"}
        return
    again = [stage.stage for stage in compiled.report.cut.stages if stage.recompute]
    event(f"recomputes {bool(again)}")
    assert kept(compiled) is None


@pytest.mark.parametrize("kind", ["1f1b", "interleaved-1f1b"])
def test_auto_runs_the_fewest_layers_of_each_rank_again_that_fit(kind):
    model = {"hidden": 256, "heads": 8, "seq_len": 256, "vocab": 500}
    how = {"kind": kind, "pp": 2, "layers": 12, "model": model, "partition": {"layers_per_stage": "equal"}}
    kept = max(rank.bytes for rank in compile_job(job(**how)).memory)
    how["hardware"] = {"memory_gib": 0.9 * kept / GIB}
    found = compile_job(job(memory={"activations": {"recompute": "auto"}}, **how))
    counts = [int((found.job.memory.of(s) + " 0").split()[1]) for s in range(len(found.layers))]
    assert 0 < max(counts) < 6
    for rank, room in enumerate(found.job.rooms):
        few = [max(0, count - (s % 2 == rank)) for s, count in enumerate(counts)]
        named = {str(s): f"recompute {n}" if n else "keep" for s, n in enumerate(few)}
        less = compile_job(job(memory={"activations": named}, **{**how, "hardware": {}}))
        assert found.memory[rank].bytes <= room and (few == counts or less.memory[rank].bytes > room)
