"""Bidirectional and wave schedules: closed forms, cuts in half, any p and m; sums of copies that overlap."""

from dataclasses import replace

import pytest

from tests.compiler.grid import WAVES, make, timed, units
from tests.lowered import lower
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request, find
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind

every = pytest.mark.parametrize("name", WAVES)


CLOSED_FORMS = {  # name -> makespan and peak, for which p, m and v
    "chimera": lambda p, m, v: (3 * m + (p - 2) * (1 + m // p), p) if p % 2 == 0 and m % p == 0 else None,
    "bitpipe": lambda p, m, v: (3 * m + 2 * (p - 2) / v, p) if p % 2 == 0 and m == p else None,
    "dualpipe": lambda p, m, v: (3 * m + p / 2 - 1, p + 1) if m % 2 == 0 and m >= 2 * p else None,
    "dualpipe-v": lambda p, m, v: (3 * m + (p - 1) / 2, p + 0.5) if m >= 2 * p else None,
    "hanayo": lambda p, m, v: (3 * m + 4 * (p - 1) / v, p) if m == p else None,
    "chimera-zb": lambda p, m, v: (3 * m + (p - 1) // 2, p) if m in (p, 2 * p) and 4 <= p <= 10 else None,
    "bitpipe-zb": lambda p, m, v: (3 * m + (p - 1) // 2 / v, p) if m in (p, 2 * p) and 4 <= p <= 10 else None,
}


@pytest.mark.long("dualpipe", "hanayo")
@every
def test_closed_forms_hold_up_to_16_ranks(name):
    tried = 0
    for p in (2, 4, 5, 6, 8, 9, 10, 12, 16):
        for m in (p, 2 * p, 2 * p + 1, 3 * p, 4 * p):
            for v in {SCHEDULES[name].default_chunks, 4 if name in ("bitpipe", "hanayo") else 2}:
                if not SCHEDULES[name].allows(v) or p % SCHEDULES[name].ranks_in:
                    continue
                expected = CLOSED_FORMS[name](p, m, v)
                if expected is not None:
                    tried += 1
                    program = make(name, p, m, v)
                    found = timed(program).makespan, max(units(program))
                    assert found == pytest.approx(expected), f"p={p} m={m} v={v}"
    assert tried >= 6


@pytest.mark.long("bitpipe", "hanayo", "chimera")
@every
def test_activations_stay_within_those_of_the_paper_for_any_number_of_microbatches(name):
    most = {"dualpipe": 1.0, "dualpipe-v": 0.5}.get(name, 0.0)
    for p in (2, 3, 4, 6, 8):
        for m in (1, p - 1, p, p + 1, 2 * p + 1, 19):
            if m and not p % SCHEDULES[name].ranks_in:
                assert max(units(make(name, p, m))) <= p + most + 1e-9, f"p={p} m={m}"


def ops_of(timeline, p, pipes):
    """Of the first p ranks: (kind, stage, microbatch, start, end) of each op, the last three by the number of pipes."""
    spans = [[] for _ in range(p)]
    for rank, op, start, end in timeline:
        if rank < p:
            spans[rank].append((op.kind, op.stage, op.mb // pipes, start / pipes, end / pipes))
    return spans


@pytest.mark.long("dualpipe-v-dualpipe-8")
@pytest.mark.parametrize("p", few(range(1, 17), range(1, 9)))
@pytest.mark.parametrize(("half", "whole"), [("dualpipe-v", "dualpipe"), ("hanayo", "chimera")])
def test_one_pipe_in_a_v_is_two_pipes_cut_in_half(p, half, whole):
    """Op by op, exactly in time: DualPipeV of DualPipe, Hanayo with one wave of Chimera; ops of a V take half."""
    for m in (1, p, 2 * p, 2 * p + 3) if half == "dualpipe-v" else (p, 3 * p):
        cut, both = timed(make(half, p, m, 2)), timed(make(whole, 2 * p, 2 * m, 1))
        assert ops_of(cut, p, 1) == ops_of(both, p, 2)


@pytest.mark.long("8-16")
@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 16), (8, 8), (8, 16)])
def test_split_backwards_beat_the_papers_with_the_same_parameters_and_activations(p, m):
    for paper, v in (("chimera", 1), ("bitpipe", 2)):
        ours, theirs = make(f"{paper}-zb", p, m, v), make(paper, p, m, v)
        assert ours.placement == theirs.placement
        assert timed(ours).makespan <= timed(theirs).makespan - 1
        assert max(units(ours)) <= max(units(theirs)) + 1e-9


COSTS = [(1.0, 1.0, 1.0, 0.1, 1.0), (18.5, 18.1, 9.3, 0.6, 0.4), (1.0, 1.5, 0.5, 0.3, 1.0), (1.0, 2.0, 1.0, 0.0, 1.3)]


@pytest.mark.parametrize("times", COSTS)
@pytest.mark.parametrize("share", few([0.6, 0.75, 1.0, 1.5], (0.6, 1.0)))
def test_a_memory_limit_is_never_exceeded_and_more_memory_never_hurts(times, share):
    for name, p, m, v in (("chimera-zb", 4, 9, 1), ("bitpipe-zb", 4, 6, 2), ("bitpipe-zb", 5, 10, 2)):
        costs = Costs.uniform(SCHEDULES[name].placement(p, v), *times)
        program = SCHEDULES[name].make(Request(p, m, v, costs=costs, memory_limit=share * p))
        assert max(rank.units for rank in peaks(program, costs)) <= share * p + 1e-6
        roomy = SCHEDULES[name].make(Request(p, m, v, costs=costs, memory_limit=2.0 * p))
        assert simulate(roomy, costs).makespan <= simulate(program, costs).makespan * 1.02


@pytest.mark.parametrize("name", ["chimera-zb", "bitpipe-zb"])
def test_the_least_memory_is_that_of_one_microbatch_and_below_it_the_answer_is_what_works(name):
    v = SCHEDULES[name].default_chunks
    program = SCHEDULES[name].make(Request(4, 5, v, memory_limit=1.0))
    assert max(units(program)) == pytest.approx(1.0)
    check_all(lower(program))
    with refused("E303", hint='"0.25x"'):
        SCHEDULES[name].make(Request(4, 5, v, memory_limit=0.9))


def test_longer_units_trade_memory_for_time():
    for name, v in (("chimera", 1), ("bitpipe", 2), ("hanayo", 2)):
        short = SCHEDULES[name].make(Request(4, 16, v))
        long = SCHEDULES[name].make(Request(4, 16, v, group=8))
        assert timed(long).makespan < timed(short).makespan
        assert max(units(long)) > max(units(short))


def test_even_numbers_of_ranks_and_stages_are_asked_for():
    with refused("E110", "dualpipe needs a multiple of 2 ranks, parallel.pp is 5", hint="set parallel.pp = 4 or 6"):
        find("dualpipe").check_ranks(5)
    find("dualpipe").check_ranks(6)
    with refused("E110"):
        make("dualpipe", 3, 8)
    with refused("E110", hint="set schedule.chunks = 4"):
        find("hanayo").stages_per_rank(3)
    assert find("hanayo").stages_per_rank(6) == 6


@pytest.mark.long("bitpipe-zb-3-5-2")
@pytest.mark.parametrize(("name", "p", "m", "v"), [("bitpipe-zb", 3, 5, 2), ("bitpipe-zb", 2, 5, 2)])
def test_annealing_keeps_every_op_and_the_limit_and_gains(monkeypatch, name, p, m, v):
    """An odd number of microbatches gives the pipes different shares."""
    monkeypatch.setattr("zbc.compiler.schedules.searched.available", lambda: False)  # compiled, it does the same
    costs = Costs.uniform(SCHEDULES[name].placement(p, v), 18.5, 18.1, 9.3, 0.6, 0.4)
    gained = 0
    for limit in (0.8 * p, float(p)):
        found = []
        for budget in (0.0, 0.03, 0.03):
            program = SCHEDULES[name].make(Request(p, m, v, costs=costs, memory_limit=limit, budget=budget))
            check_all(program)
            assert max(rank.units for rank in peaks(program, costs)) <= limit + 1e-6
            found.append((simulate(program, costs).makespan, program))
        assert found[1][0] <= found[0][0] + 1e-9
        assert found[1] == found[2], "made again, it is the same"
        assert sorted(map(sorted, found[0][1].ranks)) == sorted(map(sorted, found[1][1].ranks))
        gained += found[1][0] < found[0][0] - 1e-6
    assert gained


PAPERS = [("chimera", 1), ("bitpipe", 2)]
SPLIT = [("chimera-zb", 1), ("bitpipe-zb", 2)]


def lowered(name, v, p, m, each, **how):
    """The complete program, its costs with sums that take `each` ms, and the makespan without."""
    compute = SCHEDULES[name].make(Request(p, m, v))
    free = Costs.uniform(compute.placement)
    costs = free.with_ms(reduce=(each,) * compute.placement.stages)
    program = lower(replace(compute, **how), costs=costs)
    check_all(program)
    return program, costs, simulate(compute, free).makespan


def with_late_sums(program):
    """The program with all REDUCEs after the last compute op and the last transfer."""
    ranks = []
    for ops in program.ranks:
        sums = [op for op in ops if op.kind is Kind.REDUCE]
        rest = [op for op in ops if op.kind is not Kind.REDUCE]
        end = next(i for i, op in enumerate(rest) if op.kind is Kind.VALIDATE)
        ranks.append([*rest[:end], *sums, *rest[end:]])
    late = program.with_ranks(ranks, by="late-sums")
    check_all(late)
    return late


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("name", "v"), PAPERS)
def test_all_sums_but_the_one_that_begins_at_the_end_are_hidden(name, v, p):
    """The gradients of stage 0 are complete with the last op of the step: only its sum is exposed."""
    each = 1.0 / v
    program, costs, before = lowered(name, v, p, 2 * p, each)
    after = simulate(program, costs).makespan
    sums = sum(op.kind is Kind.REDUCE for op in program.ranks[0])
    assert sums == 2 * v
    assert after == pytest.approx(before + each)
    late = simulate(with_late_sums(program), costs).makespan
    assert late == pytest.approx(before + sums * each)
    assert (late - after) / ((sums - 1) * each) >= 0.8


@pytest.mark.parametrize(("name", "v"), [*PAPERS, *SPLIT, ("dualpipe", 1)])
def test_a_sum_starts_right_behind_the_last_gradient_of_its_stage_unless_another_has_to_start_first(name, v):
    program, _, _ = lowered(name, v, 4, 8, 0.25)
    for ops in program.ranks:
        sums = [i for i, op in enumerate(ops) if op.kind is Kind.REDUCE]
        for k, i in enumerate(sums):
            last = max(j for j, op in enumerate(ops) if op.kind.computes and op.stage == ops[i].stage)
            between = [op for op in ops[last + 1 : i] if op.kind.computes]
            assert last < i
            assert not between or sums[k - 1] > last, "or it stands behind the sum before it"


@pytest.mark.parametrize(("name", "v"), SPLIT)
def test_a_searched_order_leaves_its_sums_time(name, v):
    """The search times candidates with their sums."""
    placement = SCHEDULES[name].placement(4, v)
    free = Costs.uniform(placement)
    slow = free.with_ms(reduce=(2.0,) * placement.stages)
    found = []
    for known in (free, slow):
        program = SCHEDULES[name].make(Request(4, 8, v, costs=known))
        found.append(simulate(lower(program, costs=slow), slow).makespan)
    assert found[1] <= found[0]
