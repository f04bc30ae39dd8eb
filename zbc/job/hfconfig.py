"""Converts `[model]` from and to a Hugging Face config.json, for GPT-2, Llama and its variants, also with experts.

A key that zbc would compute in another way than transformers is refused by name, never ignored. Dropout rates are not
read: zbc's families have no dropout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.job.model_section import AROUND, GEMMA, OWN, Model, RopeScaling

CONFIG = "config.json"
_ALIKE = 3  # common first letters of the names of related models
_GELU = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_GATES = ("hidden_act", "hidden_activation")  # the activation of the gate of a gemma, in either
_FIXED: dict[str, dict[str, Any]] = {  # key -> the only value that zbc computes
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "mlp_bias": False},
    **{kind: {"hidden_act": "silu"} for kind in ("mistral", "qwen2", "qwen3", "phi3")},
    "granite": {"hidden_act": "silu", "mlp_bias": False},
    "mixtral": {"hidden_act": "silu", "router_jitter_noise": 0.0},
    "qwen2_moe": {"hidden_act": "silu", "decoder_sparse_step": 1, "qkv_bias": True},
    "qwen3_moe": {"hidden_act": "silu", "decoder_sparse_step": 1},
    "smollm3": {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False},
    **{kind: {**dict.fromkeys(_GATES, "gelu_pytorch_tanh"), "use_bidirectional_attention": False} for kind in GEMMA},
}


@dataclass(frozen=True)
class _Variant:
    """Defaults of transformers for keys that the config.json of a variant of Llama lacks."""

    hidden: int = 4096
    ffn: int = 11008
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None
    head_size: int | None = None
    vocab: int = 32000
    seq_len: int = 2048
    eps: float = 1e-6
    tied: bool = False
    padding: int | None = None
    theta: float = 10000.0
    count: str = "num_experts"  # the key of the number of experts
    width: str = "moe_intermediate_size"  # the key of their width
    experts: tuple[int, int, int, bool] | None = None  # number of experts, top k, width, `norm_top_k`
    window: int | None = None  # of all layers except every `every`-th
    every: int = 1  # or, without a window, every such layer has no positions
    caps: tuple[float | None, float | None] = (None, None)  # of scores and logits
    shared: int | None = None  # the width of the shared expert


_VARIANTS = {
    "llama": _Variant(),
    "mistral": _Variant(ffn=14336, kv_heads=8, seq_len=131072),
    "qwen2": _Variant(ffn=22016, kv_heads=32, vocab=151936, seq_len=32768),
    "qwen3": _Variant(ffn=22016, kv_heads=32, head_size=128, vocab=151936, seq_len=32768),
    "phi3": _Variant(3072, 8192, vocab=32064, seq_len=4096, eps=1e-5, padding=32000),
    "granite": _Variant(),
    "mixtral": _Variant(
        ffn=14336,
        kv_heads=8,
        seq_len=131072,
        eps=1e-5,
        theta=1e6,
        count="num_local_experts",
        width="intermediate_size",
        experts=(8, 2, 14336, True),
    ),
    "qwen2_moe": _Variant(2048, 5632, 24, 16, 16, None, 151936, 32768, experts=(60, 4, 1408, False), shared=5632),
    "qwen3_moe": _Variant(2048, 6144, 24, 32, 4, None, 151936, 32768, experts=(128, 8, 768, False)),
    "gemma": _Variant(3072, 24576, 28, 16, 16, 256, 256000, 8192, tied=True, padding=0),
    "gemma2": _Variant(
        2304, 9216, 26, 8, 4, 256, 256000, 8192, tied=True, padding=0, window=4096, every=2, caps=(50.0, 30.0)
    ),
    "gemma3_text": _Variant(
        2304, 9216, 26, 8, 4, 256, 262208, 131072, tied=True, padding=0, theta=1e6, window=4096, every=6
    ),
    "smollm3": _Variant(2048, 11008, 36, 16, 4, None, 128256, 32768, tied=True, padding=128004, theta=2e6, every=4),
}
_CLASSES = {"gemma3_text": "Gemma3", "smollm3": "SmolLM3"}  # whose classes are not called as they are: Qwen3Moe
# Variants that may have biases in all of attention, and those with one sliding window for all layers, with its default.
_BIASED = ("llama", "qwen3", *GEMMA, "smollm3", "granite", "qwen3_moe")
_WINDOWED = {"mistral": 4096, "phi3": None, "mixtral": None}


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

    Raises E521 for features that zbc lacks; `source` names the file in messages.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FIXED:
        raise _refused(source, "model_type", kind, f"zbc reads {', '.join(_FIXED)}", _nearest(str(kind)))
    fixed = {**_FIXED[kind], "quantization_config": None}
    for key, value in fixed.items():
        if config.get(key) is not None and config[key] != value:
            raise _refused(source, key, config[key], f"zbc computes {json.dumps(value)} only")
    try:
        return Model.model_validate((_gpt2 if kind == "gpt2" else _llama)(config, source))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _invalid(source, f"{place}: {first['msg'].lower()}") from None
    except (TypeError, ValueError) as error:
        raise _invalid(source, str(error)) from None


def _invalid(source: str, why: str) -> ZbcError:
    text = f"model: {source} gives no valid model: {why}"
    return ZbcError("E521", text, hint="compare it with the config.json of the original model")


_GPT2 = {  # the name that transformers gives it in all models and that counts first, GPT-2's own, and the default
    "layers": ("num_hidden_layers", "n_layer", 12),
    "hidden": ("hidden_size", "n_embd", 768),
    "heads": ("num_attention_heads", "n_head", 12),
    "seq_len": ("max_position_embeddings", "n_positions", 1024),
}


def _gpt2(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _GELU:
        raise _refused(source, "activation_function", activation, f"zbc has {', '.join(_GELU)}")
    return {
        "family": "gpt",
        **{key: config.get(name, config.get(own, usual)) for key, (name, own, usual) in _GPT2.items()},
        "ffn_hidden": config.get("n_inner"),
        "vocab": config.get("vocab_size", 50257),
        "activation": _GELU[activation],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _llama(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`[model]` of Llama and its variants. `seq_len` ends at a sliding window: within it attention is plain causal."""
    kind = config["model_type"]
    given = config.get("sliding_window") if kind in _WINDOWED or config.get("use_sliding_window") else None
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise _refused(source, "sliding_window", given, "it is a number of positions")
    window = window_of(config)
    default = _VARIANTS[kind]
    longest = config.get("max_position_embeddings", default.seq_len)
    words, padding = config.get("vocab_size", default.vocab), config.get("pad_token_id", default.padding)
    if isinstance(padding, int) and isinstance(words, int) and not -words <= padding < words:
        raise _refused(source, "pad_token_id", padding, f"it is a word of {words}")
    return {
        "family": "llama",
        "variant": kind,
        "attention_bias": config.get("attention_bias", False) if kind in _BIASED else False,
        "layers": config.get("num_hidden_layers", default.layers),
        "hidden": config.get("hidden_size", default.hidden),
        "heads": config.get("num_attention_heads", default.heads),
        "kv_heads": config.get("num_key_value_heads", default.kv_heads),
        "head_size": config.get("head_dim", default.head_size),
        **({"ffn_hidden": config.get("intermediate_size", default.ffn)} if default.experts is None else {}),
        "vocab": words,
        "padding_token": words + padding if isinstance(padding, int) and padding < 0 else padding,
        "seq_len": min(longest, window) if window is not None and isinstance(longest, int) else longest,
        "norm_eps": config.get("rms_norm_eps", default.eps),
        **_rope(config, source),
        "tie_embeddings": config.get("tie_word_embeddings", default.tied),
        **(_experts(config, default, source) if default.experts is not None else {}),
        **_own(config, default),
    }


