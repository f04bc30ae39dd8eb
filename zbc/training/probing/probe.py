"""Side effects of a layer's forward, observed while shapes are derived; and layers that a plan cannot train as one
process would, refused by name before training starts.

random       it draws from torch's generators: the stage seeds them for it
overwrites   it writes into its input, which an earlier layer or a message may still need: it gets a copy
remembers    it changes buffers of its modules, as BatchNorm does: see remembered.py
whole        its backward is not split, all of it is in B: it calls autograd itself
carries      it changes plain attributes of its modules in every forward: see `carried`
adds         its backward adds gradients of its own, which a zero gradient of its output shows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode

from zbc.errors import ZbcError
from zbc.ir import Key, Op
from zbc.plan.directory import Manifest
from zbc.runtime.core.bundle import taken_apart
from zbc.runtime.core.private import TorchDispatchMode, tree_leaves
from zbc.runtime.core.stage import Stage, StageLayer, Traits
from zbc.runtime.seeding import arguments, draws_unseeded, moved, samples, unseeded

_OF_TORCH = frozenset(vars(nn.Module())) | {"forward"}
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
    """Records calls of autograd, and of hooks on tensors."""

    _CALLS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in self._CALLS
        self.hooks |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def attributes(module: nn.Module) -> dict[str, list[Any]]:
    """The plain attributes of a layer and of the modules inside it, with tensor versions."""
    return {
        f"{path}.{key}" if path else key: [
            (leaf, leaf._version if isinstance(leaf, Tensor) else 0) for leaf in tree_leaves(value)
        ]
        for path, inner in module.named_modules()
        for key, value in vars(inner).items()
        if key not in _OF_TORCH
    }


def differing(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> tuple[str, ...]:
    """The attributes that changed or are new."""
    return tuple(key for key, value in after.items() if key not in before or not _alike(before[key], value))


def _alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        at == then and (a is b or (type(a) is type(b) and isinstance(a, int | float | complex | str) and a == b))
        for (a, at), (b, then) in zip(one, other, strict=True)
    )


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
    # Perhaps it adds gradients: by hooks of parameters, or by autograd functions of a user in its backward.
    nodes = (type(node) for node in graph(taken_apart(y)[0]) if isinstance(node, BackwardCFunction))
    adds = differentiates.seen or differentiates.hooks or any(p._backward_hooks for p in module.parameters())
    adds = adds or any(not vars(kind)["_forward_cls"].__module__.startswith("zbc.") for kind in nodes)
    traits = Traits(ops.draws, ops.wrote(given), changed, differentiates.seen, carries, adds=adds)
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
    return y is x or any(getattr(node, "variable", None) is x for node in graph([y]))


def graph(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of a backward from these tensors."""
    seen, left = set[Any]([None]), list[Any](tensor.grad_fn for tensor in tensors)
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [before for before, _ in node.next_functions]


def refuse_untrainable(name: str, layer: nn.Module) -> None:
    """Raises E509 for parameters that have no size yet and for TorchScript modules."""
    for path, module in layer.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            text = f"model: layer {where} is TorchScript, of which nobody sees what its forward does"
            raise ZbcError("E509", text, hint="return the module that it was made from")
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            text = f"model: layer {where} is lazy: its parameters have no size before its first forward"
            raise ZbcError("E509", text, hint="give the sizes to the constructor")


def refuse_stage(manifest: Manifest, ops: Sequence[Op], stage: Stage) -> None:
    """Raises E509 if a layer of a stage would not train as in one process, on a rank with `ops`."""
    order = [(op.mb, op.slice) for op in ops if op.kind.is_forward and op.stage == stage.index]
    ordered, copies = order == sorted(set(order)), manifest.holders(stage.index) > 1
    for layer in stage.layers:
        if copies:
            _refuse_hooks(stage, layer)
        if not ordered or copies:
            _refuse_buffers(stage, layer, copies=copies)
        why = _lost(manifest, stage, ordered=ordered and not copies)
        if layer.traits.carries and why is not None:
            names = ", ".join(layer.traits.carries[:3])
            text = f"model: the output of layer {layer.name} depends on attributes that its forward changes ({names}),"
            hint = "keep such state in buffers (register_buffer), or use a plan where each forward runs once, in order"
            raise ZbcError("E509", f"{text} and {why}", hint=hint)
        if layer.traits.mixes and overlaps(ops, stage.index):
            names = ", ".join(layer.traits.mixes[:3])
            text = f"model: layer {layer.name} keeps what its output or its backward needs in attributes ({names}), and"
            text += f" forwards of other microbatches change them before the backward in stage {stage.index}"
            hint = "make such tensors in every forward; in a torch.autograd.Function use ctx.save_for_backward"
            raise ZbcError("E509", text, hint=hint)


def _refuse_hooks(stage: Stage, layer: StageLayer) -> None:
    """Refuses hooks on accumulated gradients, which in a replica are not those of one process."""
    for name, parameter in layer.module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            text = f"model: layer {layer.name} has a hook on the accumulated gradient of {name}, and several ranks hold"
            text += f" a copy of stage {stage.index}: each would see its own share"
            hint = "use register_hook, which sees the gradient of each microbatch, or a plan that has the stage once"
            raise ZbcError("E509", text, hint=hint)


def _refuse_buffers(stage: Stage, layer: StageLayer, *, copies: bool) -> None:
    """Refuses buffers that forwards change unless one rank runs each microbatch once, in ascending order."""
    if not layer.traits.remembers:
        return
    text = f"model: layer {layer.name} changes its buffer {layer.traits.remembers[0]} in its forward, and "
    if copies:
        text += f"several ranks hold a copy of stage {stage.index}: each would keep other values"
    else:
        text += f"the plan does not run the forwards of stage {stage.index} in the order of the microbatches"
    hint = "use a layer without running statistics, as GroupNorm or LayerNorm, or track_running_stats=False"
    raise ZbcError("E509", text, hint=hint)


def _lost(manifest: Manifest, stage: Stage, *, ordered: bool) -> str | None:
    """The reason why attributes would not change as in one process; None if they do."""
    training = manifest.training
    if stage.recompute:
        return "recompute runs its forwards twice"
    if training.get("optimizer", {}).get("sync") == "post-validate":
        return "without the barrier forwards may run again"
    if not ordered:
        return "its forwards do not run in the order of the microbatches on one rank"
    return "checkpoints do not hold attributes" if training.get("checkpoint", {}).get("every", 0) else None


def overlaps(ops: Sequence[Op], stage: int) -> bool:
    """Whether a forward of a stage runs before the backward of the previous one has completed."""
    waiting = set[Key]()
    for op in ops:
        if op.stage == stage and op.kind.is_forward:
            if waiting:
                return True
            waiting.add(op.key)
        elif op.stage == stage and op.kind.makes_part:
            waiting.discard(op.key)
    return False
