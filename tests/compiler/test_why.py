"""Why a step is not shorter, and the idle windows of ranks: compared with the timeline they explain."""

from dataclasses import replace
from itertools import pairwise

import pytest

import zbc
from tests.compiler.grid import make
from tests.jobs import job, write_job
from tests.lowered import lower
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.sim.simulate import simulate
from zbc.compiler.whatif.why import binds, critical_path, what_ifs
from zbc.compiler.whatif.windows import windows
from zbc.text import GIB

EVEN = {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.25}


def compiled(**changes):
    return compile_job(job(**{"costs": EVEN, **changes}), budget=0.0)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_critical_path_is_as_long_as_the_step(kind, objective):
    found = compiled(kind=kind, schedule={"objective": objective})
    path = critical_path(found)
    assert sum(path.by_rank.values()) == pytest.approx(sum(path.by_kind.values()))
    if objective == "makespan":
        assert path.total == pytest.approx(found.report.makespan_ms)
    else:
        assert path.total <= found.report.makespan_ms + 1e-9
    assert path.transfers == pytest.approx(0.25 * path.changes)


def test_what_binds_is_told_from_the_bound_and_the_memory():
    costs = {**EVEN, "comm": 0.0}
    assert binds(compiled(kind="zb-h2", m=16, schedule={"objective": "span"}, costs=costs)).startswith("the work of")
    assert binds(compiled(kind="zb-h2", m=16, costs=costs)).startswith("the lower bound")
    assert binds(compiled(kind="1f1b")).startswith("the order of ops")
    assert binds(compiled(kind="interleaved-1f1b", schedule={"group": 1})).startswith("schedule.group = 1: rounds")
    assert not binds(compiled(kind="interleaved-1f1b")).startswith("schedule.group")
    assert binds(compiled(kind="1f1b", schedule={"memory_limit": "1.0x"})).startswith("the memory limit")
    assert binds(compiled(kind="v-auto", schedule={"memory_limit": "0.8x"})).startswith("the memory limit")
    assert binds(compiled(kind="1f1b", schedule={"memory_limit": "1.3x"})).startswith("the order of ops")


@pytest.mark.parametrize("kind", few(["zb-auto", "1f1b", "auto"], ("zb-auto", "1f1b")))
def test_a_what_if_is_what_planning_the_changed_job_gives(kind):
    heavy = {"per": "layer", "f": 1.0, "b": 1.0, "w": 1.0}
    cut = {"layers_per_stage": [3, 2, 2, 1]} if kind != "auto" else {}
    parts = {"kind": kind, "costs": heavy, "partition": cut}
    limit = {"memory_limit": "2x", "objective": "span"}
    found = {entry.change: entry for entry in what_ifs(compile_job(job(**parts, schedule=limit), budget=0.0))}
    changed = {
        "one microbatch more": job(**parts, m=9, schedule=limit),
        "10% more memory for activations": job(**parts, schedule={**limit, "memory_limit": "2.2x"}),
    }
    if cut:
        moved = {**parts, "partition": {"layers_per_stage": [2, 2, 2, 2]}}
        changed["one layer from stage 0 to stage 3"] = job(**moved, schedule=limit)
    now = compile_job(job(**parts, schedule=limit), budget=0.0)
    for change, other in changed.items():
        step = compile_job(other, budget=0.0).step_ms
        assert found[change].ms == pytest.approx(step)
        assert found[change].factor == pytest.approx(step / other.schedule.microbatches / (now.step_ms / 8))


@pytest.mark.long("v-half")
@pytest.mark.parametrize("name", SCHEDULES)
def test_busy_time_and_windows_tile_the_makespan_of_every_rank(name):
    for m in (4, 7, 12):
        program = replace(lower(make(name, 4, m)), dp=2)
        costs = Costs.uniform(program.placement, 1.0, 1.3, 0.6, 0.25)
        costs = costs.with_ms(reduce=(0.4,) * program.placement.stages)
        timeline = simulate(program, costs)
        begin = min(timeline.first_start(rank) for rank in range(4))
        for rank in range(4):
            found = list(windows(timeline, rank))
            busy = [(timeline.start[i] - begin, timeline.end[i] - begin) for i in timeline.ops(rank)]
            assert sum(one.length_ms for one in found) + timeline.busy(rank) == pytest.approx(timeline.makespan)
            pieces = sorted(busy + [(one.start_ms, one.start_ms + one.length_ms) for one in found])
            assert all(b[0] == pytest.approx(a[1], abs=1e-9) for a, b in pairwise(pieces))
            idle = timeline.idle(rank)
            for cause in ("warm_up", "message", "drain", "sums"):
                length = sum(one.length_ms for one in found if one.cause == cause)
                assert length == pytest.approx(getattr(idle, cause), abs=1e-9), (m, rank, cause)


def test_a_window_names_the_op_that_ends_it():
    program = make("1f1b", 2, 2)
    found = list(windows(simulate(program, Costs.uniform(program.placement)), 1))
    assert [(one.start_ms, one.length_ms, one.cause, one.before) for one in found] == [
        (0.0, 1.0, "warm_up", "F s1 m0"),
        (7.0, 2.0, "drain", ""),
    ]


def test_what_is_free_is_the_limit_less_what_is_held_at_any_moment_of_the_window(tmp_path):
    model = {"layers": 8, "hidden": 256, "heads": 4, "vocab": 512, "seq_len": 64}
    plan = zbc.plan(zbc.load(write_job(tmp_path, model=model, pp=4, m=8, hardware={"memory_gib": 1.0})))
    found = plan.bubbles()
    assert found.makespan_ms == plan.timeline.makespan and len(found.windows) == 4
    for rank, (each, memory) in enumerate(zip(found.windows, plan.compiled.memory, strict=True)):
        kept = memory.weights + memory.gradients + memory.masters + memory.optimizer
        assert each and all(GIB - kept - memory.activations - 1 <= one.free_bytes <= GIB - kept for one in each), rank
    first = found.windows[3][0]
    assert first.cause == "warm_up" and first.free_bytes > found.windows[3][1].free_bytes - 1
