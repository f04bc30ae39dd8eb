"""Stages with different numbers of ranks: the numbers, their order, and settings of jobs."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs import job, write_job
from tests.refusals import refused
from zbc.compiler.check import check_graph
from zbc.compiler.check.faults import op_faults
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.partition.replicas import Problem, joined, length, plans
from zbc.compiler.schedules.replicated import placement_of, replicated
from zbc.compiler.schedules.request import Request
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.job.rules import asked_again

CASES = json.loads((Path(__file__).parent.parent / "reference" / "replicas.json").read_text())
RUNS = [(2, 1), (1, 2), (3, 1), (2, 1, 1), (2, 3), (3, 2)]


def problem_of(case, devices, microbatches, *, per_node, near=25e6, far=3e6, scale=1.0):
    sizes = (case["params_bytes"], [scale * size for size in case["cut_bytes"]])
    times = ([scale * ms for ms in case[key]] for key in ("f", "b"))
    return Problem(*times, *sizes, devices, per_node, near, far, microbatches)


@pytest.mark.parametrize("case", CASES["brute_force"])
def test_known_instances(case):
    one = problem_of(case, case["devices"], case["microbatches"], per_node=case["per_node"])
    assert plans(one)[0].ms == pytest.approx(case["best_ms"])
    assert length(one, [tuple(stage) for stage in case["plan"]]) == pytest.approx(case["best_ms"])


@pytest.mark.parametrize("case", CASES["profiles"], ids=lambda case: f"{case['profile']}-{case['per_node']}")
def test_published_profiles(case):
    one = problem_of(case["instance"], 16, 16, per_node=case["per_node"], scale=16.0)
    found = plans(one)[0]
    assert found.ms <= case["ours"] * (1 + 1e-9)
    assert found.ms <= case["pipedream"] and found.ms <= case["data_parallel"] + 0.05
    if case["profile"].startswith("vgg-19"):
        assert [stage[2] for stage in found.stages] == [14, 2]


def every_plan(layers, devices):
    """All numbers of replicas, by brute force."""
    for stages in range(1, min(layers, devices) + 1):
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            points = [0, *cuts, layers]
            for splits in itertools.combinations(range(1, devices), stages - 1):
                ends = [0, *splits, devices]
                yield [(points[s], points[s + 1], ends[s + 1] - ends[s]) for s in range(stages)]


@pytest.mark.parametrize("seed", range(60))
def test_the_best_plan_is_that_of_brute_force(seed):
    rng = random.Random(seed)
    layers, devices = rng.randint(2, 8), rng.randint(2, 4)
    case = {key: [rng.uniform(1, 20) for _ in range(layers)] for key in ("f", "b")}
    case["params_bytes"] = [10 ** rng.uniform(4, 9) for _ in range(layers)]
    case["cut_bytes"] = [0.0, *(rng.uniform(0, 5e7) for _ in range(layers - 1))]
    one = problem_of(case, devices, rng.choice([4, 16, 64]), per_node=rng.randint(1, devices))
    least = min(length(one, stages) for stages in every_plan(layers, devices))
    assert plans(one)[0].ms == pytest.approx(least)
    assert all(plan.ms <= least * 1.1 for plan in plans(one, 0.1))


def test_joined_layers_keep_their_sums():
    one = problem_of(CASES["brute_force"][0], 3, 16, per_node=3)
    small = joined(one, 3)
    assert len(small.f) == 3 and [*map(sum, small[:3])] == pytest.approx([*map(sum, one[:3])])
    assert all(size in one.before for size in small.before)


# ---- the order -----------------------------------------------------------------------------------------------------


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


def test_one_replica_each_is_1f1b():
    costs = Costs.uniform(placement_of((1, 1, 1, 1), 8))
    program = replicated((1, 1, 1, 1), 8).make(Request(4, 8, costs=costs))
    assert Context(program, costs).timeline.makespan == 3 * 8 + 3 * 3


def test_a_stage_of_two_ranks_keeps_up_with_one_of_half_its_work():
    """F = B = W = 2 on two ranks, 1 on one: a microbatch leaves every 3 ms, and the pipeline is full."""
    placement = placement_of((2, 1), 12)
    costs = Costs.uniform(placement).with_ms(f=(2.0, 1.0), b=(2.0, 1.0), w=(2.0, 1.0), bw=(4.0, 2.0))
    program = replicated((2, 1), 12).make(Request(3, 12, costs=costs))
    assert Context(program, costs).timeline.makespan <= 12 * 3 + 2 + 4 + 4


# ---- jobs ----------------------------------------------------------------------------------------------------------


def asked(**changes):
    parallel = {"pp": 3, "replicas": [2, 1], **changes.pop("parallel", {})}
    return job(kind="replicated-1f1b", m=changes.pop("m", 5), parallel=parallel, **changes)


def test_the_cut_evens_out_the_work_of_ranks():
    found = compile_job(asked(layers=9))
    counts = [len(names) for names in found.layers]
    assert counts[0] > counts[1] and found.program.placement.replicas == (2, 1)
    assert found.program.topology.name(1) == "rank 1 [stage 0, replica 1]"
    assert found.program.topology.name(2) == "rank 2 [stage 1, replica 0]"


def test_replicas_say_how_many_ranks_there_are(tmp_path):
    path = write_job(tmp_path, kind="replicated-1f1b", parallel={"replicas": [2, 3]}, pp=None)
    assert load_job(path).parallel.pp == 5


def test_auto_is_never_worse_than_equal_replicas():
    costs = {"per": "layer", "f": [4.0, 1, 1, 1, 1, 1, 1, 1], "b": [4.0, 1, 1, 1, 1, 1, 1, 1], "w": 1.0}
    found = compile_job(asked(parallel={"pp": 4, "replicas": "auto"}, costs=costs, m=8), budget=0.0)
    for counts in ([4], [2, 2], [1, 1, 1, 1], [3, 1], [1, 3]):
        other = compile_job(asked(parallel={"pp": 4, "replicas": counts}, costs=costs, m=8), budget=0.0)
        if len(set(counts)) == 1:
            assert found.report.makespan_ms <= other.report.makespan_ms * (1 + 1e-9)
    assert isinstance(found.job.parallel.replicas, list) and sum(found.job.parallel.replicas) == 4


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parallel": {"pp": 4}}, r"sum to 3, parallel\.pp is 4"),
        ({"parallel": {"pp": 7, "replicas": [6, 1]}}, "a stage has 6 replicas and a step 5 microbatches"),
        ({"schedule": {"kind": "1f1b"}}, "goes with schedule.kind"),
        ({"schedule": RAMP}, r"a stage has 2 replicas and a step of schedule\.ramp 1 microbatches"),
        (UNEQUAL, r"a stage has 2 replicas and a step of data\.balance 1 microbatches"),
    ],
)
def test_what_does_not_go_together(changes, text):
    with pytest.raises(ZbcError, match=text) as caught:
        asked(**changes)
    assert [error.code for error in caught.value.errors] == ["E110"] and caught.value.hint


def test_the_schedule_needs_its_replicas():
    with refused("E110", match=r"needs parallel\.replicas"):
        job(kind="replicated-1f1b")


def test_a_job_with_replicas_can_be_held_against_other_schedules(tmp_path):
    path = write_job(tmp_path, kind="replicated-1f1b", pp=3, m=6, parallel={"replicas": [2, 1]})
    assert compile_job(load_job(path, schedule="1f1b")).program.placement.replicas == ()


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2)])
@pytest.mark.parametrize("how", ["plain", "dp", "zero1"])
def test_everything_else_goes_with_replicas(replicas, how):
    parallel = {"pp": sum(replicas), "replicas": list(replicas), "dp": 2 if how == "dp" else 1}
    found = compile_job(asked(parallel=parallel, optimizer={"zero1": how == "zero1"}))
    assert found.program.topology.world == sum(replicas) * parallel["dp"]
