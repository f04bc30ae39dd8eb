"""A rank's training state by names that do not depend on the partition.

    model.<parameter>           its value: the master's if there is one
    optim.<parameter>.<key>     its optimizer state: exp_avg, exp_avg_sq, step, momentum_buffer
    buffer.<buffer>             a module's buffer, if it is in its state_dict or forwards change it

Random numbers need no state of their own: all of them are drawn from seeds made of names, steps and microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ops import EXPERTS, WORDS, home_of
from zbc.plan.directory import holding
from zbc.runtime.core.grouped import of_expert
from zbc.runtime.core.optimizer import StageOptimizer, inside
from zbc.runtime.core.stage import StageLayer
from zbc.runtime.core.state import Worker
from zbc.runtime.features.shards.pieces import Piece, deal
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.ties import Ties
from zbc.training.checkpoint.files import TensorPart, check_type
from zbc.training.models.adapters import Frozen
from zbc.training.models.stacks import Stack, pieces, stacks_of

MODEL, OPTIM, BUFFER = "model.", "optim.", "buffer."


@dataclass(frozen=True)
class HeldPart:
    """A part of a tensor on this rank. All of `holders` have the same; `writer` is the one that writes it."""

    part: TensorPart
    holders: tuple[int, ...]
    writer: int


def entries(worker: Worker) -> list[HeldPart]:
    """The whole state of a rank between two steps. Raises E611 for types that the files cannot store."""
    stacks = stacks_of(worker)
    owners = [*sorted(worker.stages), *(owner for owner in sorted(worker.optimizers) if owner < 0)]
    held = [part for owner in owners for entry in _weights(worker, owner) for part in _by_expert(entry, stacks)]
    held += [entry for stage in sorted(worker.stages) for entry in _others(worker, stage)]
    for entry in held:
        check_type(entry.part.name, entry.part.tensor)
    return [entry for entry in held if entry.part.tensor.numel()]


def _by_expert(held: HeldPart, stacks: Mapping[str, Stack]) -> Iterator[HeldPart]:
    """The entry of a weight, or of its optimizer state, as those of single experts if it is a stack."""
    whole, key = held.part.name, ""
    if whole.startswith(OPTIM):
        whole, _, key = whole.rpartition(".")
    stack = stacks.get(whole.removeprefix(OPTIM if key else MODEL))
    if stack is None:
        yield held
        return
    shape, end = held.part.shape, f".{key}" if key else ""
    every = ((place, 0, held.part.tensor) for place in range(stack.own))  # of one number for all
    found = pieces(shape, held.part.start, held.part.tensor) if shape else every
    for place, start, tensor in found:
        part = TensorPart(of_expert(whole, stack.first + place) + end, shape[1:], start, tensor)
        yield replace(held, part=part)


def written(worker: Worker, parameter: str) -> bool:
    """Whether a parameter of the model is in checkpoints: frozen ones are not, if only adapters train."""
    frozen = worker.features.find(Frozen)
    return frozen is None or parameter in frozen.trained


def _weights(worker: Worker, owner: int) -> Iterator[HeldPart]:
    """Parameters and their optimizer state; writing is divided among the ranks with the same state, `usual`."""
    optimizer = worker.optimizers[owner]
    folded = worker.plan.manifest.folded
    apart = owner == WORDS or (owner <= EXPERTS and folded)  # of which tensor parallel ranks have their own
    usual = holding(worker.plan.manifest, owner, worker.rank)
    state = {} if optimizer.optimizer is None else optimizer.optimizer.state
    shares, cuts, ties = _shares(optimizer, usual), worker.features.of(SharedLayers).cuts, worker.features.of(Ties)
    if (sharded := inside(optimizer, Sharded)) is not None:
        for name in sorted(cuts.keys() & sharded.dealt):
            yield from _collected(worker, owner, name, *sharded.collect(name, worker.transport))
    for held in optimizer.held():
        if not held.tensor.numel() or not written(worker, held.name):  # nothing to save
            continue
        if held.name in cuts and held.shared:
            yield from _collected(worker, owner, held.name, held.tensor.data, state.get(held.tensor, {}))
        if held.name in cuts or (worker.share and not apart):
            continue  # unsharded parameters are written by the first rank of the group
        tied = held.name in ties.homes
        holders = ties.ranks(worker, held.name) if tied else usual
        if not held.shared:  # this rank alone has its shard, or those of the same replica in other pipes have it, too
            seats = sorted(set(worker.placement.holders(owner))) if optimizer.mirrored else ()
            holders = tuple(map(worker.seat, seats)) or (worker.rank,)
        writer = holders[0] if tied or not held.shared else shares[held.name]
        yield HeldPart(TensorPart(MODEL + held.name, held.shape, held.start, held.tensor.data), holders, writer)
        for key, value in state.get(held.tensor, {}).items():
            if value is None:
                continue
            _check_tensor(held.name, key, value)
            name = f"{OPTIM}{held.name}.{key}"
            if value.shape == held.tensor.shape:
                yield HeldPart(TensorPart(name, held.shape, held.start, value), holders, writer)
            elif held.start == 0:  # one number for all pieces of a parameter
                yield HeldPart(TensorPart(name, tuple(value.shape), 0, value), holders, writer)


def _check_tensor(name: str, key: str, value: object) -> None:
    if not isinstance(value, Tensor):
        text = f"run: the optimizer keeps a {type(value).__name__} as {key} of {name}, not a tensor"
        raise ZbcError("E611", text, hint="turn checkpoints off with checkpoint.every = 0")


def _collected(
    worker: Worker, stage: int, parameter: str, part: Tensor, state: Mapping[str, Any]
) -> Iterator[HeldPart]:
    """Gathers a tensor parallel parameter and its state; the whole group calls this, and its ranks take turns in
    keeping and writing the results. Of several replicas only the first one does.
    """
    shared = worker.features.of(SharedLayers)
    group, cut = shared.group, shared.cuts[parameter]
    home = home_of(stage)
    owner = worker.placement.rank_of(worker.features.of(Ties).homes.get(parameter, (home,))[0])
    first = worker.topology.first(worker.rank) if stage <= EXPERTS else worker.copy == 0
    if group is None or not first or owner != worker.plan.rank:
        return
    seat = group.ranks[0]
    own = [(MODEL + parameter, part), *((f"{OPTIM}{parameter}.{key}", state[key]) for key in sorted(state))]
    for turn, (name, value) in enumerate((name, value) for name, value in own if value is not None):
        _check_tensor(parameter, name, value)
        writer = seat + turn % group.size
        if value.shape != part.shape:  # one number, equal on all
            yield HeldPart(TensorPart(name, tuple(value.shape), 0, value), (writer,), writer)
            continue
        whole = cut.collect(value, group)
        if worker.rank == writer:
            yield HeldPart(TensorPart(name, tuple(whole.shape), 0, whole), (writer,), writer)


def _shares(optimizer: StageOptimizer, holders: tuple[int, ...]) -> dict[str, int]:
    """The writer of each parameter among the ranks that hold the same ones; the result is the same on all of them."""
    whole = [Piece(name, 0, parameter.numel()) for name, parameter in sorted(optimizer.parameters.items())]
    dealt = zip(holders, deal(whole, len(holders)), strict=True)
    return {piece.name: rank for rank, share in dealt for piece in share}


def _others(worker: Worker, stage: int) -> Iterator[HeldPart]:
    """Buffers, and tensors of features. Buffers that forwards change are in stages without replicas, others are equal
    on all replicas."""
    holders = holding(worker.plan.manifest, stage, worker.rank)
    layers = () if worker.share else worker.stages[stage].layers
    places = [place for layer in layers for place in state_buffers(layer)]
    buffers = [(BUFFER + name, module._buffers.get(key)) for name, module, key in places]
    for name, value in (*buffers, *features_keep(worker, stage)):
        if value is not None:
            yield HeldPart(TensorPart(name, tuple(value.shape), 0, value), holders, holders[0])


def features_keep(worker: Worker, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of features for checkpoints of a stage, by their names there."""
    for feature in worker.features:
        for name, value in feature.kept.get(stage, {}).items():
            yield f"feature.{type(feature).__name__}.{name}", value


def state_buffers(layer: StageLayer) -> Iterator[tuple[str, nn.Module, str]]:
    """The buffers that are state: those in the state_dict, and others that forwards change."""
    changing = {(id(module), key) for module, key in layer.buffers}
    for path, module in layer.module.named_modules():
        own = [key for place, key in layer.buffers if place is module and key not in module._buffers]
        for key in [*module._buffers, *own]:  # `own` ones exist from the first forward on
            if key not in module._non_persistent_buffers_set or (id(module), key) in changing:
                yield ".".join(filter(None, (layer.name, path, key))), module, key
