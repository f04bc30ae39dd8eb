"""Two to five random features at once: they train like those that change a training, or the table refuses them."""

import pytest

from tests.drawn import drawn, outcome
from tests.tiers import few

# What says no: the table, a limit of memory, a rule of one key with another.
CODES = ("E110", "E115", "E118", "E119", "E120", "E125", "E302", "E303")


@pytest.mark.parametrize("seed", few(range(150), 4))
def test_drawn_features_train_alike_or_are_refused(seed):
    one = drawn(seed)
    how, why = outcome(one)
    assert how != "wrong", f"{one.name}: {why}"
    assert how == "right" or why.startswith(CODES), f"{one.name}: {why}"
