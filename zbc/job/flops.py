"""The floating-point operations of a model, by the usual count: what MFU is a share of."""

from __future__ import annotations

from zbc.job.model_section import Model


def training_flops(model: Model) -> float | None:
    """Operations of forward and backward of one sequence; None for a factory, whose layers nobody has counted.

    A multiplication and an addition are two. Matrix products of weights count 6 per weight and token (2 forward, 4
    backward), the two of attention 6 per token, feature and position seen, half of the square being causal. Embedding
    look-ups, norms and activations count nothing, and neither does what is computed a second time (recomputation).
    """
    if not model.builtin or not model.hidden or not model.vocab or not model.seq_len:
        return None
    h, s, q = model.hidden, model.seq_len, (model.heads or 1) * model.head_width
    each = (3 if model.family == "llama" else 2) * h
    mlp = model.met * each * model.expert_width + h * model.experts if model.experts else each * model.mlp_width
    matrices = h * (2 * q + 2 * model.kv_width) + mlp
    weights = model.layers * matrices + h * model.vocab
    return 6.0 * s * (weights + model.layers * s * q)
