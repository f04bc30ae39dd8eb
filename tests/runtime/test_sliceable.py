"""Layers, losses and data of users that cannot run in slices of a sequence are refused, by name, before training."""

import pytest

from tests.runtime.test_slices import HERE, SEQUENCES, plan_of, user
from tests.threads import run_threads
from zbc.errors import ZbcError

LONG = {"data": {"kind": HERE + "Sequences", "args": {"length": 48}}, "rows": (0, 20, 48)}
OTHERS = [
    ("convolution", "layers.2 mixes tokens of different slices (they differ by", "from token 20 on)"),
    ("normed", "layers.2 mixes tokens of different slices", "from token 0 on)"),
    ("both_ways", "layers.2 mixes tokens of different slices", "from token 0 on)"),
    ("own_causal", "layers.2 mixes tokens of different slices", "from token 20 on)"),
    ("pooled", "layers.2 mixes tokens of different slices", "from token 0 on)"),
    ("state", "layers.2 mixes tokens of different slices", "from token 20 on)"),
    ("recurrent", "layers.2 mixes tokens of different slices", "from token 20 on)"),
    ("counts", "layers.2 changes seen in its forward, which runs once for every slice", ""),
]


def refused(**options):
    with pytest.raises(ZbcError) as caught:
        run_threads(plan_of("1f1b", 1, 2, 2, **options), 1)
    return caught.value


@pytest.mark.parametrize(("what", "text", "where"), OTHERS)
def test_a_layer_that_mixes_tokens_on_its_own_is_refused_by_name(what, text, where):
    error = refused(model={**user("mixing", what=what), "seq_len": 48}, **LONG)
    assert error.code == "E512" and text in error.message and error.message.endswith(where)
    assert error.hint.endswith("or set schedule.slices = 1")


def test_a_layer_that_draws_random_numbers_is_not_compared():
    model = {**user("mixing", what="noisy"), "seq_len": 48}
    (worker,) = run_threads(plan_of("1f1b", 1, 2, 2, model=model, **LONG), 1)
    assert len(worker.results) == 1


def test_a_gradient_that_mixes_tokens_is_seen_too():
    error = refused(model={**user("mixing", what="backwards"), "seq_len": 48}, **LONG)
    assert error.code == "E512" and "layers.2 mixes tokens of different slices in its backward" in error.message


@pytest.mark.parametrize("loss", ["without_zeros", "sum_over_tokens", "last_token"])
def test_a_loss_that_is_no_mean_over_tokens_is_refused(loss):
    padded = {"kind": HERE + "Padded", "args": {"ignored": 0}}
    what = ("tokens", {"data": padded}) if loss == "without_zeros" else ("mixers", SEQUENCES)
    error = refused(model=user(what[0], loss=HERE + loss), **what[1])
    assert error.code == "E513" and error.message.startswith(f"model: {HERE}{loss} is no mean over tokens: ")


def test_samples_that_are_no_sequences_are_refused():
    error = refused(model=user("mixers"), data={"kind": HERE + "OneNumber"})
    assert (error.code, error.hint) == ("E110", "set schedule.slices = 1")
    assert error.message.endswith(f"and targets of {HERE}OneNumber are float32 [] each")
