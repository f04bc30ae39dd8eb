"""Ranks may hold different numbers of stages, and a pipe may have none on a rank: every command accepts that."""

import json

import pytest

from tests.jobs import write_job
from tests.tiers import few

RANKS = {"fork": 4, "fold": 3, "three": 2}
CHUNKS = {"fork": None, "fold": None, "three": 1}


@pytest.fixture
def planned(zbc, folder):
    """Plans with one of the plugins of tests/uneven.py; returns the plan directory."""

    def plan(name, *options, **changes):
        order = {"kind": f"tests.uneven:{name}", "microbatch_size": 1, **changes.pop("schedule", {})}
        write_job(folder, pp=RANKS.get(name, 3), m=6, schedule=order, **{"train": {"steps": 1}, **changes})
        return zbc("plan", "zbc.toml", *options)

    return plan


@pytest.mark.long
@pytest.mark.parametrize("name", few(RANKS, ("fork",)))
def test_such_a_placement_is_planned_proven_and_drawn(name, zbc, folder, planned):
    ran = planned(name)
    assert ran.code == 0, ran.err
    assert "deadlock-free" in ran.out
    manifest = json.loads((folder / "plan" / "plan.json").read_text())
    assert manifest["parameters"] == {"chunks": CHUNKS[name]}
    assert zbc("check", "plan").code == 0
    assert zbc("report", "plan").code == 0
    drawn = zbc("visualize", "plan").out
    assert [f" {rank} |" in drawn for rank in range(RANKS[name] + 1)] == [True] * RANKS[name] + [False]
    for picture in ("order.svg", "order.html", "order.json"):
        assert zbc("visualize", "plan", "-o", picture).code == 0
    for target in ("json", "dot", "graphml", "perfetto"):
        assert zbc("export", "plan", "--format", target, "-o", f"plan.{target}").code == 0
    assert zbc("plan", "plan", "-o", "again").code == 0
    assert zbc("compare", "plan", "again").code == 0


@pytest.mark.long("fold")
@pytest.mark.parametrize("name", ["fork", "fold"])
def test_an_uneven_schedule_is_planned_with_limits_costs_and_post_validate(name, planned):
    ran = planned(
        name,
        schedule={"memory_limit": "3x"},
        costs={"per": "rank", "f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.1},
        optimizer={"sync": "post-validate", "zero1": name == "fork"},
        train={"steps": 1, "eval_every": 1},
        data={"kind": "synthetic", "validation": 0.01},
    )
    assert ran.code == 0, ran.err


@pytest.mark.long
def test_costs_per_rank_are_shared_by_the_stages_of_the_rank(zbc, planned, folder):
    planned("fold", costs={"per": "rank", "f": [1.0, 3.0, 2.0], "b": 1.0, "w": 1.0})
    ran = zbc("plan", "zbc.toml", "-v")
    stages = [line.split() for line in ran.out.splitlines() if line.strip().startswith(("0 ", "1 ", "2 ", "3 "))][-4:]
    assert [row[-5] for row in stages] == ["1.00", "1.50", "1.50", "2.00"]


@pytest.mark.long
@pytest.mark.parametrize("name", few(["fork", "fold"], ("fork",)))
def test_an_uneven_schedule_trains_and_a_report_reads_its_trace(name, zbc, planned):
    assert planned(name).code == 0
    for words in (("run", "plan", "--local", RANKS[name], "--trace", "1", "-o", "run"), ("report", "run")):
        ran = zbc(*words)
        assert ran.code == 0, ran.err
    assert zbc("visualize", "run").code == 0


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("idle", {}, "no stage on rank 1"),
        ("joined", {}, "stages that are not in a row"),
        ("unequal", {"parallel": {"pp": 2}}, "pipes of different lengths"),
        ("fold", {"schedule": {"chunks": 2}}, "leave schedule.chunks out"),
    ],
)
def test_a_plugin_whose_placement_is_no_pipeline_or_not_as_asked_is_told_so(name, changes, text, planned):
    ran = planned(name, **changes)
    assert "error[E121]" in ran.err and text in ran.err
