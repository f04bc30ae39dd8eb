"""Handlers of the ops of a parallel vocabulary; see vocabulary.py. Stores are in vocabulary_state.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Kind, Message, Op
from zbc.runtime.core.route import read
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import IGNORED, TensorSpec
from zbc.runtime.features.words.vocabulary_state import Meeting, Met, Unit, Vocabulary
from zbc.runtime.features.words.words import as_one
from zbc.runtime.transports.transport import Then

_Where = TypeVar("_Where", Message, Unit)
_Value = TypeVar("_Value")


# ---- the embedding -------------------------------------------------------------------------------------------


def look_up(worker: Worker, op: Op) -> None:
    """I: looks up this rank's words of the inputs; zeros for the words of other ranks."""
    shared, unit = shared_of(worker, op)
    tokens, _ = read(worker, worker.source, "inputs", worker.number(op.mb), shared.slice_of(op))
    began = worker.clock.start()
    shared.looked[unit], shared.given[unit] = shared.embedding.look_up(tokens)
    worker.clock.stop(began)


def give(worker: Worker, op: Op) -> None:
    """GIVE: starts the reduce of all ranks' embeddings to the first stage's rank, whose F waits."""
    shared, unit = shared_of(worker, op)
    _reduce(worker, op, _take(shared.given, unit, op, "its I has not run"), shared.first, shared.entry(worker, op))


def take(worker: Worker, op: Op) -> None:
    """TAKE: starts the broadcast of the gradient of the first stage's input; E waits."""
    shared, _ = shared_of(worker, op)
    _broadcast(worker, op, Message(0, -1, op.mb, 0, op.slice), shared.first, shared.entry(worker, op))


def embedding_gradient(worker: Worker, op: Op) -> None:
    """E: the gradient of this rank's rows of the embedding."""
    shared, unit = shared_of(worker, op)
    grad = shared.arrive(worker, Met(Kind.TAKE, *unit))
    began = worker.clock.start()
    shared.embedding.learn(_take(shared.looked, unit, op, "its I has not run"), grad)
    worker.clock.stop(began)


# ---- the output layer ----------------------------------------------------------------------------------------


def spread(worker: Worker, op: Op) -> None:
    """SPREAD: starts the broadcast of the last stage's output; S waits."""
    shared, _ = shared_of(worker, op)
    edge = Message(shared.last_stage, shared.last_stage + 1, op.mb, 0, op.slice)
    _broadcast(worker, op, edge, shared.last, shared.exit(worker, op))


def tell(worker: Worker, op: Op) -> None:
    """S: the softmax statistics of this rank's words; with 1 sum its terms of the input gradient, too. Tensor parallel
    ranks have different words, and merge their statistics for the other ranks of the pipeline."""
    shared, unit = shared_of(worker, op)
    part, training = shared.slice_of(op), worker.phase_run.trains
    targets, share = read(worker, worker.source, "targets", worker.number(op.mb), part)
    hidden = shared.arrive(worker, Met(Kind.SPREAD, *unit))
    began = worker.clock.start()
    counting = (targets != IGNORED).sum().double().clamp(min=1.0)
    weight = worker.phase_run.weigh(worker, worker.number(op.mb), targets, share) / counting
    step = worker.phase_run.portion * worker.scale
    early = training and shared.sums == 1
    keep = training and (shared.sums == 2 or shared.output.weight.requires_grad)
    told = shared.told[unit] = shared.output.tell(hidden, targets, weight, step, early=early, keep=keep)
    if shared.group is not None:
        told.said = as_one(shared.group.collect(told.mine))
    worker.clock.stop(began)


def meet(worker: Worker, op: Op) -> None:
    """MEET: starts the all-gather of the statistics of S; with 1 sum followed by the reduce of the gradient of the last
    stage's output to its rank, whose B waits. T waits."""
    shared, unit = shared_of(worker, op)
    told = _take(shared.told, unit, op, "its S has not run")
    mine = (told.mine if told.said is None else told.said).contiguous()
    parts = mine.new_empty(len(shared.ranks), *mine.shape)
    meeting = Meeting(told, parts, shared.exit(worker, op), worker.rank == shared.last)
    then = None if told.spread is None else Then(meeting.make, shared.last)
    meeting.pending = worker.transport.start_gather(mine.view(-1), meeting.parts.flatten(1), shared.ranks, then)
    shared.met[unit] = meeting
    if then is not None and meeting.here:
        shared.coming[Met(Kind.MEET, *unit)] = meeting


