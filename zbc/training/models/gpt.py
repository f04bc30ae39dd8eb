"""The layers of the built-in GPT and Llama: pre-norm blocks, causal attention, an untied head.

    embed       token embedding, plus learned positions           (B, T) int64       -> (B, T, H)
    layers.i    x + attention(norm(x)), then x + mlp(norm(x))     (B, T, H)          -> (B, T, H)
    head        norm and projection without bias                  (B, T, H)          -> (B, T, V) logits

The residual stream stays float32 under autocast. Initial weights follow GPT-2: normal with 0.02, biases 0, and the
projections back into the residual stream divided by sqrt(2 layers).

    gpt         LayerNorm, learned or rotary positions, GELU
    llama       RMSNorm, rotary positions, SwiGLU; grouped-query attention
    qwen2       a llama with biases of queries, keys and values
    qwen3       a llama with a norm of each head's queries and keys

With `experts` (experts.py) llamas are Mixtral, and Qwen2 and Qwen3 with experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbc.job.model_section import Model
from zbc.runtime.core.again import ATTENTION, GATHERED, made_again
from zbc.runtime.features.packing import places, rows_now
from zbc.runtime.features.slices.slicing import attention, first_row
from zbc.training.models.experts import Experts
from zbc.training.models.parts import STD, linear, norm_of, rotary_of, same


class Embed(nn.Module):
    """(B, T) int64 -> (B, T, H)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        vocab, hidden, seq_len = model.vocab or 0, model.hidden or 0, model.seq_len or 0
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = None if model.rotary else nn.Embedding(seq_len, hidden)
        self.look_up: Callable[[Tensor], Tensor] | None = None  # instead of the table's own
        self.length = seq_len
        self.place = 0  # index of this rank's shard of the tokens, with sequence parallelism
        self.own: Callable[[int, torch.device], Tensor] | None = None  # as in Rotary
        self.index: Tensor
        self.register_buffer("index", torch.arange(seq_len), persistent=False)
        for table in (self.tokens, self.positions):
            if table is not None:
                nn.init.normal_(table.weight, std=STD)

    def forward(self, tokens: Tensor) -> Tensor:
        x = (self.look_up or self.tokens)(tokens)
        if self.positions is None:
            return x
        rows, start = rows_now(), first_row() + self.place * x.shape[1]
        index = self.index if self.own is None else self.own(tokens.shape[1], x.device)
        at = index if rows is None else places(rows, self.length, x.device)[:, index]
        return x + self.positions(at[..., start : start + x.shape[1]])  # type: ignore[no-any-return]

    def without_words(self) -> tuple[str, Tensor]:
        """Begins after the look-up; returns the name of the table, and it."""
        table: Tensor = self.tokens.weight
        self.register_module("tokens", None)
        self.look_up = same
        return "tokens.weight", table


class Block(nn.Module):
    """(B, T, H) -> (B, T, H). Query head i shares the keys and values of head i // (heads / kv_heads); with a `window`
    a token attends to as many tokens, itself included."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        hidden, heads, size = model.hidden or 0, model.heads or 0, model.head_width
        kv_heads, layers, gated = model.kv_heads or heads, model.layers, model.family == "llama"
        self.heads, self.kv_heads, self.size, self.gated = heads, kv_heads, size, gated
        self.activation = nn.SiLU() if gated else nn.GELU("tanh" if model.variant == "gpt2" else "none")
        experts = Experts(model, self.activation) if model.experts else None
        self.norm1 = norm_of(model, hidden)
        # Rows: all queries, keys, values.
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * size, bias=not gated or model.variant == "qwen2")
        self.norm_q, self.norm_k = (norm_of(model, size) if model.variant == "qwen3" else None for _ in range(2))
        self.proj = linear(heads * size, hidden, layers, bias=not gated)
        self.norm2 = norm_of(model, hidden)
        self.mlp = experts
        if experts is None:
            if gated:
                self.gate_up = linear(hidden, 2 * model.mlp_width, bias=False)  # rows: gate, then up
            else:
                self.up = linear(hidden, model.mlp_width)
            self.down = linear(model.mlp_width, hidden, layers, bias=not gated)
        self.rotary = rotary_of(model) if model.rotary else None
        self.enter = self.leave = same
        self.attend = attention
        self.limits: dict[str, Any] = {"window": model.window}

    def forward(self, x: Tensor) -> Tensor:
        # The output of a norm is not bound to a name: it is freed once the next layer has read it.
        x = x + self.leave(self.proj(self._mixed(self.qkv(self._before(self.norm1, x)))))
        if self.mlp is not None:
            return x + self.mlp(self._before(self.norm2, x)).view(x.shape)  # type: ignore[no-any-return]
        if self.gated:
            return x + self.leave(self.down(made_again(self._gated, self.gate_up(self._before(self.norm2, x)))))
        return x + self.leave(self.down(made_again(self.activation, self.up(self._before(self.norm2, x)))))

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        return made_again(partial(self._normed, norm), x, inside=(norm,), what=GATHERED)

    # A norm of single operations has several gradients for its input: with the view they are added up before they are
    # added to that of the stream, in the same order as with recompute.
    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x.view_as(x) if self.gated else x)
        rows = self.enter if norm is not self.norm2 or self.mlp is None else self.mlp.rows
        return rows(y)

    def _gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate) * up  # type: ignore[no-any-return]

    def _mixed(self, x: Tensor) -> Tensor:
        return made_again(self._mix, x, inside=(self.norm_q, self.norm_k), what=ATTENTION)

    def _mix(self, x: Tensor) -> Tensor:
        """Attention of the joint queries, keys and values."""
        batch, length, _ = x.shape
        heads = x.view(batch, length, -1, self.size).transpose(1, 2)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = (norm(x.float()).type_as(x) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return self.attend(q, k, v, **self.limits).transpose(1, 2).reshape(batch, length, self.heads * self.size)


class GptHead(nn.Module):
    """(B, T, H) -> (B, T, V)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = norm_of(model, model.hidden or 0)
        self.chunk = model.loss_chunk  # of tokens whose logits the loss makes at once, from (B, T, H)
        self.logits = nn.Linear(model.hidden or 0, model.vocab or 0, bias=False)
        nn.init.normal_(self.logits.weight, std=STD)
        self.enter = self.join = same

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(self.norm(x))
        if self.chunk is not None:
            return y
        return self.join(self.logits(y))

    def without_words(self) -> tuple[str, Tensor]:
        """Ends before the logits; returns the name of their table, and it."""
        table, self.chunk = self.logits.weight, None  # a chunk is of logits
        self.register_module("logits", nn.Identity())
        return "logits.weight", table
