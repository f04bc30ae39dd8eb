"""The cost of consecutive steps, with the optimizer's barrier and without it."""

from dataclasses import replace
from itertools import islice, pairwise

import pytest

from tests.compiler.grid import FIXED, make
from tests.lowered import lower
from zbc.compiler import steps
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate, steady_state
from zbc.compiler.steps import consecutive, settled, with_barrier, without_barrier
from zbc.ir import Kind

UNIT = 1.0


def costs_of(program, *, f=UNIT, b=UNIT, w=UNIT, comm=0.0, hop=0.0, step=0.0, tentative=None) -> Costs:
    """Times of a rank, shared evenly by its stages."""
    stages, ranks = program.placement.stages, program.placement.ranks
    made = Costs.uniform(program.placement, f, b, w, comm)
    each = [(ms * ranks / stages,) * stages for ms in (step, step if tentative is None else tentative)]
    return made.with_ms(step=each[0], tentative=each[1], hop=(hop,))


def of_complete(complete):
    return with_barrier(complete), without_barrier(complete)


def either_way(order, costs):
    """The times of an order with and without the barrier, equal from both of its complete programs."""
    timeline = simulate(order, costs)
    found = of_complete(Context(lower(order, costs=costs), costs))
    assert of_complete(Context(lower(order, "post-validate", costs), costs)) == pytest.approx(found)
    assert found[0] == pytest.approx(settled(Context(lower(order, costs=costs), costs)))
    assert found[0] >= timeline.makespan
    return found


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
def test_an_optimizer_that_takes_no_time_costs_the_makespan_or_the_settled_span(name, p, m):
    program = make(name, p, m)
    costs = costs_of(program)
    timeline = simulate(program, costs)
    wanted = timeline.makespan, steady_state(timeline, costs)
    assert either_way(program, costs) == pytest.approx(wanted)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16)])
def test_zb_h2_and_zb_v_reach_the_work_of_a_rank_without_the_barrier(p, m):
    """arXiv 2401.10241: without a barrier their bubble is zero, with one p-1 and (p-1)/2 units."""
    for name, bubble in (("zb-h2", p - 1), ("zb-v", (p - 1) / 2)):
        program = make(name, p, m)
        assert either_way(program, costs_of(program)) == (pytest.approx(3 * m + bubble), pytest.approx(3 * m))


def test_verdicts_and_optimizers_take_their_time_with_and_without_the_barrier():
    program = make("zb-h2", 4, 8)
    barrier, ahead = either_way(program, costs_of(program, step=2.0))
    assert (barrier, ahead) == (pytest.approx(27 + 2.0), pytest.approx(24 + 2 * 2.0))
    cheap = either_way(program, costs_of(program, step=2.0, tentative=0.5))
    assert cheap[1] == pytest.approx(24 + 2.5)
    # From the last rank back to the first: three hops, which a warm-up of six forwards hides, until it does not.
    hidden, seen = (either_way(program, costs_of(program, hop=hop))[1] for hop in (0.5, 8.0))
    assert hidden == pytest.approx(24) and seen > 24 + 5


@pytest.mark.parametrize("name", FIXED)
def test_the_ops_of_a_step_without_a_barrier_run_in_the_order_they_need(name):
    program = lower(make(name, 4, 8), "post-validate")
    costs = costs_of(program, comm=0.1, hop=0.3, step=1.0)
    for timeline in islice(consecutive(program, costs), 3):
        at = {(span.rank, span.op): span for span in timeline}
        find = {(span.rank, span.op.kind): span for span in timeline if span.op.kind.row.closes == "ahead"}
        for rank in range(4):
            if rank:
                assert find[rank, Kind.NORM].start >= find[rank - 1, Kind.NORM].end + 0.3 - 1e-9
                assert find[rank - 1, Kind.VERDICT].start >= find[rank, Kind.VERDICT].end + 0.3 - 1e-9
            back = min(span.start for (r, op), span in at.items() if r == rank and op.kind in (Kind.B, Kind.BW))
            assert find[rank, Kind.COMMIT].end <= back + 1e-9


def test_steps_follow_without_a_gap_and_of_a_large_one_only_the_asked_time_is_told(monkeypatch):
    program = lower(make("zb-h2", 4, 8), "post-validate")
    costs = costs_of(program, step=1.0)
    timelines = list(islice(consecutive(program, costs), 4))
    for before, after in pairwise(timelines):
        assert after.first_start(0) == pytest.approx(before.last_end(0))
    assert timelines[3].last_end(0) - timelines[2].last_end(0) == pytest.approx(settled(Context(program, costs)))
    program, at = make("1f1b", 4, 8), costs_of(make("1f1b", 4, 8))
    monkeypatch.setattr(steps, "LARGE", 50)
    found = [of_complete(Context(lower(program, *sync, costs=at), at))[1] for sync in ((), ("post-validate",))]
    assert found[0] is None and found[1] > 24


def test_gathers_and_sums_take_their_time_with_and_without_the_barrier():
    # After each step, with a barrier or without: a forward needs all of them.
    program = replace(make("1f1b", 2, 4), dp=2, sharded=True)
    free, gathered = (costs_of(program).with_ms(gather=(ms,) * 2) for ms in (0.0, 2.0))
    (barrier, less), (longer, more) = either_way(program, free), either_way(program, gathered)
    assert longer == pytest.approx(barrier + 2.0)
    assert more == pytest.approx(less + 2.0)
    program = replace(make("1f1b", 2, 4), dp=2)
    costs = costs_of(program).with_ms(reduce=(5.0, 5.0))
    assert either_way(program, costs)[1] == pytest.approx(simulate(program, costs).makespan + 5.0)
