"""Handlers of the ops of the pipeline itself: one function per kind. Stores are in state.py."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.runtime.core.optimizer import set_rate, squares
from zbc.runtime.core.route import Left
from zbc.runtime.core.slot import BETWEEN, Slot, swap_slot
from zbc.runtime.core.stage import mismatch
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tape import Inputs
from zbc.runtime.core.validate import peak_bytes


def forward(worker: Worker, op: Op) -> None:
    """F: runs the stage on its input; the output is stored on its edges, or added to the loss."""
    route = worker.routes[op]
    key, stage, takes, gives = route.key, route.stage, route.takes, route.gives
    if key in worker.kept or takes is None or gives is None:
        raise ZbcError("E703", f"run: {op} runs twice")
    number, slot = worker.number(key.mb), Slot() if route.slotted else None
    x = None if takes.waits else takes.take(worker, number)
    finish = gives.finish(worker, number)
    x = takes.take(worker, number) if x is None else x  # last, so that a message is used as soon as it arrives
    if x.dtype is not stage.takes.dtype or x.shape != stage.takes.shape:
        raise mismatch(f"the input of F {key.name}", x, stage.takes)
    clock = worker.clock
    began = clock.start()
    y, left = route.keeps.forward(stage, x, worker.step, number, finish, slot)
    grad = gives.give(worker, y, op, number)
    if left is not None:
        left.grad, worker.kept[key] = grad, left
    clock.stop(began)


_NOTHING = Inputs([], lambda index, x: x, lambda index: nullcontext(), 0)  # its backward does nothing


def backward(worker: Worker, op: Op) -> None:
    """BW: both gradients in one backward pass. B: the gradient of the stage input; those of weights wait for W."""
    route = worker.routes[op]
    key, stage, takes, gives = route.key, route.stage, route.takes, route.gives
    left = worker.kept.pop(key, None)
    if left is None:
        raise ZbcError("E703", f"run: {op}: its F has not run")
    left = route.keeps.back(worker, op, left)
    grad = left.grad
    if takes is not None:
        grad, wanted = takes.take(worker, 0), stage.returned
        if wanted is not None and (grad.dtype is not wanted.dtype or grad.shape != wanted.shape):
            raise mismatch(f"the gradient for B {key.name}", grad, wanted)
        grad = grad if stage.goes is None else stage.goes.widened(grad)
        if not stage.passed and not grad.any():  # in one process it has none, and AdamW skips it
            left.tape = _NOTHING
    clock = worker.clock
    began = clock.start()
    _walk(worker, op, left, grad)
    stage.alone.look(worker.step)
    if gives is not None:
        input_grad = left.entry.grad
        gives.give(worker, route.keeps.zeros(left.entry) if input_grad is None else input_grad, op, 0)
    clock.stop(began)


def _walk(worker: Worker, op: Op, left: Left, grad: Tensor | None) -> None:
    """Runs the backward of the graph. With B the weight gradients of split layers stay in the slot, for W."""
    slot, halved = left.slot, op.kind.splits
    if slot is None:
        left.tape.backward(grad)
        return
    slot.fills = not halved and worker.meets
    slot.split = halved or slot.fills
    before = swap_slot(slot)
    try:
        left.tape.backward(grad)
    finally:
        swap_slot(before)
    if halved:
        worker.slots[op.key] = slot
    elif slot.split:
        slot.run(BETWEEN.value)


def backward_weight(worker: Worker, op: Op) -> None:
    """W: computes the weight gradients that B deferred."""
    slot = worker.slots.pop(op.key, None)
    if slot is None:
        raise ZbcError("E703", f"run: W {op.key.name}: its B has not run")
    began = worker.clock.start()
    slot.run(BETWEEN.value)
    worker.clock.stop(began)


def send(worker: Worker, op: Op) -> None:
    """SEND_F, SEND_B: starts sending the tensor of an edge; from here on only the transport holds it."""
    message, peer = worker.routes[op][2:4]
    tensor = None if message is None else worker.edges.pop(message, None)
    if tensor is None or message is None:
        raise ZbcError("E703", f"run: {op}: what it sends has not been computed")
    worker.transport.send(worker.renamed.get(message, message), tensor, peer)


def receive(worker: Worker, op: Op) -> None:
    """RECV_F, RECV_B: posts the buffer for the tensor of an edge; the op that reads it waits."""
    route = worker.routes[op]
    if route.message is not None and route.buffer is not None:
        worker.transport.post(worker.renamed.get(route.message, route.message), route.buffer(), route.peer)


def reduce(worker: Worker, op: Op) -> None:
    """REDUCE: starts the all-reduce of an owner's gradients over all its replicas."""
    bucket = worker.sums[op]
    for feature in worker.features:
        feature.reduces(worker, op)
    bucket.start(worker.transport)
    worker.summing.append(bucket)


def validate(worker: Worker, op: Op) -> None:
    """VALIDATE: all ranks learn the loss, the gradient norm and whether to stop; see validate.py."""
    worker.settle(*worker.stages)
    first = worker.phase_run.first
    losses = {} if worker.share else {first + mb: loss for mb, loss in worker.losses.items()}
    losses |= worker.entries()
    own, peak = squares(worker), peak_bytes(worker.device)
    busy = worker.clock.read()()  # waits for the ops, while a GPU computes the squares
    vector = worker.vector(own, losses, busy, peak)
    worker.losses.clear()
    worker.all_reduce(vector, worker.everyone)
    worker.verdict = worker.learn(vector)


def optimizer_step(worker: Worker, op: Op) -> None:
    """STEP: clips, updates an owner's weights unless the verdict is to skip, and drops its gradients."""
    if (verdict := worker.verdict) is None:
        raise ZbcError("E703", f"run: {op} comes before VALIDATE")
    worker.before_update()
    optimizer = worker.optimizers[op.stage]
    if not verdict.skipped:
        set_rate(optimizer, worker.rate(worker.phases, worker.step))
        optimizer.step(verdict.clip(worker.clip))
    optimizer.drop()
    optimizer.stepped(worker.transport, skipped=verdict.skipped)
