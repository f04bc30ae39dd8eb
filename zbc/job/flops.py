"""The floating-point operations of a model, by the usual count: what MFU is a share of."""

from __future__ import annotations

from zbc.job.model_section import Model


def training_flops(model: Model, *, frozen: bool = False) -> float | None:
    """Operations of forward and backward of one sequence; None for a factory, whose layers nobody has counted.

    A multiplication and an addition are two. Matrix products of weights count 6 per weight and token (2 forward, 4
    backward, 2 of them not where they are `frozen`), the two of attention 6 per token, feature and position seen, half
    of the square being causal. Embedding look-ups, norms, activations and adapters count nothing, and neither does what
    is computed a second time (recomputation).
    """
    if not model.builtin or not model.hidden or not model.vocab or not model.seq_len:
        return None
    s = model.seq_len
    weights, attention = _per_token(model)
    whole = 6.0 * s * (weights + s * attention)
    return whole - 2.0 * s * weights if frozen else whole


def attention_cost(model: Model) -> float:
    """Operations of a token for each token of its sequence, over those that it takes by itself; 0 for a factory."""
    if not model.builtin or not model.hidden or not model.vocab:
        return 0.0
    weights, attention = _per_token(model)
    return attention / weights


def _per_token(model: Model) -> tuple[int, float]:
    """Weights of all matrices that a token is multiplied with, and features of queries over all layers, those with a
    window as far as they see."""
    h, q = model.hidden or 0, (model.heads or 1) * model.head_width
    each = (3 if model.family == "llama" else 2) * h
    mlp = each * model.mlp_width
    if model.experts:
        common = model.shared_hidden or 0
        mlp = each * (model.met * model.expert_width + common) + h * (model.experts + bool(common))
    matrices = h * (2 * q + 2 * model.kv_width) + mlp
    more = (each * model.mlp_width - mlp) * model.first_dense  # of blocks without experts
    s = model.seq_len or 1
    seen = ((2 * w * s - w * w) / (s * s) for w in (min(model.block(i).window or s, s) for i in range(model.layers)))
    return model.layers * matrices + more + h * (model.vocab or 0), q * sum(seen)
