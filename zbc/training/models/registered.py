"""zbc's functions in transformers' registries of attention and of experts, under the name "zbc".

Attention: models that ask the registry and need no more than `zbc.attention` has run in slices and on packed rows;
others have their own attention. Experts: their products are grouped, their weight gradients can wait, and replicas can
share them out.
"""

from __future__ import annotations

import functools
import sys
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.output_capturing import install_all_output_capturing_hooks

from zbc.errors import ZbcError
from zbc.runtime.core.grouped import Groups
from zbc.runtime.core.private import real_tensors
from zbc.runtime.core.split import GroupedLinear
from zbc.runtime.features.experts.expert_parallel import Swaps
from zbc.runtime.features.slices.slicing import attention
from zbc.training.models.experts import Balance, lowered

ZBC, HINT = "zbc", "a factory of your own layers is the way: docs/extending.md"
_STACKS = ("gate_up_proj", "up_proj", "down_proj")
_plain = masking_utils.causal_mask_function
# `inside`: zbc calls a model, and knows its packed rows, for which transformers would look at numbers of positions.
here = threading.local()


class Unfit(Exception):
    """A model asks for attention that `zbc.attention` does not have."""


def refused(root: Any, why: str, hint: str = HINT) -> ZbcError:
    return ZbcError("E521", f"model: {root.config.model_type} of transformers cannot be taken apart: {why}", hint=hint)


def _mask(*_: Any, mask_function: Any = _plain, local_size: int | None = None, **given: Any) -> Tensor | None:
    """None for causal attention; for a window of tokens a mask without numbers, whose last size is the window."""
    if given.get("attention_mask") is not None or given.get("allow_is_causal_skip") is False:
        raise Unfit("masks of its own")
    if mask_function is _plain:
        return None
    parts = [part for cell in mask_function.__closure__ or () for part in cell.cell_contents if part is not _plain]
    if local_size is None or [part.__qualname__.partition(".")[0] for part in parts] != ["sliding_window_overlay"]:
        raise Unfit("masks that are not causal")
    return torch.empty(1, 1, 0, local_size)


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """(batch, heads, tokens, features) each -> (batch, tokens, heads, features)."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    more = [name for name, value in given.items() if isinstance(value, Tensor) and not name.endswith("position_ids")]
    if dropout or not causal or more or (mask is not None and mask.numel()):
        raise Unfit(", ".join(more) or "masks or dropout in its attention")
    window = sliding_window if mask is None else mask.shape[-1]
    if scaling is not None and scaling != q.shape[-1] ** -0.5:
        q = q * (scaling * q.shape[-1] ** 0.5)
    tokens, size = getattr(module, "spread_over", None), v.shape[-1]
    if tokens is not None:  # keys and values are sent together
        v = functional.pad(v, (0, k.shape[-1] - size))
    y = (attention if tokens is None else tokens.attention)(q, k, v, window=window, cap=softcap)
    return y[..., :size].transpose(1, 2).contiguous(), None


class Stack(GroupedLinear):
    """The weights (E, outputs, inputs) of experts; `transposed`: transformers has (E, inputs, outputs)."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, *, transposed: bool) -> None:
        whole = weight.mT if transposed else weight
        super().__init__(len(whole), whole.shape[2], whole.shape[1], bias=False)
        self.weight, self.bias, self.transposed = nn.Parameter(whole.contiguous()), bias, transposed


def is_experts(module: nn.Module) -> bool:
    """Whether a module asks the registry of experts."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def stack(layer: nn.Module) -> nn.Module:
    """Makes the weights of experts in a layer stacks whose gradients can wait."""
    for module in filter(is_experts, layer.modules()):
        for name in [name for name in _STACKS if name in module._parameters]:
            weight, bias = (module._parameters.pop(key, None) for key in (name, f"{name}_bias"))
            assert weight is not None
            setattr(module, name, Stack(weight.detach(), bias, transposed=bool(module.is_transposed)))
    return layer


def _experts(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """(N, H), the experts (N, k) of each token and their weights (N, k) -> (N, H)."""
    if x.is_meta:  # counts of tokens are numbers
        return x + (weights.sum() + torch.stack([p.sum() for p in self.parameters()]).sum()).to(x.dtype)
    each, swaps = chosen.flatten(), getattr(self, "swaps", Swaps())
    counts = each.new_zeros(self.num_experts).scatter_add_(0, each, torch.ones_like(each))
    met = swaps.dispatch(x, chosen, weights, counts, lowered)
    made: Tensor = swaps.combine(met, functools.partial(_of_rows, self)).to(x.dtype)
    return made


def _of_rows(self: Any, rows: Tensor, groups: Groups) -> Tensor:
    gated = self.has_gate
    inner = self._apply_gate(self.gate_up_proj(rows, groups)) if gated else self.act_fn(self.up_proj(rows, groups))
    made: Tensor = self.down_proj(inner, groups)
    return made


def balance(root: Any, config: Any) -> Balance | None:
    """The loss that a model adds in training, if its configuration asks for it. Raises E521 for another one."""
    weight = getattr(root, "router_aux_loss_coef", 0.0)
    if not (weight and getattr(config, "output_router_logits", False)):
        return None
    config.output_router_logits = False  # in calls of parts
    found, own = Balance(root.num_experts, root.num_experts_per_tok, weight), vars(sys.modules[type(root).__module__])
    with real_tensors(), torch.device("cpu"), torch.no_grad(), suppress(Exception):  # of its own code
        some = tuple(torch.linspace(0, top, 8 * found.experts).sin().view(8, -1) for top in (90, 40))
        theirs = weight * own["load_balancing_loss_func"](some, found.experts, found.met)
        if torch.allclose(found.loss(found.told(torch.zeros(2, found.experts), some)), theirs):
            install_all_output_capturing_hooks(root)
            return found
    hint = "set output_router_logits = false in config.json, to train without it"
    raise refused(root, "the loss of its routers is another one", hint)


def _packed(at: Tensor) -> Tensor | None:
    return None if getattr(here, "inside", False) else _found(at)


_found, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, _packed
AttentionInterface.register(ZBC, _attention)
masking_utils.AttentionMaskInterface.register(ZBC, _mask)
ALL_EXPERTS_FUNCTIONS.register(ZBC, _experts)
