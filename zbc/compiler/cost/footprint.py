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
from dataclasses import dataclass, replace

from zbc.compiler.cost.sizes import GRAD_BYTES, Sizes, weight_grad


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one layer for one microbatch, and elements of its largest parameter."""

    act_b: float = 0.0
    act_w: float = 0.0
    stays: float = 0.0  # the part of act_b that offload leaves on the device
    entry: float = 0.0  # its input
    entry_stays: float = 0.0  # the same of it
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
_BY_TOKEN = (
    "act_b",
    "stays",
    "act_w",
    "entry",
    "entry_stays",
    "result",
    "more_f",
    "more_alone",
    "logits",
    "loose",
    "tail",
    "kv",
    "fused",
)


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
    own = h * z.weighed if z.common else 0
    inside = (1 if z.experts else 2) * h + z.mixed + routed + own + (4 if z.gated else 2) * f
    read = router_inputs(z)

    def weights(first: bool) -> tuple[float, float]:
        grads = z.stack_grad if z.experts else z.weight_grad
        down, up = (grads(h * z.mlp * k, first=first) for k in (1, 2 if z.gated else 1))
        most = max(f * n * t + (grad or around) + down, 2 * f * n * t if z.gated else 0) - z.left
        return max(down, up - (f + h) * n * t), max(most, z.inside_norm, _attended(z))

    (more_w, more_bw), (first_w, first_bw) = weights(first=False), weights(first=True)
    gathers = n * (2 * k * z.cp + 4 * k - 2 * q - (4 if z.gated else 2) * f) * t if z.cp > 1 else 0.0
    act_b = (2 * (z.stream * h + z.norm) + z.behind) * z.own
    act_b += (
        (z.head_norms + inside * n + z.logs + z.router + z.orders + n * z.weighed * (z.common > 0)) * t
        + read
        + 8 * z.choices
    )
    rise_w, rise_bw = (None, _rise_of_experts(z, act_b) + around) if z.experts else _rises(z, grad)
    more_b = (3 if z.gated else 2) * f * n * t + grad + spread - z.left
    if z.experts:  # the shared expert runs before or after the others, and these between the rows of all
        rows, others = 2 * z.met * h * n * t, (3 if z.gated else 2) * min(z.met * z.mlp, z.common) * n * t
        gathers = sent_back(z, again=False)
        more_b, more_bw, first_bw = (max(rows, one - others) for one in (more_b, more_bw, first_bw))
        more_bw, first_bw = max(more_bw, _of_outputs(z, first=False)), max(first_bw, _of_outputs(z, first=True))
        if z.experts < z.choices:  # and their gradients, in two orders, while W's part of all experts is kept
            more_b = max(more_b, 1.5 * rows - (z.met * z.mlp * n * t if z.gated else 0))
        more_bw, first_bw = more_bw + around, first_bw + around
    return Footprint(
        act_b=act_b,
        act_w=(2 * h + 2 * z.met * h + (h + 1) * (z.common > 0) + 2 * q + 2 * k + (3 if z.gated else 2) * f) * n * t
        + read
        + z.choices * n * z.scored,
        entry=z.stream * h * z.own + 8 * z.top_k * t,  # and the chosen experts
        result=z.stream * h * z.own,
        loose=z.stream * h * z.own * z.copied,
        keeps_given=not (z.cast or z.experts) and z.shared == 1,
        more_f=max(
            h * n * t + spread,
            gathers,
            max(z.scores, z.peaks) - n * (q + 4 * f + h) * t - (z.stream * h + z.norm + z.behind) * z.own,
        ),
        more_alone=max(
            (4 if z.gated else 2) * f * n * t,
            ((4 if z.gated else 2) * z.met * z.mlp + z.met * h + h) * n * t + z.orders * t if z.experts else 0.0,
            max(z.scores, z.peaks) - h * n * t,
        ),
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
        largest=h * max(q + 2 * k, (2 if z.gated else 1) * max(z.common, z.in_stage)),
        kv=2 * k * n * t * z.cp,
        # Norms in float32 keep that tensor as well.
        fused=(q + k) * n * t if z.rotary and z.cp == 1 and not (z.qk_norm and n == 4) else 0,
    )


def router_inputs(z: Sizes, *, again: bool = False) -> float:
    """Bytes of a norm's output, or of casts of it, that router and shared expert keep for their weight gradients; with
    selective recompute, `again`, all that read the same tensor share a cast."""
    if not z.experts:
        return 0.0
    router, beside = z.hidden * z.width * z.scored, z.hidden * z.width * z.tokens
    if again:
        return router + beside * z.kept_beside
    if z.fold > z.shared and z.common:  # the router reads a copy of its rows, the shared expert and its gate all
        return router + beside * (1 + z.cast)
    return beside + router * (2 if z.cast else z.shared > 1) if z.common else router


def sent_back(z: Sizes, *, again: bool) -> float:
    """`more_f` of a block of experts: as their outputs are added up or, if sent back, in two orders. Meanwhile the
    tokens exist that they read, which may run `again` in B."""
    low, stream = z.hidden * z.width * z.tokens, z.hidden * z.stream
    sent = max(z.top_k * low + low, 2 * z.met * low * (z.experts < z.choices))
    if z.common:  # it runs later: it keeps its activation and output; then that, with its gate, and the sum are there
        gate, wide = z.width * z.tokens, (2 if z.gated else 1) * (1 if again else 2) * z.common * z.width * z.tokens
        sent = max(sent - wide - low - gate, 3 * low + gate)
    kept = not z.cast and (z.kept_beside if again else z.common)  # by the shared expert
    copies = z.fold > z.shared  # rows to route, of tokens that nothing else keeps
    given = stream * z.tokens * (z.shared > 1 and not kept) if z.fold == 1 else stream * z.routed * (copies and z.cast)
    normed = stream * z.own * ((again or z.cast or (copies and not z.common)) and not (kept and z.shared == 1))
    return sent + given + normed + 4 * z.choices * z.routed + 8 * z.top_k * z.tokens - stream * z.own


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
    whole = replace(whole, more_f=max(whole.more_f, sent_back(z, again=True)))
    if z.experts < z.choices:  # gradients of the rows in two orders, as in a block's B
        wide = z.met * (3 * z.hidden - (z.mlp if z.gated else 0)) * z.width - 4 * z.choices / z.fold - 8 * z.top_k
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


def mixed(z: Sizes) -> float:
    """Bytes that attention keeps beside the joint queries, keys and values."""
    return (z.head_norms + (z.mixed - z.queries - 2 * z.keys) * z.width + z.logs) * z.tokens


def _of_outputs(z: Sizes, *, first: bool) -> float:
    """Bytes of a BW as the experts' last weights get their gradients: those of their outputs, in two orders, and of
    their inputs; the shared expert, which ran before, has freed its activations."""
    gone = (4 if z.gated else 2) * z.common
    inside = (2 * z.met * z.hidden + z.met * z.mlp - gone) * z.width * z.tokens
    return inside + z.stack_grad(z.hidden * z.mlp, first=first)


def _rise_of_experts(z: Sizes, kept: float) -> float:
    """`rise_bw` of a block of experts that keeps `kept` bytes: their gradients are made matrix after matrix, and free
    activations. The shared expert runs before them, attention after them."""
    h, rows, inside = z.hidden, z.met * z.hidden * z.width * z.tokens, (4 if z.gated else 2) * z.width * z.tokens
    common = GRAD_BYTES * sum(map(math.prod, z.mlp_shapes(z.common))) if z.common else 0
    own = GRAD_BYTES * sum(z.apart)
    gone = inside * z.common
    return max(
        common + (3 if z.gated else 2) * z.common * z.width * z.tokens,
        common + _of_outputs(z, first=True) + GRAD_BYTES * z.hidden * z.mlp * z.experts,
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


NOTHING = Footprint()
