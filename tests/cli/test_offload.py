"""Output of planning on the partition, offload, shares and a profile; its errors and its files."""

import csv
import json
from pathlib import Path

import pytest

from tests.jobs import per_layer, write_job
from tests.profiles import layer, nbytes, profile_of
from tests.refusals import refused
from zbc.commands.console import show
from zbc.commands.profiling import summary
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.job.profile import Measured

pytestmark = pytest.mark.usefixtures("everything_moves")
COSTS = {"f": 1.0, "b": 1.0, "w": 1.0, "offload": 1.0}


def planned(tmp_path, kind="1f1b", limit="0.5x", *, costs=COSTS, **more):
    changes = {"costs": costs, "schedule": {"memory_limit": limit}, "memory": {"activations": "offload"}, **more}
    path = write_job(tmp_path, kind=kind, pp=4, m=8, layers=16, **changes)
    return compile_job(load_job(path), suggest=False, budget=0.0)


def test_the_manifest_says_what_the_host_needs(tmp_path):
    planned(tmp_path).write(tmp_path / "plan")
    manifest = json.loads((tmp_path / "plan/plan.json").read_text())
    assert {"OFFLOAD", "RELEASE", "RELOAD"} <= set(manifest["capabilities"])
    found = manifest["predicted"]["host"]["rank 0"]
    assert found["slabs"]["s0"] >= 2 and found["bytes"] > 0
    assert "rank 3" not in manifest["predicted"]["host"], "its order keeps to the limit"


def test_what_the_host_has_no_room_for_is_refused(tmp_path):
    with refused("E301"):
        planned(tmp_path, hardware={"host_gib": 1e-6})


def test_speed_in_bytes_is_that_of_the_bytes_that_move(tmp_path):
    ms = {"f": 1.0, "b": 1.0, "w": 1.0}
    slow, fast = (planned(tmp_path, costs=ms, hardware={"host_gbps": gbps}).costs for gbps in (1.0, 2.0))
    sizes = slow.bytes_of("host")
    assert all(0 < size <= kept for size, kept in zip(sizes, slow.bytes_of("kept"), strict=True))
    assert slow.column("out") == pytest.approx([size / 1e6 for size in sizes])
    assert fast.column("back") == pytest.approx([size / 2e6 for size in sizes])


def test_the_lane_of_copies_is_drawn(tmp_path, zbc):
    planned(tmp_path).write(Path("plan"))
    shown = zbc("visualize", "plan").out
    assert "O copy to the host" in shown and "L copy back" in shown
    zbc("visualize", "plan", "-o", "plan.svg")
    assert "OFFLOAD s0 m0" in Path("plan.svg").read_text()


@pytest.mark.long
def test_plan_and_compare_say_how_often_weights_are_gathered_and_what_of_it_shows(job, zbc):
    job(kind="breadth-first", pp=2, m=4, parallel={"dp": 2})
    sweep = ["--sweep", "parallel.shard=none,weights", "--schedule", "breadth-first", "--format", "csv"]
    rows = zbc("compare", "zbc.toml", *sweep).out.splitlines()
    found = {row["parallel.shard"]: row for row in csv.DictReader(rows)}
    assert (found["none"]["gathers"], found["none"]["gathers_exposed_ms"]) == ("", "")
    assert found["weights"]["gathers"] == "2" and float(found["weights"]["gathers_exposed_ms"]) > 0
    assert "gathers" not in zbc("compare", "zbc.toml", "--schedule", "breadth-first", "--format", "csv").out
    planned = zbc("plan", "zbc.toml", "--set", 'parallel.shard="weights"', "--set", "memory.resident=1")
    assert "3 gathers of weights on a rank" in planned.out
    report = zbc("plan", "zbc.toml", "--set", 'parallel.shard="optimizer"', "--json", "-o", "two").json()
    assert report["gathered"]["count"] == 2 and 0 < report["gathered"]["exposed_ms"] <= report["gathered"]["ms"]


