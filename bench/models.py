"""Every causal language model of the installed transformers, in a tiny configuration made by one rule: whether zbc's
layers give its logits and one backward's gradients. `python bench/models.py [NAME ..]` prints a Markdown table.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from typing import Any

SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "mamba_n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "rotary_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    **{name: 0.0 for part in ("hidden_", "attention_", "", "activation_", "embed_") for name in (f"{part}dropout",)},
    **dict.fromkeys(
        (
            "resid_pdrop",
            "embd_pdrop",
            "attn_pdrop",
            "layerdrop",
            "final_dropout",
            "residual_dropout",
            "hidden_dropout_prob",
        ),
        0.0,
    ),
    **{"vocab_size": 128, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MIXED = ["conv", "full_attention"] * 2
OWN: dict[str, dict[str, Any]] = {  # what the rule does not give
    **{key: {"head_dim": 8} for key in ("deepseek_v3", "longcat_flash", "youtu", "axk1")},  # that of rotary positions
    "codegen": dict.fromkeys(("n_head", "num_attention_heads"), 4),
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": MIXED, "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "zaya": {"num_experts_per_tok": 1},
}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
MOST = 3e7  # parameters
TOLERANCE, SMALL = 1e-6, 1e-3
HALVES = 3e-6  # of sums in two terms, which round otherwise


def row(name: str, *, routed: bool = True) -> tuple[str, ...]:
    """Whether it trains, its attention, whether two ranks share its layers, whether replicas share out its experts,
    whether its routers have a loss, whether ranks share its words, and why not."""
    import torch
    import transformers

    from zbc.errors import ZbcError
    from zbc.training.models.transformers import DecoderOfExperts, apart, config_of, layers

    try:
        usual = transformers.AutoConfig.for_model(name)
        fixed = {key for key, of in vars(type(usual)).items() if isinstance(of, property) and of.fset is None}
        sizes = {key: value for key, value in SIZES.items() if hasattr(usual, key) and key not in fixed}
        routed = routed and all(hasattr(usual, key) for key in ROUTED)
        sizes |= {**(ROUTED if routed else {}), **OWN.get(name, {})}
        config = transformers.AutoConfig.for_model(name, **sizes).to_dict()
        torch.manual_seed(0)
        made: Any = config_of(config)
        with torch.device("meta"):  # first: some stay as large as they are
            large = transformers.AutoModelForCausalLM.from_config(made)
        if sum(p.numel() for p in large.parameters()) > MOST:
            return "", "", "", "", "", "", "the rule gives no tiny configuration"
        theirs, error = None, None
        for attention in ("sdpa", "eager"):
            try:
                theirs = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
                break
            except ValueError as found:
                error = found
        if theirs is None:
            raise error or ValueError
        ids = torch.randint(3, 100, (2, 24))
        out = theirs.train()(ids, use_cache=False)
        wanted, added = out.logits, theirs.router_aux_loss_coef * out.aux_loss if routed else 0.0
        (wanted.square().sum() + added).backward()
    except Exception as error:
        if routed:
            return row(name, routed=False)
        return "", "", "", "", "", "", f"the rule gives no configuration that runs: {type(error).__name__}"
    try:
        model, parts = apart(config), [build() for build in layers(config)]
    except ZbcError as error:
        if "loss of its routers" in error.message:
            return row(name, routed=False)
        why = error.details[-1].partition("attention: ")[2] if error.details else error.message
        return "no", "", "", "", "", "", why.partition("apart: ")[2] or why
    try:
        off, y = compared(parts, theirs, ids, wanted)
    except Exception as error:
        return "no", "", "", "", "", "", f"{type(error).__name__}: {error}".splitlines()[0][:100]
    shared = "yes" if any(isinstance(part, DecoderOfExperts) for part in parts) else ""
    if not off <= TOLERANCE:
        return "no", "", "", "", "", "", f"off by {off:.0e}"
    told, halves = "yes" if model.balance is not None else "", halved(config, theirs, ids, wanted)
    sliced_too = "yes" if model.attention == "zbc" and sliced(parts, ids, y) else ""
    return "yes", sliced_too, "yes" if halves is None else "", shared, told, worded(config, parts, ids, y), halves or ""


def compared(parts: list[Any], theirs: Any, ids: Any, wanted: Any, group: Any = None) -> tuple[float, Any]:
    """How far the logits and gradients of layers are off those of the model, and the logits; with a group those of a
    rank that shares the layers."""
    import torch
    from torch import nn

    saved, cuts, terms, grads = theirs.state_dict(keep_vars=True), dict[Any, Any](), set[Any](), dict[int, Any]()
    names = [(place, *found) for place, part in enumerate(parts) for found in part.theirs()]
    with torch.no_grad():
        for _, _, key, tensor in names:
            tensor.copy_(saved[key])
    turned = {(place, mine) for place, mine, _, t in names if t.stride() != parts[place].state_dict()[mine].stride()}
    for place, part in enumerate(parts if group is not None else ()):
        shares = part.shares(group, joined=True)
        cuts |= {(place, name): cut for name, cut in shares.cuts.items()}
        terms |= {(place, name) for name in shares.partial}
    y = ids
    for part in parts:
        y = part(*y) if isinstance(y, tuple) else part(y)
    y.square().sum().backward()
    off, first = ((y - wanted).abs().max() / wanted.abs().max()).item(), dict[int, Any]()
    for place, mine, key, _ in names:
        p = dict(parts[place].named_parameters()).get(mine)
        if p is not None and p.grad is not None:
            grad = p.grad
            if (place, mine) in terms:
                group.start(grad).wait()
            first.setdefault(id(saved[key]), (place, mine))
            grads[id(saved[key])] = grads.get(id(saved[key]), 0) + grad
    trained = {id(p): p.grad for p in saved.values() if isinstance(p, nn.Parameter) and p.grad is not None}
    small = max(grad.norm() for grad in trained.values()) * SMALL  # some gradients are 0 but for rounding
    for key, grad in trained.items():
        at = first.get(key)
        grad = grad.mT if at in turned else grad
        grad = cuts[at].of(grad) if at in cuts else grad
        if at is not None or group is None or not group.place:  # only the first rank has some biases
            off = max(off, ((grads.get(key, torch.zeros_like(grad)) - grad).norm() / (grad.norm() + small)).item())
    return off, y


def halved(config: dict[str, Any], theirs: Any, ids: Any, wanted: Any) -> str | None:
    """Why two ranks do not share the layers by the model's plan; None if they do."""
    from concurrent.futures import ThreadPoolExecutor

    from zbc.errors import ZbcError
    from zbc.runtime.features.tensor_parallel import Group
    from zbc.runtime.transports.hub import Hub, HubTransport
    from zbc.training.models.transformers import layers, shared

    hub = Hub(2)

    def rank(place: int) -> float:
        try:
            group = Group((0, 1), place, HubTransport(hub, place))
            return compared([build() for build in layers(config)], theirs, ids, wanted, group)[0]
        except Exception as error:
            hub.poison(place, str(error))
            raise

    try:
        shared(config, 2)
        with ThreadPoolExecutor(2) as ranks:
            off = max(ranks.map(rank, range(2)))
    except Exception as error:
        if isinstance(error, ZbcError) and "has no plan of tensor" in error.message:
            return ""
        return f"tp: {type(error).__name__}: {error}".splitlines()[0][:100]
    return None if off <= HALVES else f"tp: off by {off:.0e}"


