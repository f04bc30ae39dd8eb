"""What a rank remembers of a step that has run and is not final yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zbc.ir import Message
from zbc.runtime.progress import StepResult
from zbc.runtime.validate import Verdict


@dataclass
class TentativeStep:
    """A step whose verdict may be unknown; its gradients are where backward left them until the step is `final`."""

    step: int
    losses: dict[int, Tensor | float]
    busy: float
    peak: int
    seconds: float
    sums: Tensor | None = None  # of all ranks, on the last one
    verdict: Verdict | None = None
    final: bool = False
    redone: bool = False

    def result(self) -> StepResult | None:
        """The step as the ranks agreed on it; None before they have."""
        return None if self.verdict is None else self.verdict.result(self.step, self.seconds, redone=self.redone)


@dataclass
class Ahead:
    """What a plan without a barrier needs besides its ops.

    `again` is what REDO runs: the ops before it that make or move tensors. `outstanding` are the messages they receive
    and do not use.
    """

    again: list[tuple[Any, Any, str]] = field(default_factory=list)  # handler, op, text
    outstanding: list[Message] = field(default_factory=list)
    pending: TentativeStep | None = None
    buffers: Buffers | None = None


class Buffers:
    """The buffers of modules that forward changes (running statistics, say): a forward that runs again needs them as
    they were. Which these are shows in the first step, whose forwards never run again."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._places = self._all()
        # The tensors themselves, not their ids: that of one that is gone may be the id of the one in its place.
        self._before = [(b, -1 if b is None else b._version) for b in map(self._get, self._places)]
        self._running: list[tuple[nn.Module, str]] | None = None
        self._saved: list[Tensor | None] = []

    def save(self) -> None:
        """Remember the values; to be called at the beginning of each step but the first."""
        if self._running is None:
            now = [(b, -1 if b is None else b._version) for b in map(self._get, self._places)]
            pairs = zip(self._places, self._before, now, strict=True)
            self._running = [place for place, (a, at), (b, then) in pairs if a is not b or at != then]
            known = {(id(module), name) for module, name in self._places}
            self._running += [(m, name) for m, name in self._all() if (id(m), name) not in known]
            self._before.clear()
        self._saved = [None if b is None else b.detach().clone() for b in map(self._get, self._running)]

    def restore(self) -> None:
        """Bring the remembered values back."""
        with torch.no_grad():
            for (module, name), value in zip(self._running or (), self._saved, strict=True):
                buffer = module._buffers[name]
                if buffer is None or value is None or buffer.shape != value.shape:
                    module._buffers[name] = None if value is None else value.clone()
                else:
                    buffer.copy_(value)

    def _all(self) -> list[tuple[nn.Module, str]]:
        return [(m, name) for module in self._modules for m in module.modules() for name in m._buffers]

    @staticmethod
    def _get(place: tuple[nn.Module, str]) -> Tensor | None:
        return place[0]._buffers[place[1]]
