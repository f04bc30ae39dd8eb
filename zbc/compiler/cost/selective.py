"""Bytes of a block with selective recompute, whose B runs again what is between its linear layers.

Its backward's peaks are those of the tensors that it makes and frees, in their order.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from zbc.compiler.cost.footprint import Footprint, block, mixed, router_inputs, sent_back
from zbc.compiler.cost.sizes import GRAD_BYTES, Sizes


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
        kept, read = h * n * t * z.kept_beside, router_inputs(z)
        gone += read - h * n * t - kept
        whole = replace(whole, act_b=whole.act_b - gone, act_w=whole.act_w - read + router_inputs(z, again=True))
        more_f = max(whole.more_f, sent_back(z, again=True))
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

    def weight(elements: float, *freed: float, count: int = 0) -> None:
        """The gradient of a weight, or of a stack of `count`; then the tensors that it is made of are freed."""
        fresh = (z.stack_grad if count else z.weight_grad)(elements, first=first)
        came = GRAD_BYTES * (count or 1) * elements * stays
        (waiting if waits else steps).extend((fresh, came, -fresh, *(-one for one in freed)))

    def meet() -> None:
        if not split:
            add(*waiting)
            waiting.clear()

    def expert(width: int, count: int, share: float, grads: float, rows: float, *again: float) -> None:
        """The activation of `count` experts runs again, for a `share` of the tokens, and what made their rows `again`;
        their weights' gradients free `grads` of the outputs, and the `rows`."""
        wide = width * share * n * t
        add(wide, up * wide)  # the gradient of the last product's input, and that input
        weight(h * width, wide, grads, count=count)
        add(*((3 * wide, -3 * wide, -2 * wide) if z.gated else (wide, -2 * wide)), share * low, *again)
        weight(up * h * width, up * wide, rows, count=count)

    add(mine * z.cast)
    if gathers:
        add(low, low, -low, -mine * z.cast)
    grad = low if gathers or z.cast else 0.0
    normed = inside + own + beside, -beside, mine * z.cast  # and a cast
    if z.common:  # the gradients of its output and of its gate; without collectives before it, it reads a norm's output
        add(low, low, n * t, -low, -low)
        kept = low * z.kept_beside
        expert(z.common, 0, 1.0, low, kept, *(() if kept else normed))
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
    expert(z.mlp, z.experts, z.met, got, got)
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
    add(n * z.choices * z.scored - z.router * t - order, mine)
    if z.kept_beside:
        add(own, -2 * own)
    add(*(() if z.common else normed), -own * z.cast)
    weight(h * z.choices, here, n * z.choices * z.scored)
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
