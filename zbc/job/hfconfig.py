"""Converts `[model]` from and to a Hugging Face config.json, for GPT-2, Llama and models that differ little from it.

Any other model, or a key with a value that zbc would compute in another way, is none of these: transformers builds it
(hfmodel.py). So is one without a size, whose default transformers knows. Dropout rates are not read: zbc's families
have no dropout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.job.model_section import Model

CONFIG = "config.json"
_GELU = {"gelu_new": "gpt2", "gelu_pytorch_tanh": "gpt2", "gelu": "plain"}


class _Kind(NamedTuple):
    """A model_type that is a llama of a `variant`; with experts `number` and `width` are the keys of their number and
    width, and `shared` that of the width of the expert that all tokens meet."""

    variant: str = "plain"
    number: str = ""
    width: str = "moe_intermediate_size"
    shared: str = ""


_KINDS = {
    "llama": _Kind(),
    "mistral": _Kind(),
    "qwen2": _Kind("qwen2"),
    "qwen3": _Kind("qwen3"),
    "mixtral": _Kind(number="num_local_experts", width="intermediate_size"),
    "qwen2_moe": _Kind("qwen2", "num_experts", shared="shared_expert_intermediate_size"),
    "qwen3_moe": _Kind("qwen3", "num_experts"),
}
_WINDOWED = ("mistral", "mixtral")  # with one window for all layers
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
_ONLY: dict[str, Any] = {  # key -> the only value that zbc computes, also the one without the key
    "hidden_act": "silu",
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "output_router_logits"), False),
    **dict.fromkeys(("pad_token_id", "quantization_config"), None),
    "mlp_only_layers": [],
    **dict.fromkeys(("partial_rotary_factor", "decoder_sparse_step"), 1),
    "router_jitter_noise": 0,
    "qkv_bias": True,
}
_ONLY_GPT2 = {
    "scale_attn_weights": True,
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"), False),
    "quantization_config": None,
}
_GPT2 = {  # the name that transformers gives it in all models and that counts first, and GPT-2's own
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "seq_len": ("max_position_embeddings", "n_positions"),
}


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The config.json of a folder, or another file by `name`. Raises E520."""
    path = folder / name
    hint = "name a folder with config.json and *.safetensors, as transformers' save_pretrained writes it"
    try:
        config = json.loads(contents(path))
    except OSError as error:
        raise ZbcError("E520", f"model: cannot read {path}: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise ZbcError("E520", f"model: {path} is not JSON", details=[str(error)[:200]], hint=hint) from None
    if not isinstance(config, dict):
        raise ZbcError("E520", f"model: {path} is not a JSON object", hint=hint)
    return config


def model_of(config: Mapping[str, Any], source: str) -> Model:
    """The `[model]` with the same function as transformers' model of `config`; `seq_len` is the longest it allows.
    Raises E521 for a model that zbc's families do not compute; `source` names the file in messages."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ("gpt2", *_KINDS):
        raise _refused(source, "model_type", kind)
    for key, value in (_ONLY_GPT2 if kind == "gpt2" else _ONLY).items():
        if config.get(key) is not None and config[key] != value:
            raise _refused(source, key, config[key])
    try:
        found = _gpt2(config, source) if kind == "gpt2" else _llama(config, _KINDS[kind], source)
        return Model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        text = f"model: {source} gives no valid model: {place}: {first['msg'].lower()}"
        raise ZbcError("E521", text, hint="compare it with the config.json of the original model") from None


def _gpt2(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _GELU:
        raise _refused(source, "activation_function", activation)
    return {
        "family": "gpt",
        **{key: _size(config, source, name if name in config else own) for key, (name, own) in _GPT2.items()},
        "ffn_hidden": config.get("n_inner"),
        "vocab": _size(config, source, "vocab_size"),
        "variant": _GELU[activation],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "ties": config.get("tie_word_embeddings", True) or {},
    }


def _llama(config: Mapping[str, Any], kind: _Kind, source: str) -> dict[str, Any]:
    named, types = config["model_type"], config.get("layer_types")
    if types is not None and not (isinstance(types, list) and {"full_attention"} >= {*map(str, types)}):
        raise _refused(source, "layer_types", types)
    own = _experts(config, kind, source) if kind.number else {"ffn_hidden": _size(config, source, "intermediate_size")}
    if named == "mistral" and "sliding_window" not in config:
        raise _refused(source, "sliding_window", None)
    return {
        "family": "llama",
        "variant": kind.variant,
        **{key: _size(config, source, theirs) for key, theirs in _SIZES.items()},
        "head_size": _size(config, source, "head_dim") if kind.variant == "qwen3" else config.get("head_dim"),
        "rope_theta": _theta(config, source),
        "ties": config.get("tie_word_embeddings", False) or {},
        "window": config.get("sliding_window") if named in _WINDOWED else None,
        **own,
    }


def _experts(config: Mapping[str, Any], kind: _Kind, source: str) -> dict[str, Any]:
    counts = {config[key] for key in ("num_experts", "num_local_experts") if isinstance(config.get(key), int)}
    if len(counts) != 1:
        raise _refused(source, kind.number, config.get(kind.number))
    met, width = (_size(config, source, key) for key in ("num_experts_per_tok", kind.width))
    normed = kind.variant == "plain" or config.get("norm_topk_prob", False)
    if normed and met == 1:  # a weight of 1, of which routers learn nothing
        raise _refused(source, "num_experts_per_tok", met)
    return {
        "experts": counts.pop(),
        "top_k": met,
        "ffn_hidden": [width, _size(config, source, kind.shared)] if kind.shared else width,
        "router": "softmax" if normed or met == 1 else "softmax of all",
    }


def _theta(config: Mapping[str, Any], source: str) -> Any:
    """The base of rotary positions, if they are plain and all places that have it agree."""
    found = [config["rope_theta"]] if config.get("rope_theta") is not None else []
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key) or {}
        plain = isinstance(table, Mapping) and not any(isinstance(value, Mapping) for value in table.values())
        if not plain or table.get("rope_type", table.get("type", "default")) != "default":
            raise _refused(source, key, table)
        if table.get("partial_rotary_factor", 1) != 1:
            raise _refused(source, f"{key}.partial_rotary_factor", table["partial_rotary_factor"])
        found += [table["rope_theta"]] if table.get("rope_theta") is not None else []
    if not found or found != found[:1] * len(found):
        raise _refused(source, "rope_theta", found[-1] if found else None)
    return float_of(found[0])


def _size(config: Mapping[str, Any], source: str, key: str) -> Any:
    """A value that has to be there."""
    if config.get(key) is None:
        raise _refused(source, key, None)
    return float_of(config[key]) if key.endswith("_eps") else config[key]


def float_of(value: Any) -> Any:
    """A whole number of JSON as a float: 500000 for 500000.0; other values unchanged."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and abs(value) < 2**63 else value


def _refused(source: str, key: str, value: Any) -> ZbcError:
    text = f"model: {source} has {key} = {json.dumps(value)[:80]}, which zbc's own families do not compute"
    hint = "drop model.family and its sizes: model.pretrained alone is the model as transformers builds it"
    return ZbcError("E521", text, hint=hint)


# ---- a job against a folder ----------------------------------------------------------------------------------

_COMPARED = ("family", "layers", "hidden", "heads", "head_width", "kv_width", "vocab", "norm_eps", "rotary")
_OF_EXPERTS = ("experts", "met", "shared_hidden", "normed", "router", "expert_groups")


def check_fits(job: Model, config: Mapping[str, Any], source: str) -> Model:
    """The model of the folder. Raises E521 with every size in which the job differs from it."""
    folder = model_of(config, source)
    keys = [*_COMPARED, "mlp_width", *(_OF_EXPERTS if folder.experts or job.experts else ())]
    keys += ["variant", "window"] if folder.family == job.family else []
    keys += ["rope_theta"] if folder.rotary else []
    names = {"head_width": "head_size", "mlp_width": "ffn_hidden", "kv_width": "kv_heads x head_size"}
    names |= {"met": "top_k", "shared_hidden": "ffn_hidden, of all tokens", "normed": "router"}
    wrong = [
        f"{names.get(key, key)}: the job has {getattr(job, key)}, {source} {getattr(folder, key)}"
        for key in keys
        if getattr(job, key) != getattr(folder, key)
    ]
    if not folder.rotary and (job.seq_len or 0) > (folder.seq_len or 0):
        wrong.append(f"seq_len: the job has {job.seq_len}, {source} has positions for {folder.seq_len}")
    if job.tie_embeddings and not folder.tie_embeddings:
        wrong.append(f"ties: the job ties them, {source} has a matrix for each")
    if wrong:
        hint = "`zbc init DIR --from-hf FOLDER` writes a job that fits; plan again after a change of [model]"
        raise ZbcError("E521", "model: the job is another model than model.pretrained", details=wrong, hint=hint)
    return folder


# ---- export --------------------------------------------------------------------------------------------------


def config_of(model: Model) -> dict[str, Any]:
    """The config.json with which transformers computes the same function. Raises E524 if there is none."""
    if not model.builtin:
        text = f"run: family {model.family} cannot be written as a Hugging Face folder"
        raise ZbcError("E524", text, hint="save the weights of a family of your own in your own code")
    if model.family == "llama":
        return _llama_config(model)
    if model.rotary:
        text = "run: a gpt with rotary positions has no counterpart in Hugging Face's GPT-2"
        raise ZbcError("E524", text, hint='learned positions, or family = "llama"')
    if model.kv_heads not in (None, model.heads):
        text = "run: a gpt with fewer heads of keys and values has no counterpart in Hugging Face's GPT-2"
        raise ZbcError("E524", text, hint='drop model.kv_heads, or family = "llama"')
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocab,
        "n_positions": model.seq_len,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.mlp_width,
        "activation_function": "gelu_new" if model.variant == "gpt2" else "gelu",
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
        "tie_word_embeddings": model.tie_embeddings,
    }


