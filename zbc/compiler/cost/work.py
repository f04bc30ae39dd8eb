"""Kernels of a built-in model's layers for one microbatch, in F, B and W: floating-point operations and bytes moved.

Per token of a block of width h, with queries of width q (all heads), keys and values of width k each, an MLP of width
f, and P weights that multiply the token in linear layers:

    F   2 P + 4 q c      c: keys that causal attention computes with per query, on average (`keys_seen`)
    B   2 P + 10 q c     the scores are computed again: five products where forward has two (arXiv 2205.14135)
    W   2 P

With `optimizer.qk_clip` F has another product of queries and keys, 2 q c, whose scores are written and read twice.

P is h (2q + 2k) + 2 h f for gpt (12 h^2 with q = k = h and f = 4h), h (2q + 2k) + 3 h f for llama. With experts a token
passes `top_k` MLPs of its own and the router, h E; all experts have weights to read and gradients to write. The head
does 2 h V in each of F, B and W, and moves the V logits of a token several times for the loss. Norms, residual sums,
rotary positions, activations and the loss count by their bytes alone. Kernel counts are torch's launches for such a
layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from zbc.compiler.cost.machine import Kernel
from zbc.compiler.cost.sizes import CHUNK, GRAD_BYTES, Sizes

# Keys are taken in tiles, and causal attention leaves out whole tiles only: of torch's CPU kernel, of FlashAttention 2.
TILE = {"cpu": 512, "cuda": 128}
# Relative to the rate of products: FlashAttention 2 reaches 50 to 73% of an A100's peak where products reach 80 to 90%
# (arXiv 2307.08691); torch's CPU kernel is as fast as its products in float32.
ATTENTION = {"cpu": 1.0, "cuda": 0.7}


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels of one layer for one microbatch."""

    f: tuple[Kernel, ...]
    b: tuple[Kernel, ...]
    w: tuple[Kernel, ...]


