"""Kernels and bytes of the ends of a model whose ranks share the vocabulary: what a rank's words take (vocabulary.py),
and what is left in the first and the last stage."""

from __future__ import annotations

from dataclasses import dataclass

from zbc.compiler.cost.footprint import GRAD_BYTES, Footprint
from zbc.compiler.cost.machine import Kernel


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of embedding and output layer. `width`: bytes of an activation, `stream`: of one of the residual stream,
    which has the type of the parameters."""

    hidden: int
    gated: bool  # llama: RMSNorm
    cuda: bool
    vocab: int
    seq_len: int
    length: int  # tokens of a sequence in a slice
    sequences: int
    width: int
    stream: int
    rotary: bool
    wide_norm: bool = False  # gemma: norms of single operations, in float32, on every device
    logits_cap: bool = False
    tp: int = 1  # ranks that each have a part of the layer
    shared: int = 1  # ranks that each have their part of the tokens outside of the linear layers
    fused_grads: bool = False  # linear layers add weight gradients inside their products
    cp: int = 1  # ranks that each have their part of the tokens everywhere

    @property
    def tokens(self) -> int:
        """Tokens of a rank."""
        return self.sequences * self.length // self.cp

    @property
    def own(self) -> float:
        """Tokens of a rank outside of the linear layers."""
        return self.tokens / self.shared

    @property
    def norm(self) -> int:
        """Bytes per token that a norm keeps in addition to its input and output: its statistics.

        RMSNorm on a CPU is made of single operations, and keeps the normalized input too.
        """
        if not self.gated:
            return 2 * self.stream
        copied = self.stream < 4 and by_steps(self)
        return 4 * (1 + self.wide_norm) + (6 if copied else 4) * self.hidden * by_steps(self)

    @property
    def cast(self) -> bool:
        """Whether the layers compute in another type than that of their weights."""
        return self.width < self.stream

    @property
    def adds_inside(self) -> bool:
        """Whether linear layers add weight gradients inside their products."""
        return self.fused_grads and (self.cuda or self.width == GRAD_BYTES)


@dataclass(frozen=True, slots=True)
class Work:
    """The kernels of one layer for one microbatch."""

    f: tuple[Kernel, ...]
    b: tuple[Kernel, ...]
    w: tuple[Kernel, ...]


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


def norm_width(z: Sizes) -> int:
    """Bytes per number inside a norm: autocast on a GPU computes it in float32, on a CPU in the type of its input."""
    return 4 if z.cuda and z.width < 4 else z.stream


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
    return Work((logits, Kernel(0, loss[0], 3 + capped)), (logits, Kernel(0, loss[1], 3 + capped)), product_w)


def _accumulate(z: Sizes, params: int, tensors: int) -> Kernel:
    """Weight gradients are added to their sums: two reads and a write in float32, after a cast if they are narrow."""
    return Kernel(0, (3 * GRAD_BYTES + _cast(z.width, GRAD_BYTES)) * params, tensors)


def _added(made: Kernel, z: Sizes, params: int) -> Kernel:
    """A product that reads and writes the sum, in float32, where it would write a weight gradient."""
    return made._replace(moved=made.moved + (2 * GRAD_BYTES - z.width) * params)


def product(rows: float, k: int, n: int, width: int) -> Kernel:
    """`rows` times a k x n matrix; `width` bytes per number."""
    return Kernel(2 * rows * k * n, width * (rows * (k + n) + k * n))


def norm_bytes(z: Sizes) -> Footprint:
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


def places_bytes(z: Sizes, *, again: bool) -> Footprint:
    """The positions that are added to a vocabulary-parallel embedding, if they are learned; `again`: a stage that runs
    any of its forward twice keeps the rows it was given."""
    rows = z.stream * z.hidden * z.tokens
    if z.rotary:
        return Footprint(entry=rows, result=rows)
    table = GRAD_BYTES * z.seq_len * z.hidden
    return Footprint(
        act_b=rows * again,
        act_w=rows,
        entry=rows,
        result=rows,
        keeps_given=True,
        more_w=table,
        more_bw=table,
        came_w=table,
        largest=z.seq_len * z.hidden,
    )