def config_from(source: Mapping[str, Any], model: Model, dtype: str) -> dict[str, Any]:
    """The config.json of a model trained from the model of `source`, with weights of type `dtype`. Keys of `source` are
    kept, also those that zbc does not read, except for those that this training changed."""
    given, named = model_of(source, CONFIG), [_class_of(str(source["model_type"]))]
    changed: dict[str, Any] = {"architectures": named} if source.get("architectures") != named else {}
    if model.tie_embeddings != given.tie_embeddings:
        changed["tie_word_embeddings"] = model.tie_embeddings
    longest = source.get("max_position_embeddings")
    if isinstance(longest, int) and (model.seq_len or 0) > longest:
        changed["max_position_embeddings"] = model.seq_len
    types = {key: dtype for key in ("dtype", "torch_dtype") if source.get(key) not in (None, dtype)}
    return {**source, **changed, **types}


def _class_of(kind: str) -> str:
    return "GPT2LMHeadModel" if kind == "gpt2" else f"{kind.title().replace('_', '')}ForCausalLM"


def _llama_config(model: Model) -> dict[str, Any]:
    """Of the first kind that has its variant, with or without experts; of those with a window mistral."""
    fits = (k for k, v in _KINDS.items() if v.variant == model.variant and bool(v.number) == bool(model.experts))
    kind = next(name for name in fits if name in _WINDOWED or model.window is None or model.variant != "plain")
    if model.window is not None and kind not in _WINDOWED:
        text = "run: a llama with window and variant has no counterpart in transformers"
        raise ZbcError("E524", text, hint="drop model.variant, or model.window")
    return {
        "architectures": [_class_of(kind)],
        "model_type": kind,
        **{theirs: getattr(model, key) for key, theirs in _SIZES.items()},
        "num_key_value_heads": model.kv_heads or model.heads,
        "intermediate_size": model.mlp_width,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        **dict.fromkeys(("attention_bias", "mlp_bias"), False),
        "sliding_window": model.window,
        **(_experts_config(model, kind) if model.experts else {}),
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
        "tie_word_embeddings": model.tie_embeddings,
    }


def _experts_config(model: Model, name: str) -> dict[str, Any]:
    kind = _KINDS[name]
    wrong = {
        f"{'with' if model.shared_hidden else 'without'} an expert that all tokens meet": bool(model.shared_hidden)
        != bool(kind.shared),
        "whose weights of experts do not add up to 1": kind.variant == "plain" and not model.normed,
        f"with a {model.router} router": model.router == "sigmoid",
        "with groups of experts": bool(model.expert_groups),
    }
    if (why := next((why for why, so in wrong.items() if so), None)) is not None:
        text = f"run: experts of a llama {why} have no counterpart in transformers"
        raise ZbcError("E524", text, hint='drop variant, or use "qwen2" (which has ffn_hidden of two) or "qwen3"')
    keys: dict[str, Any] = {kind.number: model.experts, "num_experts_per_tok": model.met, kind.width: model.mlp_width}
    keys["router_aux_loss_coef"] = model.balances[0]
    if kind.variant != "plain":
        keys |= {"norm_topk_prob": model.normed, "decoder_sparse_step": 1}
    return keys | ({kind.shared: model.shared_hidden} if kind.shared else {})
