"""Steps without a barrier: the pass makes a running program of any legal order, also if the last step is rejected.

Each seed is one random schedule. `operational.py` runs it twice: once with the assumed verdict, once with a REDO that
runs its forwards again.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from tests.check import operational
from tests.check.each import check_deadlock, survives_blocking_sends, verdict
from tests.check.programs import BREAKS, Broken, broken, compute_order, placement
from tests.listing import listing, show
from tests.lowered import lower
from tests.refusals import error_of, refused
from tests.tiers import few
from zbc.compiler.check import check_all, survival
from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import build
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

SCHEDULES = 2000
BATCHES = [range(start, start + 250) for start in range(0, SCHEDULES, 250)]


@cache
def schedule(seed: int) -> Program:
    """A random legal schedule, closed without a barrier; small sizes (one rank, one microbatch) are frequent."""
    rng = random.Random(seed)
    place = placement(rng)
    microbatches, slices = rng.choice([1, 1, 2, 3, 4, 6]), rng.choice([1, 1, 1, 2])
    pipes = [rng.randrange(len(place.pipes)) for _ in range(microbatches)]
    ranks: list[list] = [[] for _ in range(place.ranks)]
    for rank, op in compute_order(rng, place, pipes, slices):
        ranks[rank].append(op)
    program = Program(place, microbatches, tuple(map(tuple, ranks)), ("random",), slices)
    copies, tied = rng.choice([1, 1, 1, 2]), rng.random() < 0.2 and place.stages > 1
    sharded = random.Random(f"sharded {seed}").random() < 0.3
    return lower(replace(program, dp=copies, tied=tied, sharded=sharded), "post-validate", costs(rng, place))


def costs(rng: random.Random, place: Placement) -> Costs | None:
    """Unit costs, or anything, zero included."""
    if rng.random() < 0.3:
        return None

    def each(*values: float) -> tuple[float, ...]:
        return tuple(rng.choice(values) for _ in range(place.stages))

    found = Costs.uniform(place, comm=rng.choice([0.0, 0.1, 3.0]))
    times = {"f": each(0.0, 1.0, 2.5), "b": each(0.0, 1.0, 4.0), "w": each(0.0, 1.0), "tentative": each(0.0, 0.5)}
    return found.with_ms(**times, hop=(rng.choice([0.0, 0.01, 2.0]),))


@cache
def damaged(seed: int) -> Broken:
    rng = random.Random(-seed)
    return broken(rng, schedule(seed), rng.choice(list(BREAKS)))


@cache
def rejected(seed: int) -> ZbcError | None:
    """The error of check_all for the damaged program."""
    return verdict(check_all, damaged(seed).program)


@pytest.mark.parametrize("seeds", few(BATCHES, 1))
def test_every_legal_schedule_can_do_without_the_barrier(seeds):
    for seed in seeds:
        program = schedule(seed)
        check_all(program)
        for redo in (False, True):
            outcome = operational.run(program, seed=seed, redo=redo)
            assert outcome.ok, f"seed {seed}\n{show(program)}\n{outcome}"


@pytest.mark.parametrize("seeds", few([seeds[::2] for seeds in BATCHES], 1))
def test_a_program_passes_exactly_if_it_runs_whatever_the_verdict(seeds):
    for seed in seeds:
        result = damaged(seed)
        error = rejected(seed)
        outcomes = [operational.run(result.program, seed=seed, redo=redo) for redo in (False, True)]
        shown = f"seed {seed} ({result.how})\n{show(result.program)}\n{error}\n{outcomes}"
        assert (error is None) is all(outcome.ok for outcome in outcomes), shown


@pytest.mark.repeats
def test_the_programs_are_of_every_kind():
    codes, redone, breaks = Counter(), Counter(), Counter()
    for seed in range(0, SCHEDULES, 2):
        error = rejected(seed)
        codes[error.code if error else "passes"] += 1
        breaks[damaged(seed).how] += 1
        ops = schedule(seed).ranks[0]
        redone[sum(op.kind is Kind.F for op in ops[: ops.index(Op(Kind.REDO, 0))])] += 1
    assert min(codes[code] for code in ("E201", "E202", "E203", "E204", "E205", "E206")) >= 10, codes
    assert codes["passes"] >= 200 and len(redone) >= 5, (codes, redone)
    assert min(breaks[how] for how in BREAKS) >= 30, breaks


def test_what_a_device_does_to_a_step_without_a_barrier_is_what_is_said():
    found = Counter()
    for seed in range(0, SCHEDULES, 10):
        said = survival(build(schedule(seed)))
        outcomes = [operational.run(schedule(seed), seed=seed, device=device).ok for device in ("waits", "queue")]
        assert [said.device_waits, said.one_queue] == outcomes, show(schedule(seed))
        found[said[1:]] += 1
    assert min(found[True, True], found[False, True], found[False, False]) >= 20, found


def test_a_program_survives_blocking_sends_exactly_if_it_runs_with_them():
    found = Counter()
    for seed in range(0, SCHEDULES, 10):
        survives = survives_blocking_sends(schedule(seed))
        assert survives == operational.run(schedule(seed), blocking=True, seed=seed).ok, show(schedule(seed))
        found[survives] += 1
    assert min(found[True], found[False]) >= 20, found


FINE = """
    rank 0: NORM, VERDICT, F s0 m0, SEND_F s0 m0 >r1, REDO, RECV_B s0 m0 <r1, COMMIT s0, BW s0 m0, TENTATIVE s0
    rank 1: NORM, VERDICT, RECV_F s1 m0 <r0, F s1 m0, REDO, COMMIT s1, BW s1 m0, SEND_B s1 m0 >r0, TENTATIVE s1
