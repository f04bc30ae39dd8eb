"""Warm-up before the first step on a GPU: uses every kernel, and every group at its real size, with nothing posted.

The first use of a kernel loads it, that of a group connects it, and memory is allocated by the driver: each may wait
until the device is idle. After a posted receive that is when the message arrives, which may depend on the waiting op: a
deadlock. Afterwards weights, gradients, optimizers and buffers are unchanged, bit by bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbc.ir import Message, Op
from zbc.job.userobject import IN_A_RANK
from zbc.ops import At, Lane
from zbc.plan.directory import judges
from zbc.plan.groups import of_replica
from zbc.runtime.core import exhausted
from zbc.runtime.core.optimizer import Masters, build_optimizer, squares
from zbc.runtime.core.remembered import left_alone, places
from zbc.runtime.core.route import KEEPS, stage_loss
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import Batch, each, to_device
from zbc.runtime.features.ahead import NORM, VERDICT, Ahead
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.features.words import words
from zbc.runtime.features.words.vocabulary_state import Vocabulary
from zbc.runtime.seeding import seed_of, seeded
from zbc.runtime.transports.network import directions, rounds
from zbc.runtime.transports.transport import Letter
from zbc.training import devices
from zbc.training.building.context import Settings
from zbc.training.data.prefetch import Prefetched
from zbc.training.evaluate import evaluating

_FEW = 64  # elements of a parameter that represents all of its type


def warm(worker: Worker) -> None:
    """All ranks call this together, once, before their first step."""
    manifest = worker.plan.manifest
    try:
        _warm(worker, Settings.of(manifest))
    except IN_A_RANK as error:
        if exhausted.ran_out(error):
            error.add_note(exhausted.predicted(manifest, worker.rank))
        error.add_note(f"while {manifest.topology.name(worker.rank)} ran its kernels for the first time")
        raise


def _warm(worker: Worker, settings: Settings) -> None:
    losses: dict[int, Tensor | float] = {}
    with _unchanged(worker):
        for stage in worker.stages.values():
            ops = [op for run in worker.phase_runs for op in run.plan.ops if op.stage == stage.index]
            kinds = dict.fromkeys(op.kind for op in ops if op.kind.is_backward)
            with seeded(seed_of(settings.train.seed, "warm", stage.index)):
                for kind in (*kinds, *kinds):  # the second time gradients are accumulated
                    if (found := _through(worker, stage, split=kind.splits)) is not None:
                        losses[0] = found
        _share_words(worker)
        _sum(worker, losses)
        for stage in worker.stages.values():
            _update(worker, stage, settings)
    for optimizer in worker.optimizers.values():
        optimizer.drop()
    if worker.evaluation is not None:
        with _unchanged(worker), evaluating(worker):
            for stage in worker.stages.values():
                first = stage.of_rows(worker.length(0))
                first.evaluate(_input(worker, first), _finish(worker, first), "warm")
    _signal(worker)
    _transfer(worker)
    worker.transport.finish_step(drain=True)
    devices.settled(worker.device)


# ---- kernels -------------------------------------------------------------------------------------------------


@contextmanager
def _unchanged(worker: Worker) -> Iterator[None]:
    """Runs its body on copies of buffers and attributes that forwards of layers change, then puts the former back."""
    layers = [layer for stage in worker.stages.values() for layer in stage.layers]
    with ExitStack() as stack:
        stack.enter_context(left_alone([place for layer in layers for place in layer.buffers]))
        for layer in layers:
            for module, name in places(layer.module, (*layer.traits.carries, *layer.traits.mixes)):
                if name in vars(module):
                    stack.callback(setattr, module, name, vars(module)[name])
                    setattr(module, name, copy.deepcopy(vars(module)[name]))
                else:
                    stack.callback(vars(module).pop, name, None)
        yield


def _through(worker: Worker, stage: Stage, *, split: bool) -> Tensor | float | None:
    """Runs forward and backward of a microbatch through a stage; returns its loss, if it ends in one. Offloads and
    reloads if the plan does, which allocates the stage's host memory."""
    stage = stage.of_rows(worker.length(0))  # as long as those of the first microbatch, whose data it gets
    x, finish = _input(worker, stage), _finish(worker, stage)
    slot = Slot() if split or stage.slotted else None
    last = worker.features.find(Vocabulary) is None and not worker.placement.sinks(stage.index)
    ops = (op for run in worker.phase_runs for op in run.plan.ops if op.stage == stage.index)
    moved = next((op for op in ops if op.kind.row.lane is Lane.OUT), None)
    keeps = KEEPS if moved is None else worker.features.of(Offloads).moves
    y, left = keeps.forward(stage, x, worker.step, 0, finish, slot)
    assert left is not None
    del x  # as in a step, where only the saved state of F has it
    if moved is not None:
        for turn in (left.entry.offload, left.entry.release, left.entry.reload, left.entry.arrive):
            turn(moved)
    grad = worker.phase_run.share(y) if last else torch.zeros_like(y)
    with using(slot), torch.autograd.set_multithreading_enabled(False):
        if slot is not None:
            slot.split = split
        left.tape.backward(grad)
    if slot is not None and split:
        slot.run()
    if not last:
        return None
    return y.item() if worker.on_host else y.detach().clone()


