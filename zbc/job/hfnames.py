"""Maps parameters of built-in families to the tensors of a Hugging Face folder.

zbc stacks the rows of matrices that read the same input (q, k, v; gate and up) into one parameter.
GPT-2's matrices are stored as (inputs, outputs), all others as (outputs, inputs).
"""

from __future__ import annotations

from typing import NamedTuple

from zbc.job.model_section import Model


class TensorRows(NamedTuple):
    """One tensor of a folder: `rows` of the parameter (None: all), stored transposed or not."""

    name: str
    rows: int | None = None
    transposed: bool = False


_GPT2 = {
    "norm1": "ln_1",
    "qkv": "attn.c_attn",
    "proj": "attn.c_proj",
    "norm2": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_LLAMA = {
    "norm1": "input_layernorm",
    "norm_q": "self_attn.q_norm",
    "norm_k": "self_attn.k_norm",
    "proj": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "down": "mlp.down_proj",
}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
HEAD = "lm_head.weight"


def parts(model: Model, parameter: str) -> list[TensorRows]:
    """The tensors that make up the parameter with this global name (`layers.3.qkv.weight`), from its first row on."""
    return _llama(model, parameter) if model.family == "llama" else _gpt2(parameter)


def _gpt2(parameter: str) -> list[TensorRows]:
    ends = {
        "embed.tokens.weight": "transformer.wte.weight",
        "embed.positions.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.logits.weight": HEAD,
    }
    if parameter in ends:
        return [TensorRows(ends[parameter])]
    _, index, module, kind = parameter.split(".")
    turned = kind == "weight" and not module.startswith("norm")
    return [TensorRows(f"transformer.h.{index}.{_GPT2[module]}.{kind}", transposed=turned)]


def _llama(model: Model, parameter: str) -> list[TensorRows]:
    ends = {
        "embed.tokens.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.logits.weight": HEAD,
    }
    if parameter in ends:
        return [TensorRows(ends[parameter])]
    _, index, module, *inside, kind = parameter.split(".")
    stem = f"model.layers.{index}"
    if module == "mlp":
        return _experts(model, stem, inside)
    if module == "qkv":
        queries = (model.heads or 0) * model.head_width
        rows = {"q_proj": queries, "k_proj": model.kv_width, "v_proj": model.kv_width}
        return [TensorRows(f"{stem}.self_attn.{name}.{kind}", count) for name, count in rows.items()]
    if module == "gate_up":
        return [TensorRows(f"{stem}.mlp.{name}.weight", model.mlp_width) for name in ("gate_proj", "up_proj")]
    return [TensorRows(f"{stem}.{_LLAMA[module]}.{kind}")]


def _experts(model: Model, stem: str, inside: list[str]) -> list[TensorRows]:
    """The tensors of `router`, `experts.3.gate_up`, `shared.down` and so on."""
    mixtral = model.variant == "plain"
    stem += ".block_sparse_moe" if mixtral else ".mlp"
    if inside[0] in ("router", "shared_gate"):
        return [TensorRows(f"{stem}.{'gate' if inside[0] == 'router' else 'shared_expert_gate'}.weight")]
    width = model.mlp_width
    if inside[0] == "shared":
        stem, width = f"{stem}.shared_expert", model.shared_hidden
    else:
        stem += f".experts.{inside[1]}"
    names = ("gate", "up") if inside[-1] == "gate_up" else ("down",)
    called = [_MIXTRAL[name] if mixtral else f"{name}_proj" for name in names]
    return [TensorRows(f"{stem}.{name}.weight", width if len(called) > 1 else None) for name in called]
