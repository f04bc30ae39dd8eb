"""What each op does on a rank. One function per kind, collected in `HANDLERS` at the end; stores are in state.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Message, Op
from zbc.job.userobject import IN_A_RANK
from zbc.runtime import ahead
from zbc.runtime.added import Adding, swap_adding
from zbc.runtime.optimizer import set_rate
from zbc.runtime.packing import packed
from zbc.runtime.parcels import Parcel
from zbc.runtime.reading import read
from zbc.runtime.sharded import Sharded
from zbc.runtime.slicing import Part
from zbc.runtime.slot import Slot, swap_slot
from zbc.runtime.stage import Stage, mismatch
from zbc.runtime.state import Ends, Kept, Worker, name_of, take
from zbc.runtime.tape import Inputs, Tape
from zbc.runtime.tensors import Loss, TensorSpec
from zbc.runtime.units import between
from zbc.runtime.validate import peak_bytes
from zbc.runtime.vocabulary_ops import VOCABULARY
from zbc.runtime.vocabulary_state import Met

__all__ = ["HANDLERS", "Worker"]

# ---- compute -------------------------------------------------------------------------------------------------


def forward(worker: Worker, op: Op) -> None:
    """F: run the stage on its input; the output goes to a SEND, to the next stage here, or into the loss."""
    key, stage, message, _, local, first, last, ends = worker.routes[op]
    if worker.gathering:
        worker.finish_gather(key.stage)
    if worker.scattering:
        worker.poll_sums()
    kept, run, step = worker.kept, worker.phase_run, worker.step
    if key in kept:
        raise ZbcError("E703", f"run: {op} runs twice")
    number, takes = run.first + key.mb % run.count, stage.takes
    if message is None:
        if first:
            x = read(worker, worker.batches, "inputs", number, stage.part, stage.reads)[0]
        else:
            x = handed(worker, key) if ends is None else joined(worker, stage, ends)
    finish = _ending(worker, number, stage.part) if last else stage.fit
    # A layer that splits its backward costs more than torch's own, so only where W comes apart, or casts are kept.
    slot = Slot() if stage.casts_weights or worker.group is not None or key in run.halves else None
    if message is not None:  # last, so that what comes is used at once
        x = stage.arrived(worker.wait(message))
    if x.dtype is not takes.dtype or x.shape != takes.shape:
        raise mismatch(f"the input of F {name_of(key)}", x, takes)
    moves = key in run.moves
    if stage.flows and not moves:
        x.requires_grad_()  # made for this op alone, here or by the stage before
    clock, adding = worker.clock, Adding(worker.portion(number, stage.part))
    began, outer = clock.start(), swap_adding(adding)
    inp: Tensor | Parcel = x
    turns = run.turns.get(key.stage)
    try:
        if moves:
            y, tape, inp = into_parcel(worker, stage, x, step, number, finish, slot)
        elif turns is None:
            y, tape = stage.forward(x, step, number, finish, slot)
        else:
            with stage.resting(turns.resting(step, number)) as frozen:
                slot = Slot(frozen) if frozen else slot  # which sees to it that layers of users do not train either
                y, tape = stage.forward(x, step, number, finish, slot)
    finally:
        swap_adding(outer)
    if adding.total is not None:
        worker.added[key] = adding.total
    if last:
        # mse_loss leaves its number in a storage as large as its input; on a device nobody waits for it here.
        loss = y.item() if worker.on_host else y.detach().clone()
        weight = worker.weight(number)
        loss = loss if weight == 1.0 else loss * weight
        worker.losses[key.mb] = loss if not key.slice else worker.losses.get(key.mb, 0.0) + loss
        kept[key] = inp, tape, worker.loss_share(y, number), slot
    else:
        output = y.detach()
        if worker.plan.manifest.with_w and worker.frees_with(key.stage, output):
            output = output.clone()  # a layer gave a weight, which may be gone before the next stage reads it
        if ends is None:
            store, place = (worker.outputs, key) if local is None else (worker.handed, local)
            store[place] = output
        else:
            give(ends, [output] * len(ends.gives), worker.outputs, worker.handed)
        kept[key] = inp, tape, None, slot
    clock.stop(began)


def into_parcel(
    worker: Worker,
    stage: Stage,
    x: Tensor,
    step: int,
    number: int,
    finish: Callable[[Tensor], Tensor],
    slot: Slot | None,
) -> tuple[Tensor, Tape, Parcel]:
    """The forward of what is to move to the host: what it keeps is in the parcel."""
    parcel, flows = Parcel(worker.pool, x), stage.flows
    if stage.recompute and stage.layers:
        y, tape = stage.forward(x.requires_grad_() if flows else x, step, number, finish, slot)
        assert isinstance(tape, Inputs)
        parcel.adopt(tape.inputs, stage.names, flows=flows)
    else:
        with parcel.hooks():
            y, tape = stage.forward(parcel.enter(x, worker.anchor) if flows else x, step, number, finish, slot, parcel)
    parcel.leave(y, *(() if flows else (x,)))
    return y, tape, parcel


def handed(worker: Worker, key: Key) -> Tensor:
    """A stage's input that no message brings: a stage before on this rank gave it, or all ranks looked it up."""
    if worker.vocabulary is not None and key.stage == 0:
        return worker.arrive(Met(Kind.GIVE, key.mb, key.slice))
    return take(worker.handed, key, "F {}: the stage before has not handed over its output")


