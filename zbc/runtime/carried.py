"""What a layer carries from one forward to the next in plain attributes, where nobody can put it back.

Buffers that a forward changes are renewed for every microbatch (remembered.py). A counter, or the last input kept in an
attribute, is not: that comes out as in one process only where each forward runs once, in order. Many attributes that
change do no harm, such as tables made at the first forward or weights of attention kept to be looked at; so layers that
change some are run with numbers, and asked whether their output depends on what they saw before.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.plan import Manifest
from zbc.runtime.seeding import seeded
from zbc.userobject import FAILURES

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


def may_run_again(manifest: Manifest) -> bool:
    """Whether a plan may run a forward twice, or, with two pipes, microbatches in another order."""
    recomputes = any(_recomputes(manifest, stage) for stage in range(manifest.stages))
    return recomputes or _ahead(manifest) or len(manifest.placement[0]) > 1


def refuse_carried(manifest: Manifest, ops: Iterable[Op], stage: int, layer: str, names: Sequence[str]) -> None:
    """Raise E509 if forwards of a stage may run again, or in another order, and a layer of it carries `names`."""
    if not names:
        return
    order = [op.mb for op in ops if op.kind is Kind.F and op.stage == stage]
    if _recomputes(manifest, stage):
        why = "recompute runs its forwards twice"
    elif _ahead(manifest):
        why = "without the barrier forwards may run again"
    elif order != sorted(set(order)) or len(set(manifest.placement[stage])) > 1:
        why = "its forwards do not run in the order of the microbatches on one rank"
    else:
        return
    some = ", ".join(names[:3])
    text = f"model: the output of layer {layer} depends on attributes that its forward changes ({some}), and {why}"
    hint = "keep such state in buffers (register_buffer), or use a plan where each forward runs once, in order"
    raise ZbcError("E509", text, hint=hint)


def _recomputes(manifest: Manifest, stage: int) -> bool:
    activations = manifest.planning.get("memory", {}).get("activations", "keep")
    return (activations if isinstance(activations, str) else activations.get(str(stage))) == "recompute"


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
