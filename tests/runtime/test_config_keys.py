"""Configurations with keys at any place where transformers reads them: the same logits as its model, or refused."""

import json
import os
import random

import pytest
import torch

from tests.tiers import few

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

from zbc.errors import ZbcError
from zbc.job import hfconfig
from zbc.training.models import pretrained
from zbc.training.models.model import layers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
KINDS = ["gpt2", *hfconfig._KINDS]
TOKENS = 12
BASE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "initializer_range": 0.2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
BASE |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
BASE |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OWN = {
    "gpt2": {"n_positions": 16, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
    "mistral": {"sliding_window": 5},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
}
NAMES = {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 61, "initializer_range": 0.2}  # GPT-2's own
BY_LAYER = [["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2, ["sliding_attention"] * 4]


def drawn(kind, rng):
    """A config.json of a kind of model with some keys, each at a place where transformers finds it."""

    def rope():
        stretch = rng.choice(["default", "linear", "dynamic", "llama3", "yarn"])
        table = {rng.choice(["rope_type", "type"]): stretch}
        table |= {} if stretch == "default" else {"factor": rng.choice([2.0, 4.0])}
        table |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if stretch == "llama3" else {}
        beside = {"original_max_position_embeddings": 8} if stretch in ("llama3", "yarn") else {}
        return table | some({**beside, "rope_theta": 500.0, "partial_rotary_factor": 0.5}, 0.3)

    def some(keys, chance):
        return {key: value for key, value in keys.items() if rng.random() < chance}

    if kind == "gpt2":
        twice = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 14}
        keys = {**twice, "n_inner": 40, "activation_function": rng.choice(["gelu", "relu"])}
        return {"model_type": kind, **NAMES, **OWN[kind], **some(keys, 0.25)}
    layered = {"full_attention": rope(), "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    keys = {
        "rope_theta": rng.choice([100.0, 500]),
        "partial_rotary_factor": rng.choice([0.5, 1.0]),
        "rope_scaling": rng.choice([None, {}, rope(), rope()]),
        "rope_parameters": rng.choice([rope(), rope(), layered]),
        "original_max_position_embeddings": 4,
        "sliding_window": rng.choice([3, 5, None]),
        "use_sliding_window": rng.random() < 0.7,
        "max_window_layers": rng.choice([0, 2, 4, 9]),
        "layer_types": rng.choice(BY_LAYER),
        "num_key_value_heads": rng.choice([None, 4]),
        "num_experts": 6,
        "num_local_experts": 6,
        "num_experts_per_tok": rng.choice([1, 3]),
        "norm_topk_prob": rng.random() < 0.5,
        "pad_token_id": 3,
        "attention_bias": True,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": 0.01,
    }
    return {"model_type": kind, **BASE, **OWN.get(kind, {}), **some(keys, 0.2)}


def compared(config, folder):
    """Whether transformers and zbc both read a configuration; asserts that their logits are the same then."""
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tokens = torch.randint(0, 61, (2, TOKENS))
    try:
        theirs = transformers.AutoConfig.from_pretrained(folder)
        peer = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
        peer(tokens)
    except Exception:  # transformers refuses it, in many ways
        return False
    peer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))  # not as it was just written
    try:
        model = hfconfig.model_of(config, "config.json")
        plans = pretrained.fill(layers(model, 0), model, folder)
    except ZbcError:
        return False
    value = tokens
    with torch.no_grad():
        for plan in plans:
            value = plan.build(0)(value)
        torch.testing.assert_close(value, peer(tokens).logits, rtol=2e-4, atol=2e-4, msg=str(config))
    return True


@pytest.mark.long("llama", "mixtral", "qwen2_moe", "qwen3_moe")
@pytest.mark.parametrize("seed", few(range(6), [0]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_is_the_model_of_transformers_or_refused(kind, seed, tmp_path):
    rng, count = random.Random(f"{kind} {seed}"), 0
    for _ in range(60):
        count += compared(drawn(kind, rng), tmp_path)
        if count == 4:
            return
    pytest.fail(f"of 60 configurations {count} are read")
