"""Slices of microbatches: proofs and the operational machine agree, as they are and damaged."""

from __future__ import annotations

import random

import pytest

from tests.check.pairs import damaged, verdicts
from tests.check.slices import NAMES, draw, swapped
from tests.compiler.grid import SCHEDULES
from tests.lowered import lower
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.schedules import Request
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, nth, turned


@pytest.mark.parametrize("seed", few(range(200), 25))
def test_random_slices_are_proven_and_run(seed):
    one = draw(seed, ranks=5, microbatches=6, slices=5)
    assert verdicts(one.program, seed) == (True, True), str(one)
    for change in (damaged, swapped):
        passes, runs = verdicts(change(one.program, random.Random(seed)), seed)
        assert passes == runs, str(one)


def test_backwards_run_slices_in_reverse():
    assert [turned(n, 3) for n in range(6)] == [2, 1, 0, 5, 4, 3]
    assert nth(Kind.F, 1, 4, 3) == Op(Kind.F, 1, 1, 0, 1)
    assert nth(Kind.B, 1, 4, 3) == Op(Kind.B, 1, 1, 0, 1)
    assert nth(Kind.W, 1, 3, 3) == Op(Kind.W, 1, 1, 0, 2)


@pytest.mark.parametrize("name", few(NAMES, ("1f1b", "zb-v")))
def test_swapped_slices_are_named_with_both_ops_and_the_fix(name):
    """A slice's backward needs the gradients of its keys and values, which later slices leave."""
    card = SCHEDULES[name]
    program = lower(card.make(Request(2, 3, card.default_chunks, slices=3)))
    broken = swapped(program, random.Random(0))
    assert broken != program
    with pytest.raises(ZbcError) as caught:
        check_all(broken)
    first = caught.value.errors[0]
    assert first.code == "E206"
    words = [first.message, first.hint or "", *first.details]
    assert any(("m" in word and ".1" in word) or ".2" in word for word in words)
