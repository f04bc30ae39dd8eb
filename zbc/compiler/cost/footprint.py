"""Bytes that a layer of a built-in model keeps for one microbatch, and temporaries of its ops.

Counted from torch's allocations (training/recording/measure.py measures them). Per token of a block of width h, with
queries of width q (all heads), keys and values of width k each, an MLP of width f, n-byte activations and a residual
stream of r bytes:

    kept F -> B   2 h r: the residual input of both halves; n bytes each: norm outputs 2h, q k v, attention out q, MLP
                  in and out: gpt 2f, llama 4f (gate, up, silu of gate, product); with rotary positions 2q + k more:
                  rotated q and k, since v keeps the unrotated ones alive, and a copy of the attention's output, which
                  is in another order then; 4 per head and the norms' statistics. With experts the MLP's part is kept
                  top_k times, with 2 h top_k n for the rows sent to the experts and back and 8 E for the router
    kept B -> W   n bytes each: input and output gradient of the linear layers (stored by runtime/core/split.py)

    gpt with q = k = h, f = 4h     14 h n (17 h n with rotary positions) and 2 h r, and 16 h n
    llama                          (4h + 2q + 2k + 3f) n from B to W

The head keeps its input, the norm's output and float32 log-probabilities. With recompute F keeps a layer's `entry`
only. An op's `more` is beyond the bytes held before it and, for F, after it: gradients inside GELU or softmax, and a
weight gradient to be added to the sum, unless it is the first of a step and becomes the sum. It is counted as if
nothing of the layer had been freed yet. In the first backward of a step gradients are made one after the other while
activations are freed: its `rise` is computed from weight to weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

CHUNK = 512  # queries whose capped scores exist at once (runtime/features/slicing.py)
GRAD_BYTES = 4  # gradients and optimizer state are float32


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one layer for one microbatch, and elements of its largest parameter."""

    act_b: float = 0.0
    act_w: float = 0.0
    entry: float = 0.0  # its input
    result: float = 0.0  # its output
    more_f: float = 0.0
    more_alone: float = 0.0  # F that keeps nothing
    more_b: float = 0.0
    more_w: float = 0.0
    more_bw: float = 0.0
    first_b: float | None = None  # as more_b if the layer has no gradients yet, and the computed ones stay;
    first_w: float | None = None  # None: the same
    first_bw: float | None = None
    came_b: float = 0.0  # gradients that its first B of a step makes, and its first W
    came_w: float = 0.0
    rise_b: float | None = None  # peak of its first B, W or BW beyond the bytes held before it, gradients
    rise_w: float | None = None  # as they are made; None: as if all were made first
    rise_bw: float | None = None
    late_b: float = 0.0  # as more_b, more_bw and rise_bw, but of a part of B and BW by which the gradient that comes
    late_bw: float = 0.0  # from the next layer of the stage is gone
    late_rise: float = 0.0
    until_bw: float | None = None  # peak of a BW until its first collective, if later layers have none: at it ranks
    # compute the weight gradients of those
    casts: float = 0.0  # copies of weights in the autocast type, once for all microbatches
    tables: float = 0.0  # constants, not parameters
    logits: float = 0.0  # the part of act_b with an entry per word of the vocabulary
    largest: float = 0.0
    loose: float = 0.0  # the part of its input that only the first layer of a stage keeps
    tail: float = 0.0  # its output, if its backward needs that
    keeps_given: bool = False  # B leaves its incoming gradient itself for W, which act_w counts
    pair: float = 0.0  # elements: twice a parameter and once the one before it, at most; 0 for twice the largest
    ends: tuple[float, float] = (0.0, 0.0)  # elements of its first and its last parameter
    kv: float = 0.0  # the part of act_b in keys and values
    fused: float = 0.0  # the part of act_b kept only because keys and values are views of it; slices copy them
    # In a slice, whose F finds kv there: bytes of all slices' keys, values and gradients that its B frees or (-) makes.
    ends_kv: float | None = None

    @property
    def first(self) -> Footprint:
        """This footprint in its first backward of a step."""
        b, w, bw = self.first_b, self.first_w, self.first_bw
        return replace(
            self,
            more_b=self.more_b if b is None else b,
            more_w=self.more_w if w is None else w,
            more_bw=self.more_bw if bw is None else bw,
        )

    def remade(self, gone: float, made: float) -> Footprint:
        """This footprint if B recomputes `gone` bytes of F's activations, and needs `made` bytes more for that."""
        known = {name: getattr(self, name) for name in _OF_BACKWARD}
        more = {name: value + made for name, value in known.items() if value is not None}
        return replace(self, act_b=self.act_b - gone, **more)

    def at_least(self, b: float, bw: float) -> Footprint:
        """This footprint with a backward of at least `b` bytes (B) and `bw` bytes (BW) of temporaries."""
        known = {name: getattr(self, name) for name in _OF_BACKWARD}
        least = {name: bw if name.endswith("bw") else b for name in known}
        return replace(self, **{name: max(value, least[name]) for name, value in known.items() if value is not None})

    def scaled(self, rows: float) -> Footprint:
        """The footprint of a share of the tokens; bytes of parameters stay."""
        return replace(self, **{name: rows * getattr(self, name) for name in _BY_TOKEN})

    @property
    def coming(self) -> Footprint:
        """This footprint in its first backward of a step, whose gradients count in addition to the bytes held."""
        z, b, w, bw = self.first, self.rise_b, self.rise_w, self.rise_bw
        return replace(
            self,
            more_b=z.more_b + self.came_b if b is None else b,
            more_w=z.more_w + self.came_w if w is None else w,
            more_bw=z.more_bw + self.came_b + self.came_w if bw is None else bw,
            late_bw=self.late_rise,
        )


