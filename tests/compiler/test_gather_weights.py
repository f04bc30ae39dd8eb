"""Weights that are unsharded and resharded: gathers by farthest next use, the checks of E208, one-sided exchange."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import FREE, job
from tests.listing import edited
from tests.refusals import error_of, refused
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.fuse_backward import FuseBackward
from zbc.compiler.passes.gather_weights import GatherWeights, RenewWeights
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.passes.optimizer_step import OptimizerStep
from zbc.compiler.passes.reduce_grads import ReduceGrads
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.schedules.request import Request
from zbc.compiler.sim.context import Context
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

ROWS = json.loads((Path(__file__).parents[1] / "reference" / "gathers.json").read_text())["rows"]
ONE_PIPE = sorted(
    name for name, card in SCHEDULES.items() if len(card.make(Request(2, 4, card.default_chunks)).placement.pipes) == 1
)


def gathered(schedule, p, m, v, resident, gather=0.0, *, closed=True, with_w=False, only=None):
    """A schedule lowered with gathers of `gather`; a rank's share of F, B and W takes one unit of time."""
    program = replace(SCHEDULES[schedule].make(Request(p, m, v)), dp=2, sharded=True)
    stages, chunks = program.placement.stages, program.placement.stages / p
    each, both = (1 / chunks,) * stages, (2 / chunks,) * stages
    costs = Costs.uniform(program.placement).with_ms(
        f=each, b=each, w=each, bw=both, gather=(gather,) * stages, reduce=(0.0,) * stages
    )
    context = Context(program, costs)
    last = [ReduceGrads(), OptimizerStep()] if closed else []
    for one in (InsertComm(), FuseBackward(), only or GatherWeights(resident, with_w), *last):
        context = context.then(one.run(context.program, context))
    return context


def renewed(schedule, p, m, v, gather=0.0):
    """The same with only the optimizer sharded."""
    return gathered(schedule, p, m, v, None, gather, only=RenewWeights())


def counts(program, kind=Kind.GATHER):
    return [sum(op.kind is kind for op in ops) for ops in program.ranks]


@pytest.mark.long("breadth-first-8-8-4-3", "breadth-first-8-24-3-1")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(row[key]) for key in list(row)[:5]))
def test_gathers_and_times_are_those_of_the_reference(row):
    shape = row["schedule"], row["p"], row["m"], row["v"], row["resident"]
    assert counts(gathered(*shape, closed=False).program) == row["gathers_per_rank"]
    for gather, makespan in row.get("makespan_with_gather_of", {}).items():
        assert gathered(*shape, float(gather), closed=False).timeline.makespan == pytest.approx(makespan, abs=1e-5)


@pytest.mark.parametrize("row", [row for row in ROWS if row["resident"] == row["v"]], ids=str)
def test_where_the_optimizer_alone_is_shared_out_a_step_takes_as_long_as_with_room_for_all_weights(row):
    shape = row["schedule"], row["p"], row["m"], row["v"]
    for gather, makespan in row.get("makespan_with_gather_of", {"0.25": None, "2.0": None}).items():
        context = renewed(*shape, float(gather))
        check_all(context.program)
        assert counts(context.program) == [row["v"]] * row["p"] and not any(counts(context.program, Kind.FREE))
        whole = gathered(*shape, row["v"], float(gather)).timeline.makespan
        assert context.timeline.makespan == pytest.approx(whole if makespan is None else makespan, abs=1e-5)


def in_turn(stages, sequence):
    """One rank whose forwards take stages in any order: a microbatch for each use of a stage."""
    ops = tuple(Op(Kind.F, stage, mb) for mb, stage in enumerate(sequence))
    return Program(Placement(((0,) * stages,)), len(sequence), (ops,), ("any",), dp=2, sharded=True)


def fewest(sequence, room):
    """The fewest gathers over all choices of weights to free, by brute force."""
    states = {frozenset(): 0}
    for stage in sequence:
        after: dict[frozenset[int], int] = {}
        for there, cost in states.items():
            whole = there | {stage}
            ways = [there] if stage in there else [whole] if len(whole) <= room else [whole - {x} for x in there]
            for way in ways:
                after[way] = min(after.get(way, 99), cost + (stage not in there))
        states = after
    return min(states.values())


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(1, 5))
def test_no_way_to_make_room_has_fewer_gathers(sequence, room):
    program = in_turn(5, sequence)
    found = GatherWeights(room).run(program, Context.of(program))
    assert counts(found) == [fewest(sequence, room)] and counts(found, Kind.FREE) == counts(found)


@pytest.mark.long("v-auto", "v-half", "braid-v")
@pytest.mark.parametrize("name", ONE_PIPE)
def test_every_schedule_passes_all_checks_with_any_room(name):
    card = SCHEDULES[name]
    for p, m in ((2, 4), (4, 8)):
        stages = len(card.make(Request(p, m, card.default_chunks)).placement.stages_of(0))
        for resident, with_w in itertools.product(range(1, stages + 1), (False, True)):
            try:
                context = gathered(name, p, m, card.default_chunks, resident, with_w=with_w)
            except ZbcError as error:
                assert error.code == "E110" and "group" in error.message and resident == 1
                continue
            check_all(context.program)