def sliced(parts: list[Any], ids: Any, whole: Any) -> bool:
    """Whether two slices of the rows have the logits of whole ones."""
    import torch

    from zbc.runtime.core.tensors import Part
    from zbc.runtime.features.slices.slicing import Inside, within

    pasts, found, length = dict[Any, Any](), list[Any](), ids.shape[1]
    with torch.no_grad(), contextlib.suppress(Exception):
        for number, (start, stop) in enumerate(((0, 10), (10, length))):
            y = ids[:, start:stop]
            for place, part in enumerate(parts):
                with within(Inside(Part(number, start, stop, length), pasts, str(place))):
                    y = part(*y) if isinstance(y, tuple) else part(y)
            found.append(y)
        return bool((torch.cat(found, 1) - whole).abs().max() <= 10 * TOLERANCE * whole.abs().max())
    return False


def worded(config: dict[str, Any], parts: list[Any], ids: Any, whole: Any) -> str:
    """Whether the layers without their words, which they lose, have the logits of whole ones; "" if zbc refuses it."""
    import torch
    from torch.nn import functional

    from zbc.training.models.transformers import words_of

    ends = words_of(config)
    if isinstance(ends, str):
        return ""
    tables = [part.without_words()[1] for part in (parts[0], parts[-1])]
    y = functional.embedding(ids, tables[0])
    with torch.no_grad(), contextlib.suppress(Exception):
        for part in parts:
            y = part(*y) if isinstance(y, tuple) else part(y)
        off = (ends.shaped.logits(y @ tables[1].mT) - whole).abs().max() / whole.abs().max()
        return "yes" if off <= TOLERANCE else f"off by {off:.0e}"
    return "off"


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    transformers.logging.set_verbosity_error()
    if names and names[0] == "--rows":
        for name in names[1:]:
            print("|", " | ".join((name, *row(name))), "|", flush=True)
        return
    names, found = names or sorted(known), list[str]()
    columns = ("model", "trains", "slices, cp", "tp", "ep", "loss of routers", "words", "why not")
    print("|", " | ".join(columns), "|\n" + "| --- " * len(columns) + "|")
    while names:  # a few in each process: some take long, or end it
        some, names = names[:12], names[12:]
        try:
            command = [sys.executable, __file__, "--rows", *some]
            out = subprocess.run(command, capture_output=True, text=True, timeout=150).stdout
        except subprocess.TimeoutExpired as late:
            out = (late.stdout or b"").decode()
        rows = [line for line in out.splitlines() if line.startswith("| ")]
        found += rows
        if len(rows) < len(some):
            found.append(f"| {some[len(rows)]} |  |  |  |  |  |  | took too long, or ended its process |")
            names = some[len(rows) + 1 :] + names
        print(*found[-len(some) :] if len(rows) >= len(some) else found[-len(rows) - 1 :], sep="\n", flush=True)
    trains = [line for line in found if "| yes |" in line]
    print(f"transformers {transformers.__version__}: {len(trains)} of {len(found)} train", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
