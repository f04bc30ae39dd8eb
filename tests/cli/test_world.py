"""`parallel.world`: pp and dp chosen by the time per sample, and `schedule.batch` for microbatches."""

import pytest

from tests.jobs import write_job
from tests.refusals import refused
from zbc.compiler import shapes
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.host import gpus

HARDWARE = {"device": "cuda", "tflops": 1.0, "link_gbps": 40.0, "ranks_per_node": 4, "inter_node_gbps": 5.0}


def written(folder, world, batch, kind="1f1b", parallel=(), **tables):
    """A job of 8 layers on so many ranks, with microbatches of 2."""
    schedule = {"kind": kind, "microbatches": None, "batch": batch}
    return write_job(folder, parallel={"pp": None, "world": world, **dict(parallel)}, schedule=schedule, **tables)


@pytest.mark.always
def test_the_best_of_all_divisors_is_taken(tmp_path):
    path = written(tmp_path, 8, 64, "zb-v", hardware=HARDWARE)
    chosen = load_job(path)
    took = compile_job(chosen, budget=0.0)
    by_hand = {}
    for pp in (1, 2, 4):
        settings = [f"parallel.pp={pp}", f"parallel.dp={8 // pp}", f"schedule.microbatches={64 // 2 // (8 // pp)}"]
        made = compile_job(load_job(path, settings), budget=0.0)
        by_hand[pp] = made.settled_ms / made.sequences
    assert took.settled_ms / took.sequences <= min(by_hand.values()) * (1 + 1e-9)
    assert len({round(ms, 6) for ms in by_hand.values()}) == 3, "the choice must matter"
    assert [row.shape.pp for row in chosen.weighed] == [1, 2, 4, 8]


@pytest.mark.long
def test_ranks_that_share_layers_are_chosen_too(tmp_path):
    """Divisors of the heads that fit on a node; 4 ranks may share the 4 heads, 8 may not."""
    path = written(tmp_path, 8, 16, parallel={"tp": "auto"}, hardware=HARDWARE)
    found = load_job(path)
    assert {row.shape.tp for row in found.weighed} == {1, 2, 4}
    assert all(row.shape.ranks == 8 for row in found.weighed)
    assert [row.shape[:2] for row in found.weighed if row.shape.tp == 4] == [(1, 2), (2, 1)]
    assert found.parallel.ranks == 8 and type(found.parallel.tp) is int
    fixed = load_job(path, ["parallel.tp=2"])
    assert {row.shape.tp for row in fixed.weighed} == {2} and fixed.parallel.tp == 2


@pytest.mark.long
def test_ranks_that_share_tokens_are_chosen_where_that_is_asked_for(tmp_path):
    """Numbers whose chunks divide a sequence of 16 tokens and that fit on a node."""
    path = written(tmp_path, 8, 16, hardware=HARDWARE)
    assert {row.shape.cp for row in load_job(path).weighed} == {1}
    found = load_job(path, ['parallel.cp="auto"', "parallel.tp=2"])
    assert {row.shape.cp for row in found.weighed} == {1, 2} and found.parallel.ranks == 8
    assert all(row.shape.ranks == 8 for row in found.weighed) and type(found.parallel.cp) is int
    assert {row.shape.cp for row in load_job(path, ["parallel.cp=4"]).weighed} == {4}


@pytest.mark.long
def test_replicas_that_share_out_experts_are_chosen_too(tmp_path):
    """Divisors of dp and the experts that fit on a node."""
    model = {"family": "llama", "experts": 12, "ffn_hidden": 16}
    path = written(tmp_path, 8, 16, parallel={"ep": "auto"}, hardware=HARDWARE, model=model)
    found = load_job(path)
    assert {(row.shape.dp, row.shape.ep) for row in found.weighed} >= {(8, 1), (8, 2), (8, 4), (4, 4), (2, 2), (1, 1)}
    assert all(row.shape.dp % row.shape.ep == 0 and row.shape.ep <= 4 for row in found.weighed)
    assert type(found.parallel.ep) is int and "ep 4" in str(found.weighed[2].shape)
    assert load_job(path, ["parallel.ep=2", "parallel.dp=4"]).parallel.ep == 2
    four = {(row.shape.dp, row.shape.ep) for row in load_job(path, ["parallel.ep=4"]).weighed}
    assert four == {(8, 4), (4, 4), (2, 2), (1, 1)}, "by as many as divide the replicas"