def test_w_brings_no_weights_back_unless_it_needs_them():
    plain, with_w = (sum(counts(gathered("zb-v", 4, 8, 2, 1, with_w=w).program)) for w in (False, True))
    assert plain < with_w


@pytest.mark.parametrize("resident", [0, 3])
def test_room_that_cannot_be_is_refused(resident):
    with refused("E110"):
        gathered("zb-v", 2, 4, 2, resident)


FREED, RENEWED = (lambda: gathered("zb-v", 2, 4, 2, 1).program), (lambda: renewed("zb-v", 2, 4, 2).program)
FAULTS = {
    "left out": (FREED, "GATHER s3, ", "", "E208", "GATHER s3 before it"),
    "behind its op": (FREED, "GATHER s0, F s0 m0", "F s0 m0, GATHER s0", "E208", "GATHER s0 before it"),
    "freed too early": (FREED, "F s0 m2, SEND_F s0 m2, FREE s0", "FREE s0, F s0 m2, SEND_F s0 m2", "E208", "not there"),
    "never freed": (FREED, "FREE s0, ", "", "E208", "no room"),
    "twice": (FREED, "GATHER s0, ", "GATHER s0, GATHER s0 #9, ", "E208", "that are there"),
    "unused": (FREED, "GATHER s0, ", "GATHER s0, FREE s0 #9, ", "E208", "nothing has used"),
    "stale": (FREED, "FREE s0 #3, ", "", "E208", "before the step"),
    "renewed late": (RENEWED, "GATHER s0, (.*), F s0 m1", r"\1, GATHER s0, F s0 m1", "E206", "F s0 m0 comes before"),
    "not renewed": (RENEWED, "GATHER s0, ", "", "E202", "never runs GATHER s0"),
    "renewed twice": (RENEWED, "GATHER s0, ", "GATHER s0, GATHER s0, ", "E202", "GATHER s0 runs a second time"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_gathers_is_named(fault):
    program, old, new, code, text = FAULTS[fault]
    errors = error_of(check_all, edited(program(), (0, old, new))).errors
    assert {one.code for one in errors} == {code} or code == "E202"
    assert any(one.code == code and text in f"{one.message} {one.hint}" for one in errors)


BASE = {"kind": "interleaved-1f1b", "m": 4, "schedule": {"chunks": 2}}


def asked(dp=2, pp=4, shard="weights", exchange="one-sided", **more):
    parallel = {"pp": pp, "dp": dp, "shard": shard, "exchange": exchange, **more.pop("parallel", {})}
    return job(**{**BASE, "parallel": parallel, **more})


def test_all_copies_of_a_stage_take_from_each_other_where_two_pipes_have_it():
    """And not those of a pipe alone, as where they meet; so all have to be on one host."""
    made = (asked(pp=2, kind="chimera", exchange=way, schedule={}, costs=FREE) for way in ("one-sided", "collective"))
    taken, met = map(compile_job, made)
    assert met.program.ranks == taken.program.ranks
    for one, other in zip(taken.costs.bytes, met.costs.bytes, strict=True):
        assert one.own / one.gradients < 0.6 * other.own / other.gradients
    with refused("E110", "the copies of stage 0 are on 2 nodes", hint="a node for 4 copies"):
        compile_job(replace(asked(pp=2, kind="chimera", schedule={}, hardware={"ranks_per_node": 2}), node=(2, 1)))


@pytest.mark.long
def test_replicas_of_a_rank_are_put_on_one_node():
    """Although that sends more between nodes than the default tile."""
    hardware = {"hardware": {"ranks_per_node": 4}, "schedule": {"chunks": 2, "microbatch_size": 256}}
    compiled = compile_job(asked(dp=4, **hardware))
    assert compiled.program.node == (1, 4) and compiled.program.one_sided
    assert compile_job(asked(dp=4, exchange="collective", **hardware)).program.node != (1, 4)
    assert compile_job(asked(dp=2, **hardware)).program.node == (2, 2)
    alone = compile_job(asked(dp=2, hardware={"ranks_per_node": 8})).program
    assert alone.node is None, "all of the run is on one"


@pytest.mark.parametrize(
    ("dp", "more"),
    [
        (4, {"hardware": {"ranks_per_node": 2}}),
        (2, {"hardware": {"ranks_per_node": 4}, "parallel": {"order": [0, 1, 2, 3, 4, 5, 6, 7]}}),
    ],
)
def test_replicas_on_several_nodes_are_refused(dp, more):
    with refused("E110", match=r"the replicas of rank 0 are on 2 nodes|are on 4 nodes", hint='use "collective"'):
        compile_job(asked(dp=dp, **more))
