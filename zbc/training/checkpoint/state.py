"""A rank's training state by names that do not depend on the partition, and its reading from a checkpoint of any plan.

    model.<parameter>           its value: the master's if there is one
    optim.<parameter>.<key>     its optimizer state: exp_avg, exp_avg_sq, step, momentum_buffer
    buffer.<buffer>             a module's buffer, if it is in its state_dict or forwards change it

Random numbers need no state of their own: all of them are drawn from seeds made of names, steps and microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.trained import PRECISION, Difference, differences
from zbc.ops import EXPERTS, WORDS, home_of
from zbc.plan.directory import holding
from zbc.plan.manifest import Manifest
from zbc.runtime.core import rounded
from zbc.runtime.core.grouped import of_expert
from zbc.runtime.core.optimizer import Held, StageOptimizer, inside
from zbc.runtime.core.stage import StageLayer
from zbc.runtime.core.state import Worker
from zbc.runtime.features.moving import MEAN, Mean
from zbc.runtime.features.scaling import Scale, Scaling
from zbc.runtime.features.shards.pieces import Piece, deal
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.features.tensor_parallel import Cut, SharedLayers
from zbc.runtime.features.ties import Ties
from zbc.runtime.features.unflushed.versions import FED, OLDER, Feedback, Unflushed
from zbc.text import few
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.files import TYPES, Reader, TensorPart, check_type
from zbc.training.checkpoint.folder import StoredTensor
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Board
from zbc.training.models.adapters import Frozen
from zbc.training.models.experts import Stack, pieces, stacks_of

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
    keeping and writing the results. Of several replicas only the first one does."""
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


def load(
    worker: Worker,
    board: Board,
    folder: Path,
    *,
    alive: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda line: None,
) -> int:
    """Overwrites the state of all ranks, which call this together, before the first step; returns its number of steps.

    `alive` is called from time to time; `tell` receives messages of rank 0. Raises E612 (damaged; the ranks divide the
    files among them and check every byte), E613 (another model, optimizer or seed).
    """
    manifest = worker.plan.manifest
    readers: list[Reader] = []

    def look() -> dict[str, Any]:
        reader = Reader(folder, alive)
        wrong = [difference for difference in _differences(reader, manifest) if difference.key not in PRECISION]
        if wrong:
            first, *others = wrong
            text = f"run: {reader.folder} was trained with {first}"
            raise ZbcError("E613", text, hint=first.undo, details=[f"and with {other}" for other in others[:6]])
        reader.check_files(worker.rank, manifest.topology.world)
        readers.append(reader)
        return {} if worker.batches is None else {"data_samples": worker.batches.count}

    told = together(board, "checkpoint checked", look)
    reader = readers[0]
    together(board, "checkpoint loaded", lambda: _restore(worker, reader))
    steps = reader.index.step
    worker.resume(steps, reader.index.samples)
    scaling = worker.features.find(Scaling)
    if scaling is not None and reader.index.loss_scale is not None:
        scaling.scale = Scale(*reader.index.loss_scale)
    before = reader.index.data_samples
    now = told.get("data_samples", before)
    if worker.rank == 0 and before is not None and now != before:
        tell(f"the data has {now} samples, {before} when the checkpoint was written: their order is another now")
    for difference in _differences(reader, manifest) if worker.rank == 0 else ():
        tell(f"the checkpoint was trained with {difference}")
    return steps


def _differences(reader: Reader, manifest: Manifest) -> list[Difference]:
    """The settings of the training that differ, as far as the checkpoint, which may be an old one, stores them."""
    index, training = reader.index, manifest.training
    ours = {"train.seed": training["train"]["seed"], "optimizer.kind": training["optimizer"]["kind"]}
    theirs = {"train.seed": index.seed, "optimizer.kind": index.optimizer}
    changed = [Difference(key, theirs[key], value) for key, value in ours.items() if theirs[key] != value]
    now = {**manifest.planning, "optimizer": training["optimizer"]}
    return changed + ([] if index.trained is None else differences(index.trained, now))


def _restore(worker: Worker, reader: Reader) -> None:
    """Overwrites the whole state of a rank. Raises E612 (damaged), E613 (another model)."""
    reader.tensors = _stacked(reader.tensors, worker.layout.parameters)
    _check_fits(worker, reader)
    for optimizer in worker.optimizers.values():
        _restore_weights(worker, optimizer, reader)
    for stage in worker.stages:
        for name, module, key in (place for layer in worker.stages[stage].layers for place in state_buffers(layer)):
            about, now = reader.tensors.get(BUFFER + name), module._buffers.get(key)
            if about is None:
                continue
            if now is None or list(now.shape) != about.shape or now.dtype != TYPES[about.dtype]:
                now = torch.empty(about.shape, dtype=TYPES[about.dtype], device=worker.device)
                module._buffers[key] = now
            reader.fill(now, BUFFER + name)
        for name, value in features_keep(worker, stage):
            if name in reader.tensors:
                reader.fill(value, name)
    if (frozen := worker.features.find(Frozen)) is not None:
        frozen.check()