_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_scale": "logits_scaling",
}


def _own(config: Mapping[str, Any], default: _Variant) -> dict[str, Any]:
    """Keys of Granite, SmolLM3 and Gemma."""
    kind = config["model_type"]
    if kind == "granite":
        return {key: float_of(config.get(theirs, 1.0)) for key, theirs in _GRANITE.items()}
    if kind == "smollm3":
        turned = config.get("no_rope_layers")
        every = config.get("no_rope_layer_interval", default.every)
        return {"unturned_every": every if turned is None else _every([bool(layer) for layer in turned])}
    if kind not in AROUND:
        return {}
    size, caps = config.get("query_pre_attn_scalar", 256), dict(zip(_CAPS, default.caps, strict=True))
    types = config.get("layer_types")
    every = config.get("sliding_window_pattern", default.every)
    every = every if types is None else _every([layer == "sliding_attention" for layer in types])
    window = config.get("sliding_window", default.window)
    keys = {key: float_of(config.get(_CAPS[key], cap)) for key, cap in caps.items()}
    if kind == "gemma3_text":
        keys["scores_cap"] = None  # as transformers, which does not read it there
    plain = config.get("head_dim", default.head_size) == size
    keys["attention_scale"] = None if plain or not isinstance(size, int | float) or size <= 0 else size**-0.5
    return keys | ({"window": window, "whole_every": every} if window is not None and every != 1 else {})


