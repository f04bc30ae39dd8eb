"""The checks and a machine that runs the program agree on thousands of random programs, whole and broken.

`operational.py` is the machine, `programs.py` makes and breaks the programs. Each seed is one program.
"""

import random
from collections import Counter
from functools import cache

import pytest

from tests.check import operational
from tests.check.certificate import check_circle, check_places, circles, fewest_waits, named_ops
from tests.check.each import check_complete, check_deadlock, check_pairing, survives_blocking_sends, verdict
from tests.check.programs import BREAKS, Broken, broken, correct
from tests.listing import show
from tests.tiers import few
from zbc.compiler.check import check_all, survival
from zbc.compiler.graph import build
from zbc.errors import ZbcError
from zbc.ir import Program
from zbc.ops import TIED

PROGRAMS = 2500
BATCHES = [range(start, start + 250) for start in range(0, PROGRAMS, 250)]
batches = pytest.mark.parametrize("seeds", few(BATCHES, 1), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


@cache
def case(seed: int) -> tuple[Program, Broken]:
    """A correct program and its broken version: every fifth is broken twice."""
    rng = random.Random(seed)
    program = correct(rng)
    result = broken(rng, program, rng.choice(list(BREAKS)))
    if seed % 5 == 0:
        again = broken(rng, result.program, rng.choice(list(BREAKS)))
        result = Broken(again.program, f"{result.how}, {again.how}", result.touched | again.touched)
    return program, result


@cache
def rejected(seed: int) -> ZbcError | None:
    """The error of check_all for the broken program."""
    return verdict(check_all, case(seed)[1].program)


@cache
def deadlock(seed: int, blocking: bool) -> ZbcError | None:
    """The error of check_deadlock for the broken program."""
    return verdict(check_deadlock, case(seed)[1].program, blocking_sends=blocking)


@cache
def ran(seed: int, blocking: bool) -> operational.Outcome:
    """The machine's result for the broken program."""
    return operational.run(case(seed)[1].program, blocking=blocking, seed=seed)


def describe(seed: int, result: Broken, *said: object) -> str:
    return "\n".join(map(str, [f"seed {seed} ({result.how})", show(result.program), *said]))


@pytest.mark.long
@batches
def test_a_program_passes_exactly_if_it_runs(seeds):
    for seed in seeds:
        _, result = case(seed)
        error, outcome = rejected(seed), ran(seed, False)
        assert (error is None) is outcome.ok, describe(seed, result, error, outcome)


@batches
def test_a_program_survives_blocking_sends_exactly_if_it_runs_with_them(seeds):
    for seed in seeds:
        _, result = case(seed)
        sound = not any(verdict(check, result.program) for check in (check_complete, check_pairing))
        outcome = ran(seed, True)
        assert (sound and survives_blocking_sends(result.program)) is outcome.ok, describe(seed, result, outcome)


@pytest.mark.long
@batches
def test_what_a_device_does_to_a_program_is_what_is_said(seeds):
    for seed in seeds:
        _, result = case(seed)
        if rejected(seed) is None:
            said = survival(build(result.program))
            outcomes = [operational.run(result.program, seed=seed, device=device) for device in ("waits", "queue")]
            assert [said.device_waits, said.one_queue] == [outcome.ok for outcome in outcomes], describe(
                seed, result, said, outcomes
            )


@pytest.mark.long
@batches
def test_whatever_gets_stuck_is_a_deadlock_with_a_proof_and_whatever_runs_is_none(seeds):
    """check_deadlock alone, on programs that the checks before it would reject."""
    for seed in seeds:
        _, result = case(seed)
        for blocking in (False, True):
            error, state = deadlock(seed, blocking), ran(seed, blocking).state
            if state != "failed":
                assert (error is None) is (state == "success"), describe(seed, result, error, state)
            if error is not None:
                found = circles(error)
                assert len(found) == (error.errors[0].message.endswith(("each other", "own rank")))
                check_places(error, result.program)
                for lines in found:
                    check_circle(lines, result.program, blocking=blocking)


@pytest.mark.long
@batches
def test_every_rejected_program_names_an_op_that_was_touched(seeds):
    """After one break of a program that ran, the error names an op that was moved, dropped or changed, or its partner
    in a transfer; or at least one of the same stage and microbatch."""
    for seed in seeds:
        program, result = case(seed)
        error = rejected(seed)
        if error is None:
            continue
        named = named_ops(error)
        assert named, describe(seed, result, error)
        check_places(error, result.program)
        if "," in result.how or verdict(check_all, program) is not None:
            continue  # broken twice, or never right
        assert {op.key for op in named} & {op.key for op in result.touched}, describe(seed, result, error)
        if result.how != "other op":
            assert named & result.touched, describe(seed, result, error)


@pytest.mark.long
def test_no_circle_is_shorter_than_the_one_reported():
    lengths, none = Counter(), 0
    for seed in range(PROGRAMS):
        _, result = case(seed)
        program = result.program
        if program.size > 70 or any(verdict(check, program) for check in (check_complete, check_pairing)):
            continue
        for blocking in (False, True):
            error = deadlock(seed, blocking)
            if error is None and none < 20:
                none += 1
                assert fewest_waits(program, blocking=blocking) is None, describe(seed, result)
            elif error is not None and sum(lengths.values()) < 100:
                [lines] = circles(error)
                lengths[len(lines)] += 1
                assert len(lines) == fewest_waits(program, blocking=blocking), describe(seed, result, error)
        if (none, sum(lengths.values())) == (20, 100):
            break
    assert (none, sum(lengths.values())) == (20, 100) and max(lengths) >= 3, lengths


@pytest.mark.repeats
def test_the_programs_are_of_every_kind():
    """Agreement on programs of one kind only would prove little."""
    codes, breaks, states, collectives = Counter(), Counter(), Counter(), Counter()
    for seed in range(PROGRAMS):
        program, result = case(seed)
        kinds = {op.kind.value for _, _, op in program if op.kind.is_collective}
        shared = {"REDUCE t" for _, _, op in program if op.stage == TIED}
        collectives.update([*kinds, *shared, f"{program.dp} copies"])
        error = rejected(seed)
        codes[error.code if error else "passes"] += 1
        states[ran(seed, True).state] += 1
        breaks[result.how.partition(",")[0]] += 1
    assert min(codes[code] for code in ("E201", "E202", "E203", "E204", "E205", "E206")) >= 40, codes
    assert codes["passes"] >= 800 and PROGRAMS - codes["passes"] >= 1500, codes
    assert min(states.values()) >= 500, states
    assert min(breaks[how] for how in BREAKS) >= 100, breaks
    met = ("REDUCE", "REDUCE t", "GATHER", "VALIDATE", "2 copies")
    assert min(collectives[name] for name in met) >= 100, collectives
