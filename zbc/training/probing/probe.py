"""Side effects of a layer's forward, observed while shapes are derived.

random       it draws from torch's generators: the stage seeds them for it
overwrites   it writes into its input, which an earlier layer or a message may still need: it gets a copy
remembers    it changes buffers of its modules, as BatchNorm does: see remembered.py
whole        its backward is not split, all of it is in B: it calls autograd itself
carries      it changes plain attributes of its modules in every forward: see carried.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbc.errors import ZbcError
from zbc.runtime.core.private import TorchDispatchMode
from zbc.runtime.core.stage import Traits
from zbc.runtime.seeding import arguments, draws_unseeded, moved, samples, unseeded
from zbc.training.probing.carried import attributes, differing

_STATISTICS = ("running_mean", "running_var")  # kernels of BatchNorm write to them, which is not in their schema


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ops that draw random numbers, and whether from a generator argument; the storages they write to, which
    version counters miss for `.data`; and ops with gradients that are not dense."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.elsewhere = self.sparse = False
        self._written: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = arguments(func, args, kwargs)
        self.elsewhere |= given.get("generator") is not None
        self.draws |= samples(func, given)
        self.sparse |= any(given.get(name) is True for name in ("sparse", "sparse_grad"))
        statistics = _STATISTICS if given.get("training", given.get("train")) else ()
        for argument in func._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or argument.name in statistics:
                self._written += [t.untyped_storage() for t in _tensors(given.get(argument.name))]
        return func(*args, **kwargs)

    def wrote(self, tensor: Tensor) -> bool:
        """Whether some op wrote to the storage of a tensor."""
        if tensor.layout is not torch.strided:
            return False
        place = tensor.untyped_storage()._cdata
        return any(storage._cdata == place for storage in self._written)


def _tensors(value: Any) -> list[Tensor]:
    """The dense tensors in an argument of an op."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, Tensor) and item.layout is torch.strided]


class _Differentiates(TorchFunctionMode):
    """Records calls of autograd."""

    _CALLS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in self._CALLS
        return func(*args, **(kwargs or {}))


def observe(name: str, module: nn.Module, x: Tensor) -> tuple[object, Traits, tuple[str, ...]]:
    """Calls the forward of `module` on `x`; returns its result, its traits, and the names of buffers that it made.

    If the first forward changed attributes, a second one runs: attributes that it does not change are tables.
    Raises E509 if it draws unseeded random numbers (outside torch, or from a generator of its own), writes to its
    parameters, or has gradients that are not dense.
    """
    y, traits, made = _once(name, module, x)
    if not (made or traits.carries):
        return y, traits, made
    _, again, _ = _once(name, module, x)
    return y, replace(traits, remembers=union(traits.remembers, again.remembers), carries=again.carries), made


def _once(name: str, module: nn.Module, x: Tensor) -> tuple[object, Traits, tuple[str, ...]]:
    """The result and traits of one forward, and the names of buffers that it made."""
    buffers, given = dict(module.named_buffers()), x.clone()
    others, before = unseeded(), attributes(module)
    with _Ops() as ops, _Differentiates() as differentiates:
        y = module(given)
    _refuse(name, module, ops, "a generator of its own" if ops.elsewhere else moved(others))
    after = dict(module.named_buffers())
    changed = tuple(key for key, old in buffers.items() if after.get(key) is not old or ops.wrote(old))
    carries = differing(before, attributes(module))
    traits = Traits(ops.draws, ops.wrote(given), changed, differentiates.seen, carries)
    return y, traits, tuple(key for key in after if key not in buffers)


def union(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Each name once, in order."""
    return tuple(dict.fromkeys((*one, *other)))


def _refuse(name: str, module: nn.Module, ops: _Ops, source: str | None) -> None:
    """Raises E509 if a forward did something that a stage does not support; `source`: an unseeded generator it used."""
    written = next((key for key, parameter in module.named_parameters() if ops.wrote(parameter)), None)
    if source is not None:
        raise draws_unseeded(f"layer {name}", source)
    if written is not None:
        text = f"writes to its parameter {written} in its forward, which other microbatches and copies still need"
        hint = "compute it from the parameter instead: torch.nn.utils.parametrize; drop max_norm of an embedding"
    elif ops.sparse:
        text = "has sparse gradients, which the gradient norm and sums over ranks do not know"
        hint = "set sparse=False"
    else:
        return
    raise ZbcError("E509", f"model: layer {name} {text}", hint=hint)


def reaches(y: Tensor, x: Tensor) -> bool:
    """Whether a backward from `y` reaches the leaf `x`."""
    seen, left = set[Any](), [y.grad_fn]
    if y is x:
        return True
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is x:
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False
