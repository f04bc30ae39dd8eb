"""Three to six random features at once train like one rank with those that change a training, or are refused."""

import pytest

from tests.drawn import drawn, outcome
from tests.tiers import few

# By the table, a rule of one key with another, a limit; where replicas would meet in other orders, and where two
# versions of the weights are too few.
REFUSED = ("E1", "E3", "E209", "E210")

# torch hides this warning while it compiles, which fails if several threads do.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.mark.parametrize("seed", few(range(150), [0, 41, 43, 53]))
def test_drawn_features_train_alike_or_are_refused(seed):
    one = drawn(seed)
    how, why, *_ = outcome(one)
    assert how == "right" or (how == "refused" and why.startswith(REFUSED)), f"{one.name}: {how}, {why}"