@pytest.mark.parametrize(
    ("shares", "pp", "said"),
    [({"tp": 2}, 8, "8 / tp = 4"), ({"tp": "auto"}, 3, "8\n"), ({"cp": 2}, 8, "8 / cp = 4")],
)
def test_ranks_of_a_pipeline_that_are_given_have_to_divide_the_others(tmp_path, shares, pp, said):
    path = written(tmp_path, 8, 16, parallel=shares, hardware=HARDWARE)
    with refused("E110", match=f"pp = {pp} does not divide parallel.world = {said}"):
        load_job(path, [f"parallel.pp={pp}"])


@pytest.mark.long
def test_what_is_only_weighed_is_a_bound(tmp_path):
    """Long steps are planned with fewer microbatches: their estimate must not exceed the time of the whole step."""
    path = written(tmp_path, 4, 256, hardware=HARDWARE)
    rows = load_job(path).weighed
    assert any(row.at_least for row in rows) and not all(row.at_least for row in rows)
    for row in rows:
        settings = [f"parallel.pp={row.shape.pp}", f"parallel.dp={row.shape.dp}"]
        whole = compile_job(load_job(path, [*settings, f"schedule.microbatches={row.shape.microbatches}"]), budget=0.0)
        assert row.sample_ms <= whole.settled_ms / whole.sequences * (1 + 1e-9)
        assert row.at_least or row.sample_ms == pytest.approx(whole.settled_ms / whole.sequences)


def test_what_is_taken_has_the_numbers_of_its_shape(tmp_path):
    path = written(tmp_path, 6, 24)
    job = load_job(path)
    assert job.parallel.pp * job.parallel.dp == 6
    assert job.parallel.dp * job.schedule.microbatches * 2 == 24
    assert job.where("parallel", "pp").endswith("zbc.toml:10:9"), "the place of world"
    assert "world" not in job.planning()["parallel"] and "batch" not in job.planning()["schedule"]


def test_a_batch_alone_gives_the_microbatches(tmp_path):
    path = written(tmp_path, None, 24, parallel={"pp": 2, "dp": 2})
    assert load_job(path).schedule.microbatches == 6
    assert load_job(path, ["schedule.microbatches=5"]).schedule.microbatches == 5
    with refused("E110", match="a batch of 22 samples"):
        load_job(path, ["schedule.batch=22"])


def test_the_command_line_counts(tmp_path):
    path = written(tmp_path, 8, 32)
    fixed = load_job(path, ["parallel.pp=2"])
    assert (fixed.parallel.pp, fixed.parallel.dp, fixed.schedule.microbatches) == (2, 4, 4)
    assert not fixed.weighed
    opened = load_job(write_job(tmp_path), ["parallel.world=2"])
    assert opened.parallel.dp * opened.schedule.microbatches == 8, "the batch that the job had"


def test_where_nothing_fits_the_smallest_overflow_is_named(tmp_path):
    limited = {**HARDWARE, "memory_gib": 1e-6}
    path = written(tmp_path, 4, 16, hardware=limited)
    with refused("E110", hint="of all, 1f1b at pp 4, dp 1 needs") as caught:
        load_job(path)
    assert len(caught.value.details) == 3


def test_a_shape_that_does_not_fit_is_not_taken(tmp_path):
    path = written(tmp_path, 4, 16, hardware=HARDWARE)
    free = load_job(path)
    held = {row.shape.pp: row.peak_bytes for row in free.weighed}
    least = min(held.values())
    limit = (least + sorted(held.values())[1]) / 2 / 2**30
    tight = load_job(path, [f"hardware.memory_gib={limit}"])
    assert held[tight.parallel.pp] == least
    assert [row.error.code for row in tight.weighed if row.error] == ["E301", "E301"]


