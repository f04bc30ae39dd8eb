"""Stages with different numbers of ranks: the numbers, their order, and settings of jobs."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from tests.jobs import job, write_job
from zbc.compiler.check import check_graph
from zbc.compiler.check.faults import op_faults
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.replicated import placement_of, replicated
from zbc.compiler.schedules.request import Request
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.job.rules import asked_again

RUNS = [(2, 1), (1, 2), (3, 1), (2, 1, 1), (2, 3), (3, 2)]


@pytest.mark.parametrize("replicas", [*RUNS, (1, 1, 1), (4,), (3, 2, 4), (1, 5), (5, 1, 2)])
@pytest.mark.parametrize(("m", "slices"), [(5, 1), (8, 1), (13, 1), (8, 2), (5, 4)])
def test_orders_are_proven(replicas, m, slices):
    placement = placement_of(replicas, m)
    assert placement.ranks == sum(replicas) and len(placement.pipes) == min(math.lcm(*replicas), m)
    for pipe, ranks in enumerate(placement.pipes):
        assert list(ranks) == [sum(replicas[:s]) + pipe % r for s, r in enumerate(replicas)]
    costs = Costs.uniform(placement, comm=random.Random(m).choice([0.0, 0.3]))
    program = replicated(replicas, m).make(Request(sum(replicas), m, costs=costs, slices=slices))
    context = Context(program, costs)
    assert not [*op_faults(context.graph)]
    check_graph(context.graph)
    for s, r in enumerate(replicas):
        for rank in range(sum(replicas[:s]), sum(replicas[: s + 1])):
            mine = {op.mb % r for op in program.ranks[rank]}
            assert mine == {rank - sum(replicas[:s])}, "microbatch i is of replica i mod r"


def test_replicas_of_a_stage_keep_up_with_others():
    costs = Costs.uniform(placement_of((1, 1, 1, 1), 8))
    program = replicated((1, 1, 1, 1), 8).make(Request(4, 8, costs=costs))
    assert Context(program, costs).timeline.makespan == 3 * 8 + 3 * 3
    # F = B = W = 2 on two ranks, 1 on one: a microbatch leaves every 3 ms, and the pipeline is full.
    placement = placement_of((2, 1), 12)
    costs = Costs.uniform(placement).with_ms(f=(2.0, 1.0), b=(2.0, 1.0), w=(2.0, 1.0), bw=(4.0, 2.0))
    program = replicated((2, 1), 12).make(Request(3, 12, costs=costs))
    assert Context(program, costs).timeline.makespan <= 12 * 3 + 2 + 4 + 4


def asked(**changes):
    parallel = {"pp": 3, "replicas": [2, 1], **changes.pop("parallel", {})}
    return job(kind="replicated-1f1b", m=changes.pop("m", 5), parallel=parallel, **changes)


def test_the_cut_evens_out_the_work_of_ranks():
    found = compile_job(asked(layers=9))
    counts = [len(names) for names in found.layers]
    assert counts[0] > counts[1] and found.program.placement.replicas == (2, 1)
    assert found.program.topology.name(1) == "rank 1 [stage 0, replica 1]"
    assert found.program.topology.name(2) == "rank 2 [stage 1, replica 0]"


def test_replicas_say_how_many_ranks_there_are_and_which_schedule(tmp_path):
    path = write_job(tmp_path, kind="replicated-1f1b", parallel={"replicas": [2, 3]}, pp=None)
    assert load_job(path).parallel.pp == 5
    path = write_job(tmp_path, kind="replicated-1f1b", pp=3, m=6, parallel={"replicas": [2, 1]})
    assert compile_job(load_job(path, schedule="1f1b")).program.placement.replicas == ()


@pytest.mark.parametrize("seed", range(4))
def test_auto_is_as_fast_as_the_best_of_all_replicas(seed):
    rng = random.Random(seed)
    pp, layers = rng.choice([3, 4]), 8
    costs = {"per": "layer", "w": 1.0, **{name: [rng.uniform(1, 5) for _ in range(layers)] for name in ("f", "b")}}

    def step(replicas):
        found = compile_job(asked(parallel={"pp": pp, "replicas": replicas}, costs=costs, m=8), budget=0.0)
        assert isinstance(found.job.parallel.replicas, list) and sum(found.job.parallel.replicas) == pp
        return found.step_ms

    cuts = (cut for count in range(pp) for cut in itertools.combinations(range(1, pp), count))
    every = [[b - a for a, b in itertools.pairwise([0, *cut, pp])] for cut in cuts]
    assert step("auto") <= min(map(step, every)) * 1.01


RAMP = {"ramp": [{"microbatches": 1, "steps": 1}, {"microbatches": 2, "steps": 1}]}
UNEQUAL = {"data": {"kind": "tokens", "path": "x.bin", "balance": "length"}}


@pytest.mark.parametrize("changes", [{"schedule": RAMP}, UNEQUAL])
def test_auto_has_no_rank_without_work_in_any_step(changes):
    found = compile_job(asked(parallel={"replicas": "auto"}, **changes), budget=0.0)
    assert found.job.parallel.replicas == [1, 1, 1]
    for start in found.ramp:
        assert all(start.compiled.program.ranks) and start.compiled.job.parallel.replicas == [1, 1, 1]


def test_a_ramp_of_enough_microbatches_goes_with_replicas():
    (start,) = compile_job(asked(schedule={"ramp": [{"microbatches": 2, "steps": 1}]}), budget=0.0).ramp
    assert start.compiled.program.microbatches == 2 and all(start.compiled.program.ranks)


def test_a_job_made_from_a_job_is_asked_the_rules_again():
    made = asked()
    with pytest.raises(ZbcError, match="a stage has 2 replicas and a step 1 microbatches"):
        asked_again(replace(made, schedule=made.schedule.model_copy(update={"microbatches": 1})))
    assert asked_again(made) is made
