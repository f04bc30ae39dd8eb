"""Routes: the source of an op's input and the sink of its output, looked up once per plan.

Special properties of a stage (it reads the data, ends in the loss, has several neighbours; offloaded activations;
frozen layers) are the parts of its routes, some supplied by features. The ops (ops.py) are the same for all stages:

    F    x = takes.take();  y, left = keeps.forward(x);  left.grad = gives.give(y);  kept[key] = left
    B    left = keeps.back(kept.pop(key));  grad = left.grad or takes.take();  left.tape.backward(grad);  gives.give(..)

The value of an edge is in `Worker.edges`, keyed by its message (sent or not), until its SEND or the stage that reads it
pops it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Key, Message, Op
from zbc.job.userobject import IN_A_RANK
from zbc.ops import At, Scope
from zbc.runtime.core.bundle import shown, taken_apart
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Finish, Stage
from zbc.runtime.core.tape import Tape
from zbc.runtime.core.tensors import Batch, Length, Loss, Part, TensorSpec, each, share_of, to_device
from zbc.runtime.seeding import seed_of, seeded

if TYPE_CHECKING:
    from zbc.runtime.core.state import BatchSource, PhaseRun, Worker


@dataclass(slots=True)
class Left:
    """Saved by F for B: the input, which receives its gradient, or its parcel if activations are offloaded; the tape;
    the gradient of the loss, at the last stage; the slot, None if backward is one op on torch's own layers."""

    entry: Any  # Tensor | Parcel
    tape: Tape
    slot: Slot | None
    grad: Tensor | None = None


# ---- sources -------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Supplies the input of an op."""

    @property
    def waits(self) -> bool:
        """Whether to take it last, so that it is used as soon as it arrives."""

    def take(self, worker: Worker, number: int) -> Tensor: ...


class Data(NamedTuple):
    """Microbatch `number` of the data: all of it or a slice, for one group of layers."""

    stage: Stage
    waits: bool = False

    def take(self, worker: Worker, number: int) -> Tensor:
        found: Tensor = read(worker, worker.source, "inputs", number, self.stage.part, self.stage)[0]
        return found


class Here(NamedTuple):
    """The output of another stage of this rank."""

    edge: Message
    waits: bool = False

    def take(self, worker: Worker, number: int) -> Tensor:
        return worker.edges.pop(self.edge)


class Comes(NamedTuple):
    """The tensor of a message; `laid` gives it the memory layout that it has in one process."""

    edge: Message
    laid: Callable[[Tensor], Tensor] | None = None
    waits: bool = True

    def take(self, worker: Worker, number: int) -> Tensor:
        tensor = worker.wait(self.edge)
        return tensor if self.laid is None else self.laid(tensor)


class Several(NamedTuple):
    """Tensors of several stages, in their order, joined into one."""

    sources: tuple[Source, ...]
    join: Callable[[list[Tensor]], Tensor]
    waits: bool = True

    def take(self, worker: Worker, number: int) -> Tensor:
        return self.join([source.take(worker, number) for source in self.sources])


Side = Literal["inputs", "targets"]


def read(
    worker: Worker, batches: BatchSource | None, kind: Side, number: int, part: Part | None, stage: Stage | None = None
) -> tuple[Any, float]:
    """The inputs or targets of a microbatch, or of a slice of it, on the rank's device; and the slice's share in the
    loss. `stage`: the one that the inputs are for, if they may be several. Each microbatch is looked up once, for all
    its slices. Raises E505 for sequences of another length."""
    if batches is None:
        raise ZbcError("E703", "run: this rank reads no data, and its plan asks for some")
    look_up = batches.inputs if kind == "inputs" else batches.targets
    if part is None:
        x = look_up(worker.step, number)
        if stage is not None:
            x = stage.entered(x)
        return x if worker.on_host else each(functools.partial(to_device, device=worker.device), x), 1.0
    at = (kind, worker.step, number)
    whole = worker.reading.pop(at, None)
    if whole is None:
        found: Any = look_up(worker.step, number)
        whole = found  # one tensor: slices of several are refused (training/building/context.py)
        if whole.dim() > 1 and whole.shape[1] != part.length:
            text = f"run: {kind} have {whole.shape[1]} tokens, the slices of the plan are cut from {part.length}"
            hint = "samples of one length, for evaluation too: model.seq_len; or schedule.slices = 1"
            raise ZbcError("E505", text, hint=hint)
    if not part.last:
        worker.reading[at] = whole
    share = share_of(whole, part) if kind == "targets" else 1.0
    return to_device(part.of(whole).contiguous(), worker.device), share