_CAPS = {"scores_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"}
_HAS = {  # variant -> its keys of OWN
    "granite": (*_GRANITE,),
    "gemma2": ("attention_scale", "window", "whole_every", *_CAPS),
    "gemma3_text": ("attention_scale", "window", "whole_every", "window_theta", "logits_cap"),
    "smollm3": ("unturned_every",),
}


def _every(alike: list[bool]) -> int | None:
    """n if all layers but every n-th are alike; None if all are. Raises ValueError for any other order."""
    if all(alike):
        return None
    every = alike.index(False) + 1
    if alike != [(i + 1) % every > 0 for i in range(len(alike))]:
        raise ValueError(f"layers {[i for i, same in enumerate(alike) if not same]} are not every {every}-th")
    return every


def _experts(config: Mapping[str, Any], default: _Variant, source: str) -> dict[str, Any]:
    assert default.experts is not None
    count, met, width, normed = default.experts
    fixed, dense = config["model_type"] == "mixtral", config.get("mlp_only_layers") or []
    if dense != [*range(len(dense))]:
        raise _refused(source, "mlp_only_layers", dense, "zbc has blocks without experts at the beginning alone")
    own = {"first_dense": len(dense), "ffn_hidden": config.get("intermediate_size", default.ffn)} if dense else {}
    return own | {
        "experts": config.get(default.count, config.get("num_local_experts", config.get("num_experts", count))),
        "top_k": config.get("num_experts_per_tok", met),
        "expert_hidden": config.get(default.width, width),
        "norm_top_k": normed if fixed else config.get("norm_topk_prob", normed),
        "shared_hidden": config.get("shared_expert_intermediate_size", default.shared) if default.shared else None,
    }


def window_of(config: Mapping[str, Any]) -> int | None:
    """The sliding window of the model, in positions; None if all layers see all positions before."""
    kind, types = config.get("model_type"), config.get("layer_types")
    whole, layers = config.get("max_window_layers", 28), config.get("num_hidden_layers", 32)
    window: int | None = config.get("sliding_window", _WINDOWED.get(kind, 4096) if isinstance(kind, str) else None)
    used = kind in _WINDOWED or (bool(config.get("use_sliding_window")) and kind != "smollm3")
    if kind in ("qwen2", "qwen3", "qwen2_moe", "smollm3") and isinstance(types, list):
        used = "sliding_attention" in types and (used or kind == "smollm3")
    elif kind in ("qwen2", "qwen3", "qwen2_moe") and isinstance(whole, int) and isinstance(layers, int):
        used = used and (whole > 0 if kind == "qwen2_moe" else whole < layers)  # layers from there, or before it
    return window if used else None