def joined(worker: Worker, stage: Stage, ends: Ends) -> Tensor:
    """The input of a stage in a graph: an output, or several as one tensor."""
    why = "F {}: the stage before has not handed over its output"
    found = [worker.wait(edge) if crosses else take(worker.handed, edge, why) for edge, crosses in ends.takes]
    if stage.inputs and stage.came is not None:
        return stage.came.joined(found)
    return stage.arrived(found[0]) if ends.takes[0][1] else found[0]


def give(
    ends: Ends,
    tensors: Sequence[Tensor],
    sent: dict[Key | Message, Tensor],
    kept: dict[Key | Message, Tensor],
) -> None:
    """Lay a tensor for each edge where its SEND looks, or the stage on this rank that reads it."""
    for (edge, crosses), tensor in zip(ends.gives, tensors, strict=True):
        (sent if crosses else kept)[edge] = tensor


def _summed(worker: Worker, ends: Ends) -> Tensor:
    """The gradient of an output by all stages that read it, in their order: a sum of three depends on it."""
    why = "B {}: the next stage has not handed over its gradient"
    found = [worker.wait(edge) if crosses else take(worker.output_grads, edge, why) for edge, crosses in ends.takes]
    total = found[0]
    for more in found[1:]:
        total = total + more
    return total


def _ending(worker: Worker, number: int, part: Part | None) -> Callable[[Tensor], Tensor]:
    """What makes the loss of the last stage's output."""
    target, share = read(worker, worker.batches, "targets", number, part)
    if not worker.weight(number):
        share = 0.0
    elif part is None:
        return functools.partial(stage_loss, worker.loss, target)
    return functools.partial(slice_loss, worker.loss, target, share)


def slice_loss(function: Loss, target: Tensor, share: float, output: Tensor) -> Tensor:
    """What a slice adds to the loss of its microbatch. Raises E505 as `stage_loss`."""
    if share == 0.0:  # no target counts: a mean over none would be no number
        return (output * 0.0).sum()
    return stage_loss(function, target, output) * share


def stage_loss(function: Loss, target: Tensor, output: Tensor) -> Tensor:
    """The loss of a microbatch. Raises E505 if it is not one number."""
    try:
        loss = function(output, target)
    except IN_A_RANK as error:
        error.add_note(f"in model.loss, for an output {TensorSpec.of(output)} and a target {TensorSpec.of(target)}")
        raise
    if loss.dim() != 0:
        text = f"run: model.loss returned a tensor of shape {list(loss.shape)}, it must be one number"
        raise ZbcError("E505", text, hint="return the mean over the microbatch")
    return loss


