"""What a rank remembers of a step that has run and is not final yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zbc.ir import Message
from zbc.runtime.clock import Busy
from zbc.runtime.progress import StepResult
from zbc.runtime.remembered import Kept, Place
from zbc.runtime.validate import Verdict


@dataclass
class TentativeStep:
    """A step whose verdict may be unknown; its gradients are where backward left them until the step is `final`."""

    step: int
    losses: dict[int, Tensor | float]
    busy: Busy
    peak: int
    seconds: float
    sums: Tensor | None = None  # of all ranks, on the last one
    verdict: Verdict | None = None
    final: bool = False
    redone: bool = False
    added: Mapping[int, Tensor | float] = field(default_factory=dict)  # by layers, as `Added.told` has it

    def result(self) -> StepResult | None:
        """The step as the ranks agreed on it; None before they have."""
        return None if self.verdict is None else self.verdict.result(self.step, self.seconds, redone=self.redone)


@dataclass
class Ahead:
    """What a plan without a barrier needs besides its ops.

    `again` is what REDO runs: the ops before it that make or move tensors. `outstanding` are the messages they receive
    and do not use. `buffers` are those that forwards change, `found` what was in them when the step began.
    """

    again: list[tuple[Any, Any, str]] = field(default_factory=list)  # handler, op, text
    outstanding: list[Message] = field(default_factory=list)
    pending: TentativeStep | None = None
    buffers: tuple[Place, ...] = ()
    found: list[Kept] = field(default_factory=list)
