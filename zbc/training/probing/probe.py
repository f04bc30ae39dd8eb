"""What the forward of a layer does besides returning a tensor, seen while shapes are derived.

random       it draws from torch's generators: the stage seeds them for it
overwrites   it writes into its input, which an earlier layer or a message may still need: it gets a copy
remembers    it changes buffers of its modules, as BatchNorm does: see remembered.py
whole        its backward stays in one piece, all in B: it calls autograd itself, or its layers in a way of their own
carries      it changes plain attributes of its modules: see carried.py
mixes        it keeps in such attributes what the backward of another microbatch still needs
grows        its first forward makes buffers: tables, or what it remembers from then on
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.plan.directory import Manifest
from zbc.runtime.stage import Traits
from zbc.training.probing.carried import attributes, differing


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices ops that draw random numbers, and from a generator of whose; what memory they write to, which versions do
    not tell of `.data`; and those whose gradients are not dense."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.elsewhere = self.sparse = False
        self._written: list[torch.UntypedStorage] = []  # kept, so that no other is taken for one of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.elsewhere |= given.get("generator") is not None
        # Attention draws for its dropout only, and says so if it has none.
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and bool(given.get("dropout_p", True))
        self.sparse |= any(given.get(name) is True for name in ("sparse", "sparse_grad"))
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written += [t.untyped_storage() for t in _tensors(given.get(argument.name))]
        return func(*args, **kwargs)

    def wrote(self, tensor: Tensor) -> bool:
        """Whether some op wrote to the memory of a tensor."""
        if tensor.layout is not torch.strided:
            return False
        place = tensor.untyped_storage()._cdata
        return any(storage._cdata == place for storage in self._written)


def _tensors(value: Any) -> list[Tensor]:
    """The dense tensors in an argument of an op."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, Tensor) and item.layout is torch.strided]


class _Differentiates(TorchFunctionMode):
    """Notices calls of autograd."""

    _CALLS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in self._CALLS
        return func(*args, **(kwargs or {}))


def observe(name: str, module: nn.Module, x: Tensor, run: Callable[[Tensor], object]) -> tuple[object, Traits]:
    """Call `run(x)`, the forward of `module`, and say what it did.

    Raises E509 if it draws random numbers that nobody seeds (outside of torch, or from a generator of its own), writes
    to its parameters, or asks for gradients that are not dense.
    """
    buffers = {key: (buffer, buffer._version) for key, buffer in module.named_buffers()}
    version, states, carried = x._version, _states(), attributes(module)
    with _Ops() as ops, _Differentiates() as differentiates:
        y = run(x)
    elsewhere = next((what for what, state in _states().items() if states.get(what, state) != state), None)
    _refuse(name, module, ops, "a generator of its own" if ops.elsewhere else elsewhere)
    after = dict(module.named_buffers())
    changed = [
        key for key, (old, at) in buffers.items() if after.get(key) is not old or old._version != at or ops.wrote(old)
    ]
    remembers = tuple(dict.fromkeys([*changed, *_statistics(module)]))
    grows = tuple(key for key in after if key not in buffers)
    carries = differing(carried, attributes(module))
    overwrites = x._version != version or ops.wrote(x)
    return y, Traits(ops.draws, overwrites, remembers, differentiates.seen, carries, grows=grows)


def _refuse(name: str, module: nn.Module, ops: _Ops, source: str | None) -> None:
    """Raise E509 for what a forward did that no stage can do; `source`: of random numbers that nobody seeds."""
    written = next((key for key, parameter in module.named_parameters() if ops.wrote(parameter)), None)
    if source is not None:
        text = f"draws from {source} in its forward"
        hint = "draw with torch's own generator, which is seeded for each step, microbatch and layer"
    elif written is not None:
        text = f"writes to its parameter {written} in its forward, which other microbatches and copies still need"
        hint = "compute it from the parameter instead: torch.nn.utils.parametrize; drop max_norm of an embedding"
    elif ops.sparse:
        text = "has sparse gradients, which the gradient norm and sums over ranks do not know"
        hint = "set sparse=False"
    else:
        return
    raise ZbcError("E509", f"model: layer {name} {text}", hint=hint)


def _states() -> dict[str, object]:
    """Generators outside of torch, by what they are called; numpy's only where somebody has imported it."""
    found: dict[str, object] = {"Python's random module": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        found["numpy.random"] = repr([*map(_plain, numpy.get_state())])
    return found


def _plain(value: Any) -> Any:
    return value.tobytes() if hasattr(value, "tobytes") else value


def reaches(y: Tensor, x: Tensor) -> bool:
    """Whether a backward from `y` comes to the leaf `x`."""
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


def _statistics(module: nn.Module) -> list[str]:
    """Running statistics, which kernels update without a trace."""
    return [
        f"{path}.{key}" if path else key
        for path, inner in module.named_modules()
        if isinstance(inner, _NormBase) and inner.training and inner.track_running_stats
        for key in ("running_mean", "running_var", "num_batches_tracked")
        if inner._buffers.get(key) is not None
    ]


def refuse_untrainable(name: str, layer: nn.Module) -> None:
    """Raise E509 for parameters that have no size yet, gradients that are not dense, and what cannot be looked into."""
    for path, module in layer.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            text = f"model: layer {where} is TorchScript, of which nobody sees what its forward does"
            raise ZbcError("E509", text, hint="return the module that it was made from")
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            text = f"model: layer {where} is lazy: its parameters have no size before its first forward"
            raise ZbcError("E509", text, hint="give the sizes to the constructor")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            text = f"model: layer {where} has sparse gradients, which the gradient norm and sums over ranks do not know"
            raise ZbcError("E509", text, hint="set sparse=False")


def refuse_unordered(manifest: Manifest, ops: Iterable[Op], stage: int, layer: str, traits: Traits) -> None:
    """Raise E509 if the buffers that a layer's forward changes could not come out as in one process.

    They follow the order of the forwards, so there has to be one order: a single copy of the stage, each microbatch
    once, ascending.
    """
    if not traits.remembers:
        return
    what = f"model: layer {layer} changes its buffer {traits.remembers[0]} in its forward"
    hint = "use a layer without running statistics, as GroupNorm or LayerNorm, or track_running_stats=False"
    if manifest.holders(stage) > 1:
        text = f"{what}, and several ranks hold a copy of stage {stage}: each would keep other values"
        raise ZbcError("E509", text, hint=hint)
    order = [op.mb for op in ops if op.kind is Kind.F and op.stage == stage]
    if order != sorted(set(order)):
        text = f"{what}, and the plan does not run the forwards of stage {stage} in the order of the microbatches"
        raise ZbcError("E509", text, hint=hint)


def refuse_listening(manifest: Manifest, stage: int, layer: str, module: nn.Module) -> None:
    """Raise E509 if a hook sees accumulated gradients of a layer, and they are those of one copy of its stage only."""
    if manifest.holders(stage) == 1:
        return
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            text = (
                f"model: layer {layer} has a hook on the accumulated gradient of {name}, and several ranks hold a copy"
            )
            hint = "use register_hook, which sees the gradient of each microbatch, or a plan that has the stage once"
            raise ZbcError("E509", f"{text} of stage {stage}: each would see its own share", hint=hint)