def test_auto_counts_gpus_and_their_memory(tmp_path, monkeypatch):
    path = written(tmp_path, "auto", 16, hardware={"device": "cuda"})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("zbc.job.world.gpus", lambda: [80.0, 40.0])
    job = load_job(path)
    assert job.parallel.pp * job.parallel.dp == 2 and job.hardware.memory_gib == 40.0
    monkeypatch.setattr("zbc.job.world.gpus", lambda: [])
    with pytest.raises(ZbcError, match="nvidia-smi finds none"):
        load_job(path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    job = load_job(path)
    assert job.parallel.pp * job.parallel.dp == 4


def test_gpus_are_those_that_are_visible(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81920\necho 40960\necho 24576\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.gpus() == [80.0, 40.0, 24.0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert gpus.gpus() == [24.0, 80.0]
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpus.gpus() == []


def test_other_ranks_of_a_launch_do_not_weigh(tmp_path, monkeypatch):
    path = written(tmp_path, 8, 32)
    monkeypatch.setattr(shapes, "weighed", None)
    assert load_job(path, sketch=True).parallel.ranks == 8


def test_plan_shows_what_was_weighed(zbc, folder):
    written(folder, 16, 64, hardware=HARDWARE)
    said = zbc("plan", "zbc.toml", "-o", "p")
    assert said.code == 0, said.err
    assert "the fastest of 16 ranks, each planned by the fast search" in said.out
    assert "pp 16, dp 1: more ranks than the 8 layers" in said.out
    rows = zbc("plan", "zbc.toml", "-o", "p", "--json").json()["world"]
    assert [(row["pp"], row["dp"]) for row in rows] == [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)]
    assert rows[-1]["reason"] == "more ranks than the 8 layers" and rows[-1]["ms_per_sample"] is None
    shown = zbc("explain", "zbc.toml", "--json").json()["sections"]["parallel"]
    best = min((row for row in rows if row["ms_per_sample"]), key=lambda row: row["ms_per_sample"])
    assert (shown["pp"]["value"], shown["dp"]["value"]) == (best["pp"], best["dp"])
    assert zbc("check", "p").code == 0


def test_compare_chooses_once_and_sweeps_what_it_is_told(zbc, folder):
    written(folder, 4, 32, hardware=HARDWARE)
    said = zbc("compare", "zbc.toml", "--schedule", "1f1b,zb-h1")
    assert "the fastest of 4 ranks; --sweep parallel.pp=1,2,4 plans others" in said.out
    rows = zbc("compare", "zbc.toml", "--schedule", "1f1b", "--sweep", "parallel.pp=1,2", "--json").json()
    assert len(rows["schedules"]) == 2 and "world" not in rows


@pytest.mark.long
def test_what_a_shape_has_nobody_for_is_left_out_of_it(tmp_path):
    """Shards of one replica, tokens of one rank, experts of one: such a shape is a candidate like any other."""
    experts = {"family": "llama", "experts": 4, "ffn_hidden": 16}
    cases = (
        ({"shard": "weights", "exchange": "one-sided"}, "1f1b", {"memory": {"resident": 1}}),
        ({"tp": "auto", "tp_sequence": True}, "1f1b", {"model": {"seq_len": 16}}),
        ({"ep": 4}, "1f1b", {"model": experts}),
        ({"shard": "optimizer"}, "chimera", {}),
    )
    for keys, kind, tables in cases:
        path = written(tmp_path, 8, 32, kind, keys, hardware=HARDWARE, **tables)
        rows = {(row.shape.pp, row.shape.dp, row.shape.tp): row for row in load_job(path).weighed}
        refused = [row.error for row in rows.values() if row.error and row.error.code in ("E110", "E119")]
        assert all("are on 2 nodes" in error.message for error in refused), keys
        assert rows[8, 1, 1].sample_ms and rows[4, 2, 1].sample_ms
    alone = load_job(path, ["parallel.pp=8", "parallel.dp=1", "schedule.microbatches=16"])
    assert alone.parallel.shard == "optimizer", "the two pipes of chimera share it out"
    other = load_job(path, ["parallel.pp=8", "parallel.dp=1", "schedule.microbatches=16"], "1f1b")
    named = load_job(path, ["parallel.pp=4", "parallel.dp=2"], "1f1b")
    assert other.parallel.shard == "none" and named.parallel.shard == "optimizer"


def test_compare_chooses_the_ranks_that_share_layers_too(zbc, folder):
    """The choice for all rows is a whole shape, without settings that have no effect in it."""
    parallel = {"tp": "auto", "tp_sequence": True, "shard": "optimizer"}
    written(folder, 4, 32, parallel=parallel, hardware=HARDWARE)
    said = zbc("compare", "zbc.toml", "--schedule", "1f1b,gpipe", "--json").json()
    assert all(row.get("makespan_ms") for row in said["schedules"]), said
