"""Windows in which ranks idle: they tile the step, and say what is free."""

from dataclasses import replace
from itertools import pairwise

import pytest

import zbc
from tests.compiler.grid import make
from tests.jobs import toml_text
from tests.lowered import lower
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.sim.simulate import simulate
from zbc.compiler.whatif.windows import windows
from zbc.text import GIB


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


def test_a_window_names_the_op_that_ends_it(tmp_path):
    program = make("1f1b", 2, 2)
    found = list(windows(simulate(program, Costs.uniform(program.placement)), 1))
    assert [(one.start_ms, one.length_ms, one.cause, one.before) for one in found] == [
        (0.0, 1.0, "warm_up", "F s1 m0"),
        (7.0, 2.0, "drain", ""),
    ]


def test_what_is_free_is_the_limit_less_what_is_held_at_any_moment_of_the_window(tmp_path):
    model = {"layers": 8, "hidden": 256, "heads": 4, "vocab": 512, "seq_len": 64}
    job = tmp_path / "job.toml"
    job.write_text(toml_text(model=model, pp=4, m=8, hardware={"memory_gib": 1.0}))
    plan = zbc.plan(zbc.load(job))
    found = plan.bubbles()
    assert found.makespan_ms == plan.timeline.makespan and len(found.windows) == 4
    for rank, (each, memory) in enumerate(zip(found.windows, plan.compiled.memory, strict=True)):
        kept = memory.weights + memory.gradients + memory.masters + memory.optimizer
        assert each and all(GIB - kept - memory.activations - 1 <= one.free_bytes <= GIB - kept for one in each), rank
    first = found.windows[3][0]
    assert first.cause == "warm_up" and first.free_bytes > found.windows[3][1].free_bytes - 1
