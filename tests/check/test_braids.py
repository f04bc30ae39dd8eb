"""Orders with groups: proofs and the operational machine agree, as they are, with marks moved, and damaged."""

from __future__ import annotations

import random

import pytest

from tests.check.braids import draw, unmarked
from tests.check.pairs import damaged, verdicts
from tests.tiers import few


@pytest.mark.parametrize("seed", few(range(300), 30))
def test_random_groups_are_proven_if_they_run(seed):
    one = draw(seed, ranks=5, microbatches=8)
    passes, runs = verdicts(one.program, seed)
    assert passes == runs, str(one)
    assert runs or one.name != "braid-v", str(one)
    for change in (unmarked, damaged):
        passes, runs = verdicts(change(one.program, random.Random(seed)), seed)
        assert passes == runs, f"{one} {change.__name__}"
