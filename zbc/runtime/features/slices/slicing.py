"""Sequence chunks ("slices") of a microbatch, as in Seq1F1B, and attention across them.

A forward runs on one slice, rows [start, stop) of a sequence of `length`; `now` returns it. A layer that treats every
token separately needs no change; one that mixes tokens does so through `attention`.

`Past` holds K and V of one attention of one microbatch, in one buffer each, and during backward their gradients. F of a
slice writes its rows and attends to rows [0, stop); B adds the gradients of rows [0, stop) and returns those of its own
rows, which are complete because backwards run in reverse order. So each slice has one ordinary graph with one root, and
splitting the backward of linear layers works unchanged. The graphs of all slices share the buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import handle_torch_function, has_torch_function

from zbc.errors import ZbcError
from zbc.runtime.core.again import Around, around
from zbc.runtime.core.current import SLICE
from zbc.runtime.core.tensors import Part, cached
from zbc.runtime.features.added import tell_peaks
from zbc.runtime.features.packing import Mix, each_alone, places, rows_now
from zbc.runtime.features.words.words import wide


class Past:
    """K and V of one attention for one microbatch, (.., length, features), and their gradients. Raises E703 if the
    forwards of slices do not run in order, or their backwards not in reverse."""

    __slots__ = ("_grads", "_left", "_written", "keys", "length", "values")

    def __init__(self, length: int) -> None:
        self.length = self._left = length  # rows whose backward is still to come
        self._written = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._grads: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and their gradients."""
        held = (self.keys, self.values, *(self._grads or ()))
        return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)

    def write(self, start: int, stop: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes rows [start, stop); returns K and V of rows [0, stop), as views with separate version counters. Rows
        saved by earlier slices are not written to, so their versions need not change. With recompute a forward runs
        again right before its backward, when its rows are already written."""
        if start != self._written and not (stop == self._left and self.keys is not None):
            text = f"run: forward of rows [{start}, {stop}): the next to run are those that begin at {self._written}"
            raise ZbcError("E703", text, hint="plan again")
        if self.keys is None or self.values is None:
            self.keys, self.values = (t.new_empty((*t.shape[:-2], self.length, t.shape[-1])) for t in (k, v))
        if start == self._written:
            self.keys.data[..., start:stop, :] = k
            self.values.data[..., start:stop, :] = v
            self._written = stop
        return self.keys.data[..., :stop, :], self.values.data[..., :stop, :]

    def add(self, start: int, stop: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Adds gradients of rows [0, stop); returns those of [start, stop), which are complete now."""
        if stop != self._left:
            text = f"run: backward of rows [{start}, {stop}): the next to come are those that end at {self._left}"
            raise ZbcError("E703", text, hint="plan again")
        self._left = start
        if self._grads is None:
            self._grads = dk, dv
        else:
            for grads, new in zip(self._grads, (dk, dv), strict=True):
                grads[..., :stop, :] += new
        own = tuple(grads[..., start:stop, :] for grads in self._grads)
        if start == 0:
            self.keys = self.values = self._grads = None
            return own[0], own[1]
        return own[0].clone(), own[1].clone()


Pasts = dict[tuple[str, int], Past]  # of one stage and microbatch: by layer and index of the attention in it


@dataclass(slots=True)
class Inside:
    """One forward of a layer in a slice; `pasts` is None if only shapes are computed."""

    part: Part
    pasts: Pasts | None = None
    layer: str = ""
    calls: int = 0  # of attention so far

    def past(self, ranks: int = 1) -> Past | None:
        """The Past of the layer's next attention, in the same order in every slice; tokens are sharded over `ranks`."""
        if self.pasts is None:
            return None
        key = self.layer, self.calls
        self.calls += 1
        past = self.pasts.get(key)
        if past is None:
            past = self.pasts[key] = Past(ranks * self.part.length)
        return past


within = SLICE.using  # the forward of a layer in a slice


def now() -> Inside | None:
    """The current slice of this thread; None if forwards have whole microbatches, and while torch compiles: compiled
    layers run no slices."""
    return None if torch.compiler.is_compiling() else SLICE.value


def _again() -> Around | None:
    """A context with the same slice and attention index, for a recompute."""
    inside = now()
    if inside is None:
        return None
    again = replace(inside)
    return lambda: within(again)


around.append(_again)


def first_row() -> int:
    """The position in the sequence of the first row of the current forward."""
    inside = now()
    return 0 if inside is None else inside.part.start


# ---- for layers ----------------------------------------------------------------------------------------------


def positions(x: Tensor) -> Tensor:
    """Positions of the tokens of `x` (batch, tokens, ..) in their sequence: (tokens,) int64, on its device; for packed
    rows, (batch, tokens)."""
    rows = rows_now()
    if rows is not None:
        return places(rows, x.shape[1], x.device)
    start = first_row()
    return torch.arange(start, start + x.shape[1], device=x.device)


class Limits(NamedTuple):
    """Limits of attention: a token attends to the last `window` tokens, itself included, None: to all before it; scores
    s become cap tanh(s / cap). `block`: its number, if it reports the largest score of each head (qk_clip.py)."""

    window: int | None = None
    cap: float | None = None
    block: int | None = None


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, cap: float | None = None, block: int | None = None
) -> Tensor:
    """Causal attention, (batch, heads, tokens, features) each; K and V may have fewer heads, which queries share.

    `window`: number of tokens that one attends to, itself included; `cap`: scaled scores s become cap tanh(s / cap).

    Tokens of a slice also attend to earlier slices; in packed rows, tokens attend to their own sample only. Uses
    torch's scaled_dot_product_attention if it supports the arguments.
    """
    rows, mix = rows_now(), functools.partial(causal, limits=Limits(window, cap, block))
    return attend(q, k, v, mix) if rows is None else each_alone(mix, q, k, v, rows)


