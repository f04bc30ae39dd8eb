"""Loads of experts, and router biases that balance them (arXiv 2408.15664).

Every F reports the number of rows of each expert of a block; VALIDATE sums them over all ranks. If routers have a bias,
STEP changes an expert's by `rate`: up if its load was below the mean of its block, down if it was above. The bias
affects the choice of experts for a token, not their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from zbc.ir import Kind, Op
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.state import Handler, PhaseRun, Worker


@runtime_checkable
class Routed(Protocol):
    """A layer with a router; its `count` experts have the indices from `place` on among those of all blocks."""

    place: int | None
    count: int
    rate: float
    bias: Tensor | None


class Routing(Feature):
    """The layers with routers, by stage."""

    def __init__(self, layers: Mapping[int, Sequence[Routed]]) -> None:
        self._layers = layers

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        run.wrap([kind for kind in Kind if kind.steps], self._balance)

    def _balance(self, handler: Handler, worker: Worker, op: Op) -> None:
        handler(worker, op)
        verdict = worker.verdict
        if verdict is None or verdict.skipped:
            return
        for router in self._layers.get(op.stage, ()):
            if router.bias is not None and router.place is not None:
                loads = torch.tensor(verdict.routed[router.place : router.place + router.count], dtype=torch.float64)
                router.bias.add_(router.rate * (loads.mean() - loads).sign().to(router.bias))


def number_blocks(name: str, layer: nn.Module, count: int) -> list[Routed]:
    """The routers of a layer `layers.3`; sets the index of their first expert among those of all blocks."""
    inside: list[object] = [*layer.modules()]
    routers = [router for router in inside if isinstance(router, Routed)]
    for router in routers:
        router.place = int(name.rpartition(".")[2]) * count
    return routers


def build(context: Context) -> Routing | None:
    count = context.manifest.planning.get("model", {}).get("experts") or 0
    stages = context.stages.items() if count else ()
    blocks = {s: [layer for layer in stage.layers if layer.name.startswith("layers.")] for s, stage in stages}
    routers = {s: [r for one in own for r in number_blocks(one.name, one.module, count)] for s, own in blocks.items()}
    return Routing(routers) if routers else None
