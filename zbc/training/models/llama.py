"""The Llama block: RMSNorm, rotary positions, grouped-query attention, SwiGLU; and its variants.

    embed       token embedding                                   (B, T) int64       -> (B, T, H)
    layers.i    x + attention(norm(x)), then x + mlp(norm(x))     (B, T, H)          -> (B, T, H)
    head        norm and projection                               (B, T, H)          -> (B, T, V) logits

Embedding and head are those of gpt.py, with another norm. Query head i shares the keys and values of head
i // (heads / kv_heads). Initial weights as in gpt.py; the residual stream stays float32 under autocast.

    qwen2       biases of queries, keys and values
    qwen3       a norm of each head's queries and keys
    granite     scale factors for embeddings, scores, outputs of attention and MLP, and logits
    gemma       norms multiply by 1 + weight, the gate is a GELU, embeddings come times sqrt(H)
    gemma2      a gemma with norms before and after attention and MLP, limits of attention and capped scores and logits
    gemma3_text a gemma2 with a norm of each head's queries and keys; layers with a window turn by a base of their own
    smollm3     some layers have no positions

With `experts` (experts.py) these are the blocks of Mixtral, and of Qwen2 and Qwen3 with experts.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbc.excludes import HEAD_NORMS
from zbc.job.model_section import AROUND, GEMMA, Block, Model
from zbc.runtime.core.again import ATTENTION, GATHERED, made_again
from zbc.runtime.features.slices.slicing import Limits, attention
from zbc.training.models.experts import experts_of
from zbc.training.models.parts import linear, rotary_of, same


def norm(size: int, eps: float, variant: str) -> nn.Module:
    """The norm of a variant, over the last dimension, of `size` features."""
    return OffsetNorm(size, eps) if variant in GEMMA else nn.RMSNorm(size, eps=eps)


class OffsetNorm(nn.Module):
    """RMSNorm in float32 that multiplies by 1 + weight, as in Gemma; initial weights are 0."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        found = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (found * (1.0 + self.weight.float())).type_as(x)


def gate(variant: str) -> nn.Module:
    """The activation of the gate of an MLP."""
    return nn.GELU("tanh") if variant in GEMMA else nn.SiLU()


class LlamaBlock(nn.Module):
    """(B, T, H) -> (B, T, H)."""

    def __init__(self, model: Model, kind: Block) -> None:
        super().__init__()
        hidden, heads, size = model.hidden or 0, model.heads or 0, model.head_width
        kv_heads, eps, variant, layers = model.kv_heads or heads, model.norm_eps, model.variant, model.layers
        experts = experts_of(model, kind, gate(variant), gated=True)
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.norm1 = norm(hidden, eps, variant)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * size, bias=model.qkv_bias)  # rows: all queries, keys, values
        self.norm_q, self.norm_k = (norm(size, eps, variant) if variant in HEAD_NORMS else None for _ in range(2))
        self.proj = linear(heads * size, hidden, layers, bias=model.attention_bias)
        self.behind1 = norm(hidden, eps, variant) if variant in AROUND else same
        self.norm2 = norm(hidden, eps, variant)
        self.mlp = experts
        if experts is None:
            self.gate_up = linear(hidden, 2 * model.mlp_width, bias=False)  # rows: gate, then up
            self.down = linear(model.mlp_width, hidden, layers, bias=False)
        self.behind2 = norm(hidden, eps, variant) if variant in AROUND else same
        self.gate = gate(variant)
        self.rotary = rotary_of(model, windowed=kind.window is not None) if kind.turned else None
        self.enter = self.leave = same
        self.attend = attention
        self.scores = None if model.attention_scale is None else model.attention_scale * math.sqrt(size)
        self.residual = model.residual_scale
        self.limits: dict[str, Any] = Limits(kind.window, model.scores_cap)._asdict()

    def forward(self, x: Tensor) -> Tensor:
        # The output of a norm is not bound to a name: it is freed once the next layer has read it.
        mixed = self.leave(self.proj(self._mixed(self.qkv(self._before(self.norm1, x)))))
        x = self._sum(x, self.behind1(mixed))
        del mixed
        if self.mlp is not None:
            y = self.mlp(self._before(self.norm2, x)).view(x.shape)
        else:
            y = self.leave(self.down(self._inside(self.gate_up(self._before(self.norm2, x)))))
        return self._sum(x, self.behind2(y))

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return made_again(partial(self._normed, norm), x, inside=(norm,), what=GATHERED)

    # A norm of single operations has several gradients for its input: with the view they are added up before they are
    # added to that of the stream, in the same order as with recompute.
    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x.view_as(x))
        rows = self.enter if norm is not self.norm2 or self.mlp is None else self.mlp.rows
        return rows(y)

    def _mixed(self, x: Tensor) -> Tensor:
        return made_again(self._mix, x, inside=(self.norm_q, self.norm_k), what=ATTENTION)

    def _inside(self, x: Tensor) -> Tensor:
        return made_again(self._gated, x)

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.gate(gate) * up  # type: ignore[no-any-return]

    def _sum(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual == 1.0 else x + y * self.residual

    def _mix(self, x: Tensor) -> Tensor:
        """Attention of the joint queries, keys and values."""
        batch, length, _ = x.shape
        heads = x.view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = (norm(x.float()).type_as(x) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        q = q if self.scores is None else q * self.scores
        q, k = (q, k) if self.rotary is None else (self.rotary(q), self.rotary(k))
        return self.attend(q, k, v, **self.limits).transpose(1, 2).reshape(batch, length, self.heads * self.size)
