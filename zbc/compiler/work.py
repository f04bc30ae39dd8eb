"""What the layers of a built-in model do for one microbatch: the kernels of F, B and W, as operations and bytes moved.

Per token of a block of width h, with queries of width q (all heads), keys and values of width k each, an MLP of width
f, and P weights that the token meets in linear layers:

    F   2 P + 4 q c      c: keys that causal attention computes with per query, on average (`keys_seen`)
    B   2 P + 10 q c     the scores are computed anew: five products where forward has two (arXiv 2205.14135)
    W   2 P

P is h (2q + 2k) + 2 h f for gpt (12 h^2 with q = k = h and f = 4h), h (2q + 2k) + 3 h f for llama. With experts a token
meets `top_k` MLPs of its own and the router, h E; all experts have weights to read and gradients to write. The head
does 2 h V in each of F, B and W, and moves the V logits of a token several times to make a loss of them. What norms,
residual sums, rotary positions, activations and the loss do counts by its bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zbc.compiler.footprint import GRAD_BYTES, Sizes
from zbc.compiler.machine import Kernel

# Keys are taken in tiles, and causal attention leaves out whole tiles only: of torch's CPU kernel, of FlashAttention 2.
TILE = {"cpu": 512, "cuda": 128}


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels of one layer for one microbatch."""

    f: tuple[Kernel, ...]
    b: tuple[Kernel, ...]
    w: tuple[Kernel, ...]


def keys_seen(length: int, tile: int) -> float:
    """Keys that a query of a causal attention computes with, on average over a sequence of `length`.

    (length + tile) / 2 for whole tiles, all of a sequence that is shorter than one.
    """
    rows = [min(tile, length - begin) for begin in range(0, length, tile)]
    return sum(count * min(length, begin * tile + tile) for begin, count in enumerate(rows)) / length


def product(rows: float, k: int, n: int, width: int, matrices: int = 1) -> Kernel:
    """`rows` times a k x n matrix, of `matrices` that are all needed by some rows; `width` bytes per number."""
    return Kernel(2 * rows * k * n, width * (rows * (k + n) + matrices * k * n))


def embedding(z: Sizes) -> Work:
    params = (z.vocab + (0 if z.rotary else z.seq_len)) * z.hidden
    rows = z.stream * z.hidden * z.tokens
    look_up = Kernel(0, (2 if z.rotary else 5) * rows)
    dense = Kernel(0, rows + 3 * GRAD_BYTES * params)  # a dense gradient is filled, then added
    return Work((look_up,), (), (dense,))


def block(z: Sizes) -> Work:
    # (inputs, outputs, rows per token, matrices) of every linear layer
    h, f, each = z.hidden, z.mlp, z.top_k or 1
    up = 2 * f if z.gated else f
    linear = [(h, z.queries + 2 * z.keys, 1, 1), (z.queries, h, 1, 1)]
    linear += [(h, up, each, z.experts or 1), (f, h, each, z.experts or 1)]
    linear += [(h, z.experts, 1, 1)] if z.experts else []
    products = tuple(product(z.tokens * rows, k, n, z.width, count) for k, n, rows, count in linear)
    seen = keys_seen(z.seq_len, TILE["cuda" if z.cuda else "cpu"])
    heads = z.width * (z.queries + z.keys) * z.tokens
    attention = Kernel(4 * z.queries * seen * z.tokens, 2 * heads)
    backward = Kernel(10 * z.queries * seen * z.tokens, 4 * heads)
    others = Kernel(0, _elementwise(z))
    back = Kernel(0, 2 * others.moved)  # reads what forward read and the gradient, writes a gradient
    grads = (*products, *_accumulate(z, z.matrices + z.vectors))
    return Work((*products, attention, others), (*products, backward, back), grads)


def _elementwise(z: Sizes) -> float:
    """Bytes that two norms, two residual sums, rotary positions, the MLP's activation and the routing move."""
    n, r, each = z.width, z.stream, z.top_k or 1
    norms, sums = 2 * (r + n) * z.hidden, 2 * (2 * r + n) * z.hidden
    turned = 2 * n * (z.queries + z.keys) + 2 * n * z.queries if z.rotary else 0
    activation = (5 if z.gated else 2) * n * z.mlp * each
    # A token's row is copied to each of its experts; what they return is read, weighted and added up.
    routed = (n * (1 + 3 * z.top_k) * z.hidden + 8 * z.experts) if z.experts else 0
    return (norms + sums + turned + activation + routed) * z.tokens


def head(z: Sizes) -> Work:
    h, n, r, vocab = z.hidden, z.width, z.stream, z.vocab
    logits = product(z.tokens, h, vocab, n)
    cast = (n + 4) * vocab * z.tokens if n < 4 else 0  # the loss is computed in float32
    norm = (r + n) * h * z.tokens
    # log_softmax reads twice and writes; backward fills a gradient with zeros, reads it and the output, and writes one.
    forward = (logits, Kernel(0, norm), Kernel(0, cast + 3 * 4 * vocab * z.tokens))
    backward = (logits, Kernel(0, 2 * norm), Kernel(0, cast + 4 * 4 * vocab * z.tokens))
    return Work(forward, backward, (logits, *_accumulate(z, h * vocab)))


def _accumulate(z: Sizes, params: int) -> Iterator[Kernel]:
    """A weight gradient is added to the sum: two reads and a write in float32, after a cast where it is narrower."""
    cast = z.width + GRAD_BYTES if z.width < GRAD_BYTES else 0
    yield Kernel(0, (3 * GRAD_BYTES + cast) * params)
