"""The loss of a model, as ranks compute it: of sharded logits, with more terms than torch's, or by chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from zbc.job import spec
from zbc.runtime.core.tensors import Loss
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.features.words import cross_entropy
from zbc.runtime.features.words.words import AS_IS, PLAIN, Terms
from zbc.training.models import model


def by_words(chosen: spec.Model) -> bool:
    """Whether the loss can be computed from sharded logits."""
    return chosen.causal and chosen.loss == "cross_entropy"


def terms_of(chosen: spec.Model) -> Terms:
    return Terms(chosen.z_losses[0], chosen.label_smoothing, chosen.label_smoothing / (chosen.vocab or 1))


def loss_of(chosen: spec.Model, group: Group | None, layers: Iterable[nn.Module]) -> Loss:
    """The loss of a model; `layers` are this rank's, of which the head has the settings of a loss by chunks."""
    terms = terms_of(chosen)
    if not by_words(chosen) or (group is None and terms == PLAIN and chosen.loss_chunk is None):
        return model.loss(chosen.loss)
    return cross_entropy.cross_entropy(chosen.vocab or 0, terms, group, _chunks(layers))


def log_probabilities_of(
    chosen: spec.Model, group: Group | None, layers: Iterable[nn.Module]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function that computes log probabilities of targets; None if the model's output is not logits."""
    if not by_words(chosen):
        return None
    return cross_entropy.log_probabilities(chosen.vocab or 0, group, _chunks(layers))


def _chunks(layers: Iterable[nn.Module]) -> cross_entropy.Chunks | None:
    heads: Iterable[Any] = (layer for layer in layers if getattr(layer, "chunk", None) is not None)
    return next((cross_entropy.Chunks(head.logits, head.chunk, getattr(head, "shaped", AS_IS)) for head in heads), None)