def total(found: list[Tensor]) -> Tensor:
    """The sum of an output's gradients from all its readers, in their order, on which the sum of three depends."""
    return functools.reduce(torch.add, found)


# ---- sinks ---------------------------------------------------------------------------------------------------


# They take the output of an op; for a loss, `give` returns the gradient that its backward starts from.


class Edges(NamedTuple):
    """Stores on edges, for SENDs and stages of this rank; `each` makes one tensor per edge."""

    edges: tuple[Message, ...]
    stage: Stage
    each: Callable[[Tensor], list[Tensor]] | None = None

    def finish(self, worker: Worker, number: int) -> Finish:
        return self.stage.fit

    def give(self, worker: Worker, tensor: Tensor, op: Op, number: int) -> None:
        values = [tensor] * len(self.edges) if self.each is None else self.each(tensor)
        for edge, value in zip(self.edges, values, strict=True):
            worker.edges[edge] = value


class Losses(NamedTuple):
    """Adds to the loss of the step."""

    stage: Stage

    def loss(self, worker: Worker, number: int) -> Loss:
        """The loss function; a user's is seeded if it has `zbc_random`, otherwise watched."""
        loss, part = worker.loss, self.stage.part
        if worker.watch is None or not worker.watch.loss:
            return loss
        if getattr(loss, "zbc_random", False) is not True:
            return functools.partial(worker.watch.run, "model.loss", loss)
        seed = seed_of(self.stage.seed, worker.step, number, "loss", part and part.number)
        return seeded(seed, worker.device)(loss)

    def finish(self, worker: Worker, number: int) -> Finish:
        part = self.stage.part
        target, share = read(worker, worker.source, "targets", number, part)
        return _weighted(self.loss(worker, number), target, share if worker.weight(number) else 0.0)

    def give(self, worker: Worker, tensor: Tensor, op: Op, number: int) -> Tensor | None:
        # The storage of mse_loss's result is as large as its input. A device's loss is not waited for here.
        loss = tensor.item() if worker.on_host else tensor.detach().clone()
        weight, share = worker.weight(number), worker.phase_run.share(tensor, worker.scale)
        loss = loss if weight == 1.0 else loss * weight
        worker.losses[op.mb] = loss if not op.slice else worker.losses.get(op.mb, 0.0) + loss
        return share if weight == 1.0 else share * weight


class Measures(Losses):
    """Adds to the loss of an evaluation, each microbatch weighted by the number of its targets that count."""

    def finish(self, worker: Worker, number: int) -> Finish:
        target, share = read(worker, worker.source, "targets", number, self.stage.part)
        weight = worker.phase_run.weigh(worker, number, target, share)
        return _weighted(worker.phase_run.criterion(worker, number, self.loss(worker, number)), target, weight)

    def give(self, worker: Worker, tensor: Tensor, op: Op, number: int) -> None:
        worker.losses[op.mb] = tensor if not op.slice else worker.losses.get(op.mb, 0.0) + tensor


Sink = Edges | Losses


def _weighted(loss: Loss, target: Batch, weight: float) -> Finish:
    if weight == 1.0:
        return functools.partial(stage_loss, loss, target)
    return functools.partial(slice_loss, loss, target, weight)


def slice_loss(function: Loss, target: Batch, share: float, output: Any) -> Tensor:
    """The contribution of a slice to the loss of its microbatch. Raises E505 as `stage_loss`."""
    if share == 0.0:  # no target counts: a mean over none would be nan
        return total([(tensor * 0.0).sum() for tensor in taken_apart(output)[0] if TensorSpec.of(tensor).numbers])
    return stage_loss(function, target, output) * share


def stage_loss(function: Loss, target: Batch, output: Any) -> Tensor:
    """The loss of a microbatch. Raises E505 if it is not one number."""
    try:
        loss: Tensor = function(output, target)
    except IN_A_RANK as error:
        error.add_note(f"in model.loss, for an output {shown(output)} and a target {shown(target)}")
        raise
    if loss.dim() != 0:
        text = f"run: model.loss returned a tensor of shape {list(loss.shape)}, it must be one number"
        raise ZbcError("E505", text, hint="return the mean over the microbatch")
    return loss


# ---- kept between F and B ------------------------------------------------------------------------------------


Made = tuple[Tensor, Left | None]  # the output of a forward, and what it saves for its backward