def attend(q: Tensor, k: Tensor, v: Tensor, mix: Mix, ranks: int = 1) -> Tensor:
    """Applies `mix` to queries and to all keys and values so far: in a slice including those of earlier slices.
    Queries are sharded over `ranks`, each of which has all keys and values."""
    inside = now()
    past = None if inside is None else inside.past(ranks)
    if inside is None or past is None:
        return mix(q, k, v)
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # as torch's attention would, once for all slices
        low = torch.get_autocast_dtype(kind)
        q, k, v = (t.to(low) if t.dtype is torch.float32 else t for t in (q, k, v))
    start, stop = ranks * inside.part.start, ranks * inside.part.stop
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attend.apply(q, k, v, past, start, stop, mix)  # type: ignore[no-any-return, no-untyped-call]
    return mix(q, *past.write(start, stop, k.detach(), v.detach()))


class _Attend(torch.autograd.Function):
    """Attention of a slice as a small graph of its own, on views of the buffers, without copies or recompute."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, past: Past, start: int, stop: int, mix: Mix) -> Tensor:
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            alone = q.untyped_storage().nbytes() == q.nbytes  # a view would keep the joint tensor of all three
            own = q.detach() if alone else q.detach().clone()
            q, k, v = _Enter.apply(anchor, own, *past.write(start, stop, k, v))  # type: ignore[no-untyped-call]
            mixed = mix(q, k, v)
        ctx.past, ctx.rows = past, (start, stop)
        ctx.entries, ctx.edge = [get_gradient_edge(t) for t in (q, k, v)], get_gradient_edge(mixed)
        return mixed.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        entries, edge = ctx.entries, ctx.edge
        ctx.entries = ctx.edge = None
        dq, dk, dv = torch.autograd.grad([edge], entries, [grads[0]])
        return dq, *ctx.past.add(*ctx.rows, dk, dv), None, None, None, None


class _Enter(torch.autograd.Function):
    """Queries, keys and values as tensors that are not leaves, so that queries can be offloaded; gradients end here."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.detach(), k.detach(), v.detach()


def causal(q: Tensor, k: Tensor, v: Tensor, limits: Limits) -> Tensor:
    """Causal attention of the last rows: each attends to all rows up to its own."""
    if limits.block is not None:
        tell_peaks(limits.block, functools.partial(peaks, q, k, limits))
    rows, length, grouped = q.shape[-2], k.shape[-2], k.shape[-3] < q.shape[-3]
    if limits.cap is not None or (limits.window or length) < length:
        return _limited(q, k, v, limits)
    if rows == length:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if q.is_cuda:
        return last_rows(q, k, v)
    mask = _lower_right(rows, length, length, q.dtype, q.device)
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)


