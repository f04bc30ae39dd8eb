"""Floating-point operations of a model, by the usual count, for MFU."""

from __future__ import annotations

from zbc.job.model_section import Model

# Keys are taken in tiles, and causal attention leaves out whole tiles only: of torch's CPU kernel, of FlashAttention 2.
TILE = {"cpu": 512, "cuda": 128}


def keys_seen(length: int, tile: int) -> float:
    """Keys that a query of causal attention computes with, on average over a sequence of `length`. (length + tile) / 2
    for whole tiles; the whole sequence if it is shorter than a tile."""
    whole, rest = divmod(length, tile)
    return (tile * tile * whole * (whole + 1) // 2 + rest * length) / length


def training_flops(model: Model, *, frozen: bool = False) -> float | None:
    """Operations of forward and backward of one sequence; None for a factory, whose layers are not counted.

    A multiplication and an addition are two. Matrix products of weights count 6 per weight and token (2 forward, 4
    backward; 2 less if `frozen`), the two products of attention 6 per token, feature and visible position, half of
    the square. Embedding look-ups, norms, activations, adapters and recomputation count nothing.
    """
    if not model.builtin or not model.hidden or not model.vocab or not model.seq_len:
        return None
    s = model.seq_len
    weights, attention = _per_token(model)
    whole = 6.0 * s * (weights + s * attention)
    return whole - 2.0 * s * weights if frozen else whole


def attention_cost(model: Model) -> float:
    """Operations of a token per token of its sequence, relative to its own matrix products; 0 for a factory."""
    if not model.builtin or not model.hidden or not model.vocab:
        return 0.0
    weights, attention = _per_token(model)
    return attention / weights


def of_block(model: Model) -> tuple[int, int]:
    """Weights of a block that a token is multiplied with, but for a router's, and query features."""
    q = (model.heads or 1) * model.head_width
    width = (model.met if model.experts else 1) * model.mlp_width + model.shared_hidden
    return (model.hidden or 0) * (2 * q + 2 * model.kv_width + (3 if model.family == "llama" else 2) * width), q


def _per_token(model: Model) -> tuple[int, float]:
    """Weights that a token is multiplied with, and query features over all layers; layers with a window count their
    visible share."""
    h, s = model.hidden or 0, model.seq_len or 1
    matrices, q = of_block(model)
    router = h * (model.experts + bool(model.shared_hidden)) if model.experts else 0
    w = min(model.window or s, s)
    seen = (2 * w * s - w * w) / (s * s)
    return model.layers * (matrices + router) + h * (model.vocab or 0), model.layers * q * seen
