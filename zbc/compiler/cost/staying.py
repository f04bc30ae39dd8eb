"""Bytes that offload leaves on the device: of tensors too small to be worth a copy (`SMALL`), and of whole numbers.

A layer's tensors are counted one by one, as torch saves them; what they leave of its activations stays. Layers that a
factory makes are known by their sum alone.
"""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler.cost.footprint import Footprint, router_inputs
from zbc.compiler.cost.sizes import Sizes
from zbc.ops import SMALL


def moving(sizes: list[float]) -> float:
    """Bytes of the tensors that move."""
    return sum(size for size in sizes if size >= SMALL)


def block(z: Sizes, size: Footprint, *, spared: bool = False, attention: bool = False) -> Footprint:
    """The footprint of a block with what stays; `spared`: it recomputes selectively, with `attention` or without."""
    n, t, q, k, met = z.width, z.tokens, z.queries, z.keys, z.met
    own, low = z.stream * z.hidden * z.own, z.hidden * n * t
    inside = [2, 1, 1] if z.gated else [1, 1]  # of an MLP: gate and up in one, the activation, the product
    heads = [(q + 2 * k) * n * t, q * n * t] if z.cp == 1 else [*3 * [q * n * t], 2 * k * n * t * z.cp]
    turned = [q * n * t, k * n * t, q * n * t][: 2 + (not z.capped)] if z.turned_kept and z.cp == 1 else []
    found = 2 * _norm(z, kept=not spared) + 2 * (bool(z.behind) * [4 * z.hidden * z.own] * 2)
    if spared and attention:
        heads, turned = heads[:1], []
    else:
        copies = z.head_norms // (4 * (q + k)) if z.qk_norm else 0
        found += [*turned, z.logs * t, *copies * [4 * q * t, 4 * k * t]]
    found += heads
    for width in filter(None, (z.mlp * met, z.common)):
        found += [width * each * n * t for each in (inside[:1] if spared else inside)]
    if z.experts:
        found += [*2 * [met * low], router_inputs(z, again=spared), 4 * z.choices * z.routed] + [low] * bool(z.common)
    if not (spared or z.regathers):
        found += [low] * (1 if z.experts else 2)  # outputs of the norms
    return _with(size, found, own)


def head(z: Sizes, size: Footprint) -> Footprint:
    """The footprint of the head, or of the last norm alone, with what stays."""
    n, t, logits = z.width, z.tokens, size.logits
    wide = n * z.vocab * t if z.logits_cap else 0.0  # the tanh of the cap
    found = [*_norm(z, kept=True), z.hidden * n * t, wide, logits - wide]
    return _with(size, found, z.stream * z.hidden * z.own)


def embedding(z: Sizes, size: Footprint) -> Footprint:
    """The footprint of the embedding, which keeps whole numbers, or of learned positions."""
    return _with(size, [], size.entry if size.entry > 8 * z.tokens else 0.0)


def measured(size: Footprint, like: Footprint | None = None) -> Footprint:
    """A measured footprint with what stays: as much of it as of the estimated one; all if its sum is small."""
    part = like.stays / like.act_b if like is not None and like.act_b else float(size.act_b < SMALL)
    first = like.entry_stays / like.entry if like is not None and like.entry else float(size.entry < SMALL)
    return replace(size, stays=part * size.act_b, entry_stays=first * size.entry)


def _norm(z: Sizes, *, kept: bool) -> list[float]:
    """The tensors of a norm: its input and, of single operations, what F keeps of the normalized one."""
    inner = z.norm > 4 * z.hidden
    wide, input_ = 4 * z.hidden * z.own, z.stream * z.hidden * z.own
    return ([wide, wide] if z.copied else [input_, wide]) if inner and kept else [input_]


def _with(size: Footprint, tensors: list[float], entry: float) -> Footprint:
    """`tensors` may be more than it keeps, where it is frozen: then as large a part of them."""
    part = min(1.0, size.act_b / (sum(tensors) or 1.0))
    stays = max(0.0, size.act_b - part * moving(tensors))
    return replace(size, stays=stays, entry_stays=max(0.0, size.entry - moving([entry])))