_NOTHING = Inputs([], lambda index, x: x, lambda index: nullcontext(), 0)  # a backward that ends where it begins


def backward(worker: Worker, op: Op) -> None:
    """BW: both halves in one walk of the graph. B: the gradient of the stage input; that of weights waits for W."""
    key, stage, message, _, local, first, last, ends = worker.routes[op]
    if worker.gathering:
        worker.finish_gather(key.stage)
    if worker.scattering:
        worker.poll_sums()
    try:
        x, tape, grad, slot = worker.kept.pop(key)
    except KeyError:
        raise ZbcError("E703", f"run: {op}: its F has not run") from None
    if isinstance(x, Parcel):
        x = _arrived(worker, op, x)
    if not last:
        if ends is not None:
            grad = _summed(worker, ends)
        else:
            grad = _output_grad_here(worker, key) if message is None else worker.wait(message)
        gives = stage.returned
        if gives is not None and (grad.dtype is not gives.dtype or grad.shape != gives.shape):
            raise mismatch(f"the gradient for B {name_of(key)}", grad, gives)
        if stage.goes is not None:
            grad = stage.goes.widened(grad)
        if not stage.passed and not grad.any():  # in one process there is none, and AdamW moves nothing
            tape = _NOTHING
    clock = worker.clock
    began = clock.start()
    if op.kind is Kind.B:
        _backward_apart(worker, op, tape, grad, slot)
    elif slot is None:
        tape.backward(grad)
    else:
        slot.split = slot.fills = worker.group is not None
        _with_slot(slot, tape, grad)
        if slot.split:
            slot.run(between())
    stage.alone.look(worker.step)
    if not first:
        found = x.grad
        if found is None:
            found = x.zeros() if isinstance(x, Parcel) else torch.zeros_like(x)
        if ends is not None and stage.inputs and stage.came is not None:
            give(ends, stage.came.parted(found), worker.input_grads, worker.output_grads)
        else:
            found = found if stage.came is None else found[: stage.came.back]
            if ends is None:
                store, place = (worker.input_grads, key) if local is None else (worker.output_grads, local)
                store[place] = found
            else:
                give(ends, [found], worker.input_grads, worker.output_grads)
    clock.stop(began)


def _arrived(worker: Worker, op: Op, parcel: Parcel) -> Tensor | Parcel:
    """What comes back from the host, once it is there. It is this rank's own copy, so it holds the others up."""
    progress = worker.progress
    text = progress.op
    if parcel.coming():
        progress.op = f"{text}, waits for {op._replace(kind=Kind.RELOAD)}"
    found = parcel.arrive(op)
    progress.op = text
    return found


def _backward_apart(worker: Worker, op: Op, tape: Tape, grad: Tensor | None, slot: Slot | None) -> None:
    """Leave the weight gradients of split layers in the slot, for W."""
    if slot is None:
        raise ZbcError("E703", f"run: {op} comes apart from its W, its F was told otherwise")
    slot.split = True
    _with_slot(slot, tape, grad)
    worker.slots[op.key] = slot


def _with_slot(slot: Slot, tape: Tape, grad: Tensor | None) -> None:
    before = swap_slot(slot)
    try:
        tape.backward(grad)
    finally:
        swap_slot(before)


def _output_grad_here(worker: Worker, key: Key) -> Tensor:
    """The gradient of a stage output that no message brings: it is made here, or by all ranks together."""
    shared = worker.vocabulary
    if shared is not None and key.stage == shared.last_stage:
        return worker.arrive(Met(Kind.MEET if shared.sums == 1 else Kind.SUM, key.mb, key.slice))
    return take(worker.output_grads, key, "B {}: the next stage has not handed over its gradient")


