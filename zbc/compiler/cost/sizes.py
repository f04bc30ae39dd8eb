"""Sizes of a layer of a built-in model, and what follows from them: shapes, bytes per token, what waits for ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zbc.plan.dealing import STACK

CHUNK = 512  # queries whose capped scores exist at once (runtime/features/slicing.py)
GRAD_BYTES = 4  # gradients and optimizer state are float32


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that determine the footprints of a GPT or a llama.

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
    top_k: float = 0  # divided by `fold`
    fold: int = 1  # ranks that share the layer and each route their part of the tokens, to whole experts
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
    by_matrix: bool = False  # the optimizer steps matrices of experts one by one: Muon

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.sequences * self.seq_len // self.cp

    @property
    def own(self) -> float:
        """Tokens of a rank outside of the linear layers."""
        return self.tokens / self.shared

    @property
    def routed(self) -> float:
        """Tokens whose experts a rank chooses."""
        return self.tokens / self.fold

    @property
    def scored(self) -> float:
        """Tokens that the router of a rank reads."""
        return self.tokens / max(self.shared, self.fold)

    @property
    def weighed(self) -> float:
        """The share of the tokens for which a rank weighs the output of the shared expert."""
        return 1 / self.shared if self.fold > 1 else 1

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
        return tuple(map(math.prod, self._stacks)) if self.experts else ()

    def mlp_shapes(self, width: int) -> tuple[tuple[int, ...], ...]:
        """The shape of each parameter of an MLP of this width."""
        h = self.hidden
        return ((2 * width, h), (h, width)) if self.gated else ((width, h), (width,), (h, width), (h,))

    @property
    def _mlps(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the MLP, or of the router, the experts and the shared expert."""
        if not self.experts:
            return self.mlp_shapes(self.mlp)
        common = (*self.mlp_shapes(self.common), (1, self.hidden)) if self.common else ()
        return ((self.choices, self.hidden), *self._stacks, *common)

    @property
    def in_stage(self) -> int:
        """The width of the MLP, or of all experts if no replicas share them out: these step them apart."""
        return 0 if self.experts < self.choices else (self.experts or 1) * self.mlp

    @property
    def _stacks(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the experts' parameters: one for all experts, or each matrix for Muon, which steps it alone."""
        own = self.mlp_shapes(self.mlp)
        return own * self.experts if self.by_matrix else tuple((self.experts, *shape) for shape in own)

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
    def orders(self) -> float:
        """Bytes per token of the places of its rows among those of all experts, there and back; int64."""
        return 8 * self.top_k * (5 if self.experts < self.choices else 3)

    @property
    def router(self) -> float:
        """Bytes per token of the scores of all experts, of those chosen, of their sum and, as factors, quotients."""
        return 4 * (self.choices + 1) / self.fold + (4 + self.width) * self.top_k if self.experts else 0

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

    def stack_grad(self, elements: float, *, first: bool) -> float:
        """Bytes the weight gradients of the experts take, of `elements` each, before they are added to their sum."""
        some = min(self.experts, max(1, STACK // (int(elements) or 1)))  # at a time
        if (first and some == self.experts and self.width == GRAD_BYTES) or (self.adds_inside and not first):
            return 0.0
        return some * elements * self.width

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
