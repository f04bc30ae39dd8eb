"""Any schedule with a vocabulary that all ranks share: proofs and machine agree, as it is and damaged."""

from __future__ import annotations

import random

import pytest

from tests.check.pairs import damaged, verdicts
from tests.check.words import crossed, draw
from tests.tiers import few


@pytest.mark.parametrize("seed", few(range(150), range(40)))
def test_random_programs_are_proven_run_and_are_refused_alike_when_damaged(seed):
    one = draw(seed, ranks=6, microbatches=8, sliced=4)
    assert verdicts(one.program, seed) == (True, True), one
    for change in (damaged, crossed):
        passes, runs = verdicts(change(one.program, random.Random(seed)), seed)
        assert passes is runs, (one, change.__name__)
    assert verdicts(crossed(one.program, random.Random(seed)), seed) == (False, False) or one.request.m == 1