class Keeps:
    """Keeps the graph, on the device."""

    def forward(self, stage: Stage, x: Tensor, step: int, number: int, finish: Finish, slot: Slot | None) -> Made:
        if stage.flows:
            x.requires_grad_()  # a tensor for this op only, made here or by the previous stage
        y, tape = stage.forward(x, step, number, finish, slot)
        return y.detach(), Left(x, tape, slot)

    def back(self, worker: Worker, op: Op, left: Left) -> Left:
        """The saved state with its activations on the device, before backward."""
        return left

    def zeros(self, entry: Any) -> Tensor:
        """The gradient of an input that received none."""
        return torch.zeros_like(entry)


class Evaluates(Keeps):
    """Keeps nothing: no backward follows."""

    def forward(self, stage: Stage, x: Tensor, step: int, number: int, finish: Finish, slot: Slot | None) -> Made:
        return stage.evaluate(x, finish, "evaluation", step, number), None


KEEPS, EVALUATES = Keeps(), Evaluates()


# ---- routes --------------------------------------------------------------------------------------------------


class Route(NamedTuple):
    """The properties of an op that the plan and the placement fix."""

    key: Key
    stage: Stage
    message: Message | None = None  # of a transfer
    peer: int = -1  # the rank of the run at its other end
    takes: Source | None = None  # None: a backward that starts from the loss
    gives: Sink | None = None  # None: a backward that ends at the data
    keeps: Keeps = KEEPS
    slotted: bool = False  # whether layers may split their backward, which costs more than torch's own layers
    buffer: Callable[[], Tensor] | None = None  # makes the buffer of a receive

    @property
    def brought(self) -> Message | None:
        """The only message that a compute op reads, or a transfer's own."""
        return self.takes.edge if isinstance(self.takes, Comes) else self.message


def route_of(worker: Worker, run: PhaseRun, op: Op, length: Length | None = None) -> Route | None:
    """The route of an op, for rows of this length; None for ops without a stage. Raises E203, E205 for a plan of
    another rank."""
    kind, placement, here = op.kind, worker.placement, op.stage
    if kind.row.scope in (Scope.RANK, Scope.EVERY) or here < 0:
        return None
    whole = worker.stages.get(here)
    if whole is None:
        text = f"run: {op} is in the plan of rank {worker.plan.rank}, which does not hold stage {here}"
        raise ZbcError("E205", text, hint="plan again")
    key, stage = op.key, whole.at(op.slice).of_rows(length)
    if kind.is_transfer:
        peer = placement.peer(op)
        if peer is None:
            raise ZbcError("E203", f"run: {op} leads out of the pipeline", hint="plan again")
        message = placement.message(op)
        into = kind.gives is At.SOURCES
        buffer = None if kind.is_send else stage.empty_input if into else stage.empty_grad
        if into and stage.inputs and message is not None:
            buffer = functools.partial(stage.empty_from, message.source)
        return Route(key, stage, message, worker.seat(peer), buffer=buffer)
    if not kind.computes:
        return Route(key, stage)
    route = Route(
        key,
        stage,
        takes=None if kind.takes is None else _source(worker, op, stage),
        gives=None if kind.gives is None else _sink(worker, run, op, stage),
        slotted=stage.slotted or worker.meets or key in run.halves,
    )
    for feature in worker.features:
        route = feature.routes(worker, run, op, route)
    return route if run.trains else route._replace(keeps=EVALUATES)


def _source(worker: Worker, op: Op, stage: Stage) -> Source | None:
    placement, here, forward = worker.placement, op.stage, op.kind.takes is At.SOURCES
    others = (stage.inputs or placement.sources(here)) if forward else placement.sinks(here)
    if not others:
        return Data(stage) if forward else None
    several = len(others) > 1
    laid = None if several or not forward or stage.laid is None else stage.arrived
    brought: list[Source] = []
    for other in others:
        edge = Message(other, *op.key)
        brought.append(Comes(edge, laid) if placement.crosses(other, here, op.pipe) else Here(edge))
    join = stage.came.joined if forward and stage.came is not None else total
    return Several(tuple(brought), join) if several else brought[0]


def _sink(worker: Worker, run: PhaseRun, op: Op, stage: Stage) -> Sink | None:
    placement, here, forward = worker.placement, op.stage, op.kind.gives is At.SINKS
    others = placement.sinks(here) if forward else (stage.inputs or placement.sources(here))
    if not others:
        return (Losses if run.trains else Measures)(stage) if forward else None
    edges = tuple(Message(here, other, *op.key[1:]) for other in others)
    split: Callable[[Tensor], list[Tensor]] | None = None
    came = stage.came
    if not forward and came is not None:
        back = came.back  # the part of a gradient that is sent back
        split = came.parted if stage.inputs else lambda grad: [grad[:back]]
    return Edges(edges, stage, split)
