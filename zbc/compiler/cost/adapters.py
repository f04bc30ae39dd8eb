"""`[adapter]` in costs: layers with frozen weights cost less, and their adapters add a little.

For a block of the Transformer, per microbatch of N tokens, with n-byte activations and adapters of rank r for linear
layers with k inputs, each adapter for m of the outputs:

    F    2 N r (k + m) operations more, and a sum of the outputs
    B    the input gradients of the frozen layers, and of the adapters, 2 N r (m + k)
    W    2 N r (k + m), of adapters alone
    kept F -> B   inputs of linear layers with adapters only, and N r n for each adapter; no normalized inputs
    kept B -> W   input and output gradient of linear layers with adapters, 2 N r n for each

`params` of a frozen layer are its trainable parameters; `frozen` elements have no gradient, master or optimizer state,
and their casts are made once. Layers before the first adapter have no backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zbc.compiler.cost import estimate, work
from zbc.compiler.cost.footprint import NOTHING, Footprint, by_chunks, mixed, outside
from zbc.compiler.cost.machine import Kernel, Machine
from zbc.compiler.cost.selective import Spared
from zbc.compiler.cost.sizes import GRAD_BYTES, Sizes
from zbc.ir import Placement
from zbc.job.adapter import linears, parts
from zbc.job.spec import Job

if TYPE_CHECKING:
    from zbc.compiler.cost.estimate import Layer


@dataclass(frozen=True, slots=True)
class Beside:
    """The adapters of one linear layer on one rank: its inputs and outputs, and the outputs of each adapter."""

    inputs: int
    outputs: int
    each: tuple[int, ...]
    rank: int

    @property
    def shapes(self) -> Iterable[tuple[int, int]]:
        for outputs in self.each:
            yield from ((self.rank, self.inputs), (outputs, self.rank))

    @property
    def inside(self) -> int:
        """Numbers per token between the two matrices of all adapters."""
        return self.rank * len(self.each)


def frozen(job: Job, table: Sequence[Layer], blocks: Sequence[Sizes], ends: Sizes) -> list[Layer]:
    """The layers of a built-in model of which only adapters train; `blocks` has the sizes of each block."""
    found = [_embedding(table[0], ends)]
    for layer, z, i in zip(table[1:-1], blocks, range(len(blocks)), strict=True):
        found.append(_block(job, layer, z, _beside(job, i, z)))
    found.append(_head(job, table[-1], ends))
    first = next((i for i, layer in enumerate(found) if layer.params), len(found))
    before = [_forward_alone(layer) for layer in found[:first]]
    if first < len(found):  # and nothing before the adapter in its own block
        layer, z = found[first], blocks[first - 1]
        has = _beside(job, first - 1, z)
        kept, left = _before(z, has)
        plain = layer.size
        spared = {
            again: Spared(_behind_first(z, one, plain, left, has), cheap)
            for again, (one, cheap) in layer.spared.items()
        }
        size, whole = _behind_first(z, plain, plain, kept, has), layer.whole
        whole = whole and _behind_first(z, whole, whole, kept, has)
        return [*before, replace(layer, size=size, spared=spared, whole=whole), *found[first + 1 :]]
    return before


def _before(z: Sizes, has: dict[str, Beside]) -> tuple[float, float]:
    """Bytes that a block keeps before its first adapter if nothing before it trains; with selective recompute."""
    n, t, stream, norm = z.width, z.tokens, z.stream * z.hidden * z.own, (z.norm - _normalized(z)) * z.own
    names = ("qkv", "proj", "gate_up" if z.gated else "up", "down")
    first = next(i for i, name in enumerate(names) if name in has)
    # The next layer's adapter keeps attention's output as its input; without one a copy of the output is freed.
    output = z.queries * (first == 1 or (z.turned_kept > 0 and not z.capped))
    attention = ((z.mixed - output) * n + z.logs + _head_norms(z)) * t
    behind, heads = _behind(z) / 2 * z.own, (z.queries + 2 * z.keys) * n * t
    kept = [stream + norm, attention, stream + norm + behind, (3 if z.gated else 1) * z.mlp * n * t]
    left = [stream, heads, stream + behind, (2 if z.gated else 1) * z.mlp * n * t]
    taken = has[names[first]].inputs * n * t  # recompute does not make it again
    return sum(kept[: first + 1]), sum(left[: first + 1]) - taken


def _behind_first(z: Sizes, size: Footprint, plain: Footprint, gone: float, has: dict[str, Beside]) -> Footprint:
    """The footprint of a block that keeps `gone` bytes less, as nothing before its first adapter trains: `plain`
    without selective recompute. The stage has the block's input until B, F the MLP's input meanwhile, kept or not."""
    entry, down = z.stream * z.hidden * z.own, has.get("down")
    size = replace(size, act_b=size.act_b - gone, loose=entry)
    if {*has} & {"qkv", "proj"}:
        return size
    size = replace(size, more_f=plain.more_f + entry)  # nothing before the adapter runs again
    if down is None or len(has) > 1 or z.experts:
        return size
    # B ends at the last product's adapter, and no gradient inside the MLP is made.
    n, t = z.width, z.tokens
    forward = (3 if z.gated else 1) * z.mlp * n * t - down.inside * n * t
    need = (down.inside + z.hidden * z.cast) * n * t
    more_bw, first = need + size.more_w, need + size.came_w
    return replace(
        size, more_f=max(size.more_f, forward), more_b=need, more_bw=more_bw, first_bw=more_bw, rise_bw=first
    )


def _beside(job: Job, block: int, z: Sizes) -> dict[str, Beside]:
    """The adapters of a block, by linear layer."""
    adapter, model, tp = job.adapter, job.model, job.parallel.tp
    h, up = z.hidden, (2 if z.gated else 1) * z.mlp
    sizes = ((h, z.queries + 2 * z.keys), (z.queries, h), (h, up), (z.mlp, h))
    found = dict[str, Beside]()
    for name, (inputs, outputs) in zip(linears(model, block), sizes, strict=False):
        cut = 1 if outputs == h and name in ("proj", "down") else tp  # these are split by their inputs
        some = parts(adapter, model, f"layers.{block}.{name}", outputs * cut)
        if some:
            found[name] = Beside(inputs, outputs, tuple((one.stop - one.start) // cut for one in some), adapter.rank)
    return found


def held(job: Job, placement: Placement, s: int, part: Sequence[int], table: Sequence[Layer]) -> float:
    """Bytes of the frozen weights of a stage, without those measured by a profile."""
    count = sum(layer.frozen for i in part if (layer := table[i]).measured is None or layer.measured.held is None)
    z, last = estimate.sizes_of(job), part[-1] == len(table) - 1
    tied = job.model.tie_embeddings and not job.vocabulary
    if count and z and last and tied and {*placement.holders(s)} <= {*placement.holders(0)}:
        count -= z.vocab * z.hidden  # the rank holds the shared weight with its first stage
    return (2.0 if job.model.parameters == "bfloat16" else 4.0) * count


def _embedding(layer: Layer, z: Sizes) -> Layer:
    size = replace(
        NOTHING, entry=layer.size.entry, result=layer.size.result, more_f=layer.size.more_f, tables=layer.size.tables
    )
    return _without(replace(layer, w=0.0, size=replace(size, more_alone=layer.size.more_alone)), layer.params)


def _head(job: Job, layer: Layer, z: Sizes) -> Layer:
    """The head: B is the gradient of its input; F keeps only the part of the loss which that needs."""
    size = by_chunks(z, learns=False) if z.chunk else layer.size
    input_ = 0 if z.chunk or job.vocabulary else z.hidden * z.width * z.tokens  # a loss by chunks makes logits again
    kept = size.act_b - input_ - _normalized(z) * z.own
    back = size.more_b
    size = replace(
        _fixed(size, z), act_b=kept, act_w=0.0, more_b=back, more_w=0.0, more_bw=back, largest=0.0, keeps_given=False
    )
    learnt = work.learnt_by_chunks(z) if z.chunk else ()
    saved = Machine.of(job).ms([Kernel(0, _of_norm(z) * z.own, 0), *learnt])
    return _without(replace(layer, b=max(0.0, layer.b - saved), w=0.0, size=size), layer.params)


def _block(job: Job, layer: Layer, z: Sizes, has: dict[str, Beside]) -> Layer:
    machine, t, n = Machine.of(job), z.tokens, z.width
    forward, backward, weights = list[Kernel](), list[Kernel](), list[Kernel]()
    for one in has.values():
        for outputs in one.each:
            k, m, r = one.inputs, outputs, one.rank
            pair = [work.product(t, k, r, n), work.product(t, r, m, n)]
            forward += pair
            backward += [*pair, Kernel(0, 3 * n * k * t)]  # its input gradient is added to the others'
            weights += [*pair, Kernel(0, (3 * GRAD_BYTES + (n + GRAD_BYTES if n < GRAD_BYTES else 0)) * r * (k + m), 2)]
        forward.append(Kernel(0, 3 * n * one.outputs * t + (len(one.each) > 1) * 2 * n * one.outputs * t))
    saved = machine.ms([Kernel(0, work.norm_share(z) * _of_norm(z) * z.own, 0)])
    f = layer.f + machine.ms(forward)
    shapes = [shape for one in has.values() for shape in one.shapes]
    params = sum(map(math.prod, shapes))
    size = _size(z, layer.size, has, shapes, gathered=not job.parallel.regathers)
    whole = layer.whole and _size(z, layer.whole, has, shapes, gathered=True)
    inside = sum(one.inside for one in has.values())
    spared = {
        again: Spared(_spared(z, size, plain, has, inside, attention=again), cheap * layer.f / f if f else 0.0)
        for again, (plain, cheap) in layer.spared.items()
    }
    changed = replace(
        layer,
        f=f,
        b=max(0.0, layer.b - saved) + machine.ms(backward),
        w=machine.ms(weights) if has else 0.0,
        size=size,
        whole=whole,
        spared=spared,
        params=params,
        parts=tuple(map(math.prod, shapes)),
        matrices=tuple(shapes),
    )
    return replace(changed, frozen=layer.params)


def _spared(
    z: Sizes, size: Footprint, plain: Footprint, has: dict[str, Beside], inside: int, *, attention: bool
) -> Footprint:
    """The footprint `size` of a frozen block with selective recompute; `plain` is that of a block that trains."""
    n, t, size = z.width, z.tokens, replace(size, loose=plain.loose)
    if z.experts:  # their rows are not kept, and their activations made again
        size = size.remade(0.0, z.met * z.mlp * n * t)
        return replace(size, act_b=plain.act_b + (inside - z.met * z.hidden) * n * t, fused=plain.fused)
    stays: float = 2 * z.stream * z.hidden * z.own + _behind(z) * z.own
    stays += (z.queries + 2 * z.keys + (2 if z.gated else 1) * z.mlp + inside) * n * t
    # The last product's input is kept only for an adapter: without one it is freed as soon as it is made again.
    again = (((2 if z.gated else 0) + ("down" in has)) * z.mlp + (2 * z.hidden if z.tp > 1 else 0)) * n * t
    up, down = "gate_up" if z.gated else "up", has["down"].inside if "down" in has else 0
    # F keeps neither what these layers read nor what follows them.
    summed = [at + (z.hidden - down) * n * t - plain.result for name, at, *_ in _summed_up(z, has, stays) if name == up]
    size = replace(size, more_f=max([size.more_f, *summed]))
    if not attention:
        return size.remade(size.act_b - stays - mixed(z), again)
    return replace(size.remade(size.act_b - stays, again), fused=-size.kv)


def _size(
    z: Sizes, plain: Footprint, has: dict[str, Beside], shapes: Sequence[tuple[int, int]], *, gathered: bool
) -> Footprint:
    """The footprint of a frozen block with adapters; `gathered`: F keeps the inputs that ranks gather, or would."""
    h, q, n, t = z.hidden, z.queries, z.width, z.tokens
    f, rows = (z.met * z.mlp + z.common, z.met * h) if z.experts else (z.mlp, 0)  # of experts no inputs are kept
    _, proj, up, down = (name in has for name in ("qkv", "proj", "gate_up" if z.gated else "up", "down"))
    inside = sum(one.inside for one in has.values())
    gone: float = (h * (("qkv" not in has) + (not up)) * gathered + f * (not down)) * n * t
    gone += rows * n * t
    gone += q * n * t * (not proj and z.turned_kept > 0 and not z.capped)  # attention keeps its output in its own order
    gone += (2 * _normalized(z) * gathered + z.behind - _behind(z)) * z.own + (z.head_norms - _head_norms(z)) * t
    largest = max(map(math.prod, shapes), default=0)
    fresh, summed = (z.weight_grad(largest, first=first) for first in (True, False))
    if z.experts:  # rows of experts, or their gradients and those inside: no weight gradient holds on to others
        apart = back = max(2 * rows, rows + (2 if z.gated else 1) * z.met * z.mlp - h * (z.common > 0)) * n * t
        ahead, weights = 0.0, back
    elif down:  # gradients of the last product's input, of both layers, and their sum: a BW has freed that input
        low = h * n * t * (z.cast + (z.shared > 1))  # what a B keeps as that product's output gradient
        apart = max(3 * f * n * t + low + has["down"].inside * n * t - z.left, outside(z))
        back = max((2 * f - has["down"].inside) * n * t - z.left, outside(z))
        ahead, weights = float(GRAD_BYTES * sum(map(math.prod, has["down"].shapes))), f * n * t
    else:  # the gradients inside the MLP: its output's is freed
        apart = back = max((3 if z.gated else 2) * f * n * t - z.left, outside(z))
        ahead = weights = 0.0
    came = float(GRAD_BYTES * sum(map(math.prod, shapes)))
    kept = plain.act_b - gone + inside * n * t
    summed_up = [*_summed_up(z, has, kept)]
    return replace(
        _fixed(plain, z),
        act_b=kept,
        # A frozen layer without adapters does not keep its input.
        more_f=max(
            [
                plain.more_f,
                (f * n - (z.stream - n) * h) * t * (not down and not z.experts),
                *(at - plain.result - later for _, at, later, _ in summed_up),
            ]
        ),
        more_alone=max([plain.more_alone, *(at + alone for _, at, _, alone in summed_up)]),
        act_w=sum(one.inputs + one.outputs + 2 * one.inside for one in has.values()) * n * t,
        keeps_given=plain.keeps_given and down,
        more_b=apart,
        more_w=summed,
        more_bw=max(back, weights + summed),
        first_b=None,
        first_w=fresh,
        first_bw=max(back, weights + fresh),
        rise_bw=max(back + ahead, weights + came + fresh),
        came_b=0.0,
        came_w=came,
        casts=n * sum(map(math.prod, shapes)) if z.cast else 0.0,
        largest=largest,
    )


def _summed_up(z: Sizes, has: dict[str, Beside], kept: float) -> Iterator[tuple[str, float, float, float]]:
    """Yields for linear layers with adapters the bytes that F has beside their output as adapters' outputs, and those
    of several joined, are added to the layer's own; the bytes of a block with `kept` that F keeps behind it; and those
    of input and output, of an F that keeps nothing."""
    n, t, down = z.width, z.tokens, has["down"].inside if "down" in has else 0
    for name, one in has.items():
        beside, own = (3 if len(one.each) > 1 else 2) * one.outputs * n * t, (one.inputs + one.outputs) * n * t
        if name in ("qkv", "gate_up", "up"):
            beside += z.cast * z.stream * z.hidden * t  # the norm's output, which each casts for itself
        if name == "qkv":
            before = own + one.inside * n * t + (z.stream * z.hidden + z.norm - _normalized(z)) * z.own
            yield name, beside, kept - before, own - z.stream * z.hidden * z.own
        elif name in ("gate_up", "up"):
            yield name, beside, (z.mlp * (z.gated + (down > 0)) + down) * n * t, own
        elif name == "down":
            yield name, beside, -one.outputs * n * t, own


def _fixed(size: Footprint, z: Sizes) -> Footprint:
    """The footprint of a layer whose own weights have no gradients; their casts are constants."""
    size = replace(size, first_b=None, first_w=None, first_bw=None, rise_b=None, rise_w=None, rise_bw=None)
    return replace(size, came_b=0.0, came_w=0.0, tables=size.tables + size.casts, casts=0.0, pair=0.0)


def _without(layer: Layer, count: int) -> Layer:
    """The layer with `count` frozen parameters and none that trains."""
    return replace(layer, params=0, parts=(), matrices=(), tied=0, frozen=count)


def _forward_alone(layer: Layer) -> Layer:
    """A layer before all trainable parameters: it has no backward, and keeps only the input of its stage."""
    size, alone = layer.size, layer.size.more_alone
    size = replace(NOTHING, entry=size.entry, loose=size.entry, result=size.result, tables=size.tables)
    return replace(layer, b=0.0, w=0.0, size=replace(size, more_f=alone, more_alone=alone), spared={})


# ---- norms whose weights have no gradient ----------------------------------------------------------------------


def _of_norm(z: Sizes) -> int:
    """Bytes per token that the backward of a norm of the stream moves for the gradient of its weight."""
    return z.hidden * (5 if work.by_steps(z) else 2) * work.norm_width(z)


def _normalized(z: Sizes) -> int:
    """Bytes per token of the normalized input, which a norm of single operations keeps, in float32, for its weight
    gradient."""
    return 4 * z.hidden if z.gated and (z.wide_norm or not z.cuda) else 0


def _head_norms(z: Sizes) -> int:
    """Bytes per token that the norms of queries and keys keep without weight gradients."""
    return z.head_norms - (0 if z.cuda or not z.qk_norm else 4 * (z.queries + z.keys))


def _behind(z: Sizes) -> int:
    return 2 * (8 + 4 * z.hidden) if z.around else 0
