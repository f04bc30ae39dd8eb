"""What `plan` and `compare` say of the cut."""

import pytest

HEAVY = {"per": "layer", "f": 1.0, "b": 1.0, "w": 1.0, "head": {"f": 4.0, "b": 4.0, "w": 4.0}}


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


def test_what_recomputes_is_said(zbc, job):
    path = job(kind="1f1b", memory={"activations": "auto"}, partition={"mode": "uniform"})
    most = zbc("plan", path, "--json").json()["per_rank"][0]["peak_bytes"]
    ran = zbc("plan", "zbc.toml", "--set", f"hardware.memory_gib={0.9 * most / 2**30:.9f}")
    assert ran.code == 0
    assert "recomputed: stage 0\n" in ran.out
    again = [stage["recompute"] for stage in zbc("check", "plan", "--json").json()["cut"]["stages"]]
    assert again == [True, False, False, False]


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
    out = zbc("compare", job(layers=11, costs=HEAVY), "--schedules", "1f1b,zb-h1,interleaved-1f1b", "-v").out
    assert "layers per stage" in out
    named = [
        line.partition(": ")[2].split(", ")
        for line in out.split("layers per stage")[1].split("\n\n")[0].split("\n")[1:]
    ]
    assert sorted(name for names in named for name in names) == ["1f1b", "interleaved-1f1b", "zb-h1"]
    alike = zbc("compare", "zbc.toml", "--schedules", "1f1b,zb-h1", "-v", "--sweep", 'partition.mode="uniform"').out
    assert "layers per stage" not in alike
