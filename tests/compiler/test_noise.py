"""Steps under noise: compared with theory, or with the simulator at changed costs."""

from statistics import fmean, stdev

import pytest

from tests.compiler.grid import make
from tests.refusals import refused
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.simulate import simulate, steady_state
from zbc.compiler.whatif.noise import Noise, spread
from zbc.ir import Kind

NAMES = ("gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "chimera", "dualpipe")


def program(name="1f1b", p=4, m=8, v=None):
    return make(name, p, m, v or (2 if name in ("interleaved-1f1b", "zb-v") else 1))


def unit(made, comm=0.0):
    return Costs.uniform(made.placement, comm=comm)


def slowed(made, costs, rank, share):
    """Costs with everything on one rank slower; stages of a linear placement are ranks."""
    changed = {
        name: tuple(ms * (1 + share * (s == rank)) for s, ms in enumerate(costs.column(name)))
        for name in ("f", "b", "w")
    }
    return costs.with_ms(**changed)


@pytest.mark.parametrize("name", NAMES)
def test_without_noise_every_trial_is_the_prediction(name):
    made = program(name)
    found = spread(made, unit(made, 0.1), Noise(trials=3))
    assert found.steps == (found.predicted,) * 3 == (simulate(made, unit(made, 0.1)).makespan,) * 3
    assert found.median == found.quantile(0.05) == found.quantile(0.95) == pytest.approx(found.mean)
    assert sum(found.by_rank) + found.transfers == pytest.approx(1.0)
    assert sum(found.by_kind.values()) + found.transfers == pytest.approx(1.0)


def test_a_chain_of_ops_spreads_as_theory_says():
    """One rank: a step is a sum of independent times, with their mean and the root of the sum of their variances."""
    made = program("1f1b", p=1, m=30)
    costs = Costs.uniform(made.placement, f=1.0, b=2.0, w=1.5)
    found = spread(made, costs, Noise(jitter=0.2, trials=1500))
    backward = costs.duration(next(op for op in made.ranks[0] if op.kind is Kind.BW))
    deviation = 0.2 * (30 * (1.0**2 + backward**2)) ** 0.5
    assert fmean(found.steps) == pytest.approx(found.predicted, abs=4 * deviation / 1500**0.5)
    assert stdev(found.steps) == pytest.approx(deviation, rel=0.1)
    ordered = sorted(found.steps)
    assert ordered[70] <= found.quantile(0.05) <= ordered[80]
    assert found.quantile(0.05) < found.median < found.quantile(0.95)


@pytest.mark.parametrize("rank", range(4))
def test_a_slow_rank_costs_what_the_simulator_says_of_slower_costs(rank):
    made = program("zb-h1")
    costs = unit(made, 0.3)
    found = spread(made, costs, Noise(straggler=0.25, trials=8))
    expected = simulate(made, slowed(made, costs, rank, 0.25)).makespan
    assert found.slow[rank] == pytest.approx(expected)
    assert found.steps[rank] == found.steps[rank + 4] == pytest.approx(expected)


@pytest.mark.parametrize("rank", range(4))
def test_without_a_barrier_it_costs_the_settled_step_of_slower_costs(rank):
    made = program("zb-h2", m=12)
    costs = unit(made, 0.1)
    found = spread(made, costs, Noise(straggler=0.5, trials=8), barrier=False)
    timeline = simulate(made, costs)
    assert found.predicted == steady_state(timeline, costs) < timeline.makespan
    slow = slowed(made, costs, rank, 0.5)
    assert found.slow[rank] == pytest.approx(steady_state(simulate(made, slow), slow))


def test_a_rank_that_never_was_the_slow_one_has_no_number():
    made = program()
    found = spread(made, unit(made), Noise(straggler=0.1, trials=2))
    assert len(found.steps) == 2 and [ms == ms for ms in found.slow] == [True, True, False, False]


@pytest.mark.parametrize("name", NAMES)
def test_noise_makes_steps_longer_on_average_and_the_same_seed_draws_the_same(name):
    """A makespan is a maximum of sums, so its mean is above the makespan of the means."""
    made = program(name)
    once, again, other = (spread(made, unit(made), Noise(0.1, 0.0, 60, seed)) for seed in (3, 3, 4))
    assert once == again and once.steps != other.steps
    assert once.mean > once.predicted
    assert spread(made, unit(made), Noise(0.1, 0.0, 80, 3)).steps[:60] == once.steps
    assert once.slower(once.median) == pytest.approx(once.median / once.predicted - 1)


def test_jitter_costs_more_and_of_transfers_too():
    made = program("zb-v", m=16)
    medians = [spread(made, unit(made), Noise(jitter, trials=60)).median for jitter in (0.02, 0.1, 0.3)]
    assert medians == sorted(medians) and medians[2] > 1.05 * medians[0]
    made = program("1f1b", p=2, m=1)
    free = Costs.uniform(made.placement, f=1e-6, b=1e-6, w=0.0, comm=1.0)
    found = spread(made, free, Noise(0.1, trials=400))
    assert stdev(found.steps) == pytest.approx(0.1 * 2**0.5, rel=0.15) and found.transfers > 0.99


def test_the_longest_chain_runs_through_the_rank_that_has_most_to_do():
    made = program("1f1b")
    found = spread(made, slowed(made, unit(made), 2, 1.0), Noise(0.05, trials=40))
    assert max(range(4), key=lambda r: found.by_rank[r]) == 2
    assert found.by_rank[2] > 0.7
    assert set(found.by_kind) == {"F", "BW"} and found.by_kind["BW"] > found.by_kind["F"]


@pytest.mark.parametrize("wrong", [{"jitter": -0.1}, {"straggler": -1.0}, {"trials": 0}])
def test_noise_that_makes_no_sense_is_refused(wrong):
    with refused("E103"):
        Noise(**wrong)