def _stacked(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, with the stacks among `names` put together, which it has expert by expert."""
    found = dict(tensors)
    for name in names:
        one = of_expert(name, 0)
        if MODEL + name in tensors or MODEL + one not in tensors:
            continue
        keys = [key.removeprefix(OPTIM + one) for key in tensors if key.startswith(f"{OPTIM}{one}.")]
        for start, end in [(MODEL, ""), *((OPTIM, key) for key in keys)]:
            parts = list[StoredTensor]()
            while (part := found.pop(start + of_expert(name, len(parts)) + end, None)) is not None:
                parts.append(part)
            shape = parts[0].shape
            whole = [
                stored.model_copy(update={"start": stored.start + place * math.prod(shape)})
                for place, part in enumerate(parts if shape else parts[:1])
                for stored in part.parts
            ]
            made = {"shape": [len(parts), *shape] if shape else shape, "parts": whole}
            found[start + name + end] = parts[0].model_copy(update=made)
    return found


def _check_fits(worker: Worker, reader: Reader) -> None:
    """Raises E613 if the checkpoint is of another model than this rank's."""
    theirs = {name.removeprefix(MODEL): about for name, about in reader.tensors.items() if name.startswith(MODEL)}
    sizes = zip(worker.layout.parameters, worker.layout.sizes, strict=True)
    ours = {name for name, size in sizes if size and written(worker, name)}  # empty ones are in no file
    cuts, stacks = worker.features.of(SharedLayers).cuts, stacks_of(worker)
    differences = [f"{name}: only in this job" for name in sorted(ours - theirs.keys())]
    differences += [f"{name}: only in the checkpoint" for name in sorted(theirs.keys() - ours)]
    for held in (held for optimizer in worker.optimizers.values() for held in optimizer.held()):
        told = theirs.get(held.name)
        shape = cuts[held.name].shape if held.name in cuts else _placed(held, stacks).shape
        here = str(held.tensor.dtype).removeprefix("torch.")
        if told is not None and (told.shape != list(shape) or {here, told.dtype} not in ({here}, {*rounded.TYPES})):
            there = f"{told.dtype} {told.shape} in the checkpoint"
            differences.append(f"{held.name}: {there}, {here} {list(shape)} in this job")
    if differences:
        text, hint = f"run: {reader.folder} is of another model", "resume with the [model] it was trained with"
        raise ZbcError("E613", text, hint=hint, details=few(differences, 6))


def _restore_weights(worker: Worker, optimizer: StageOptimizer, reader: Reader) -> None:
    kept, states = _state_keys(reader, optimizer), dict[nn.Parameter, dict[str, Tensor]]()
    cuts, stacks = worker.features.of(SharedLayers).cuts, stacks_of(worker)
    for part in optimizer.incomplete():
        _fill(_placed(part, stacks), reader, cuts.get(part.name))
    for part in (_placed(held, stacks) for held in optimizer.held()):
        if part.tensor.numel() and written(worker, part.name):
            cut = cuts.get(part.name)
            _fill(part, reader, cut)
            if part.tensor.requires_grad and part.name in kept:
                keys = kept[part.name]
                states[part.tensor] = {key: _state(reader, part, f"{OPTIM}{part.name}.{key}", cut) for key in keys}
    if optimizer.optimizer is not None:
        rounded.load(optimizer.optimizer, states)
    optimizer.loaded()


def _state_keys(reader: Reader, optimizer: StageOptimizer) -> Mapping[str, list[str]]:
    """The keys of optimizer state in the checkpoint, by parameter, without optional ones that this optimizer lacks."""
    kinds: dict[str, type] = {OLDER: Unflushed, FED: Feedback, MEAN: Mean}
    keys: dict[str, list[str]] = {}
    for name in reader.tensors:
        if name.startswith(OPTIM):
            parameter, _, key = name.removeprefix(OPTIM).rpartition(".")
            if key not in kinds or inside(optimizer, kinds[key]) is not None:
                keys.setdefault(parameter, []).append(key)
    return keys


def _fill(held: Held, reader: Reader, cut: Cut | None) -> None:
    """Overwrites a parameter, or a piece of one."""
    if cut is not None:
        held.tensor.data.copy_(_part(reader, held, MODEL + held.name, cut))
    elif held.tensor.numel():
        reader.fill(held.tensor.data, MODEL + held.name, held.start)


def _placed(held: Held, stacks: Mapping[str, Stack]) -> Held:
    """An entry of some experts, as one of the stack of all."""
    stack = stacks.get(held.name)
    if stack is None:
        return held
    inner = held.shape[1:]
    return held._replace(start=held.start + stack.first * math.prod(inner), shape=(stack.all, *inner))


def _part(reader: Reader, held: Held, name: str, cut: Cut) -> Tensor:
    """The elements of `held`, from this rank's shard of a tensor, of which it reads as little as it can."""
    about, count, each = reader.tensors[name], held.tensor.numel(), math.prod(held.shape[1:])
    first, stop = (held.start // each, -(-(held.start + count) // each)) if cut.dim else (0, about.shape[0])
    inner, start = about.shape[1:], held.start - first * each
    whole = torch.empty((stop - first, *inner), dtype=TYPES[about.dtype])
    reader.fill(whole, name, first * math.prod(inner))
    return cut.of(whole).reshape(-1)[start : start + count].view(held.tensor.shape)


def _state(reader: Reader, held: Held, name: str, cut: Cut | None) -> Tensor:
    """A tensor of optimizer state: this rank's part of one with the parameter's shape, or one number."""
    about = reader.tensors[name]
    if cut is not None and about.shape == list(cut.shape):
        return _part(reader, held, name, cut)
    whole = cut is None and about.shape == list(held.shape)
    if not whole and about.shape:
        raise disk.damaged(reader.folder / disk.INDEX, f"{name} is {about.shape}, its parameter {held.shape}")
    value = torch.empty(held.tensor.shape if whole else (), dtype=TYPES[about.dtype])
    reader.fill(value, name, held.start if whole else 0)
    return value