def _share_words(worker: Worker) -> None:
    """Runs I, S, T and E of a microbatch or its first slice, twice: the second time gradients are accumulated."""
    shared = worker.features.find(Vocabulary)
    if shared is None or worker.batches is None:
        return
    part = shared.slices[0] if shared.slices else None
    tokens, targets = _carried(worker, worker.batches.inputs), _carried(worker, worker.batches.targets)
    if part is not None:
        tokens, targets = part.of(tokens), part.of(targets)
    hidden = shared.outputs[0].of_rows(worker.length(0)).empty(worker.device).normal_()
    for _ in range(2):
        looked, found = shared.embedding.look_up(tokens)
        shared.embedding.learn(looked, torch.zeros_like(found))
        weight = torch.ones((), dtype=torch.float64, device=worker.device)
        told = shared.output.tell(hidden, targets, weight, 1.0, early=shared.sums == 1)
        log, logit = words.combine(told.mine[None])
        told.loss(log, logit)
        if shared.sums == 1:
            told.part(log)
        shared.output.learn(told, log, part=shared.sums == 2)


def _input(worker: Worker, stage: Stage) -> Tensor:
    first = worker.features.find(Vocabulary) is None and not worker.placement.sources(stage.index)
    if first and worker.batches is not None:
        return stage.entered(_carried(worker, worker.batches.inputs))
    empty = stage.empty_input()
    return stage.arrived(empty.normal_() if stage.takes.numbers else empty.zero_())


def _finish(worker: Worker, stage: Stage) -> Callable[[Tensor], Tensor]:
    if worker.placement.sinks(stage.index) or worker.batches is None or worker.features.find(Vocabulary) is not None:
        return stage.fit
    return functools.partial(stage_loss, worker.loss, _carried(worker, worker.batches.targets))


def _carried(worker: Worker, read: Callable[[int, int], Batch]) -> Any:
    """The first microbatch, on the device; also allocates the maximum of pinned memory for later ones."""
    ahead = 2 * worker.batches.most if isinstance(worker.batches, Prefetched) else 2

    def carried(tensor: Tensor) -> Tensor:
        if worker.device.type == "cuda":
            pinned = [tensor.clone().pin_memory() for _ in range(ahead)]
            del pinned
        return to_device(tensor, worker.device).clone()

    return each(carried, read(worker.step, worker.number(0)))


