"""Hugging Face models that zbc plans but does not train yet, as the nearest model that it has.

Their `[model]` is a stand-in with about as many weights and operations; the differences are reported. The key
`stands_for` names the model and keeps it from being trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from zbc.errors import ZbcError
from zbc.job import hfconfig
from zbc.job.model_section import Model

_KV_HEADS = 8  # of the stand-in for latent attention


def model_of(config: Mapping[str, Any], source: str) -> tuple[Model, list[str]]:
    """The model to plan with, and its differences from the model of `config`; [] if zbc trains that model.

    Raises E521 as `hfconfig.model_of`.
    """
    stand_in = _STAND_INS.get(str(config.get("model_type")))
    if stand_in is None:
        return hfconfig.model_of(config, source), []
    try:
        values, differences = stand_in(config)
        named = {"family": "llama", "variant": "qwen3_moe", "stands_for": str(config["model_type"])}
        return Model.model_validate({**named, **values}), differences
    except (KeyError, TypeError, ZeroDivisionError, ValidationError) as error:
        text = f"model: {source} lacks a size of a {config['model_type']}, or has one that is no number"
        hint = "compare it with the config.json of the original model"
        raise ZbcError("E521", text, hint=hint, details=[str(error).split("\n")[0][:200]]) from None


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "seq_len": config["max_position_embeddings"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "top_k": config["num_experts_per_tok"],
    }


def _deepseek(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """DeepSeek-V2 and V3: latent attention, and experts with a shared expert without a gate."""
    h, heads, rope = config["hidden_size"], config["num_attention_heads"], config["qk_rope_head_dim"]
    key, value, latent = config["qk_nope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
    query = heads * (key + rope)
    q_rank = config.get("q_lora_rank")
    weights = q_rank * (h + query) if q_rank else h * query
    weights += h * (latent + rope) + latent * heads * (key + value) + heads * value * h
    groups = _KV_HEADS if heads % _KV_HEADS == 0 else 1
    size = max(8, round(weights / (2 * h * (heads + groups)) / 8) * 8)
    width, dense = config["moe_intermediate_size"], config.get("first_k_dense_replace", 0)
    values = {
        **_common(config),
        "kv_heads": groups,
        "head_size": size,
        "experts": config["n_routed_experts"],
        "expert_hidden": width,
        "shared_hidden": config["n_shared_experts"] * width if config.get("n_shared_experts") else None,
        "variant": "qwen2_moe" if config.get("n_shared_experts") else "qwen3_moe",
        "norm_top_k": bool(config.get("norm_topk_prob", config["model_type"] == "deepseek_v3")),
        "router": config.get("scoring_func") or ("sigmoid" if config["model_type"] == "deepseek_v3" else "softmax"),
        **_groups(config),
        **({"first_dense": dense, "ffn_hidden": config["intermediate_size"]} if dense else {}),
    }
    less = 1 - 2 * size / (key + rope + value)
    differences = [
        f"latent attention (MLA) is planned as {heads} heads of {size} that share {groups} keys and values: as many "
        f"weights, {abs(less):.0%} {'less' if less > 0 else 'more'} work on scores"
    ]
    if config.get("num_nextn_predict_layers"):
        differences.append("blocks that predict further tokens (MTP) are left out")
    return values, differences


def _groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of experts, if a token meets those of some groups only."""
    groups, limit = config.get("n_group") or 1, config.get("topk_group") or 1
    limits = config["model_type"] == "deepseek_v3" or config.get("topk_method") == "group_limited_greedy"
    return {"expert_groups": groups, "node_limit": limit} if limits and limit < groups else {}


def _gpt_oss(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """gpt-oss: attention with sinks, and experts with biases."""
    values = {
        **_common(config),
        "kv_heads": config["num_key_value_heads"],
        "head_size": config["head_dim"],
        "experts": config["num_local_experts"],
        "expert_hidden": config["intermediate_size"],
        "attention_bias": bool(config.get("attention_bias", True)),
        **({"window": config["sliding_window"], "whole_every": 2} if config.get("sliding_window") else {}),
    }
    return values, ["sinks of attention, and the biases of experts and routers are left out"]


_STAND_INS: dict[str, Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}
