"""Embedding and output layer of causal models with vocabulary parallelism over all ranks of a pipeline.

The first layer begins after the look-up, and the last one ends before the logits:

    embed       scale and learned positions                       (B, T, H)          -> (B, T, H)
    head        norm                                              (B, T, H)          -> (B, T, H)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.job.hfmodel import WORDS
from zbc.job.spec import Job, Model
from zbc.runtime.core.feature import Site
from zbc.runtime.core.tensors import AUTOCAST, TensorSpec
from zbc.runtime.features.words.vocabulary import Embedding, Output
from zbc.runtime.features.words.vocabulary_state import Words, words_of
from zbc.runtime.features.words.words import AS_IS, Shaped
from zbc.training.models.model import TIED, LayerPlan, by_words, terms_of

LOGITS = "head.logits.weight"


class Ends(NamedTuple):
    """The shapes (words, features) of the tables of a model, by name, the embedding's first, the output layer's last;
    its shape of logits; the word whose row of the embedding does not learn."""

    tables: Mapping[str, tuple[int, int]]
    shaped: Shaped = AS_IS
    still: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of the tables."""
        return {name: prod(shape) for name, shape in self.tables.items()}


def ends_of(model: Model) -> Ends:
    """The ends of a model whose ranks share the vocabulary."""
    if not model.builtin:
        found: Ends = userobject.load(WORDS, "the reader of models")(model.args["config"])
        return found
    names = (TIED,) if model.tie_embeddings else (TIED, LOGITS)
    return Ends(dict.fromkeys(names, (model.vocab or 0, model.hidden or 0)))


class Tables:
    """The rows [low, high) of the tables of a model, cut out of its layers."""

    def __init__(self, low: int, high: int, ends: Ends) -> None:
        self.low, self.high, self.ends = low, high, ends
        self._rows: dict[str, Tensor] = {}

    def cut(self, name: str, layer: nn.Module) -> None:
        """Takes this rank's rows from a layer with initial weights, and removes its table."""
        for local, table in without_words(layer):
            if (found := f"{name}.{local}") in self.ends.tables:
                self._rows[found] = table.detach()[self.low : self.high].clone()

    def words(
        self, site: Site, plans: Iterable[LayerPlan], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Words:
        """This rank's shard of a vocabulary; builds layers of other ranks to get their rows. `inputs` of the first
        stage and `outputs` of the last one, by slice."""
        names, chosen, learns = self.ends.tables, site.settings.model, not site.settings.adapter.rank
        for plan in plans:
            if any(name.startswith(f"{plan.name}.") and name not in self._rows for name in names):
                self.cut(plan.name, plan.build(site.settings.train.seed))
        rows = {name: nn.Parameter(self._rows.pop(name).to(site.device), learns) for name in names}
        embedding, *_, head = [*rows.values()] * 2
        output = Output(head, self.low, AUTOCAST.get(chosen.dtype), terms_of(chosen), self.ends.shaped)
        looks_up = Embedding(embedding, self.low, self.ends.still)
        return Words(rows, names, self.low, output, looks_up, inputs, outputs)


def tables_of(site: Site) -> Tables | None:
    """The object that cuts tables to this rank's vocabulary shard, if the vocabulary is parallel. Raises E406 for
    models whose output layer this runtime cannot shard."""
    shared, chosen, run = site.manifest.vocabulary, site.settings.model, site.manifest.topology
    if shared is None:
        return None
    if not by_words(chosen) or shared.rows[-1] != chosen.vocab:
        text = "run: the plan shares a vocabulary over its ranks, which this model or its other axes do not allow"
        raise ZbcError("E406", text, hint='plan again, or with parallel.vocabulary = "ends"')
    seat = run.of(site.rank)
    return Tables(*words_of(site.manifest, run.part(seat.at))[seat.pp], ends_of(chosen))


def without_words(layer: Any) -> list[tuple[str, Tensor]]:
    """Removes the table of the first or the last layer, in place; returns its name in the layer and it, if there is
    one."""
    told = getattr(layer, "without_words", None)
    return [] if told is None else [told()]


def trunk(plans: Iterable[LayerPlan]) -> list[LayerPlan]:
    """The layers without the tables, to derive shapes from."""
    made = [replace(plan, make=partial(_made, plan.make), ties={}, fill=None) for plan in plans]
    return [replace(plan, whole=i == 0) for i, plan in enumerate(made)]


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    layer = make()
    without_words(layer)
    return layer


class TableLayer(nn.Module):
    """A layer of `between_words`: `run` of its input and rows."""

    def __init__(self, run: Callable[..., Any], *size: int, learns: bool = False) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.zeros(size), learns), run

    def forward(self, *x: Tensor) -> Any:
        return self.run(*x, self.weight)

    def shard(self, group: object) -> dict[str, int]:
        return {}


def _copied(*x: Tensor) -> Any:
    found = tuple(one.clone() for one in x[:-1])
    return found if len(found) > 1 else found[0]


def between_words(plans: Iterable[LayerPlan], job: Job) -> list[LayerPlan]:
    """`trunk` for a rank alone: a look-up and logits are in place of all ranks' words."""
    table = partial(TableLayer, learns=not job.adapter.rank)
    sizes, (first, *others) = [*ends_of(job.model).tables.values()], trunk(plans)
    look_up = LayerPlan("look-up", partial(table, functional.embedding, *sizes[0]))
    copy = LayerPlan("copy", partial(TableLayer, _copied, 1))  # the first layer may return its input
    logits = LayerPlan("logits", partial(table, functional.linear, *sizes[-1]), whole=True)
    return [look_up, first, copy, *others, logits]
