"""Weights that are unsharded and resharded: gathers by farthest next use, the checks of E208, one-sided exchange."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.jobs import FREE, job
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


def late(ops):
    ops.insert(4, ops.pop(0))


@pytest.mark.parametrize(
    ("change", "code"), [(late, "E206"), (lambda ops: ops.pop(0), "E202"), (lambda ops: ops.insert(1, ops[0]), "E202")]
)
def test_weights_that_are_not_renewed_before_their_use_are_found(change, code):
    program = renewed("zb-v", 2, 4, 2).program
    ops = list(program.ranks[0])
    change(ops)
    with pytest.raises(ZbcError, match=code):
        check_all(program.with_ranks([ops, program.ranks[1]], by="broken"))


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
    with pytest.raises(ZbcError, match="E110"):
        gathered("zb-v", 2, 4, 2, resident)


def broken(change, *, with_w=False):
    program = gathered("zb-v", 2, 4, 2, 1, with_w=with_w).program
    ops = list(program.ranks[0])
    change(ops)
    return program.with_ranks([ops, *program.ranks[1:]], by="broken")


FAULTS = {
    "left out": (lambda ops: ops.remove(Op.parse("GATHER s3")), "GATHER s3 before it"),
    "behind its op": (lambda ops: ops.insert(1, ops.pop(0)), "GATHER s0 before it"),
    "freed too early": (lambda ops: free_before_its_op(ops), "not there"),
    "never freed": (lambda ops: ops.remove(Op.parse("FREE s0")), "no room"),
    "twice": (lambda ops: ops.insert(1, Op.parse("GATHER s0 #9")), "that are there"),
    "unused": (lambda ops: ops.insert(1, Op.parse("FREE s0 #9")), "nothing has used"),
    "stale": (lambda ops: ops.pop(max(i for i, op in enumerate(ops) if op.kind is Kind.FREE)), "before the step"),
}


def free_before_its_op(ops):
    free = ops.index(Op.parse("FREE s0"))
    ops.insert(max(i for i, op in enumerate(ops[:free]) if op.kind.computes), ops.pop(free))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_gathers_is_e208(fault):
    change, text = FAULTS[fault]
    with pytest.raises(ZbcError, match="E208") as caught:
        check_all(broken(change))
    assert {one.code for one in caught.value.errors} == {"E208"}
    assert any(text in f"{one.message} {one.hint}" for one in caught.value.errors)


def test_weights_may_go_before_a_w_unless_it_needs_them():
    def early(ops):
        i = [i for i, op in enumerate(ops) if op.kind is Kind.FREE][-1]
        last = max(k for k, op in enumerate(ops) if op.stage == ops[i].stage and op.kind in (Kind.B, Kind.BW))
        ops.insert(last + 1, ops.pop(i))

    check_all(broken(early))


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
    with pytest.raises(ZbcError, match=r"E110.*the copies of stage 0 are on 2 nodes") as caught:
        compile_job(replace(asked(pp=2, kind="chimera", schedule={}, hardware={"ranks_per_node": 2}), node=(2, 1)))
    assert "a node for 4 copies" in caught.value.hint


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
    with pytest.raises(ZbcError, match=r"E110.*the replicas of rank 0 are on 2 nodes|E110.*are on 4 nodes") as caught:
        compile_job(asked(dp=dp, **more))
    assert 'use "collective"' in caught.value.hint
