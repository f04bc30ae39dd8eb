"""Loads of experts: who tells them, and biases of routers that even them (arXiv 2408.15664).

Every F tells how many rows each expert of a block got; VALIDATE adds them up over all ranks. Where routers have a bias,
STEP moves that of an expert by `rate` towards the mean load of its block: up where it got less, down where it got more.
The bias decides which experts a token meets, not with what weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zbc.ir import Op
from zbc.runtime.core.feature import Context, Feature

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


@runtime_checkable
class Routed(Protocol):
    """A layer with a router, whose `count` experts are those from `place` on of all blocks."""

    place: int | None
    count: int
    rate: float
    bias: Tensor | None


class Routing(Feature):
    """The layers with routers, by stage."""

    def __init__(self, layers: Mapping[int, Sequence[Routed]]) -> None:
        self._layers = layers

    def steps(self, worker: Worker, op: Op) -> None:
        verdict = worker.verdict
        if verdict is None or verdict.skipped:
            return
        for one in self._layers.get(op.stage, ()):
            if one.bias is not None and one.place is not None:
                loads = torch.tensor(verdict.routed[one.place : one.place + one.count], dtype=torch.float64)
                one.bias.add_(one.rate * (loads.mean() - loads).sign().to(one.bias))


def number_blocks(name: str, layer: nn.Module, count: int) -> list[Routed]:
    """The routers of a layer `layers.3`, told which experts of all blocks theirs are."""
    inside: list[object] = [*layer.modules()]
    found = [one for one in inside if isinstance(one, Routed)]
    for one in found:
        one.place = int(name.rpartition(".")[2]) * count
    return found


def build(context: Context) -> Routing | None:
    count = context.manifest.planning.get("model", {}).get("experts") or 0
    stages = context.stages.items() if count else ()
    blocks = {s: [layer for layer in stage.layers if layer.name.startswith("layers.")] for s, stage in stages}
    found = {s: [r for one in own for r in number_blocks(one.name, one.module, count)] for s, own in blocks.items()}
    return Routing(found) if found else None


def experts_of_all_blocks(planning: Mapping[str, Mapping[str, object]]) -> int:
    """How many there are in a model, which the sections of a plan describe."""
    model = planning.get("model", {})
    experts, layers = model.get("experts"), model.get("layers")
    return experts * layers if isinstance(experts, int) and isinstance(layers, int) else 0