_OF_BACKWARD = ("more_b", "more_bw", "first_b", "first_bw", "rise_b", "rise_bw")
_BY_TOKEN = ("act_b", "act_w", "entry", "result", "more_f", "more_alone", "logits", "loose", "tail", "kv", "fused")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that determine the footprints of a GPT.

    `width` is the bytes of an activation inside the layers, `stream` of one of the residual stream, which has the type
    of the parameters.
    """

    hidden: int
    heads: int
    queries: int  # width of all heads
    keys: int  # of all heads of keys, and of values
    mlp: int
    gated: bool  # llama: SwiGLU, RMSNorm
    cuda: bool
    vocab: int
    seq_len: int
    sequences: int
    width: int
    stream: int
    rotary: bool
    qkv_bias: bool = False  # of queries, keys and values, if `gated`; in gpt all layers have biases
    proj_bias: bool = False  # of the projection after attention, if `gated`
    qk_norm: bool = False  # of each head's queries and keys
    wide_norm: bool = False  # gemma: norms of single operations, in float32, on every device
    qk_whole: bool = False  # olmoe: of all heads' together
    experts: int = 0  # parallel MLPs of width `mlp` on a rank
    choices: int = 0  # experts of all ranks that share them out, of which a token visits `top_k`
    top_k: int = 0
    uneven: float = 1.0  # rows that a rank's experts get, relative to even loads
    common: int = 0  # width of the shared expert, which all tokens visit
    around: bool = False  # norms before and after attention and MLP
    turned: bool = True  # blocks have rotary positions, if `rotary`
    window: int = 0  # tokens that a token attends to; 0: all before it
    capped: bool = False  # attention scores are capped, and recomputed for the backward
    clipped: bool = False  # the largest scores of each head are found, for optimizer.qk_clip
    logits_cap: bool = False
    chunk: int = 0  # tokens whose logits the loss makes at once; 0: all, as torch does
    terms: bool = False  # a z loss or label smoothing, which torch's loss lacks
    scaled: bool = False  # embeddings are scaled
    past: int = 0  # tokens of the sequence before these, whose keys and values they attend to
    tp: int = 1  # ranks that each have a part of the layer
    shared: int = 1  # ranks that each have their part of the tokens outside of the linear layers
    regathers: bool = False  # and gather them again in B
    fused_grads: bool = False  # linear layers add weight gradients inside their products
    fp8: bool = False  # linear layers of blocks multiply in fp8
    cp: int = 1  # ranks that each have their part of the tokens everywhere, and all keys and values

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.sequences * self.seq_len // self.cp

    @property
    def own(self) -> float:
        """Tokens of a rank outside of the linear layers."""
        return self.tokens / self.shared

    @property
    def matrices(self) -> int:
        """Weights in the linear layers of a block."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        each = (3 if self.gated else 2) * self.hidden
        router = self.hidden * (self.choices + bool(self.common))
        return attention + each * ((self.experts or 1) * self.mlp + self.common) + router

    @property
    def vectors(self) -> int:
        """Parameters of a block outside of its matrices: norms and biases."""
        if self.gated:
            return self.norms + self._biases[0] + self._biases[1]
        biases = self.queries + 2 * self.keys + self.hidden + (self.experts or 1) * (self.mlp + self.hidden)
        return biases + self.norms + (self.common and self.common + self.hidden)

    @property
    def norms(self) -> int:
        """Parameters of the norms of a block."""
        heads = self.queries + self.keys if self.qk_whole else 2 * self.queries // self.heads if self.qk_norm else 0
        return (2 if self.gated and not self.around else 4) * self.hidden + heads

    @property
    def _biases(self) -> tuple[int, int]:
        """Biases of a gated block: of queries, keys and values, and of the projection after attention."""
        return self.qkv_bias * (self.queries + 2 * self.keys), self.proj_bias * self.hidden

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter of a block."""
        h, q, k = self.hidden, self.queries, self.keys
        if self.gated:
            each = ((q,), (k,)) if self.qk_whole else ((q // self.heads,),) * 2 if self.qk_norm else ()
            before, behind = (((count,),) if count else () for count in self._biases)
            after = ((h,),) if self.around else ()
            return (h,), (q + 2 * k, h), *before, *each, (h, q), *behind, *after, (h,), *self._mlps, *after
        return (h,), (h,), (q + 2 * k, h), (q + 2 * k,), (h, q), (h,), (h,), (h,), *self._mlps

    @property
    def parameters(self) -> tuple[int, ...]:
        """Elements of each parameter of a block."""
        return tuple(map(math.prod, self.shapes))

    @property
    def apart(self) -> tuple[int, ...]:
        """Elements of each parameter of a block's experts that this rank has."""
        return tuple(map(math.prod, self._mlp(self.mlp))) * self.experts

    def _mlp(self, width: int) -> tuple[tuple[int, ...], ...]:
        h = self.hidden
        return ((2 * width, h), (h, width)) if self.gated else ((width, h), (width,), (h, width), (h,))

    @property
    def _mlps(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the MLP, or of the router, the experts and the shared expert."""
        if not self.experts:
            return self._mlp(self.mlp)
        common = (*self._mlp(self.common), (1, self.hidden)) if self.common else ()
        return ((self.choices, self.hidden), *(self._mlp(self.mlp) * self.experts), *common)

    @property
    def norm(self) -> int:
        """Bytes per token that a norm keeps in addition to its input and output: its statistics.

        RMSNorm on a CPU is made of single operations, and keeps the normalized input too.
        """
        if not self.gated:
            return 2 * self.stream
        if self.wide_norm:
            return 8 + (6 if self.copied else 4) * self.hidden
        return 4 if self.cuda else 4 + (6 if self.copied else 4) * self.hidden

    @property
    def copied(self) -> bool:
        """Whether a norm of single operations keeps a wide copy of its input in place of that."""
        return self.gated and self.stream < 4 and (self.wide_norm or not self.cuda)

    @property
    def head_norms(self) -> int:
        """Bytes per token that the norms of queries and keys keep, in float32: statistics, normalized input, a copy."""
        if not self.qk_norm:
            return 0
        copies = (0 if self.cuda else 1) + (self.width < 4)
        return 4 * (copies * (self.queries + self.keys) + self.heads * (self.queries + self.keys) // self.queries)

    @property
    def swaps_only(self) -> bool:
        """Whether ranks meet only where experts get their rows: a BW can compute all weight gradients there."""
        return self.experts < self.choices and self.tp == 1

    @property
    def kept_beside(self) -> bool:
        """Whether a shared expert keeps its input with selective recompute: what a collective has made of a norm's."""
        return self.common > 0 and self.tp > 1

    @property
    def orders(self) -> int:
        """Bytes per token of the places of its rows among those of all experts, there and back; int64."""
        return 8 * self.top_k * (5 if self.experts < self.choices else 3)

    @property
    def router(self) -> int:
        """Bytes per token of the scores of all experts, of those chosen, of their sum and, as factors, quotients."""
        return 4 * self.choices + (4 + self.width) * self.top_k + 4 if self.experts else 0

    @property
    def steps(self) -> float:
        """Bytes of the backward of a norm of single operations: five tensors in float32, one of which F keeps."""
        return 16 * self.hidden * self.own if self.gated and (self.wide_norm or not self.cuda) else 0.0

    @property
    def meets(self) -> float:
        """Bytes of the collective behind a norm in its backward: the gradient of its output, and the message."""
        whole = self.stream * self.hidden * self.tokens
        return 2 * whole + self.stream * self.hidden * self.own * (self.shared > 1) if self.tp > 1 else 0.0

    @property
    def behind(self) -> int:
        """Bytes per token that norms after attention and MLP keep: input and normalized input, in float32."""
        return 2 * (8 + 8 * self.hidden) if self.around else 0

    @property
    def left(self) -> float:
        """Bytes of a norm after the MLP, without a gradient, that are freed when its own backward has run."""
        return (8 + 4 * self.hidden) * self.own if self.around else 0.0

    @property
    def inside_norm(self) -> float:
        """Temporary bytes of its backward, which is made of single operations."""
        return (16 * self.hidden - 8) * self.own if self.around else 0.0

    @property
    def turned_kept(self) -> int:
        """Numbers per token: rotated queries and keys, and a copy of the attention's output, which is in another order
        then; capped attention keeps only that copy."""
        return self.queries * (1 if self.capped else 2) + self.keys if self.rotary and self.turned else 0

    @property
    def mixed(self) -> int:
        """Numbers per token that attention keeps: queries, keys and values, and its output. With context parallelism a
        rank has the keys and values of all, and the outputs for two chunks of queries and their concatenation."""
        if self.cp > 1:
            return self.queries * (2 if self.capped else 3) + 2 * self.keys * self.cp
        return 2 * self.queries + 2 * self.keys + self.turned_kept

    @property
    def met(self) -> float:
        """MLPs that a token visits, among the MLPs of a rank."""
        return (self.top_k or 1) * (self.uneven if self.experts else 1.0)

    @property
    def logs(self) -> int:
        """Bytes per token: sums of exp of an attention kernel that recomputes its scores itself."""
        return 0 if self.capped else 4 * self.heads

    @property
    def scores(self) -> float:
        """Bytes of all tensors of a chunk of capped scores while their attention runs."""
        return 5 * 4 * self._chunk if self.capped else 0.0

    @property
    def peaks(self) -> float:
        """Bytes of the scores of a chunk whose largest are found."""
        return self.width * self._chunk if self.clipped else 0.0

    @property
    def _chunk(self) -> float:
        """Scores of a chunk of queries."""
        rows = self.seq_len if self.cp == 1 else self.seq_len // (2 * self.cp)  # of queries at a time
        whole, before = rows // CHUNK * CHUNK, self.past + self.seq_len - rows
        chunks = ((min(CHUNK, whole), before + whole), (rows - whole, before + rows))
        most = max(rows * min(keys, self.window + rows if self.window else keys) for rows, keys in chunks)
        return self.heads * most * self.sequences

    @property
    def fuses(self) -> bool:
        """Whether products may be added to float32 sums in one kernel."""
        return self.cuda or self.width == GRAD_BYTES

    @property
    def adds_inside(self) -> bool:
        """Whether linear layers add weight gradients inside their products."""
        return self.fused_grads and self.fuses

    def weight_grad(self, elements: float, *, first: bool) -> float:
        """Bytes the weight gradient of a linear layer takes before it is added to the sum."""
        return 0.0 if self.adds_inside else weight_grad(elements, self.width, first=first)

    @property
    def defers(self) -> bool:
        """Whether a BW may compute weight gradients of linear layers later, at the next collective."""
        return self.fused_grads or self.regathers or self.width < GRAD_BYTES

    @property
    def cast(self) -> bool:
        """Whether the layers compute in another type than that of their weights."""
        return self.width < self.stream


def weight_grad(elements: float, width: int, *, first: bool) -> float:
    """Bytes of a weight gradient before it is added: as computed, and as float32 unless it is the `first`."""
    return elements * ((0 if first else GRAD_BYTES) + (width if width < GRAD_BYTES else 0))


def embedding(z: Sizes) -> Footprint:
    """The embedding of a sequence's tokens, and of their positions if these are learned."""
    rows = z.stream * z.hidden * z.tokens
    # A row per position, for all sequences.
    places = 0 if z.rotary else z.stream * z.hidden * z.seq_len / (z.shared * z.cp)
    scaled = rows * z.scaled  # before or after the scaling
    more = scaled if z.rotary else rows + places
    table, fresh = (weight_grad(z.vocab * z.hidden, z.stream, first=first) for first in (False, True))
    came = GRAD_BYTES * (z.vocab + (0 if z.rotary else z.seq_len)) * z.hidden
    own = (9 if z.tp > 1 else 0) * z.tokens  # rows of the rank's shard of the table, and which tokens have one
    return Footprint(
        act_b=8 * z.tokens + own,
        act_w=8 * z.tokens + rows + places,
        entry=8 * z.tokens,
        result=rows / z.shared,
        keeps_given=z.shared == 1,
        more_f=more,
        more_alone=more,
        more_b=places or scaled,
        more_w=max(0, table - places),
        more_bw=max(table + scaled, places),
        first_w=max(0, fresh - places),
        first_bw=max(fresh + scaled, places),
        came_w=came,
        rise_w=fresh + came - places,  # the gradient of the positions is made first, and its source freed
        rise_bw=max(fresh + came + scaled, 2 * places),
        tables=8 * z.seq_len / z.cp,
        largest=max(z.vocab, 0 if z.rotary else z.seq_len) * z.hidden,
    )


def block(z: Sizes) -> Footprint:
    """A block: attention and MLP, or the experts of a token."""
    h, q, k, n, t = z.hidden, z.queries, z.keys, z.width, z.tokens
    f = z.met * z.mlp + z.common  # of all MLPs that a token visits
    grad = h * n * t if z.cast else 0  # the gradient of the residual stream in the layers' type
    spread = h * n * t if z.shared > 1 else 0  # the tokens of all ranks, before and after a collective
    around = 0 if z.common else spread  # which a shared expert keeps
    routed = 2 * z.met * h if z.experts else 0
    # The output of the shared expert, before its gate.
    own = h if z.common else 0
    inside = (1 if z.experts else 2) * h + z.mixed + routed + own + (4 if z.gated else 2) * f
    read = _read(z)

    def weights(first: bool) -> tuple[float, float]:
        down, up = (z.weight_grad(h * z.mlp * k, first=first) for k in (1, 2 if z.gated else 1))
        most = max(f * n * t + (grad or around) + down, 2 * f * n * t if z.gated else 0) - z.left
        return max(down, up - (f + h) * n * t), max(most, z.inside_norm, _attended(z))

    (more_w, more_bw), (first_w, first_bw) = weights(first=False), weights(first=True)
    gathers = n * (2 * k * z.cp + 4 * k - 2 * q - (4 if z.gated else 2) * f) * t if z.cp > 1 else 0.0
    act_b = (2 * (z.stream * h + z.norm) + z.behind) * z.own
    act_b += (z.head_norms + inside * n + z.logs + z.router + z.orders + n * (z.common > 0)) * t + read + 8 * z.choices
    rise_w, rise_bw = (None, _rise_of_experts(z, act_b) + around) if z.experts else _rises(z, grad)
    more_b = (3 if z.gated else 2) * f * n * t + grad + spread - z.left
    if z.experts:  # one expert runs at a time, between the rows of all
        rows, others = 2 * z.met * h * n * t, _others(z)
        gathers = _sent_back(z, again=False)
        more_b, more_bw, first_bw = (max(rows, one - others) for one in (more_b, more_bw, first_bw))
        if z.experts < z.choices:  # and their gradients, in two orders, while W's part of all experts is kept
            more_b = max(more_b, 1.5 * rows - (z.met * z.mlp * n * t if z.gated else 0))
        more_bw, first_bw = more_bw + around, first_bw + around
    return Footprint(
        act_b=act_b,
        act_w=(2 * h + 2 * z.met * h + own + (z.common > 0) + 2 * q + 2 * k + (3 if z.gated else 2) * f) * n * t
        + read
        + z.choices * n * z.own,
        entry=z.stream * h * z.own + 8 * z.top_k * t,  # and the chosen experts
        result=z.stream * h * z.own,
        loose=z.stream * h * z.own * z.copied,
        keeps_given=not (z.cast or z.experts) and z.shared == 1,
        more_f=max(
            h * n * t + spread,
            gathers,
            max(z.scores, z.peaks) - n * (q + 4 * f + h) * t - (z.stream * h + z.norm + z.behind) * z.own,
        ),
        more_alone=max((4 if z.gated else 2) * f * n * t, max(z.scores, z.peaks) - h * n * t),
        more_b=max(more_b, outside(z)),
        more_w=more_w,
        more_bw=more_bw,
        first_w=first_w,
        first_bw=first_bw,
        came_b=GRAD_BYTES * z.norms,
        came_w=GRAD_BYTES * (z.matrices + z.vectors - z.norms),
        rise_w=rise_w,
        rise_bw=rise_bw,
        until_bw=(2 * h + 1) * z.top_k * n * t + grad if z.swaps_only and z.defers else None,
        casts=z.matrices * n if z.cast else 0,
        tables=4 * z.seq_len / z.cp * (q // z.heads) if z.rotary else 0,
        largest=h * max(q + 2 * k, 2 * z.mlp if z.gated else z.mlp),
        kv=2 * k * n * t * z.cp,
        # Norms in float32 keep that tensor as well.
        fused=(q + k) * n * t if z.rotary and z.cp == 1 and not (z.qk_norm and n == 4) else 0,
    )


def _read(z: Sizes, *, again: bool = False) -> float:
    """Bytes of a norm's output, or of casts of it, that router and shared expert keep for their weight gradients; with
    selective recompute, `again`, all that read the same tensor share a cast."""
    if not z.experts:
        return 0.0
    router, beside = z.hidden * z.width * z.own, z.hidden * z.width * z.tokens
    if again:
        return router + beside * z.kept_beside
    return beside + router * (2 if z.cast else z.shared > 1) if z.common else router


def _sent_back(z: Sizes, *, again: bool) -> float:
    """`more_f` of a block of experts: as their outputs are added up or, if sent back, in two orders. Meanwhile the
    tokens exist that they read, which may run `again` in B."""
    low, stream = z.hidden * z.width * z.tokens, z.hidden * z.stream
    sent = max(z.top_k * low + low, 2 * z.met * low * (z.experts < z.choices))
    if z.common:  # it runs later: it keeps its activation and output; then that, with its gate, and the sum are there
        gate, wide = z.width * z.tokens, (2 if z.gated else 1) * (1 if again else 2) * z.common * z.width * z.tokens
        sent = max(sent - wide - low - gate, 3 * low + gate)
    kept = not z.cast and (z.kept_beside if again else z.common)  # by the shared expert
    given = stream * z.tokens * (z.shared > 1 and not kept)
    normed = stream * z.own * ((again or z.cast) and not (kept and z.shared == 1))
    return sent + given + normed + (4 * z.choices + 8 * z.top_k) * z.tokens - stream * z.own


def outside(z: Sizes) -> float:
    """Temporary bytes of a block's B outside of the MLP: in a norm after it, in capped attention, and in the collective
    of the gradients of keys and values."""
    q, k, n, t, f = z.queries, z.keys, z.width, z.tokens, z.met * z.mlp + z.common
    return max(
        z.inside_norm,
        z.scores + n * (q + k - f) * t - z.norm * z.own - 2 * z.left,
        n * (2 * k * z.cp + 3 * k - q - (f if z.gated else 0)) * t if z.cp > 1 else 0.0,
    )


def regathered(z: Sizes) -> Footprint:
    """A block whose ranks gather tokens again in B: F keeps neither them nor the norms' tensors before them."""
    whole = replace(block(z), loose=0.0)  # it keeps its inputs, not copies
    tokens = z.hidden * z.width * z.tokens
    if not z.experts:
        return whole.remade(2 * z.norm * z.own + 2 * tokens, 0.0)  # see `learning`
    # Tokens are gathered behind the router, which reads the rank's own: these run again, and exist while F runs. The
    # shared expert keeps the gathered ones. In B the rows sent to experts and back are gone when attention's run again.
    own = z.hidden * z.width * z.own
    whole = replace(whole, more_f=max(whole.more_f, _sent_back(z, again=True)))
    if z.experts < z.choices:  # gradients of the rows in two orders, as in a block's B
        wide = z.met * (3 * z.hidden - (z.mlp if z.gated else 0)) * z.width - 4 * z.choices - 8 * z.top_k
        whole = whole.at_least(0.0, wide * z.tokens)
    return whole.remade(2 * z.norm * z.own + tokens + own, 0.0)


def learning(z: Sizes) -> Footprint:
    """A block with weight gradients. Its backward has at least the tensors of its norms, and of the collectives next to
    them; a BW computes weight gradients during these, if layers can defer them."""
    again = z.regathers
    found = regathered(z) if again else block(z)
    if z.experts:
        return found
    h, n, t, f = z.hidden, z.width, z.tokens, z.mlp * z.width * z.tokens
    if z.around:  # both norms' tokens at once, at most
        return found.remade(0.0, 2 * h * n * t * again)
    own, whole, tokens = z.stream * h * z.own, z.stream * h * t, h * n * t  # a norm's output: own, of all, cast
    ends = tokens if z.cast or z.shared > 1 else 0.0  # the gradient of the MLP's output
    up, inside, heads = (2 if z.gated else 1) * f, (4 if z.gated else 2) * f, (z.queries + 2 * z.keys) * n * t
    normed, norm, meets = z.norm * z.own, z.steps, z.meets
    attended = own + (z.head_norms + z.mixed * n + z.logs) * t  # what attention keeps, with its residual input
    read: float = tokens  # by the MLP, or by attention
    enters = made = 0.0
    if again:  # a norm, and the tokens behind it, from their own backward on
        read, normed = 0.0, normed + own * z.copied
        enters, made, norm = own + normed + whole, tokens + normed, norm + whole + normed
    else:
        attended += normed

    left = ends + up + f - inside  # after the MLP's backward: what W needs, less what is freed
    later = max(0.0, tokens + heads + z.queries * n * t - attended + again * tokens)  # and after attention's
    b = left + later + max(meets + normed * again, norm)
    if again:
        b = tokens + max(b, left + later + whole + enters)
    # Bytes in BW, the number of weight gradients made before, from the last layer's on, and whether another is made.
    steps = [(norm - inside - read, 2, False), (norm - inside - attended - 2 * read, 4, False)]
    if z.tp > 1 and z.defers:
        steps += [
            (ends + up + f, 0, False),
            (left + (tokens + enters if again else meets), 0, True),
            (up - inside + made + meets, 1, True),
            (heads - inside - attended - read + made + meets, 3, True),
        ]
    weights = (h * z.mlp, (2 if z.gated else 1) * h * z.mlp, h * z.queries, h * (z.queries + 2 * z.keys))

    def most(first: bool, came: float) -> float:
        each = ((size, sum(weights[: k + last]), weights[k] if last else 0) for size, k, last in steps)
        return max(size + came * count + z.weight_grad(more, first=first) for size, count, more in each)

    return replace(
        found,
        more_b=max(found.more_b, b),
        more_bw=max(found.more_bw, most(False, 0.0)),
        first_bw=max(found.first_bw or 0.0, most(True, 0.0)),
        rise_bw=max(found.rise_bw or 0.0, most(True, GRAD_BYTES)),
    )


class Spared(NamedTuple):
    """Selective recompute of a layer."""

    size: Footprint
    cheap: float  # the share of F that runs again


def spared(z: Sizes, *, attention: bool) -> Footprint:
    """A block with selective recompute: F keeps the outputs of its linear layers, and B recomputes their inputs, with
    `attention` also that of the projection after it."""
    h, n, t, f = z.hidden, z.width, z.tokens, z.met * z.mlp + z.common
    whole = replace(block(z), loose=0.0)  # its input is kept, and copied again
    gone = 2 * z.norm * z.own + (2 * h + (2 if z.gated else 1) * f) * n * t
    if attention:
        gone += mixed(z)
        whole = replace(whole, fused=-whole.kv)  # slices buffer keys and values next to a linear layer's output
    if z.experts:
        kept, read = h * n * t * z.kept_beside, _read(z)
        gone += read - h * n * t - kept
        whole = replace(whole, act_b=whole.act_b - gone, act_w=whole.act_w - read + _read(z, again=True))
        more_f = max(whole.more_f, _sent_back(z, again=True))
        return _routed_again(z, replace(whole, more_f=more_f), attention=attention)
    if z.gated:  # at the weights of the MLP's last product the gate's gradient is yet to come
        wide = f * n * t
        less = {name: max(getattr(whole, name) - wide, 2 * wide - z.left) for name in ("more_bw", "first_bw")}
        whole = replace(whole, **less)
    found = whole.remade(gone, ((3 if z.gated else 1) * f + (2 * h if z.tp > 1 else 0)) * n * t)
    if not z.gated and z.stream < GRAD_BYTES and z.tp == z.cp == 1:  # the gradient is widened once its input is gone
        found = replace(found, more_bw=found.more_bw - min(f * n * t, GRAD_BYTES * h * z.mlp))
    if z.cp == 1:
        return _mixed_again(z, found) if attention else _mixed_kept(z, found)
    if not attention:
        return found
    # During the collective of the gradients of keys and values, those of all tokens exist twice, with the inputs of the
    # MLP's weight gradients, which are computed meanwhile.
    meanwhile = (f + h + 3 * z.queries + (4 * z.cp + 2) * z.keys) * n * t
    return found.at_least(meanwhile, meanwhile + z.weight_grad(h * z.mlp, first=False))


def _mixed_again(z: Sizes, found: Footprint) -> Footprint:
    """A block whose backward has at least the tensors of attention that runs again, or of the norm before it.

    Attention's own and their gradients; without rotary positions those of queries, keys and values, and the joint one,
    behind attention. A norm of single operations has five in float32. B has those of the MLP's weight gradients as
    well; the MLP's activations are freed. Capped attention and norms behind attention have others.
    """
    if z.capped or z.around:
        return found
    h, q, k, n, t, f = z.hidden, z.queries, z.keys, z.width, z.tokens, z.mlp
    each = (3 * q + 2 * k + z.turned_kept) * n + z.logs if z.turned_kept else (4 * q + 4 * k) * n
    own = (each + z.head_norms) * t
    norm = _normed(z)
    low = 2 * h * z.cast  # gradients of the outputs of both halves in the layers' type
    b = (f + h + low) * n * t + max(own, (q + h) * n * t + norm)
    bw = max(own - q * n * t, norm) - (2 if z.gated else 1) * f * n * t
    came = GRAD_BYTES * (z.matrices - h * (q + 2 * k) + z.vectors - z.norms)  # ahead of it, of other weights
    return replace(found, late_b=b, late_bw=bw, late_rise=bw + came)


def _normed(z: Sizes) -> float:
    """Bytes of the backward of a norm that ran again: its gradients, of single operations or of one."""
    steps = (24 if z.copied else 20) * z.hidden if z.wide_norm or (z.gated and not z.cuda) else 0
    return (steps + (z.stream if z.cast else z.width) * z.hidden) * z.tokens


def _mixed_kept(z: Sizes, found: Footprint) -> Footprint:
    """A block whose backward runs all but attention again: it has at least the gradients of attention's output and of
    queries, keys and values, or, before that, the tensors of the norm before the MLP. B has those of the MLP's weight
    gradients as well."""
    if z.capped or z.around:
        return found
    h, n, t, up = z.hidden, z.width, z.tokens, (2 if z.gated else 1) * z.mlp
    own, norm, low = (2 * z.queries + 2 * z.keys) * n * t, _normed(z), h * z.cast
    gone, came = up * n * t, GRAD_BYTES * h * (z.mlp + up)
    b, late = ((z.mlp + h + more) * n * t for more in (low, 2 * low))
    found = found.at_least(b + norm, norm - gone)
    rise = max(found.first_bw or 0.0, found.rise_bw or 0.0, norm - gone + came)
    return replace(
        found, rise_bw=rise, late_b=late + own, late_bw=own - gone, late_rise=own - gone + came + GRAD_BYTES * h * h
    )


def _routed_again(z: Sizes, found: Footprint, *, attention: bool) -> Footprint:
    """A block of experts with selective recompute: `found` with the peaks of its backward, from its tensors' lives."""

    def most(*, split: bool, first: bool = False, stays: bool = False) -> tuple[float, float]:
        """The peak while the gradient from the next layer is there, and after."""
        steps, late, _ = _steps(z, attention=attention, split=split, first=first, stays=stays)
        held = [0.0, *accumulate(steps)]
        return max(held[: late + 1]), max(held[late + 1 :], default=0.0)

    (b, late_b), (bw, late_bw) = most(split=True), most(split=False)
    (first, _), (rise, late_rise) = most(split=False, first=True), most(split=False, first=True, stays=True)
    if z.swaps_only:
        steps, _, meets = _steps(z, attention=attention, split=False, first=False, stays=False)
        found = replace(found, until_bw=max(accumulate(steps[:meets])))
    return replace(
        found, more_b=b, more_bw=bw, first_bw=first, rise_bw=rise, late_b=late_b, late_bw=late_bw, late_rise=late_rise
    )


def _steps(z: Sizes, *, attention: bool, split: bool, first: bool, stays: bool) -> tuple[list[float], int, int]:
    """Bytes that the backward of a block of experts makes and (-) frees with selective recompute, in this order, the
    number of steps in which the gradient that it was given is there, and of those before experts' rows are swapped.

    `split`: B, whose tensors for weight gradients stay; otherwise BW, which computes these at once or, if ranks meet
    inside of ops, at the next collective. `first`: no weights have gradients yet; `stays`: those that come count.
    """
    h, q, k, n, t = z.hidden, z.queries, z.keys, z.width, z.tokens
    low, whole, own, mine = h * n * t, h * z.stream * t, h * z.stream * z.own, h * n * z.own
    sent, got = z.top_k * low, z.met * low  # the rows of this rank's tokens, and those of its experts
    mixed, joint, order, up = q * n * t, (q + 2 * k) * n * t, 8 * z.top_k * t, 2 if z.gated else 1
    away, gathers = z.experts < z.choices, z.shared > 1
    waits = split or z.tp > 1 or z.cp > 1 or away  # weight gradients do
    here, read = (mine, low) if z.cast else (own, whole)  # a norm's output as the router keeps it, and other layers
    # A norm that runs again: what its backward needs, what its forward drops, what its backward makes.
    inside, beside, back = (z.steps and (8 if z.copied else 4) * h * z.own), 4 * h * z.own * z.copied, z.steps or own
    steps, waiting = list[float](), list[float]()

    def add(*sizes: float) -> None:
        steps.extend(sizes)

    def weight(elements: float, *freed: float) -> None:
        """A weight's gradient; then the tensors that it is made of are freed."""
        fresh = z.weight_grad(elements, first=first)
        (waiting if waits else steps).extend((fresh, GRAD_BYTES * elements * stays, -fresh, *(-one for one in freed)))

    def meet() -> None:
        if not split:
            add(*waiting)
            waiting.clear()

    def expert(width: int, share: float, grads: float, rows: float, *again: float) -> None:
        """An expert's activation runs again, for a `share` of the tokens, and what made its rows `again`; its weights'
        gradients free `grads` of its output, and its `rows`."""
        wide = width * share * n * t
        add(wide, up * wide)  # the gradient of the last product's input, and that input
        weight(h * width, wide, grads)
        add(*((3 * wide, -3 * wide, -2 * wide) if z.gated else (wide, -2 * wide)), share * low, *again)
        weight(up * h * width, up * wide, rows)

    add(mine * z.cast)
    if gathers:
        add(low, low, -low, -mine * z.cast)
    grad = low if gathers or z.cast else 0.0
    normed = inside + own + beside, -beside, mine * z.cast  # and a cast
    if z.common:  # the gradients of its output and of its gate; without collectives before it, it reads a norm's output
        add(low, low, n * t, -low, -low)
        kept = low * z.kept_beside
        expert(z.common, 1.0, low, kept, *(() if kept else normed))
        add(whole * z.cast, -low * z.cast)
        if z.tp > 1:
            meet()
        add(mine, *(normed if kept else ()))
        weight(h, n * t)
        add((own - mine) * z.cast, *(() if kept else (own, -2 * own)))
    # Gradients of the outputs in the order of the tokens, then of the experts; those of weights.
    add(sent, sent, n * z.top_k * t, -sent, -grad, -n * z.top_k * t - sent, sent, sent, -sent, -sent, -order)
    meets = len(steps)
    if away:
        add(got)
        meet()
        add(-sent, got, got, -got, -got, -order)
    for place in range(z.experts):
        last = got * (place == z.experts - 1)
        expert(z.mlp, z.met / z.experts, last, last)
    add(got, -got)
    if away:
        add(got, got, -got, -got, -order, sent)
        meet()
        add(-got)
    if z.cast:
        add(z.top_k * whole, -sent)
    add(whole, whole, -whole, -z.top_k * whole, -order)
    if z.common:
        add(whole, -2 * whole)
    if z.tp > 1:
        meet()
        add(*((whole, own, -whole, -whole) if gathers else (whole, -whole)))
    add(n * z.choices * z.own - z.router * t - order, mine)
    if z.kept_beside:
        add(own, -2 * own)
    add(*(() if z.common else normed), -own * z.cast)
    weight(h * z.choices, here, n * z.choices * z.own)
    add((own - mine) * z.cast, own, -2 * own, GRAD_BYTES * h * stays)
    add(back, own - back - inside, -2 * own, own)  # the norm's input is freed; the sum with the given gradient
    late = len(steps)
    add(-own)
    if z.cp > 1:
        return steps, late, meets
    add(mine * z.cast)
    if gathers:
        add(low)
        meet()
        add(low, -low, -mine * z.cast)
    turned = z.turned_kept * n * t + z.logs * t
    add(mixed, (mixed + turned + z.head_norms * t) * attention)
    freed = mixed * (z.turned_kept > 0 or waits)  # without positions attention's backward reads the same tensor
    weight(h * q, freed, grad)
    turning = (8 if n == GRAD_BYTES else 9) * q * t * (z.turned_kept > 0)
    add(joint, -turned, turning, -turning, joint, -joint)
    add(-z.head_norms * t - mixed - joint - (mixed - freed))
    add(low, inside + own + beside, -beside)
    if gathers:
        add(whole)
        meet()
        add(whole, -whole, -own)
    add((low - whole) * z.cast)
    weight(h * (q + 2 * k), read, joint)
    add((whole - low) * z.cast)
    came = 0.0
    if gathers:
        came = own
        add(whole, own)
        meet()
        add(-whole)
    elif z.tp > 1:
        came = whole
        add(whole)
        meet()
    add(GRAD_BYTES * h * stays, back - came, own - back - inside, -whole - own, own, -2 * own)
    meet()
    return steps, late, meets


def mixed(z: Sizes) -> float:
    """Bytes that attention keeps beside the joint queries, keys and values."""
    return (z.head_norms + (z.mixed - z.queries - 2 * z.keys) * z.width + z.logs) * z.tokens


def _others(z: Sizes) -> float:
    """Bytes that the backward of all visited MLPs at once would need for the MLPs other than the running one."""
    wide = z.met * z.mlp
    return (3 if z.gated else 2) * (wide + z.common - max(wide / z.experts, z.common)) * z.width * z.tokens


def _rise_of_experts(z: Sizes, kept: float) -> float:
    """`rise_bw` of a block of experts that keeps `kept` bytes: its gradients are made expert after expert, while each
    frees its activations. The shared expert runs before them, attention after them."""
    h, rows, inside = z.hidden, z.met * z.hidden * z.width * z.tokens, (4 if z.gated else 2) * z.width * z.tokens
    common = GRAD_BYTES * sum(map(math.prod, z._mlp(z.common))) if z.common else 0
    own = GRAD_BYTES * sum(z.apart)
    gone = inside * z.common
    return max(
        common + (3 if z.gated else 2) * z.common * z.width * z.tokens,
        common + 2 * rows - gone,  # gradients of the experts' outputs, in two orders
        common + own + rows - gone - inside * z.met * z.mlp,  # and of their rows, when their outputs are freed
        GRAD_BYTES * (z.matrices + z.vectors) - kept + 2 * h * z.stream * z.own,
    )


def _attended(z: Sizes) -> float:
    """Bytes that a capped attention's backward needs in BW, when later tensors are freed; 0 for other attention."""
    if not z.capped:
        return 0.0
    gone = z.width * (4 * z.mlp + z.hidden) * z.tokens + (z.norm + z.behind) * z.own
    return z.scores + z.width * z.keys * z.tokens - gone


def _rises(z: Sizes, grad: float) -> tuple[float, float]:
    """`rise_w` and `rise_bw` of a block: the peak at the weights of its linear layers, from the last to the first.

    At each there are the gradients of all later weights, its own as computed and as it stays, and, in BW, the gradients
    of its input and output, while later activations are freed. A narrow parameter's gradient is cast after the output's
    gradient is freed.
    """
    h, q, k, n, t = z.hidden, z.queries, z.keys, z.width, z.tokens
    f, up = n * z.mlp * t, n * (2 if z.gated else 1) * z.mlp * t
    inside, norm = n * (4 if z.gated else 2) * z.mlp * t, z.norm * z.own  # the MLP's activations, and its norm's
    attended, behind = n * (z.turned_kept + q) * t, z.behind * z.own
    near, far, heads = n * h * t, n * q * t, n * (q + 2 * k) * t
    # (inputs, outputs, whether it has a bias, bytes of its input, of its output, bytes held beyond those before BW)
    linear = [
        (z.mlp, h, not z.gated, f, near, f + grad - z.left),
        (h, (2 if z.gated else 1) * z.mlp, not z.gated, near, up, near + up - inside - z.left),
        (q, h, not z.gated or z.proj_bias, far, near, far + grad - near - inside - norm - 2 * z.left),
        (h, q + 2 * k, not z.gated or z.qkv_bias, near, heads, -inside - norm - attended - behind),
    ]
    gone = rise_w = 0.0
    came = GRAD_BYTES * h * z.around  # of the norm after the MLP
    rise_bw = came + z.inside_norm
    for index, (inputs, outputs, biased, takes, gives, more) in enumerate(linear):
        stays = GRAD_BYTES * (inputs * outputs + (outputs if biased else 0))
        low = z.weight_grad(inputs * outputs, first=True)
        rise_w = max(rise_w, came + stays + low - gone)
        over = gives if index and z.stream < GRAD_BYTES else 0.0  # the stage's incoming gradient stays
        rise_bw = max(rise_bw, came + low + more, came + low + stays + more - over)
        came, gone = came + stays, gone + takes + gives
        if index == 0:
            rise_bw = max(rise_bw, came + up - z.left)  # the gradients inside the MLP
        elif index == 1:
            came += GRAD_BYTES * (1 + z.around if z.gated else 2) * h  # of its norm, and the norm after attention
        elif index == 2 and z.capped:
            rise_bw = max(rise_bw, came + _attended(z))
    return rise_w, rise_bw


def head(z: Sizes, *, defers: bool = False) -> Footprint:
    """The last norm, the projection to the vocabulary and the loss; in a stage that `defers` weight gradients, if not
    every stage can."""
    h, n, t, vocab = z.hidden, z.width, z.tokens, z.vocab
    if z.chunk:
        return by_chunks(z)
    logits = n * vocab * t
    wide = 4 * vocab * t if n < 4 else 0  # the loss is computed in float32
    kept: float = 4 * vocab * t + (logits if z.logits_cap else 0)  # for the loss, and the tanh of a cap
    gone: float = logits - 4 * vocab * t  # d logits have replaced log-probabilities before the weight gradient
    more_f, more_b = float(logits + wide), 8.0 * vocab * t
    if z.terms or z.tp > 1:  # logits are kept as they are, and exp is computed in addition
        kept, gone = logits + 4 * t + (logits if z.logits_cap else 0), 0.0
        more_f, more_b = 4.0 * vocab * t + wide, 4.0 * vocab * t + wide
    weight, fresh = (z.weight_grad(h * vocab, first=first) for first in (False, True))
    norm = h if z.gated else 2 * h
    cast = logits if z.stream < GRAD_BYTES else 0.0  # d logits are freed before a narrow weight's gradient is cast
    # A BW has at least these: the norm's tensors, or messages during which it computes the weight's gradient.
    behind, steps = kept + 8 * t, z.steps - 4 * z.own
    normed, came = steps - behind - h * n * t, GRAD_BYTES * h * vocab
    least = max(more_b, normed)
    meets = z.meets + logits - behind
    at_once, during = h * n * t + gone, meets if z.tp > 1 and z.defers else 0.0
    most = max(at_once, during)
    b = max(more_b, steps + logits - behind, meets)
    rise = fresh + max(at_once + max(0.0, came - cast), (during + came) * (during > 0))
    alone = z.swaps_only and (defers or z.defers)  # its weight's gradient comes later
    return Footprint(
        act_b=(z.stream * h + z.norm) * z.own + (h * n + 8) * t + kept,
        act_w=(h + vocab) * n * t,
        entry=z.stream * h * z.own + 8 * t,
        loose=z.stream * h * z.own * z.copied,
        more_f=more_f,
        more_alone=more_f + kept,
        more_b=b,
        more_w=weight,
        more_bw=b if alone else max(least, most + weight),
        first_w=fresh,
        first_bw=b if alone else max(least, most + fresh),
        came_b=GRAD_BYTES * norm,
        came_w=GRAD_BYTES * h * vocab,
        rise_bw=b if alone else max(more_b, normed + came, rise),
        casts=h * vocab * n if z.cast else 0,
        logits=kept,
        largest=h * vocab,
    )


def by_chunks(z: Sizes, *, learns: bool = True) -> Footprint:
    """The head if the loss makes logits of `z.chunk` tokens at once, in its backward again: it keeps its input and
    log(sum of exp), B makes the weight gradient if the layer `learns`."""
    h, n, t, vocab = z.hidden, z.width, z.tokens, z.vocab
    some = min(z.chunk, t)
    narrow = n < GRAD_BYTES
    logits, low = 4.0 * vocab * some, float(n * vocab * some * narrow)
    grad = float(GRAD_BYTES * h * vocab * learns)
    rows, product = float(h * n * t), float(n * h * vocab * (learns and not z.fuses))
    normed = float(z.stream * h * t) if z.cast else 0.0  # the norm's output, beside the cast that is kept
    most = rows + grad + max(logits * (1 + z.logits_cap), logits + low, low + product)
    norm = h if z.gated else 2 * h
    return Footprint(
        act_b=(z.stream * h + z.norm) * z.own + (h * n + 12) * t,
        entry=z.stream * h * z.own + 8 * t,
        more_f=logits + low + normed,
        more_alone=logits + low + rows + normed,
        more_b=most,
        more_bw=most,
        came_b=GRAD_BYTES * (norm + h * vocab),
        rise_b=most,
        rise_bw=most,
        first_b=most - grad,
        first_bw=most - grad,
        casts=h * vocab * n if z.cast else 0,
        largest=h * vocab,
    )


def last_norm(z: Sizes) -> Footprint:
    """The norm before a vocabulary-parallel output layer: it keeps its input, the output layer keeps its result."""
    h, t = z.hidden, z.own
    return Footprint(
        act_b=(z.stream * h + z.norm) * t,
        entry=z.stream * h * t,
        result=z.width * h * t,
        more_f=z.width * h * t,
        more_alone=z.width * h * t,
        more_b=z.width * h * t,
        more_bw=z.width * h * t,
        came_b=GRAD_BYTES * (h if z.gated else 2 * h),
        largest=h,
    )


def places(z: Sizes) -> Footprint:
    """The positions that are added to a vocabulary-parallel embedding, if they are learned."""
    rows = z.stream * z.hidden * z.tokens
    if z.rotary:
        return Footprint(entry=rows, result=rows)
    table = GRAD_BYTES * z.seq_len * z.hidden
    return Footprint(
        act_w=rows,
        entry=rows,
        result=rows,
        keeps_given=True,
        more_w=table,
        more_bw=table,
        came_w=table,
        largest=z.seq_len * z.hidden,
    )


@dataclass(frozen=True, slots=True)
class More:
    """Temporary bytes of one stage's ops beyond the larger of the bytes held before and after them."""

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    bw: float = 0.0


@dataclass(frozen=True, slots=True)
class Rise:
    """Peak bytes in a backward of one stage beyond the bytes held before it, the incoming gradient included."""

    b: float = 0.0
    w: float = 0.0
    bw: float = 0.0


@dataclass(frozen=True, slots=True)
class _Turn:
    """Bytes at the start of a layer's backward inside a stage, beyond the bytes held before the stage's op."""

    layer: Footprint
    b: float
    w: float
    bw: float
    again: float  # temporaries of its second forward beyond the activations that it keeps
    behind: float  # activations of the later layers
    given: float  # the gradient from the next layer of the stage
    until: float = 0.0  # peak of its BW while weight gradients of later layers wait for a collective
    owed: float = 0.0  # these


def _turns(layers: Sequence[Footprint], *, recompute: bool) -> tuple[list[_Turn], float]:
    """The turns of the layers, the last one's first, and the bytes B leaves for W beyond the bytes F kept."""
    kept = [z.entry if recompute else z.act_b for z in layers]
    if not recompute:
        kept[0], kept[-1] = kept[0] + layers[0].loose, kept[-1] + layers[-1].tail
    there = [0.0 if z.ends_kv is None else z.kv + z.fused for z in layers]
    kept = [
        (z.ends_kv or 0.0) + one - (0.0 if recompute else kv) for z, one, kv in zip(layers, kept, there, strict=True)
    ]
    found = list[_Turn]()
    behind = left = released = 0.0  # by later layers: kept by F, left for W beyond that, freed by W
    waiting = owed = 0.0  # by later layers until a collective in BW: what W needs, its gradients
    for k in reversed(range(len(layers))):
        z, inner = layers[k], k < len(layers) - 1
        # A second forward keeps all activations that the first one would have kept, input and output included.
        again = z.act_b + z.loose + z.tail - z.entry - there[k] if recompute else 0.0
        result = z.result if inner else 0.0  # the gradient from the next layer; the last layer's is the stage's
        # With `keeps_given` the stage's gradient existed before, and `left` counts it.
        flowing = result - layers[-1].result if inner and layers[-1].keeps_given else result
        shared = z.tail if inner and not recompute else 0.0  # its output: in `behind` as the next input
        need = z.more_f + (0.0 if z.tail else z.result) if recompute else 0.0
        found.append(
            _Turn(
                *(z, again + left + flowing, -released, again - behind + shared + result, need, behind, result),
                *((waiting + z.until_bw, owed) if waiting and z.until_bw is not None else ()),
            )
        )
        # What experts' layers leave is less than what they free.
        waiting, owed = (waiting + z.act_w, owed + z.came_w) if z.until_bw is None else (0.0, 0.0)
        behind, left, released = behind + kept[k], left + z.act_w - kept[k], released + z.act_w
    return found, left


def more(layers: Sequence[Footprint], *, recompute: bool, first: bool) -> More:
    """Temporaries of the ops of a stage of `layers`, which run one after another.

    The `first` stage has no input gradient to send, which B otherwise holds at its end. A stage's incoming gradient
    exists from before B until B ends, used up or not; at its end only the bytes left for W remain.
    """
    turns, left = _turns(layers, recompute=recompute)
    given = layers[-1].result
    stays = layers[-1].tail > 0 and not recompute  # its result is kept, else it is being sent
    f = 0.0
    for k, turn in zip(reversed(range(len(layers))), turns, strict=True):
        z, inner = turn.layer, k < len(layers) - 1
        # From the previous layer; the stage's input exists before. If a loss follows, that needs the most.
        entering = z.loose if k and z.result and not recompute else 0.0
        made = z.result if inner or not stays else 0.0
        own = (z.more_alone if recompute else z.more_f) + entering + made
        f = max(f, own - (0.0 if stays else given) - turn.behind)
    found = _most(turns)
    after = left - given + (0.0 if first else layers[0].entry)
    return More(f, max(0.0, found.b - max(0.0, after)), found.w, found.bw)


def rise(layers: Sequence[Footprint], *, recompute: bool, first: bool) -> Rise:
    """The rise of a stage of `layers`; in the `first` backward of a step it includes gradients as they are made."""
    turns, _ = _turns(layers, recompute=recompute)
    if not first:
        return _most(turns)
    b = w = 0.0
    coming = list[_Turn]()
    for turn in turns:
        z = turn.layer
        until = turn.until - turn.owed
        coming.append(replace(turn, layer=z.coming, b=turn.b + b, w=turn.w + w, bw=turn.bw + b + w, until=until))
        b, w = b + z.came_b, w + z.came_w
    return _most(coming)


def _most(turns: Sequence[_Turn]) -> Rise:
    return Rise(
        b=max(
            0.0,
            *(turn.b + max(turn.layer.more_b, turn.again) for turn in turns),
            # W's output gradient may be that from the next layer itself.
            *(turn.b + turn.layer.late_b - (0.0 if turn.layer.keeps_given else turn.given) for turn in turns),
        ),
        w=max(0.0, *(turn.w + turn.layer.more_w for turn in turns)),
        bw=max(
            0.0,
            *(turn.bw + max(turn.layer.more_bw, turn.again, turn.layer.late_bw - turn.given) for turn in turns),
            *(turn.bw + turn.until for turn in turns),
        ),
    )


NO_RISE = Rise()
NO_MORE = More()
NOTHING = Footprint()