def backward_weight(worker: Worker, op: Op) -> None:
    """W: the weight gradients that B left."""
    slot = take(worker.slots, worker.routes[op].key, "W {}: its B has not run")
    if worker.gathering and worker.plan.manifest.with_w:
        worker.finish_gather(op.stage)
    began = worker.clock.start()
    slot.run(between())
    worker.clock.stop(began)


# ---- transfers -----------------------------------------------------------------------------------------------


def send_forward(worker: Worker, op: Op) -> None:
    """SEND_F: start sending an output; from here on only the transport holds it."""
    key, _, message, peer, *_, ends = worker.routes[op]
    tensor = worker.outputs.pop(key if ends is None or message is None else message, None)
    if tensor is None or message is None:
        raise _nothing_to_send(op)
    worker.transport.send(worker.renamed.get(message, message), tensor, peer)


def send_backward(worker: Worker, op: Op) -> None:
    """SEND_B: start sending an input gradient."""
    key, _, message, peer, *_, ends = worker.routes[op]
    tensor = worker.input_grads.pop(key if ends is None or message is None else message, None)
    if tensor is None or message is None:
        raise _nothing_to_send(op)
    worker.transport.send(worker.renamed.get(message, message), tensor, peer)


def _nothing_to_send(op: Op) -> ZbcError:
    return ZbcError("E703", f"run: {op}: what it sends has not been computed")


def receive_forward(worker: Worker, op: Op) -> None:
    """RECV_F: post the buffer for the stage input; F waits for it."""
    _, stage, message, peer, *_ = worker.routes[op]
    if message is not None:
        buffer = stage.empty_from(message.source) if stage.inputs else stage.empty_input()
        worker.transport.post(worker.renamed.get(message, message), buffer, peer)


def receive_backward(worker: Worker, op: Op) -> None:
    """RECV_B: post the buffer for the gradient of the stage output; B or BW waits for it."""
    _, stage, message, peer, *_ = worker.routes[op]
    if message is not None and stage.gives is not None:
        worker.transport.post(worker.renamed.get(message, message), stage.empty_grad(), peer)


# ---- activations to the host and back -------------------------------------------------------------------------


def offload(worker: Worker, op: Op) -> None:
    """OFFLOAD: start to copy what F keeps; what nobody else holds goes."""
    key = worker.routes[op].key
    found = worker.kept.get(key)
    _parcel(op, found).offload(op)
    if found is not None:
        worker.away[key] = found


def release(worker: Worker, op: Op) -> None:
    """RELEASE: once that copy is over, let go of what F keeps."""
    key = worker.routes[op].key
    _parcel(op, worker.away.get(key)).release(op)
    worker.kept.pop(key, None)


def reload(worker: Worker, op: Op) -> None:
    """RELOAD: start to copy back; B or BW waits."""
    key = worker.routes[op].key
    found = worker.away.pop(key, None)
    _parcel(op, found).reload(op)
    if found is not None:
        worker.kept[key] = found


def _parcel(op: Op, found: Kept | None) -> Parcel:
    parcel = None if found is None else found[0]
    if not isinstance(parcel, Parcel):
        raise ZbcError("E703", f"run: {op}: there is nothing that it could move", hint="plan again")
    return parcel


# ---- the end of a step ---------------------------------------------------------------------------------------


def reduce(worker: Worker, op: Op) -> None:
    """REDUCE, TIE: start to sum the gradients of a stage, or of a weight that two share, over all that hold a copy."""
    one = worker.sums[op]
    if op.kind is Kind.REDUCE:
        worker.complete(op.stage)
    one.start(worker.transport)
    worker.summing.append(one)
    if isinstance(one, Sharded) and one.scatters:
        worker.scattering.append(one)


def scatter(worker: Worker, op: Op) -> None:
    """SCATTER: the same of what gradients of a stage there are so far; those that follow add up."""
    one = worker.sharded(op)
    worker.complete(op.stage)
    one.scatter(worker.transport)
    worker.scattering.append(one)