def keys_seen(length: int, tile: int) -> float:
    """Keys that a query of causal attention computes with, on average over a sequence of `length`.

    (length + tile) / 2 for whole tiles; the whole sequence if it is shorter than a tile.
    """
    whole, rest = divmod(length, tile)
    return (tile * tile * whole * (whole + 1) // 2 + rest * length) / length


def product(rows: float, k: int, n: int, width: int, matrices: int = 1, *, fp8: bool = False) -> Kernel:
    """`rows` times a k x n matrix, one of `matrices` that some rows need; `width` bytes per number.

    `fp8` has twice the rate, and reads its inputs once more to scale and cast them.
    """
    if fp8:
        return Kernel(rows * k * n, rows * (k * (width + 2) + n * width) + matrices * k * n)
    return Kernel(2 * rows * k * n, width * (rows * (k + n) + matrices * k * n))


def embedding(z: Sizes) -> Work:
    """Kernels of looking up the tokens of a microbatch, and their positions if these are learned."""
    params = (z.vocab + (0 if z.rotary else z.seq_len)) * z.hidden
    rows = z.stream * z.hidden * z.tokens
    found = Kernel(0, (2 + (0 if z.rotary else 3) / z.shared) * rows)
    dense = Kernel(0, rows + 3 * GRAD_BYTES * params)  # a dense gradient is filled, then added
    return Work((found,), (), (dense,))


def look_up(z: Sizes) -> Work:
    """Kernels of looking up the tokens alone."""
    rows = z.stream * z.hidden * z.tokens
    return Work((Kernel(0, 2 * rows),), (), (Kernel(0, rows + 3 * GRAD_BYTES * z.vocab * z.hidden),))


def places(z: Sizes) -> Work:
    """Kernels of learned positions alone."""
    if z.rotary:
        return Work((), (), ())
    rows = z.stream * z.hidden * z.tokens
    return Work((Kernel(0, 3 * rows),), (), (Kernel(0, rows + 3 * GRAD_BYTES * z.seq_len * z.hidden),))


def block(z: Sizes) -> Work:
    """Kernels of a block: attention and MLP, or the experts of a token."""
    # (inputs, outputs, rows per token, matrices) of every linear layer
    h, f, each = z.hidden, z.mlp, z.met
    up = 2 * f if z.gated else f
    linear: list[tuple[int, int, float, int]] = [(h, z.queries + 2 * z.keys, 1, 1), (z.queries, h, 1, 1)]
    linear += [(h, up, each, z.experts or 1), (f, h, each, z.experts or 1)]
    linear += [(h, z.choices, 1 / z.fold, 1)] if z.experts else []
    linear += [(h, 2 * z.common if z.gated else z.common, 1, 1), (z.common, h, 1, 1), (h, 1, 1, 1)] if z.common else []
    products = tuple(product(z.tokens * rows, k, n, z.width, count, fp8=z.fp8) for k, n, rows, count in linear)
    device = "cuda" if z.cuda else "cpu"
    seen = _seen(z, CHUNK if z.capped or z.window else TILE[device])
    square = z.queries * seen * z.tokens / ATTENTION[device]
    # Capped scores are float32: their bytes, for the elementwise kernels below.
    scores = 4 * z.heads * seen * z.tokens if z.capped else 0
    heads = z.width * (z.queries * z.tokens + z.keys * z.sequences * (z.seq_len + z.past))
    turns, _ = _turns(z)
    plain = Kernel(0, _plain_forward(z) * z.tokens, _norms(z) * _norm_count(z) + (4 if z.gated else 3) + turns)
    back = Kernel(0, _plain_backward(z) * z.tokens, _norms(z) * _norm_count(z) + (6 if z.gated else 8) + turns)
    limited = (Kernel(0, 12 * scores, 7), Kernel(0, 30 * scores, 16)) if z.capped else ()
    forward = (*products, *largest(z), *limited[:1], Kernel(4 * square, 2 * heads), plain)
    backward = (*products, Kernel(10 * square, 4 * heads), back, *limited[1:])
    if z.adds_inside:
        added = [_added(made, z, k * n * count) for made, (k, n, _, count) in zip(products, linear, strict=True)]
        return Work(forward, backward, (*added, _accumulate(z, z.vectors, 2 if z.gated else 8)))
    return Work(forward, backward, (*products, _accumulate(z, z.matrices + z.vectors, 6 if z.gated else 12)))


def _seen(z: Sizes, tile: int) -> float:
    """Keys that a query computes with, on average, taken in tiles."""
    seen = z.past + keys_seen(z.seq_len, tile)
    return min(seen, z.window + CHUNK / 2) if z.window else seen


def largest(z: Sizes) -> tuple[Kernel, ...]:
    """Kernels that find the largest scores of a block's heads, which no recompute repeats; () without a clip."""
    seen = _seen(z, CHUNK) * z.tokens if z.clipped else 0.0
    chunks = -(-z.seq_len // CHUNK)
    return (Kernel(2 * z.queries * seen, 4 * z.width * z.heads * seen, 12 * chunks),) if seen else ()


def cheap(z: Sizes, *, attention: bool) -> tuple[Kernel, ...]:
    """Kernels of a block's F that selective recompute runs again: norms and activation, and `attention` with rotary
    positions."""
    *scores, plain = block(z).f[-3 if z.capped else -2 :]
    behind = 2 * z.around  # norms that stay
    sums = (2 * (2 * z.stream + z.width) * z.hidden + behind * _norm_forward(z)) * z.own
    moved, starts = plain.moved - sums - _routed(z) * z.tokens, plain.starts - 2 - behind * _norm_count(z)
    if not attention:
        turns, turned = _turns(z)
        return (plain._replace(moved=moved - turned * z.tokens, starts=starts - turns),)
    return *scores, plain._replace(moved=moved, starts=starts)


def _plain_forward(z: Sizes) -> float:
    """Bytes per token of two norms, two residual sums, rotary positions, the MLP's activation and the routing."""
    n, each = z.width, z.met
    sums = 2 * (2 * z.stream + n) * z.hidden
    _, turned = _turns(z)
    activation = (5 if z.gated else 2) * n * (z.mlp * each + z.common)
    return _around(z, _norm_forward(z), sums) + turned + activation + _routed(z)


def _turns(z: Sizes) -> tuple[int, int]:
    """Kernels that turn queries and keys by their positions, and the bytes per token that they move."""
    return (14, 2 * z.width * (2 * z.queries + z.keys)) if z.rotary and z.turned else (0, 0)


def _routed(z: Sizes) -> float:
    """Bytes per token: a row is copied to each of its experts; their results are read, weighted and added up."""
    return z.width * (1 + 3 * z.top_k) * z.hidden + 8 * z.choices / z.fold if z.experts else 0


def _plain_backward(z: Sizes) -> float:
    """Bytes per token of their gradients, with gradients of biases and of q, k and v, which become one tensor."""
    n, r, each = z.width, z.stream, z.met
    sums = 2 * (3 * r + (r + n if z.cast else 0)) * z.hidden
    _, turned = _turns(z)
    activation = (8 if z.gated else 3) * n * (z.mlp * each + z.common)
    routed = n * (2 + 4 * z.top_k) * z.hidden + 16 * z.choices / z.fold if z.experts else 0
    biases = 0 if z.gated else n * (z.queries + 2 * z.keys + 2 * z.hidden + z.mlp)
    joined = 2 * n * (z.queries + 2 * z.keys)
    return _around(z, _norm_backward(z), sums) + turned + activation + routed + biases + joined


def _around(z: Sizes, norm: float, sums: float) -> float:
    """Bytes per token of norms and sums; ranks may share the tokens of the residual stream."""
    over = _norms_of_stream(z)
    return (over * norm + sums) / z.shared + (norm_share(z) - over) * norm


def norm_width(z: Sizes) -> int:
    """Bytes per number inside a norm: autocast on a GPU computes it in float32, on a CPU in the type of its input."""
    return 4 if z.cuda and z.width < 4 else z.stream


def _norms(z: Sizes) -> int:
    """Norms of a block."""
    return 2 + 2 * z.qk_norm + 2 * z.around


def norm_share(z: Sizes) -> float:
    """The width of all norms of a block, in norms of the residual stream."""
    return _norms_of_stream(z) + (z.queries + z.keys) / z.hidden if z.qk_norm else _norms_of_stream(z)


def _norms_of_stream(z: Sizes) -> int:
    return 4 if z.around else 2


def by_steps(z: Sizes) -> bool:
    """Whether a norm is made of single operations: RMSNorm on a CPU, Gemma's everywhere."""
    return z.wide_norm or (z.gated and not z.cuda)


def _norm_count(z: Sizes) -> int:
    """Kernels of a norm, casts included."""
    inside = norm_width(z)
    return (6 if by_steps(z) else 1) + (inside != z.stream) + (inside != z.width)


def _norm_forward(z: Sizes) -> float:
    """Bytes per token: a cast if types differ, a read and a write, a cast for the product after it.

    RMSNorm on a CPU is made of single operations: a square, its mean, two products.
    """
    inside = norm_width(z)
    passes = 8 if by_steps(z) else 2
    return z.hidden * (_cast(z.stream, inside) + passes * inside + _cast(inside, z.width))


def _norm_backward(z: Sizes) -> float:
    """Bytes per token backward: gradient and input are read for the input's gradient, and again for the weights'."""
    inside = norm_width(z)
    passes = 16 if by_steps(z) else 5
    return z.hidden * (_cast(z.width, inside) + passes * inside + _cast(inside, z.stream))


def _cast(source: int, target: int) -> int:
    return source + target if source != target else 0


def head(z: Sizes) -> Work:
    """Kernels of the last norm, the projection to the vocabulary and the loss."""
    out, norm = words(z), last_norm(z)
    return Work((out.f[0], *norm.f, *out.f[1:]), (out.b[0], *norm.b, *out.b[1:]), out.w)


def last_norm(z: Sizes) -> Work:
    """Kernels of the norm before the projection alone."""
    count = _norm_count(z)
    return Work((Kernel(0, _norm_forward(z) * z.own, count),), (Kernel(0, _norm_backward(z) * z.own, count),), ())


def words(z: Sizes) -> Work:
    """Kernels of the projection and the loss alone."""
    h, n, vocab = z.hidden, z.width, z.vocab
    logits = product(z.tokens, h, vocab, n)
    cast = _cast(n, 4)  # the loss is computed in float32
    # log_softmax reads twice and writes. Backward fills a gradient with zeros and writes a number into each row;
    # log_softmax's backward reads it twice and the output once, and writes.
    loss = [(cast + passes) * vocab * z.tokens for passes in (12, 20)]
    product_w = (_added(logits, z, h * vocab),) if z.adds_inside else (logits, _accumulate(z, h * vocab, 1))
    capped = 3 * z.logits_cap
    if z.logits_cap:  # divided, tanh, multiplied
        loss = [loss[0] + 6 * n * vocab * z.tokens, loss[1] + 7 * n * vocab * z.tokens]
    if z.chunk:  # one product forward, three backward: logits again, and the gradients of both factors
        parts, wide = -(-z.tokens // z.chunk), vocab * z.tokens
        forward, backward = Kernel(0, (cast + 24) * wide, 8 * parts), Kernel(0, (2 * cast + 32) * wide, 9 * parts)
        return Work((logits, forward), (logits, logits, *learnt_by_chunks(z), backward), ())
    return Work((logits, Kernel(0, loss[0], 3 + capped)), (logits, Kernel(0, loss[1], 3 + capped)), product_w)


def learnt_by_chunks(z: Sizes) -> tuple[Kernel, ...]:
    """Kernels of the weight gradient of the projection, each chunk's added to a sum, in B of a loss by chunks."""
    parts, logits = -(-z.tokens // z.chunk), product(z.tokens, z.hidden, z.vocab, z.width)
    size = z.hidden * z.vocab
    summed = (_added(logits, z, parts * size),) if z.fuses else (logits, _accumulate(z, parts * size, parts))
    return (*summed, _accumulate(z, size, 1))


def _accumulate(z: Sizes, params: int, tensors: int) -> Kernel:
    """Weight gradients are added to their sums: two reads and a write in float32, after a cast if they are narrow."""
    return Kernel(0, (3 * GRAD_BYTES + _cast(z.width, GRAD_BYTES)) * params, tensors)


def _added(made: Kernel, z: Sizes, params: int) -> Kernel:
    """A product that reads and writes the sum, in float32, where it would write a weight gradient."""
    return made._replace(moved=made.moved + (2 * GRAD_BYTES - z.width) * params)