def _rope(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Rotary bases and scaling: from `rope_parameters` since transformers 5, `rope_scaling` before, and of both what is
    written beside them, as transformers reads them."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope, local = config.get(key) or {}, config.get("rope_local_base_freq")
    usual, mixed = _VARIANTS[config["model_type"]].theta, config["model_type"] == "gemma3_text"
    by_layer = config.get("rope_parameters") if mixed else None
    for table in (rope, by_layer or {}):
        if not isinstance(table, Mapping):
            raise _refused(source, key, table, "it is a table")
    if by_layer:
        near = by_layer.get("sliding_attention") or {}
        far, local = by_layer.get("full_attention") or {}, near.get("rope_theta", local)
        rope = {**far, **(rope if key == "rope_scaling" else {})}
        if (kind := near.get("rope_type", "default")) != "default":
            raise _refused(source, "rope_parameters.sliding_attention.rope_type", kind, "zbc has default there")
    elif nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        raise _refused(source, f"{key}.{nested[0]}", rope[nested[0]], "zbc has one for all layers")
    beside = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    first = "original_max_position_embeddings"  # which counts before that of the table
    rope = {
        "rope_theta": usual,
        **beside,
        **rope,
        **({first: config[first]} if config.get(first) and not mixed else {}),
    }
    bases = {"rope_theta": float_of(rope["rope_theta"]), "rope_scaling": _scaling(rope, config, key, source)}
    return bases | ({"window_theta": float_of(10000.0 if local is None else local)} if mixed else {})


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any], key: str, source: str) -> dict[str, Any] | None:
    kind, factor = rope.get("rope_type", rope.get("type", "default")), float_of(rope.get("factor"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        place = f"{key}." if "partial_rotary_factor" not in config else ""
        text = "zbc turns all features"
        raise _refused(source, f"{place}partial_rotary_factor", rope["partial_rotary_factor"], text)
    if kind == "default":
        return None
    kinds = ("linear", "dynamic", "llama3", "yarn") if config["model_type"] != "phi3" else ()  # else it is longrope
    if kind not in kinds:
        raise _refused(source, f"{key}.rope_type", kind, f"zbc has {', '.join(('default', *kinds))}")
    longest = config.get("max_position_embeddings", _VARIANTS[config["model_type"]].seq_len)
    original = rope.get("original_max_position_embeddings", longest)
    scaling = {"kind": kind, "factor": factor}
    if kind == "linear":
        return scaling
    if kind == "dynamic":
        return {**scaling, "original_seq_len": longest}
    scaling["original_seq_len"] = original
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    scaling |= {"low_freq_factor": float_of(rope.get(low)), "high_freq_factor": float_of(rope.get(high))}
    if kind == "llama3":
        return scaling
    scaling |= {"low_freq_factor": float_of(rope.get(low) or 1), "high_freq_factor": float_of(rope.get(high) or 32)}
    scaling |= {"factor": longest / original if factor is None else factor, "fractions": not rope.get("truncate", True)}
    own, over, under = (rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if own is None and over and under:
        stretch = 0.1 * math.log(max(1.0, scaling["factor"]))
        own = (over * stretch + 1) / (under * stretch + 1)
    return scaling | ({} if own is None else {"attention_factor": float_of(own)})


def float_of(value: Any) -> Any:
    """A whole number of JSON as a float: 500000 for 500000.0; other values unchanged."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if whole and abs(value) < 2**63 else value


def _refused(source: str, key: str, value: Any, why: str, near: str | None = None) -> ZbcError:
    text = f"model: {source} has {key} = {json.dumps(value)[:80]}, which zbc does not compute"
    hint = f"use {near or 'a model without it'}, or model.pretrained without a family, or a factory: docs/models.md"
    return ZbcError("E521", text, details=[why], hint=hint)


def _nearest(kind: str) -> str:
    """The kind that zbc reads with the longest common beginning of its name; llama if none is near."""
    common = {name: next((i for i in range(len(kind)) if kind[: i + 1] != name[: i + 1]), 99) for name in _FIXED}
    best = max(common, key=lambda name: (common[name], -len(name)))
    return f"{best if common[best] >= _ALIKE else 'llama'}, the nearest that zbc has"


# ---- a job against a folder ----------------------------------------------------------------------------------

_COMPARED = ("family", "layers", "hidden", "heads", "head_width", "kv_width", "vocab", "norm_eps")
_OF_EXPERTS = ("experts", "met", "expert_width", "shared_hidden", "normed", "router", "first_dense", "expert_groups")


def check_fits(job: Model, config: Mapping[str, Any], source: str) -> Model:
    """The model of the folder. Raises E521 with every size in which the job differs from it."""
    folder = model_of(config, source)
    keys = [*_COMPARED, "rotary", *(_OF_EXPERTS if folder.experts or job.experts else ("mlp_width",))]
    keys += ["variant", "attention_bias", "padding_token", *OWN] if folder.family == "llama" == job.family else []
    keys += ["rope_theta", "rope_scaling"] if folder.rotary else ["activation"]
    names = {"head_width": "head_size", "mlp_width": "ffn_hidden", "kv_width": "kv_heads x head_size"}
    names |= {"met": "top_k", "expert_width": "expert_hidden", "normed": "norm_top_k"}
    wrong = [
        f"{names.get(key, key)}: the job has {_shown(getattr(job, key))}, {source} {_shown(getattr(folder, key))}"
        for key in keys
        if getattr(job, key) != getattr(folder, key)
    ]
    if not folder.rotary and (job.seq_len or 0) > (folder.seq_len or 0):
        wrong.append(f"seq_len: the job has {job.seq_len}, {source} has positions for {folder.seq_len}")
    window = window_of(config)
    if window is not None and (job.seq_len or 0) > window:
        wrong.append(
            f"seq_len: the job has {job.seq_len}, {source} has a sliding window of {window}: more would differ"
        )
    if job.tie_embeddings and not folder.tie_embeddings:
        wrong.append(f"tie_embeddings: the job ties them, {source} has a matrix for each")
    if wrong:
        hint = "`zbc init DIR --from-hf FOLDER` writes a job that fits; plan again after a change of [model]"
        raise ZbcError("E521", "model: the job is another model than model.pretrained", details=wrong, hint=hint)
    return folder


def _shown(value: Any) -> str:
    return str(value.model_dump(mode="json")) if isinstance(value, RopeScaling) else str(value)


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
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else "gelu",
        "layer_norm_epsilon": model.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": model.tie_embeddings,
    }


def config_from(source: Mapping[str, Any], model: Model, dtype: str) -> dict[str, Any]:
    """The config.json of a model trained from the model of `source`, with weights of type `dtype`.

    Keys of `source` are kept, also those that zbc does not read, except for those that this training changed.
    """
    made = config_of(model)
    given = model_of(source, CONFIG)
    changed = {key: made[key] for key in ("architectures",) if source.get(key) != made[key]}
    if model.tie_embeddings != given.tie_embeddings:
        changed["tie_word_embeddings"] = model.tie_embeddings
    longest = source.get("max_position_embeddings")
    fixed = model.rope_scaling is not None and model.rope_scaling.kind == "dynamic"  # which counts from there
    if isinstance(longest, int) and (model.seq_len or 0) > longest and not fixed:
        changed["max_position_embeddings"] = model.seq_len
    types = {key: dtype for key in ("dtype", "torch_dtype") if source.get(key) not in (None, dtype)}
    return {**source, **changed, **types}


def _llama_config(model: Model) -> dict[str, Any]:
    rope, scaling = _rope_config(model), model.rope_scaling
    if model.attention_bias and model.variant not in _BIASED:
        text = f"run: a {model.variant} with biases in all of attention has no counterpart in transformers"
        raise ZbcError("E524", text, hint="drop model.attention_bias")
    extra: dict[str, Any] = {"hidden_act": "silu"}
    for key in OWN:
        if key not in _HAS.get(model.variant, ()) and getattr(model, key) != Model.model_fields[key].default:
            near = [variant for variant, has in _HAS.items() if key in has]
            text = f"run: a {model.variant} with {key} has no counterpart in transformers"
            raise ZbcError("E524", text, hint=f'set model.variant = "{near[0]}", or drop it')
    if model.experts:
        extra |= _experts_config(model)
    if model.variant in GEMMA:
        extra = dict.fromkeys(_GATES, "gelu_pytorch_tanh")
    elif model.variant not in ("llama", "granite"):
        extra |= {"sliding_window": None}
    extra |= _own_config(model)
    if model.variant in _BIASED:
        extra |= {"attention_bias": model.attention_bias}
    return {
        "architectures": [f"{_CLASSES.get(model.variant, model.variant.title().replace('_', ''))}ForCausalLM"],
        "model_type": model.variant,
        "vocab_size": model.vocab,
        "max_position_embeddings": scaling.original_seq_len if scaling and scaling.kind == "dynamic" else model.seq_len,
        "hidden_size": model.hidden,
        "intermediate_size": model.expert_width if model.experts and not model.first_dense else model.mlp_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_width,
        **extra,
        "rms_norm_eps": model.norm_eps,
        "mlp_bias": False,
        "rope_theta": model.rope_theta,
        "rope_parameters": _by_layer(model, {**rope, "rope_theta": model.rope_theta}),
        "rope_scaling": None if scaling is None else rope,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": model.padding_token,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _rope_config(model: Model) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        low, high = ("low_freq_factor", "high_freq_factor") if scaling.kind == "llama3" else ("beta_slow", "beta_fast")
        rope |= {low: scaling.low_freq_factor, high: scaling.high_freq_factor}
        rope["original_max_position_embeddings"] = scaling.original_seq_len
    if scaling.kind == "yarn":
        rope |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
        rope["truncate"] = not scaling.fractions
    return rope


def _by_layer(model: Model, rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters per type of layer for gemma3_text, whose layers with a window have a base of their own."""
    if model.variant != "gemma3_text":
        return rope
    near = {"rope_type": "default", "rope_theta": model.window_theta or model.rope_theta}
    return {"full_attention": rope, "sliding_attention": near}


def _own_config(model: Model) -> dict[str, Any]:
    """Keys of Granite, SmolLM3 and Gemma."""
    size = (model.attention_scale or model.head_width**-0.5) ** -2
    if model.variant == "granite":
        scales = {theirs: getattr(model, key) for key, theirs in _GRANITE.items()}
        return scales | {"attention_multiplier": model.attention_scale or model.head_width**-0.5}
    if model.variant == "smollm3":
        return {
            "no_rope_layers": [int(model.block(i).turned) for i in range(model.layers)],
            "use_sliding_window": False,
        }
    if model.variant not in AROUND:
        return {}
    types = ["full_attention" if model.block(i).window is None else "sliding_attention" for i in range(model.layers)]
    keys: dict[str, Any] = {"layer_types": types, "sliding_window": model.window}
    whole = round(size) if abs(round(size) - size) < 1e-6 * size else size
    keys |= {"query_pre_attn_scalar": whole} | {theirs: getattr(model, key) for key, theirs in _CAPS.items()}
    if model.variant == "gemma3_text":
        keys["rope_local_base_freq"] = model.window_theta or model.rope_theta
    return keys


def _experts_config(model: Model) -> dict[str, Any]:
    variant = _VARIANTS[model.variant]
    wrong = None
    if variant.experts is None:
        wrong = f"a {model.variant} with experts"
    elif bool(model.shared_hidden) != bool(variant.shared):
        wrong = f"a {model.variant} {'with' if model.shared_hidden else 'without'} an expert that all tokens meet"
    elif model.variant == "mixtral" and not model.normed:
        wrong = "a mixtral whose weights of experts do not add up to 1"
    elif model.router != "softmax":
        wrong = f"a {model.variant} with a {model.router} router"
    elif model.expert_groups:
        wrong = f"a {model.variant} with groups of experts"
    elif model.first_dense and not model.variant.startswith("qwen"):
        wrong = f"a {model.variant} with blocks without experts"
    if wrong is not None:
        text = f"run: {wrong} has no counterpart in transformers"
        hint = 'use variant = "mixtral", "qwen2_moe" (which has shared_hidden) or "qwen3_moe"'
        raise ZbcError("E524", text, hint=hint)
    keys: dict[str, Any] = {
        variant.count: model.experts,
        "num_experts_per_tok": model.met,
        variant.width: model.expert_width,
    }
    keys |= {"router_aux_loss_coef": model.balance_loss}
    if model.variant != "mixtral":
        keys |= {"norm_topk_prob": model.normed}
    if model.variant.startswith("qwen"):
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": [*range(model.first_dense)]}
    return keys | ({"shared_expert_intermediate_size": model.shared_hidden} if variant.shared else {})
