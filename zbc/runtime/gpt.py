"""The built-in GPT: pre-norm blocks, causal attention, an untied head.

    embed       token embedding, plus learned positions           (B, T) int64       -> (B, T, H)
    layers.i    x + attention(norm(x)), then x + mlp(norm(x))     (B, T, H)          -> (B, T, H)
    head        norm and projection without bias                  (B, T, H)          -> (B, T, V) logits

The residual stream stays float32 under autocast. Initial weights follow GPT-2: normal with 0.02, biases 0, and the
projections back into the residual stream divided by sqrt(2 layers).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

STD = 0.02


class Embed(nn.Module):
    def __init__(self, vocab: int, hidden: int, seq_len: int, *, learned: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq_len, hidden) if learned else None
        self.index: Tensor
        self.register_buffer("index", torch.arange(seq_len), persistent=False)
        for table in (self.tokens, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(self.index[: tokens.shape[-1]])


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, layers: int, seq_len: int, *, rotary: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = _linear(hidden, 3 * hidden)
        self.proj = _linear(hidden, hidden, layers)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = _linear(hidden, 4 * hidden)
        self.down = _linear(4 * hidden, hidden, layers)
        self.rotary = Rotary(seq_len, hidden // heads) if rotary else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._attend(self.norm1(x)))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, hidden)


class Rotary(nn.Module):
    """Rotates pairs of features by position (arXiv 2104.09864); input (B, heads, T, head size)."""

    def __init__(self, seq_len: int, size: int, base: float = 10000.0) -> None:
        super().__init__()
        rates = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), rates)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)


class Head(nn.Module):
    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=STD)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


def _linear(inputs: int, outputs: int, residual_layers: int | None = None) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=STD if residual_layers is None else STD / math.sqrt(2 * residual_layers))
    nn.init.zeros_(linear.bias)
    return linear
