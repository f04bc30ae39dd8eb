"""Plans that were made for microbatches of unequal length train what one process does."""

import pytest

from tests.composed import TOLERANCE, apart, settings, trained
from tests.tiers import few

TOKENS = [32, 4, 16, 2, 32, 8, 24, 4]
CASES = [
    ("1f1b", ()),
    ("zb-auto", ()),
    ("chimera-zb", ()),
    ("zb-v", ()),
    ("interleaved-1f1b", ("sharded weights",)),
    ("1f1b", ("shared vocabulary",)),
    ("zb-v", ("offload",)),
    ("zb-h1", ("post-validate",)),
    ("1f1b", ("two versions",)),
]


@pytest.mark.parametrize(("kind", "traits"), few(CASES, 3))
def test_they_train_as_one_process_does(kind, traits):
    unequal, plain = settings(*traits), settings(*(trait for trait in traits if trait == "two versions"))
    unequal["schedule"] |= {"kind": kind, "tokens": TOKENS[: unequal["schedule"]["microbatches"]]}
    plain["parallel"] = {"pp": plain["parallel"]["pp"] if traits == ("two versions",) else 1}
    plain["parallel"]["dp"] = unequal["parallel"].get("dp", 1)
    plain["schedule"]["microbatches"] = unequal["schedule"]["microbatches"]
    assert apart(trained(unequal), trained(plain)) <= TOLERANCE
