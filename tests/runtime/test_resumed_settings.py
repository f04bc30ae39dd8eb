"""A run that continues from a checkpoint computes what was trained: any setting without a shape is compared."""

import pytest

from zbc.job.spec import Adapter, Model
from zbc.job.trained import PRECISION, differences

LLAMA = {"family": "llama", "layers": 4, "hidden": 16, "heads": 4, "vocab": 31, "seq_len": 16}
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 8, "balance_loss": 0.01}
OWN = {"family": "mine:make", "layers": 3}
CHANGES = {  # key -> a model, and what it is changed to
    "family": (OWN, {"family": "mine:others"}),
    "layers": (LLAMA, {"layers": 5}),
    "hidden": (LLAMA, {"hidden": 32, "head_size": 4}),
    "heads": (LLAMA, {"heads": 2, "head_size": 8, "kv_heads": 2}),
    "kv_heads": (LLAMA, {"kv_heads": 2}),
    "head_size": (LLAMA, {"head_size": 8}),
    "variant": (LLAMA, {"variant": "qwen3"}),
    "window": (LLAMA, {"window": 4}),
    "experts": (LLAMA | MOE, {"experts": 8}),
    "top_k": (LLAMA | MOE, {"top_k": 3}),
    "ffn_hidden": (LLAMA | MOE, {"ffn_hidden": 16}),
    "router": (LLAMA | MOE, {"router": "sigmoid"}),
    "balance_loss": (LLAMA | MOE, {"balance_loss": 0.1}),
    "expert_groups": (LLAMA | MOE | {"expert_groups": [4, 1]}, {"expert_groups": [2, 1]}),
    "vocab": (LLAMA, {"vocab": 32}),
    "norm_eps": (LLAMA, {"norm_eps": 0.1}),
    "rope_theta": (LLAMA, {"rope_theta": 500.0}),
    "z_loss": (LLAMA, {"z_loss": 0.1}),
    "label_smoothing": (LLAMA, {"label_smoothing": 0.1}),
    "loss": (OWN, {"loss": "mine:loss"}),
    "args": (OWN, {"args": {"depth": 3}}),
    "ties": (OWN, {"ties": {"layers.2.weight": "layers.0.weight"}}),
    "graph": (OWN, {"graph": {"a": [1], "b": [2, "a"]}}),
    # told, not refused: these change rounding, or how far positions go
    "dtype": (LLAMA, {"dtype": "bfloat16"}),
    "parameters": ({**LLAMA, "dtype": "bfloat16"}, {"parameters": "bfloat16"}),
    "seq_len": (LLAMA, {"seq_len": 32}),
}
FREE = {  # these change no number of a step, or only the first one's
    "compile": True,
    "loss_chunk": 4,
    "loss_scale": 2.0,
    "imbalance": 2.0,
    "pretrained": "folder",
    "config": "config.json",
}


def test_every_setting_of_a_model_is_sorted():
    assert CHANGES.keys() | FREE.keys() == Model.model_fields.keys() and not CHANGES.keys() & FREE.keys()


@pytest.mark.parametrize("key", CHANGES)
def test_a_setting_that_changes_what_is_computed_is_named(key):
    before, change = CHANGES[key]
    told = differences({"model": before}, {"model": before | change})
    names = {difference.key for difference in told}
    assert any(name == f"model.{key}" or name.startswith(f"model.{key}.") for name in names)
    assert (names <= PRECISION) == (key in ("dtype", "parameters", "seq_len"))
    assert not differences({"model": before | change}, {"model": before | change})


@pytest.mark.parametrize("key", FREE)
def test_a_setting_that_changes_only_how_it_is_computed_may_change(key):
    assert not differences({"model": LLAMA | MOE}, {"model": LLAMA | MOE | {key: FREE[key]}})


def test_defaults_are_the_same_whether_written_or_not():
    written = {"kv_heads": 4, "head_size": 4, "variant": "plain"}
    assert not differences({"model": LLAMA | MOE}, {"model": LLAMA | MOE | written})
    assert not differences({"model": LLAMA, "adapter": {"rank": 4}}, {"model": LLAMA, "adapter": ADAPTED})
    assert not differences({"model": {**LLAMA, "gone": 1}}, {"model": LLAMA})  # a key that this version lacks


ADAPTED = {"rank": 4, "alpha": 4.0, "targets": ["qkv"]}


@pytest.mark.parametrize(("key", "value"), [("rank", 8), ("alpha", 8.0)])
def test_settings_of_adapters_are_compared_but_for_targets_which_name_other_weights(key, value):
    assert {"rank", "alpha", "targets", "dropout"} == Adapter.model_fields.keys()
    told = differences({"model": LLAMA, "adapter": ADAPTED}, {"model": LLAMA, "adapter": ADAPTED | {key: value}})
    assert [difference.key for difference in told] == [f"adapter.{key}"]
