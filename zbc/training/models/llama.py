"""The Llama block: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no biases.

    embed       token embedding                                   (B, T) int64       -> (B, T, H)
    layers.i    x + attention(norm(x)), then x + mlp(norm(x))     (B, T, H)          -> (B, T, H)
    head        norm and projection                               (B, T, H)          -> (B, T, V) logits

Embedding and head are those of gpt.py, with another norm. Query head i shares the keys and values of head
i // (heads / kv_heads). Initial weights as in gpt.py; the residual stream stays float32 under autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.training.models.gpt import linear
from zbc.training.models.rotary import Rotary


class LlamaBlock(nn.Module):
    """(B, T, H) -> (B, T, H)."""

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        size: int,
        ffn: int,
        layers: int,
        eps: float,
        rotary: Rotary,
    ) -> None:
        """`size`: features of a head; `ffn`: width inside the MLP; `layers`: of the model, for the initial weights."""
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.norm1 = nn.RMSNorm(hidden, eps=eps)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * size, bias=False)  # rows: all queries, keys, values
        self.proj = linear(heads * size, hidden, layers, bias=False)
        self.norm2 = nn.RMSNorm(hidden, eps=eps)
        self.gate_up = linear(hidden, 2 * ffn, bias=False)  # rows: gate, then up
        self.down = linear(ffn, hidden, layers, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._attend(self.norm1(x)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self.rotary(q), self.rotary(k)
        grouped = self.kv_heads < self.heads
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(batch, length, self.heads * self.size)