def output_gradient(worker: Worker, op: Op) -> None:
    """T: the gradient of this rank's rows of the output layer; with 2 sums its part of the input gradient, too."""
    shared, unit = shared_of(worker, op)
    meeting = _take(shared.met, unit, op, "its MEET has not been started")
    worker.wait_for(f"MEET {str(op).partition(' ')[2]}", meeting.pending)
    began = worker.clock.start()
    if worker.rank == shared.last:
        count_loss(worker, unit, meeting)
    part = shared.output.learn(meeting.told, meeting.known()[0], part=shared.sums == 2)
    if part is not None:
        shared.parts[unit] = part
    worker.clock.stop(began)


def add_up(worker: Worker, op: Op) -> None:
    """SUM: starts the reduce of the gradient of the last stage's output to its rank, whose B waits."""
    shared, unit = shared_of(worker, op)
    _reduce(worker, op, _take(shared.parts, unit, op, "its T has not run"), shared.last, shared.exit(worker, op))


def settle(worker: Worker, count: Callable[[Worker, Unit, Meeting], None]) -> None:
    """After forwards without backwards: waits for the statistics of MEET, calls `count` for them on the rank that
    reports losses, and frees all units."""
    shared = worker.features.find(Vocabulary)
    if shared is None:
        return
    for unit, meeting in shared.met.items():
        worker.wait_for("MEET", meeting.pending)
        if worker.rank == shared.last:
            count(worker, unit, meeting)
    shared.met.clear()
    shared.looked.clear()
    shared.closes(worker)


def count_loss(worker: Worker, unit: Unit, meeting: Meeting) -> None:
    """Adds the loss on the last stage's rank, which reports losses as it does with a whole output layer."""
    loss = meeting.told.loss(*meeting.known())
    worker.losses[unit[0]] = worker.losses.get(unit[0], 0.0) + (loss.item() if worker.on_host else loss)


# ---- parts ---------------------------------------------------------------------------------------------------


def shared_of(worker: Worker, op: Op) -> tuple[Vocabulary, Unit]:
    """This rank's vocabulary shard, and the unit of an op."""
    return worker.features.of(Vocabulary), (op.mb, op.slice)


def _broadcast(worker: Worker, op: Op, edge: Message, root: int, spec: TensorSpec) -> None:
    """Starts the broadcast of the tensor that rank `root` has on an edge."""
    shared, unit = shared_of(worker, op)
    if worker.rank != root:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=worker.device)
    else:
        tensor = _take(worker.edges, edge, op, "what it sends has not been computed").contiguous()
    pending = worker.transport.start_broadcast(tensor, root, shared.ranks)
    shared.start(op.kind, unit, pending, tensor, spec, here=True)


def _reduce(worker: Worker, op: Op, tensor: Tensor, root: int, spec: TensorSpec) -> None:
    """Starts the reduce of all ranks' `tensor` to rank `root`."""
    shared, unit = shared_of(worker, op)
    pending = worker.transport.start_reduce(tensor, root, shared.ranks)
    shared.start(op.kind, unit, pending, tensor, spec, here=worker.rank == root)


def _take(store: dict[_Where, _Value], key: _Where, op: Op, missing: str) -> _Value:
    value = store.pop(key, None)
    if value is None:
        raise ZbcError("E703", f"run: {op}: {missing}", hint="plan again")
    return value


VOCABULARY: dict[Kind, Callable[[Worker, Op], None]] = {
    Kind.I: look_up,
    Kind.GIVE: give,
    Kind.SPREAD: spread,
    Kind.S: tell,
    Kind.MEET: meet,
    Kind.T: output_gradient,
    Kind.SUM: add_up,
    Kind.TAKE: take,
    Kind.E: embedding_gradient,
}
