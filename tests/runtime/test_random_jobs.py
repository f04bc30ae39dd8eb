"""A few random jobs in random ways."""

import random

import pytest

from tests.runtime import random_models
from tests.runtime.random_jobs import tried
from tests.tiers import few

SEEDS = range(24)


@pytest.mark.parametrize("seed", few(SEEDS, 4))
def test_a_random_job_is_what_one_rank_makes_of_it_or_refused_before_it_starts(seed, tmp_path):
    assert tried(seed, tmp_path) in ("same", "refused")


def test_every_layer_of_the_box_is_drawn():
    drawn = {name for seed in range(300) for name in random_models.chain(random.Random(seed), 6)}
    assert drawn == {name for pieces in random_models.PIECES.values() for name in pieces}
