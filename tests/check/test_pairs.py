"""Bidirectional and wave schedules of any size are complete and deadlock-free, for the check and for the machine."""

from __future__ import annotations

import random

import pytest

from tests.check.pairs import damaged, draw, verdicts
from tests.tiers import few


@pytest.mark.parametrize("block", few(range(10), 2))
def test_check_and_machine_agree_on_random_schedules_and_on_damaged_ones(block):
    passed = 0
    for seed in range(20 * block, 20 * block + 20):
        pair = draw(seed, ranks=6, microbatches=10)
        assert verdicts(pair.program, seed) == (True, True), pair
        broken = damaged(pair.program, random.Random(seed))
        found = verdicts(broken, seed)
        assert found[0] == found[1], f"{pair}, damaged with seed {seed}: check {found[0]}, machine {found[1]}"
        passed += found[0]
    assert passed < 20, "damage is seen"