def _update(worker: Worker, stage: Stage, settings: Settings) -> None:
    """Runs all methods of an optimizer of a few numbers of each type of the stage's weights."""
    lowered, ahead = settings.lowered, settings.optimizer.sync == "post-validate"
    parameters = {str(p.dtype): p for p in stage.parameters.values() if p.requires_grad}
    few = {name: p.detach().reshape(-1)[:_FEW].clone() for name, p in parameters.items()}
    if lowered is not None:
        few = {name: p.float() if p.is_floating_point() else p for name, p in few.items()}
    own, masters = {name: nn.Parameter(p) for name, p in few.items()}, settings.model.master
    made = build_optimizer(settings.optimizer, own, lowered=lowered, masters=masters, ahead=ahead)
    for scale in (None, 0.5):
        for parameter in made.parameters.values():
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        made.squares()
        if ahead and isinstance(made, Masters):
            made.tentative()
        made.step(scale)
        made.drop()


# ---- groups: every rank uses its groups in the order that all ranks share ----------------------------------------


def _sum(worker: Worker, losses: dict[int, Tensor | float]) -> None:
    """Runs gradient reductions, gathers of sharded weights, and the all-reduce of a step's vector."""
    for op in sorted(worker.sums, key=lambda op: (op.stage < 0, op.stage)):
        worker.sums[op].start(worker.transport)
        worker.summing.append(worker.sums[op])
        worker.finish_sums()
    for _, optimizer in sorted(worker.features.of(Gathers).stages.items()):
        worker.features.of(Gathers).start(worker, optimizer)
        worker.features.of(Gathers).finish(worker)
    ends = [op.mb for op in worker.plan.ops if op.kind.is_forward and not worker.placement.sinks(op.stage)]
    numbers = {worker.number(mb): losses.get(0, 0.0) for mb in ends}  # in their order: places are constants
    vector = worker.vector(squares(worker), numbers, 0.0, 0)
    worker.all_reduce(vector, worker.everyone)
    worker.learn(vector)


def _signal(worker: Worker) -> None:
    """Sends NORM down the pipeline and VERDICT back, as in a step without a barrier."""
    if not isinstance(worker.phase_run.ending, Ahead):
        return
    numbers = torch.zeros(worker.layout.size, dtype=torch.float64, device=worker.device)
    part, last = worker.plan.rank, worker.topology.pp - 1
    for letter, source, target in ((NORM, part - 1, part + 1), (VERDICT, part + 1, part - 1)):
        if 0 <= source <= last:
            numbers += _take(worker, letter, torch.empty_like(numbers), worker.seat(source))
        if letter is VERDICT and part == last:
            worker.all_reduce(numbers.clone(), judges(worker.plan.manifest))
        if 0 <= target <= last:
            worker.transport.send(letter, numbers.clone(), worker.seat(target))


def _transfer(worker: Worker) -> None:
    """Sends one message of every direction, at its real size."""
    out, back = _messages(worker, sends=True), _messages(worker, sends=False)
    pairs = of_replica(worker.plan.manifest, worker.replica, directions(worker.placement), worker.at)
    for source, target in (pair for some in rounds(pairs) for pair in some):
        if source == worker.rank and target in out:
            message, tensor = out[target]
            worker.transport.send(message, tensor, target)
        elif target == worker.rank and source in back:
            message, tensor = back[source]
            _take(worker, message, tensor, source)


def _messages(worker: Worker, *, sends: bool) -> dict[int, tuple[Message, Tensor]]:
    """By the rank at the other end: the first of the plan's messages, the same on both ends, and its tensor."""
    found: dict[int, tuple[Message, Op]] = {}
    for op in worker.plan.ops:
        if not op.kind.is_transfer or op.kind.is_recv is sends:
            continue
        _, _, message, peer, *_ = worker.routes[op]
        if message is not None and (peer not in found or message < found[peer][0]):
            found[peer] = message, op
    return {peer: (message, _tensor(worker, op)) for peer, (message, op) in found.items()}


def _tensor(worker: Worker, op: Op) -> Tensor:
    stage = worker.stages[op.stage]
    as_output = At.SINKS in (op.kind.takes, op.kind.gives)
    several = stage.inputs and not as_output
    return (stage.empty_grad() if as_output else stage.empty_from(op.other) if several else stage.empty_input()).zero_()


def _take(worker: Worker, letter: Letter, buffer: Tensor, peer: int) -> Tensor:
    worker.transport.post(letter, buffer, peer)
    return worker.wait(letter)