def validate(worker: Worker, op: Op) -> None:
    """VALIDATE: all ranks learn the loss, the gradient norm and whether to stop; see validate.py."""
    worker.finish_sums()
    for stage in worker.incomplete:
        worker.complete(stage)
    worker.average()
    first, device = worker.phase_run.first, worker.device
    losses = {} if worker.share else {first + mb: loss for mb, loss in worker.losses.items()}
    losses |= worker.told()
    squares, peak = worker.squares(), peak_bytes(device)
    busy = worker.clock.read()()  # waits for the ops, while a GPU has the squares to compute
    vector = worker.layout.vector(
        squares,
        losses,
        rank=worker.rank,
        stop=worker.stop,
        busy=busy,
        peak=peak,
        device=device,
        replica=worker.apart,
    )
    worker.losses.clear()
    worker.added.clear()
    worker.all_reduce(vector, worker.everyone)
    worker.verdict = worker.learn(vector)


def optimizer_step(worker: Worker, op: Op) -> None:
    """STEP: clip, update the stage's weights unless the verdict is to skip, and drop its gradients.

    What the rank has of a shared vocabulary is stepped with the first of its stages.
    """
    verdict, optimizer = worker.verdict, worker.optimizers[op.stage]
    if verdict is None:
        raise ZbcError("E703", f"run: {op} comes before VALIDATE")
    worker.before_update()
    shared = worker.vocabulary
    for one in [optimizer, *([shared.optimizer] if shared is not None and op.stage == min(worker.stages) else [])]:
        if not verdict.skipped:
            set_rate(one, worker.rate(worker.phases, worker.step))
            one.step(verdict.clip(worker.clip))
        one.drop()
        if isinstance(one, Sharded):
            one.publish()
        if shared is not None and one is shared.optimizer and not verdict.skipped:
            shared.optimizer.renew(worker.transport)


def gather(worker: Worker, op: Op) -> None:
    """GATHER: start to collect the weights of a stage from the ranks that each stepped a part of them."""
    optimizer = worker.sharded(op)
    optimizer.start_gather(worker.transport)
    worker.gathering.append(optimizer)


def average(worker: Worker, op: Op) -> None:
    """AVERAGE: what was sent in the step before lands, and the next part of a stage's weights is sent."""
    worker.before_update()
    worker.averages[op.stage].turn(worker.step, worker.transport)


def free(worker: Worker, op: Op) -> None:
    """FREE: give back the room of a stage's weights."""
    worker.sharded(op).free()


def in_rows(handler: Callable[[Worker, Op], None]) -> Callable[[Worker, Op], None]:
    """An op of a microbatch whose rows hold several samples."""

    def run(worker: Worker, op: Op) -> None:
        assert worker.work is not None
        with packed(worker.work.rows(worker.step, worker.number(op.mb))):
            handler(worker, op)

    return run


def overlap(worker: Worker, op: Op) -> None:
    """OVERLAP: a mark. How the two ops after it run is written into the script; see units.py."""


HANDLERS: dict[Kind, Callable[[Worker, Op], None]] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.W: backward_weight,
    Kind.BW: backward,
    Kind.SEND_F: send_forward,
    Kind.RECV_F: receive_forward,
    Kind.SEND_B: send_backward,
    Kind.RECV_B: receive_backward,
    Kind.OVERLAP: overlap,
    Kind.OFFLOAD: offload,
    Kind.RELEASE: release,
    Kind.RELOAD: reload,
    Kind.REDUCE: reduce,
    Kind.TIE: reduce,
    Kind.REDUCE_V: reduce,
    Kind.VALIDATE: validate,
    Kind.STEP: optimizer_step,
    Kind.GATHER: gather,
    Kind.FREE: free,
    Kind.AVERAGE: average,
    Kind.SCATTER: scatter,
    Kind.TENTATIVE: ahead.tentative,
    Kind.NORM: ahead.norm,
    Kind.VERDICT: ahead.verdict,
    Kind.REDO: ahead.redo,
    Kind.COMMIT: ahead.commit,
    **VOCABULARY,
}
