"""Embedding and output layer of built-in models with vocabulary parallelism over all ranks of a pipeline.

The first layer begins after the look-up, and the last one ends before the logits:

    embed       scale and learned positions                       (B, T, H)          -> (B, T, H)
    head        norm                                              (B, T, H)          -> (B, T, H)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.job.spec import Job, Model
from zbc.training.models.gpt import Embed, GptHead
from zbc.training.models.model import TIED, LayerPlan
from zbc.training.models.parts import same

LOGITS = "head.logits.weight"


def table_sizes(model: Model) -> dict[str, int]:
    """Elements of the tables of a built-in model, by name."""
    size = (model.vocab or 0) * (model.hidden or 0)
    return {name: size for name in _names(tied=model.tie_embeddings)}


def _names(*, tied: bool) -> tuple[str, ...]:
    return (TIED,) if tied else (TIED, LOGITS)


class Tables:
    """The rows [low, high) of the tables of a model, cut out of its layers."""

    def __init__(self, low: int, high: int, *, tied: bool) -> None:
        self.low, self.high = low, high
        self._names = _names(tied=tied)
        self._rows: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def cut(self, name: str, layer: nn.Module) -> None:
        """Takes this rank's rows from a layer with initial weights, and removes its table."""
        table = without_words(layer)
        found = TIED if isinstance(layer, Embed) else LOGITS
        if table is not None and found in self._names:
            self._rows[found] = table.detach()[self.low : self.high].clone()
            self._shapes[found] = tuple(table.shape)

    def parameters(self, plans: Sequence[LayerPlan], seed: int, device: torch.device) -> dict[str, nn.Parameter]:
        """The rows as parameters, by the names of the whole tables; builds layers of other ranks to get their rows."""
        for plan in plans:
            if any(name.startswith(f"{plan.name}.") and name not in self._rows for name in self._names):
                self.cut(plan.name, plan.build(seed))
        return {name: nn.Parameter(self._rows.pop(name).to(device)) for name in self._names}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the whole tables."""
        return self._shapes


def without_words(layer: nn.Module) -> Tensor | None:
    """Removes the table of a built-in layer, in place, and returns it; None if it has none."""
    if isinstance(layer, Embed):
        table: Tensor = layer.tokens.weight
        layer.register_module("tokens", None)
        layer.look_up = same
        return table
    if isinstance(layer, GptHead):
        table = layer.logits.weight
        layer.register_module("logits", nn.Identity())
        layer.chunk = None  # of logits, which it no longer computes
        return table
    return None


def trunk(plans: Iterable[LayerPlan]) -> list[LayerPlan]:
    """The layers without the tables, to derive shapes from."""
    return [replace(plan, make=_made(plan.make), ties={}, fill=None, whole=i == 0) for i, plan in enumerate(plans)]


def _made(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = make()
        without_words(layer)
        return layer

    return build


class TableLayer(nn.Module):
    """A layer of `between_words`: `run` of its input and rows."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], *size: int, learns: bool = False) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.zeros(size), learns), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight)

    def shard(self, group: object) -> dict[str, int]:
        return {}


def between_words(plans: Iterable[LayerPlan], job: Job) -> list[LayerPlan]:
    """`trunk` for a rank alone: a look-up and logits are in place of all ranks' words."""
    table = partial(TableLayer, learns=not job.adapter.rank)
    size, (first, *others) = (job.model.vocab or 0, job.model.hidden or 0), trunk(plans)
    look_up = LayerPlan("look-up", partial(table, functional.embedding, *size))
    copy = LayerPlan("copy", partial(TableLayer, lambda x, _: x.clone(), 1))  # the first layer may return its input
    logits = LayerPlan("logits", partial(table, functional.linear, *size), whole=True)
    return [look_up, first, copy, *others, logits]
