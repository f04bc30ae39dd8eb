"""The Llama block: RMSNorm, rotary positions, grouped-query attention, SwiGLU; and its variants.

Embedding, order and head are those of gpt.py, with another norm. Query head i shares the keys and values of head
i // (heads / kv_heads). Initial weights as in gpt.py; the residual stream stays float32 under autocast.

    qwen2       biases of queries, keys and values
    qwen3       a norm of each head's queries and keys

With `experts` (experts.py) these are the blocks of Mixtral, and of Qwen2 and Qwen3 with experts. With a
`window` a token attends to as many tokens, itself included.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbc.job.model_section import Model
from zbc.runtime.core.again import ATTENTION, GATHERED, made_again
from zbc.runtime.features.slices.slicing import attention
from zbc.training.models.experts import experts_of
from zbc.training.models.parts import linear, rotary_of, same


class LlamaBlock(nn.Module):
    """(B, T, H) -> (B, T, H)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden, heads, size = model.hidden or 0, model.heads or 0, model.head_width
        kv_heads, norm, layers = model.kv_heads or heads, partial(nn.RMSNorm, eps=model.norm_eps), model.layers
        experts = experts_of(model, nn.SiLU(), gated=True)
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.norm1 = norm(hidden)
        # Rows: all queries, keys, values.
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * size, bias=model.variant == "qwen2")
        self.norm_q, self.norm_k = (norm(size) if model.variant == "qwen3" else None for _ in range(2))
        self.proj = linear(heads * size, hidden, layers, bias=False)
        self.norm2 = norm(hidden)
        self.mlp = experts
        if experts is None:
            self.gate_up = linear(hidden, 2 * model.mlp_width, bias=False)  # rows: gate, then up
            self.down = linear(model.mlp_width, hidden, layers, bias=False)
        self.gate = nn.SiLU()
        self.rotary = rotary_of(model)
        self.enter = self.leave = same
        self.attend = attention
        self.limits: dict[str, Any] = {"window": model.window}

    def forward(self, x: Tensor) -> Tensor:
        # The output of a norm is not bound to a name: it is freed once the next layer has read it.
        x = x + self.leave(self.proj(self._mixed(self.qkv(self._before(self.norm1, x)))))
        if self.mlp is not None:
            return x + self.mlp(self._before(self.norm2, x)).view(x.shape)  # type: ignore[no-any-return]
        return x + self.leave(self.down(self._inside(self.gate_up(self._before(self.norm2, x)))))

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

    def _mix(self, x: Tensor) -> Tensor:
        """Attention of the joint queries, keys and values."""
        batch, length, _ = x.shape
        heads = x.view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = (norm(x.float()).type_as(x) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        q, k = self.rotary(q), self.rotary(k)
        return self.attend(q, k, v, **self.limits).transpose(1, 2).reshape(batch, length, self.heads * self.size)
