"""Loads a checkpoint, made under any plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.trained import PRECISION, Difference, differences
from zbc.plan.manifest import Manifest
from zbc.runtime.core import rounded
from zbc.runtime.core.grouped import of_expert
from zbc.runtime.core.optimizer import Held, StageOptimizer, inside
from zbc.runtime.core.state import Worker
from zbc.runtime.features.moving import MEAN, Mean
from zbc.runtime.features.scaling import Scale, Scaling
from zbc.runtime.features.tensor_parallel import Cut, SharedLayers
from zbc.runtime.features.unflushed.versions import FED, OLDER, Feedback, Unflushed
from zbc.text import few
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.files import TYPES, Reader
from zbc.training.checkpoint.folder import StoredTensor
from zbc.training.checkpoint.state import BUFFER, MODEL, OPTIM, features_keep, state_buffers, written
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Board
from zbc.training.models.adapters import Frozen
from zbc.training.models.stacks import Stack, stacks_of


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