"""
WRONG = {
    "one end of a message": (
        "RECV_F s1 m0 <r0, F s1 m0, REDO,",
        "REDO, RECV_F s1 m0 <r0, F s1 m0,",
        "E206",
        "SEND_F s0 m0 >r1 comes before REDO and RECV_F s1 m0 <r0 after it",
    ),
    "a message that would not come again": (
        "F s0 m0, SEND_F s0 m0 >r1, REDO,",
        "REDO, F s0 m0, SEND_F s0 m0 >r1,",
        "E206",
        "RECV_F s1 m0 <r0 comes before REDO and SEND_F s0 m0 >r1 after it",
    ),
    "a barrier as well": ("TENTATIVE s1", "TENTATIVE s1, VALIDATE", "E202", "NORM belongs to a step without a barrier"),
    "an early receive": (
        "F s0 m0, SEND_F s0 m0 >r1, REDO, RECV_B s0 m0 <r1,",
        "F s0 m0, SEND_F s0 m0 >r1, RECV_B s0 m0 <r1, REDO,",
        "E206",
        "RECV_B s0 m0 comes before REDO",
    ),
}


def test_a_step_without_a_barrier_reads_as_it_is_written():
    check_all(listing(FINE, Placement.linear(2)))


@pytest.mark.parametrize("how", WRONG)
def test_each_way_to_get_it_wrong_is_named(how):
    old, new, code, message = WRONG[how]
    assert old in FINE
    errors = error_of(check_all, listing(FINE.replace(old, new), Placement.linear(2))).errors
    assert any(code == error.code and message in error.message for error in errors), errors


def test_norms_that_wait_in_a_circle_are_a_deadlock():
    """Rank 1 takes the norm only after a forward whose input rank 0 sends after the verdict."""
    text = FINE.replace("NORM, VERDICT, RECV_F s1 m0 <r0, F s1 m0,", "RECV_F s1 m0 <r0, F s1 m0, NORM, VERDICT,")
    text = text.replace("NORM, VERDICT, F s0 m0, SEND_F s0 m0 >r1,", "NORM, VERDICT, REDO, F s0 m0, SEND_F s0 m0 >r1,")
    text = text.replace("SEND_F s0 m0 >r1, REDO,", "SEND_F s0 m0 >r1,")
    with refused("E201", "wait for each other"):
        check_deadlock(listing(text, Placement.linear(2)))
