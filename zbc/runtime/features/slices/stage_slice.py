"""A stage for one slice of its microbatches: with shapes of its own, and the keys and values of earlier slices.

It shares layers, weights and checks of gradients with the whole stage. Keys and values that later slices attend to
are kept from the first forward of a microbatch to its last backward; see slicing.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from torch import Tensor

from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.stage import Ports, Stage, StageLayer
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tape import Alone, Tape
from zbc.runtime.core.tensors import Part
from zbc.runtime.features.slices.slicing import Inside, Pasts, within

Place = tuple[Any, ...]  # the seed or "evaluation", the step, the number of the microbatch


@dataclass
class StageSlice(Stage):
    """A stage for one slice; all slices of a stage share `pasts`."""

    part: Part = field(kw_only=True)
    whole: Stage = field(kw_only=True)
    pasts: dict[Place, Pasts] = field(kw_only=True)

    def __post_init__(self) -> None:
        self.parameters = self.whole.parameters

    @functools.cached_property
    def alone(self) -> Alone:
        return self.whole.alone

    def forward(self, x: Tensor, step: int, mb: int, /, *how: Any) -> tuple[Tensor, Tape]:
        y, tape = super().forward(x, step, mb, *how)
        return y, _Last(tape, self.pasts, (self.seed, step, mb)) if self.part.number == 0 else tape

    def evaluate(self, x: Tensor, finish: Callable[[Tensor], Tensor], *place: object) -> Tensor:
        y = super().evaluate(x, finish, *place)
        if self.part.last:
            self.pasts.pop(place, None)
        return y

    def _run(self, layer: StageLayer, call: Callable[[Tensor], Tensor], x: Tensor, *place: object) -> Tensor:
        with within(Inside(self.part, self.pasts.setdefault(place, {}), layer.name)):
            return super()._run(layer, call, x, *place, self.part.number)


class _Last(NamedTuple):
    """The tape of the first slice, whose backward is the last one of a microbatch: frees its keys and values."""

    tape: Tape
    pasts: dict[Place, Pasts]
    at: Place

    def backward(self, grad: Tensor | None) -> None:
        self.tape.backward(grad)
        self.pasts.pop(self.at, None)


def in_slices(stage: Stage, parts: Sequence[Part], ports: Sequence[Ports]) -> None:
    """Makes the stages of a stage's slices, with these `ports`."""
    shared = {attribute.name: getattr(stage, attribute.name) for attribute in fields(Stage) if attribute.init}
    pasts = dict[Place, Pasts]()
    stage.slices = tuple(
        StageSlice(**{**shared, **own._asdict(), "part": part}, whole=stage, pasts=pasts)
        for part, own in zip(parts, ports, strict=True)
    )


class SlicePasts(Feature):
    """Keys and values of earlier slices: all are freed by the end of a step."""

    def repeats(self, worker: Worker) -> None:
        for pasts in self._of(worker):
            pasts.clear()

    def leftovers(self, worker: Worker) -> list[str]:
        return [f"pasts[m{mb}]" for pasts in self._of(worker) for _, step, mb in pasts if step <= worker.step]

    @staticmethod
    def _of(worker: Worker) -> list[dict[Place, Pasts]]:
        firsts = (first for stage in worker.stages.values() for first in stage.slices[:1])
        return [first.pasts for first in firsts if isinstance(first, StageSlice)]


def build(context: Context) -> SlicePasts:
    for index, stage in context.stages.items() if context.slices else ():
        in_slices(stage, context.slices, context.specs[index])
    return SlicePasts()
