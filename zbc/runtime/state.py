"""What one rank holds while it runs a plan: the `Worker`, and where each op finds its things.

A tensor's way through a rank, all of it keyed by `ir.Key` (stage, microbatch, pipe, slice):

    RECV_F -> F -> kept[key] until B; outputs[key] -> SEND_F, or handed[key of the next stage] if that is on this rank
    RECV_B -> B -> slots[key] until W; input_grads[key] -> SEND_B, or output_grads[key of the stage before]

Where two neighbouring stages share a rank there is no transfer: the producer puts the tensor where the consumer looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import RANK_WIDE, Key, Kind, Message, Op, message_of
from zbc.plan import RankPlan
from zbc.runtime.clock import clock_for
from zbc.runtime.data import Batches
from zbc.runtime.model import Loss
from zbc.runtime.optimizer import StageOptimizer
from zbc.runtime.progress import Progress, StepResult
from zbc.runtime.slot import Slot
from zbc.runtime.stage import Stage
from zbc.runtime.tape import Tape
from zbc.runtime.transport import Transport
from zbc.runtime.validate import Layout, Verdict

Value = TypeVar("Value")


class Kept(NamedTuple):
    """What F leaves for B."""

    x: Tensor  # the stage input; a leaf that collects its gradient
    tape: Tape
    grad: Tensor | None  # what backward starts with, at the loss
    slot: Slot


class Route(NamedTuple):
    """What the plan and the placement fix about an op, looked up once per plan."""

    key: Key
    stage: Stage
    message: Message | None  # a transfer's own; of F, B and BW the one that brings what they need
    peer: int  # of a transfer
    local: Key | None  # of F, B and BW: where the result goes in memory, if the neighbour is on this rank
    end: bool  # the last stage: F ends in the loss, B and BW begin there


@dataclass
class Worker:
    """One rank at work. The only mutable object of the runtime; after a step every store is empty."""

    plan: RankPlan
    transport: Transport
    device: torch.device
    stages: dict[int, Stage]
    batches: Batches | None  # None on ranks with neither the first nor the last stage
    loss: Loss
    optimizers: dict[int, StageOptimizer]
    clip: float | None
    layout: Layout

    step: int = 0
    stop: bool = False
    verdict: Verdict | None = None
    progress: Progress = field(default_factory=Progress)
    results: list[StepResult] = field(default_factory=list)

    handed: dict[Key, Tensor] = field(default_factory=dict)
    kept: dict[Key, Kept] = field(default_factory=dict)
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    output_grads: dict[Key, Tensor] = field(default_factory=dict)
    input_grads: dict[Key, Tensor] = field(default_factory=dict)
    slots: dict[Key, Slot] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.placement = self.plan.manifest.to_placement()
        self.everyone = tuple(range(self.placement.ranks))
        self.clock = clock_for(self.device)
        self.routes = {op: route for op in self.plan.ops if (route := _route(self, op)) is not None}
        self.script: list[tuple[Callable[[Worker, Op], None], Op, str]] = []  # what execute.py runs
        self._shares: dict[torch.dtype, Tensor] = {}

    def wait(self, message: Message) -> Tensor:
        """Block until a posted message is there."""
        progress = self.progress
        progress.waiting = True
        tensor = self.transport.wait(message)
        progress.waiting = False
        return tensor

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum over `ranks` in place; blocks."""
        self.progress.waiting = True
        self.transport.all_reduce(tensor, ranks)
        self.progress.waiting = False

    def share(self, dtype: torch.dtype) -> Tensor:
        """1/m, the gradient of a step's loss by the loss of one microbatch: the step's is their mean."""
        share = self._shares.get(dtype)
        if share is None:
            part = 1.0 / self.plan.manifest.microbatches
            share = self._shares[dtype] = torch.tensor(part, dtype=dtype, device=self.device)
        return share

    def counted(self) -> list[StageOptimizer]:
        """The stages whose gradients this rank reports: of several copies of a stage the one in pipe 0 counts."""
        rank, placement = self.plan.rank, self.placement
        return [self.optimizers[s] for s in self.stages if placement.rank_of(s) == rank]

    def leftovers(self) -> list[str]:
        """What a finished step should have used up and did not."""
        stores: list[tuple[str, Mapping[Key, Any]]] = [
            ("the output handed over for F {} was never used", self.handed),
            ("F {} has no backward", self.kept),
            ("the output of F {} was never sent", self.outputs),
            ("the gradient handed over for B {} was never used", self.output_grads),
            ("the input gradient of B {} was never sent", self.input_grads),
            ("B {} has no W", self.slots),
        ]
        found = [text.format(name_of(key)) for text, store in stores for key in store]
        return [*found, *(f"the loss of m{mb} was never reported" for mb in self.losses)]


def _route(worker: Worker, op: Op) -> Route | None:
    kind, placement = op.kind, worker.placement
    if kind in RANK_WIDE:
        return None
    stage = worker.stages.get(op.stage)
    if stage is None:
        text = f"run: {op} is in the plan of rank {worker.plan.rank}, which does not hold stage {op.stage}"
        raise ZbcError("E205", text, hint="plan again")
    key, end = op.key, op.stage == placement.stages - 1
    if kind.is_transfer:
        peer = placement.peer(op)
        if peer is None:
            raise ZbcError("E203", f"run: {op} leads out of the pipeline", hint="plan again")
        return Route(key, stage, message_of(op), peer, None, end)
    source, sink = (op.stage - 1, op.stage + 1) if kind is Kind.F else (op.stage + 1, op.stage - 1)
    message = Message(kind is Kind.F, *key) if placement.neighbours(op.stage, source, op.pipe) else None
    inside = 0 <= sink < placement.stages and not placement.neighbours(op.stage, sink, op.pipe)
    return Route(key, stage, message, -1, key._replace(stage=sink) if inside else None, end)


def take(store: dict[Key, Value], key: Key, missing: str) -> Value:
    """Remove and return; raises E703 with `missing`, {} filled with the key, if it is not there."""
    try:
        return store.pop(key)
    except KeyError:
        raise ZbcError("E703", "run: " + missing.format(name_of(key))) from None


def name_of(key: Key) -> str:
    """`s1 m0`, as in the text of an op."""
    return str(Op(Kind.F, *key)).removeprefix("F ")
