"""A rank's training state by names that do not depend on how the model was cut, and back.

    model.<parameter>           its value: the master's where there is one
    optim.<parameter>.<key>     what the optimizer keeps for it: exp_avg, exp_avg_sq, step, momentum_buffer
    buffer.<buffer>             a module's buffer, if it is in its state_dict or forwards change it

Random numbers need no state of their own: all of them are drawn from seeds made of names, steps and microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.plan.directory import meeting
from zbc.runtime.optimizer import Held, StageOptimizer
from zbc.runtime.sharded import Piece, deal
from zbc.runtime.stage import Layer
from zbc.runtime.state import Worker
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.planning import Part, read_parts
from zbc.training.checkpoint.storage import NAMES, SafetensorsReader, check_type

MODEL, OPTIM, BUFFER = "model.", "optim.", "buffer."


@dataclass(frozen=True)
class Entry:
    """A part as it lies in the worker. Every one of `holders` has the same; `writer` is the one that writes it down."""

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    holders: tuple[int, ...]
    writer: int

    def part(self, tensor: Tensor) -> Part:
        """With its elements, or a copy of them, in a row."""
        return Part(self.name, self.shape, self.start, tensor.detach().reshape(-1))


def entries(worker: Worker) -> list[Entry]:
    """Everything of a rank between two steps. Raises E611 for what the files cannot hold."""
    found = [entry for stage in worker.stages for entry in (*_weights(worker, stage), *_buffers(worker, stage))]
    for entry in found:
        check_type(entry.name, entry.tensor)
    return [entry for entry in found if entry.tensor.numel()]


def _weights(worker: Worker, stage: int) -> Iterator[Entry]:
    """Parameters and what the optimizer keeps for them; ranks with the same share out who writes what."""
    optimizer, manifest = worker.optimizers[stage], worker.plan.manifest
    usual = meeting(manifest, Op(Kind.REDUCE, stage))
    state = {} if optimizer.optimizer is None else optimizer.optimizer.state
    shares = _shares(optimizer, usual)
    for held in optimizer.held():
        if not held.tensor.numel():  # there is nothing to keep of it
            continue
        tied = held.name == worker.tied
        holders = meeting(manifest, Op(Kind.TIE, 0)) if tied else usual
        if not held.shared:
            holders = (worker.rank,)
        writer = holders[0] if tied or not held.shared else shares[held.name]
        yield Entry(MODEL + held.name, held.shape, held.start, held.tensor.data, holders, writer)
        for key, value in state.get(held.tensor, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                text = f"run: the optimizer keeps a {type(value).__name__} as {key} of {held.name}, not a tensor"
                raise ZbcError("E611", text, hint="turn checkpoints off with checkpoint.every = 0")
            name = f"{OPTIM}{held.name}.{key}"
            if value.shape == held.tensor.shape:
                yield Entry(name, held.shape, held.start, value, holders, writer)
            elif held.start == 0:  # one number for all pieces of a parameter
                yield Entry(name, tuple(value.shape), 0, value, holders, writer)


def _shares(optimizer: StageOptimizer, holders: tuple[int, ...]) -> dict[str, int]:
    """Which of the ranks that hold the same parameters writes which; they all find the same."""
    whole = [Piece(name, 0, parameter.numel()) for name, parameter in sorted(optimizer.parameters.items())]
    dealt = zip(holders, deal(whole, len(holders)), strict=True)
    return {piece.name: rank for rank, share in dealt for piece in share}


def _buffers(worker: Worker, stage: int) -> Iterator[Entry]:
    """Buffers. Those that forwards change are of a stage with one copy, any others are alike on all that hold one."""
    holders = meeting(worker.plan.manifest, Op(Kind.REDUCE, stage))
    for layer in worker.stages[stage].layers:
        for name, module, key in _places(layer):
            value = module._buffers.get(key)
            if value is not None:
                yield Entry(BUFFER + name, tuple(value.shape), 0, value, holders, holders[0])


def _places(layer: Layer) -> Iterator[tuple[str, nn.Module, str]]:
    """The buffers that are state: those of a state_dict, and others that forwards change."""
    changing = {(id(module), key) for module, key in layer.buffers}
    for path, module in layer.module.named_modules():
        own = [key for place, key in layer.buffers if place is module and key not in module._buffers]
        for key in [*module._buffers, *own]:  # those of the second kind are there from the first forward on
            if key not in module._non_persistent_buffers_set or (id(module), key) in changing:
                yield ".".join(filter(None, (layer.name, path, key))), module, key


# ---- back ----------------------------------------------------------------------------------------------------


def restore(worker: Worker, reader: SafetensorsReader) -> None:
    """Overwrite everything of a rank. Raises E612 (damaged), E613 (of another model or optimizer)."""
    check_fits(worker, reader)
    for stage, optimizer in worker.optimizers.items():
        _restore_weights(optimizer, reader)
        _restore_buffers(worker, stage, reader)


def check_fits(worker: Worker, reader: SafetensorsReader) -> None:
    """Raise E613 if the checkpoint is of another model, or of another kind of optimizer than this rank's."""
    theirs = {name.removeprefix(MODEL): about for name, about in reader.tensors.items() if name.startswith(MODEL)}
    sizes = zip(worker.layout.parameters, worker.layout.sizes, strict=True)
    ours = {name for name, size in sizes if size}  # what has no elements is in no file
    differences = [f"{name}: only in this job" for name in sorted(ours - theirs.keys())]
    differences += [f"{name}: only in the checkpoint" for name in sorted(theirs.keys() - ours)]
    for optimizer in worker.optimizers.values():
        for held in optimizer.held():
            told = theirs.get(held.name)
            if told is None:
                continue
            here, there = _kind(held.tensor.dtype, held.shape), f"{told.dtype} {told.shape}"
            if here != there:
                differences.append(f"{held.name}: {there} in the checkpoint, {here} in this job")
    if differences:
        shown = [*differences[:6], *([f"and {len(differences) - 6} more"] if len(differences) > 6 else [])]
        text = f"run: {reader.folder} is of another model"
        raise ZbcError("E613", text, hint="resume with the [model] it was trained with", details=shown)


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _restore_weights(optimizer: StageOptimizer, reader: SafetensorsReader) -> None:
    held = optimizer.held()
    kept = _state_keys(reader)
    _read(reader, {MODEL + name: [(p.data, 0)] for name, p in optimizer.incomplete().items()})
    wanted: dict[str, list[tuple[Tensor, int]]] = {}
    for one in held:
        wanted.setdefault(MODEL + one.name, []).append((one.tensor.data, one.start))
    states: dict[int, dict[str, Tensor]] = {}
    for place, one in enumerate(held):
        for key in kept.get(one.name, ()) if one.tensor.requires_grad and one.tensor.numel() else ():
            name = f"{OPTIM}{one.name}.{key}"
            about = reader.tensors[name]
            whole = about.shape == list(one.shape)
            if not whole and about.shape:
                raise disk.damaged(reader.folder / disk.INDEX, f"{name} is {about.shape}, its parameter {one.shape}")
            value = torch.empty(one.tensor.shape if whole else about.shape, dtype=NAMES[about.dtype])
            states.setdefault(place, {})[key] = value
            wanted.setdefault(name, []).append((value, one.start if whole else 0))
    _read(reader, wanted)
    _set_state(optimizer, held, states)
    optimizer.loaded()


