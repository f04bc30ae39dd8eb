"""What a layer carries from one forward to the next in plain attributes, where nobody can put it back.

Buffers that a forward changes are renewed for every microbatch (remembered.py). A counter, or the last input kept in an
attribute, is not: that comes out as in one process only where each forward runs once, in order. Many attributes that
change do no harm, such as tables made at the first forward or weights of attention kept to be looked at; so layers that
change some are run with numbers, and asked whether their output depends on what they saw before.

Nor can anybody keep apart what several microbatches leave in one attribute between their forward and their backward: a
piece of memory that each forward writes its output to, or an input that a hook of the backward reads. Such layers are
asked whether another forward in between changes an output or a gradient.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Op
from zbc.job.userobject import FAILURES
from zbc.plan.directory import Manifest
from zbc.runtime.remembered import as_before, places, renew
from zbc.runtime.seeding import seeded

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
_MANY = 1000  # items of a container that are looked at
_TIMES = 3


def attributes(module: nn.Module) -> dict[str, Any]:
    """What stands in the plain attributes of a layer and of the modules inside of it; for `differing`."""
    return {
        f"{path}.{key}" if path else key: _picture(value)
        for path, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in _OF_TORCH
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    """The attributes that are others, or new."""
    return tuple(key for key, value in after.items() if key not in before or not _alike(before[key], value))


def depends(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the output of a layer, run on the CPU with the same input and random numbers, follows what it saw before.

    `module` is used up by that. One that cannot run so is said not to.
    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with seeded(0):
        x, *others = (_numbers(shape, dtype) for _ in range(1 + _TIMES))
    try:
        first = _output(module, x)
        for other in others:
            _output(module, other)
        for name, buffer in module.named_buffers():  # those are the runtime's to put back
            if name in buffers:
                buffer.copy_(buffers[name])
        return not torch.equal(first.nan_to_num(), _output(module, x).nan_to_num())
    except FAILURES:
        return False


def settles(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the second forward of a layer on the meta device leaves its attributes alone, as one that made tables in
    the first does. One that cannot run there is said not to."""
    x = torch.zeros(shape, dtype=dtype, device="meta")
    try:
        with torch.enable_grad():
            module(x.clone())
            before = attributes(module)
            module(x.clone())
    except FAILURES:
        return False
    return not differing(before, attributes(module))