def last_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`causal` by flash attention, which has a kernel for this mask that takes no memory. A dry run answers for it."""
    if has_torch_function((q, k, v)):
        return handle_torch_function(last_rows, (q, k, v), q, k, v)
    mask = causal_lower_right(q.shape[-2], k.shape[-2])
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[-3] < q.shape[-3])


CHUNK = 512  # queries whose scores exist at once


def _limited(q: Tensor, k: Tensor, v: Tensor, limits: Limits) -> Tensor:
    """As `causal`, chunk by chunk of queries, each with only the keys that one of them attends to."""
    grouped, window, mixed = k.shape[-3] < q.shape[-3], limits.window or k.shape[-2], list[Tensor]()
    for some, first, stop in _chunks(q, k, window):
        keys, values = k[..., first:stop, :], v[..., first:stop, :]
        mask = _lower_right(some.shape[-2], stop - first, window, q.dtype, q.device)
        if limits.cap is None:
            mixed.append(functional.scaled_dot_product_attention(some, keys, values, mask, enable_gqa=grouped))
        else:
            mixed.append(_Capped.apply(some, keys, values, mask, limits.cap))  # type: ignore[no-untyped-call]
    return torch.cat(mixed, -2) if len(mixed) > 1 else mixed[0]


def _chunks(q: Tensor, k: Tensor, window: int) -> Iterator[tuple[Tensor, int, int]]:
    """Chunks of queries, each with the start and the end of the keys that one of them attends to."""
    rows, length = q.shape[-2], k.shape[-2]
    for start in range(0, rows, CHUNK):
        some = q[..., start : start + CHUNK, :]
        stop = length - rows + start + some.shape[-2]
        yield some, max(0, stop - some.shape[-2] + 1 - window), stop


@torch.no_grad()
def peaks(q: Tensor, k: Tensor, limits: Limits) -> Tensor:
    """(heads,) float32 at least: the largest score q k / sqrt(features) of each head, over the batch and the keys that
    `causal` lets queries attend to, before the cap. Rounded as attention rounds its products; chunk by chunk."""
    window, found = limits.window or k.shape[-2], list[Tensor]()
    for some, first, stop in _chunks(q, k, window):
        scores = _by_keys(some, k).flatten(-3, -2) @ k[..., first:stop, :].mT  # no copy of the keys for each query head
        scores = scores.view(*scores.shape[:-2], -1, some.shape[-2], stop - first)
        scores += _mask(some.shape[-2], stop - first, window, scores.dtype, scores.device)
        found.append(scores.amax((-2, -1)).flatten(-2).flatten(0, -2).amax(0))
    largest: Tensor = wide(torch.stack(found).amax(0)) * q.shape[-1] ** -0.5
    return largest


class _Capped(torch.autograd.Function):
    """softmax(cap tanh(s / cap) + mask) v for scores s = q k^T / sqrt(features), which backward recomputes: only q, k
    and v are saved. Scores are float32 at least."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.cap = cap
        _, likely = _weights(q, k, mask, cap)
        mixed = likely.to(v.dtype) @ v.unsqueeze(-3)
        return mixed.flatten(-4, -3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, mask = ctx.saved_tensors
        turned, likely = _weights(q, k, mask, ctx.cap)
        dy = _by_keys(grads[0], k)
        dv = (likely.to(v.dtype).mT @ dy).sum(-3)
        d = wide(dy @ v.unsqueeze(-3).mT)
        d = likely * (d - (d * likely).sum(-1, keepdim=True))
        d = (d * (1 - turned * turned) * q.shape[-1] ** -0.5).to(q.dtype)
        dq = (d @ k.unsqueeze(-3)).flatten(-4, -3)
        dk = (d.mT @ _by_keys(q, k)).sum(-3)
        return dq, dk, dv, None, None


def _by_keys(x: Tensor, k: Tensor) -> Tensor:
    """(.., heads, rows, features) with an additional dimension for the query heads that share a key head."""
    return x.view(*x.shape[:-3], k.shape[-3], -1, *x.shape[-2:])


def _weights(q: Tensor, k: Tensor, mask: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """tanh(s / cap), and the weights of the keys; (.., heads of keys, queries that share them, rows, length)."""
    scores = _by_keys(q, k) @ k.unsqueeze(-3).mT
    turned = (wide(scores) * q.shape[-1] ** -0.5 / cap).tanh_()
    return turned, (turned * cap + mask).softmax(-1)


def _mask(rows: int, length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An additive mask in `dtype`, so that torch does not convert it; cached, since graphs keep it."""
    every = torch.ones(rows, length, dtype=torch.bool, device=device)
    seen = every.tril(length - rows).triu(length - rows - window + 1)
    return torch.zeros(rows, length, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


_lower_right = cached(64)(_mask)