def _state_keys(reader: SafetensorsReader) -> Mapping[str, list[str]]:
    """What the checkpoint has of an optimizer, by parameter."""
    found: dict[str, list[str]] = {}
    for name in reader.tensors:
        if name.startswith(OPTIM):
            parameter, _, key = name.removeprefix(OPTIM).rpartition(".")
            found.setdefault(parameter, []).append(key)
    return found


def _set_state(optimizer: StageOptimizer, held: list[Held], states: Mapping[int, dict[str, Tensor]]) -> None:
    """By torch's own `load_state_dict`, which knows which state belongs on which device."""
    inner = optimizer.optimizer
    if inner is None:
        return
    order = {id(p): number for number, p in enumerate(p for group in inner.param_groups for p in group["params"])}
    state = {order[id(held[place].tensor)]: values for place, values in states.items()}
    inner.load_state_dict({"state": state, "param_groups": inner.state_dict()["param_groups"]})


def _restore_buffers(worker: Worker, stage: int, reader: SafetensorsReader) -> None:
    wanted: dict[str, list[tuple[Tensor, int]]] = {}
    for layer in worker.stages[stage].layers:
        for name, module, key in _places(layer):
            about, now = reader.tensors.get(BUFFER + name), module._buffers.get(key)
            if about is None:
                continue
            if now is None or list(now.shape) != about.shape or now.dtype != NAMES[about.dtype]:
                now = torch.empty(about.shape, dtype=NAMES[about.dtype], device=worker.device)
                module._buffers[key] = now
            wanted[BUFFER + name] = [(now, 0)]
    _read(reader, wanted)


def _read(reader: SafetensorsReader, wanted: Mapping[str, list[tuple[Tensor, int]]]) -> None:
    """Fill tensors, each from `start` on of the one in the checkpoint, wherever they are and of whatever type."""
    parts: dict[tuple[str, int], Part] = {}
    targets = []
    for name, places in wanted.items():
        for target, start in places:
            if not target.numel():
                continue
            about = reader.tensors[name]
            if (name, start) not in parts:  # pieces of one parameter all want its step
                flat = torch.empty(target.numel(), dtype=NAMES[about.dtype])
                parts[name, start] = Part(name, tuple(about.shape), start, flat)
            targets.append((target, parts[name, start].tensor))
    read_parts(reader, list(parts.values()))
    with torch.no_grad():
        for target, flat in targets:
            target.copy_(flat.view(target.shape))