def mixes(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a forward of a layer, run on the CPU, changes the output or the gradients of the forward before it.

    `module` is used up by that. One that cannot run so is said not to.
    """
    with seeded(0):
        x, other = (_numbers(shape, dtype) for _ in range(2))
    other = other if _differentiable(other) else torch.ones_like(other)
    try:
        _output(module, other)  # what is made in the first forward is there from here on
        alone = _there_and_back(copy.deepcopy(module), x, None)
    except FAILURES:
        return False
    try:
        apart = _there_and_back(module, x, other)
    except FAILURES:  # autograd sees it, where what it kept was overwritten
        return True
    return not all(map(_same, alone, apart))


def grown(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the output of a layer, run on the CPU, follows what the forwards before put into buffers that the first
    one made: those are no tables.

    `module` is used up by that. One that cannot run so is said not to.
    """
    with seeded(0):
        x, other = (_numbers(shape, dtype) for _ in range(2))
    other = other if _differentiable(other) else torch.ones_like(other)
    try:
        buffers = places(module, [name for name, _ in module.named_buffers()])
        before = renew(buffers)
        first = _output(copy.deepcopy(module), x)
        _output(module, other)
        with as_before(buffers, before):
            return not torch.equal(first.nan_to_num(), _output(module, x).nan_to_num())
    except FAILURES:
        return False


def _there_and_back(module: nn.Module, x: Tensor, between: Tensor | None) -> list[Tensor | None]:
    """The output of a layer and the gradients of its input and parameters; `between` takes its forward in between."""
    buffers = places(module, [name for name, _ in module.named_buffers()])
    x = x.clone().requires_grad_(_differentiable(x))
    with torch.enable_grad():
        renew(buffers)
        with seeded(1):
            y: Tensor = module(x.clone())
        if between is not None:
            renew(buffers)
            with seeded(2):
                module(between.clone().requires_grad_(x.requires_grad).clone())
        if y.requires_grad:
            with seeded(3):
                torch.autograd.backward(y, torch.ones_like(y))
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def may_lose_track(manifest: Manifest) -> bool:
    """Whether a plan may run a forward twice, or not all microbatches in order on one rank, or from a checkpoint on."""
    recomputes = any(_recomputes(manifest, stage) for stage in range(manifest.stages))
    return recomputes or _ahead(manifest) or manifest.holders(0) > 1 or _saves(manifest)


def refuse_carried(manifest: Manifest, ops: Iterable[Op], stage: int, layer: str, names: Sequence[str]) -> None:
    """Raise E509 if a layer of a stage carries `names`, and forwards of it may run again, or in another order, or go on
    from a checkpoint."""
    if not names:
        return
    order = [op.mb for op in ops if op.kind is Kind.F and op.stage == stage]
    if _recomputes(manifest, stage):
        why = "recompute runs its forwards twice"
    elif _ahead(manifest):
        why = "without the barrier forwards may run again"
    elif order != sorted(set(order)) or manifest.holders(stage) > 1:
        why = "its forwards do not run in the order of the microbatches on one rank"
    elif _saves(manifest):
        why = "checkpoints do not hold attributes"
    else:
        return
    some = ", ".join(names[:3])
    text = f"model: the output of layer {layer} depends on attributes that its forward changes ({some}), and {why}"
    hint = "keep such state in buffers (register_buffer), or use a plan where each forward runs once, in order"
    raise ZbcError("E509", text, hint=hint)


def refuse_mixed(ops: Iterable[Op], stage: int, layer: str, names: Sequence[str]) -> None:
    """Raise E509 if a stage runs a forward while another microbatch waits for its backward, and a layer of it keeps in
    `names` what one and the other need."""
    if not names or not _overlap(ops, stage):
        return
    text = f"model: layer {layer} keeps what its output or its backward needs in attributes ({', '.join(names[:3])})"
    text += f", and forwards of other microbatches change them before the backward in stage {stage}"
    hint = "make such tensors anew in every forward; a torch.autograd.Function hands them on with ctx.save_for_backward"
    raise ZbcError("E509", text, hint=hint)


def _overlap(ops: Iterable[Op], stage: int) -> bool:
    """Whether a forward of a stage runs before everything of the one before it has been used."""
    waiting = set[Key]()
    for op in ops:
        if op.stage == stage and op.kind is Kind.F:
            if waiting:
                return True
            waiting.add(op.key)
        elif op.stage == stage and op.kind.makes_part:
            waiting.discard(op.key)
    return False


def _recomputes(manifest: Manifest, stage: int) -> bool:
    activations = manifest.planning.get("memory", {}).get("activations", "keep")
    return (activations if isinstance(activations, str) else activations.get(str(stage))) == "recompute"


def _saves(manifest: Manifest) -> bool:
    return bool(manifest.training.get("checkpoint", {}).get("every", 0))


def _ahead(manifest: Manifest) -> bool:
    return bool(manifest.training.get("optimizer", {}).get("sync") == "post-validate")


def _output(module: nn.Module, x: Tensor) -> Tensor:
    with seeded(1), torch.no_grad():
        result: Tensor = module(x.clone())
        return result.clone()


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Noise; of whole numbers zeros, which are words of any vocabulary."""
    noise = dtype.is_floating_point or dtype.is_complex
    return torch.randn(shape, dtype=dtype) if noise else torch.zeros(shape, dtype=dtype)


def _picture(value: Any, depth: int = 2) -> Any:
    if isinstance(value, Tensor):
        return value, value._version
    if not depth:
        return value
    if isinstance(value, dict):
        return {key: _picture(item, depth - 1) for key, item in _first(value.items())}
    if isinstance(value, list | tuple | set | deque):
        return [len(value), *(_picture(item, depth - 1) for item in _first(value))]
    return copy.copy(value) if isinstance(value, bytearray) else value


def _first(items: Iterable[Any]) -> Iterator[Any]:
    return (item for _, item in zip(range(_MANY), items, strict=False))


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return isinstance(one, int | float | complex | str | bytes | bytearray) and one == other