@pytest.fixture
def measured(job):
    """Layers with long names, large numbers and times with too wide a spread."""
    large = nbytes(**dict.fromkeys(("weights", "gradients", "masters", "optimizer", "kept_b", "kept_w"), 123456789))
    wide = layer(1.0, 2.0, 3.0, bytes=large, again=1.0, step=1.0)
    wide = wide.model_copy(update={key: Measured(ms=1234.5, spread=8.82) for key in ("f", "b", "w", "again", "step")})
    return profile_of(load_job(Path(job())), layers=dict.fromkeys(("embed", "block", "head"), wide))


def test_what_was_measured_fits_eighty_columns(measured, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(*summary(measured))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "118 MiB" in "\n".join(lines) and any("spread too wide to trust" in line for line in lines)


@pytest.mark.long
def test_a_plan_says_which_times_not_to_trust_in_eighty_columns(measured, zbc, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "measured.json").write_text(measured.dumps())
    out = zbc("plan", "zbc.toml", "--profile", tmp_path / "measured.json", "-o", tmp_path / "plan").out
    assert max(len(line.rstrip()) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "882.0%" in out and "more --rounds" in " ".join(out.split())


HEAVY = per_layer(11, head=(4.0, 4.0, 4.0))


def test_the_cut_is_printed_with_its_loss(zbc, job):
    ran = zbc("plan", job(kind="1f1b", layers=11, costs=HEAVY), "-v")
    assert "above perfect balance" in ran.out
    assert "no other partition is better for this schedule" in ran.out
    cut = zbc("check", "plan", "--json").json()["cut"]
    busy = [3.0 * 8 * (len(stage["layers"]) - (s == 0) + 3 * (s == 3)) for s, stage in enumerate(cut["stages"])]
    assert cut["busiest_ms"] == pytest.approx(max(busy))
    assert cut["balanced_ms"] == pytest.approx(sum(busy) / 4) == 3.0 * 8 * 15 / 4
    loss = cut["busiest_ms"] / cut["balanced_ms"] - 1
    assert busy[cut["busiest_rank"]] == max(busy)
    assert f"rank {cut['busiest_rank']} is busy for " in ran.out
    assert f"ms, {loss:.1%} above perfect balance" in ran.out
    assert sum(len(stage["layers"]) for stage in cut["stages"]) == 13
    assert all(stage["state_bytes"] > 0 and stage["activation_bytes"] >= 0 for stage in cut["stages"])


@pytest.mark.long
def test_what_recomputes_is_said(zbc, job):
    path = job(kind="1f1b", memory={"activations": "auto"}, partition={"layers_per_stage": "equal"})
    most = zbc("plan", path, "--json").json()["per_rank"][0]["peak_bytes"]
    ran = zbc("plan", "zbc.toml", "--set", f"hardware.memory_gib={0.9 * most / 2**30:.9f}")
    assert ran.code == 0
    assert "recomputed: stage 0\n" in ran.out
    again = [stage["recompute"] for stage in zbc("check", "plan", "--json").json()["cut"]["stages"]]
    assert again == [True, False, False, False]


@pytest.mark.long
def test_many_stages_and_recompute_fit_eighty_columns(zbc, job):
    made = job(kind="interleaved-1f1b", layers=40, pp=8, m=8, memory={"activations": "recompute"})
    ran = zbc("plan", made, "--budget", "0")
    assert ran.code == 0
    assert "recomputed: all stages" in ran.out and "\nstages" not in ran.out
    assert max(map(len, ran.out.split("\n"))) <= 80
    full = zbc("plan", "zbc.toml", "--set", "schedule.chunks=4", "--budget", "0", "-v").out
    assert "\nstages" in full and "more: -v" not in full
    assert max(map(len, full.split("\n"))) <= 80


def test_compare_names_the_cuts_that_are_not_alike(zbc, job):
    out = zbc("compare", job(layers=11, costs=HEAVY), "--schedule", "1f1b,zb-h1,interleaved-1f1b", "-v").out
    assert "layers per stage" in out
    lines = out.split("layers per stage")[1].split("\n\n")[0].split("\n")[1:]
    named = [line.partition(": ")[2].split(", ") for line in lines]
    assert sorted(name for names in named for name in names) == ["1f1b", "interleaved-1f1b", "zb-h1"]
    alike = zbc(
        "compare", "zbc.toml", "--schedule", "1f1b,zb-h1", "-v", "--sweep", 'partition.layers_per_stage="equal"'
    ).out
    assert "layers per stage" not in alike
