"""Linear, embedding and convolution layers whose weight gradient can wait: B is the input gradient, W the rest.

`split_backward` replaces the `forward` of such modules, one instance at a time. The replacement takes the current
`Slot` (slot.py) along; without one, outside a pipeline step, it is the ordinary forward. Only these layers are split:
they do most of the arithmetic. Norms, biases of norms and everything else get their gradients in B.

Between B and W a slot holds the input and the output gradient of each deferred layer and nothing else of the graph.
Accumulation follows autograd (`p.grad = g`, then add), so W in microbatch order gives the bits of a fused backward.
A parameter used twice in one forward adds its two gradients in another order than autograd (about 1e-7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from zbc.errors import ZbcError
from zbc.runtime.core import grouped
from zbc.runtime.core.again import Remade, remade_of
from zbc.runtime.core.grouped import Groups
from zbc.runtime.core.private import FakeTensor, transforming
from zbc.runtime.core.slot import Slot, accumulate, accumulate_product, current_slot

# ---- linear --------------------------------------------------------------------------------------------------


_How = tuple[Slot, Remade | None, bool, Groups | None]  # of `_Linear`: slot, remade, fused, groups


class _Linear(torch.autograd.Function):
    """`y = x w^T + b`. `low` is w in the autocast type, or None outside autocast; `remade` recomputes x; `fused`: the
    weight gradient is added to its sum inside the product. With `groups` the rows of x are those of a stack of weights,
    one group after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor | None, how: _How) -> Tensor:
        ctx.shape, ctx.weight, ctx.bias, ctx.how, (_, remade, _, groups) = x.shape, weight, bias, how, how
        multiplier = weight
        if low is not None:
            multiplier, x = low, x.to(low.dtype)
            bias = None if bias is None else bias.to(low.dtype)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        if needs_weight and remade is not None:
            remade.readers += 1
        ctx.save_for_backward(x if needs_weight and remade is None else None, multiplier if needs_x else None)
        if groups is not None:
            return grouped.forward(x, multiplier, bias, groups)
        if low is None:
            return functional.linear(x, multiplier, bias)
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, multiplier, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, multiplier), how = ctx.saved_tensors, cast(_How, ctx.how)
        slot, remade, fused, groups = how
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        if groups is not None:
            grad = grad.contiguous()
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_x = None
        if multiplier is not None:
            made = grad.mm(multiplier) if groups is None else grouped.backward(grad, multiplier, groups)
            grad_x = made.view(ctx.shape)  # autograd casts it to x's type
        if needs_weight and remade is not None:
            x = remade.value(grad.dtype)
        rows: Tensor | None = None if x is None else x.detach().reshape(-1, x.shape[-1])
        weight, bias = ctx.weight, ctx.bias
        if not slot.split and not fused and groups is None:
            grad_weight = None if rows is None else grad.t().mm(rows).to(weight.dtype)
            grad_bias = grad.sum(0).to(bias.dtype) if needs_bias else None
            return grad_x, grad_weight, grad_bias, None, None

        def weight_grad() -> None:
            if rows is not None and groups is not None:
                grouped.accumulate_weights(weight, grad, rows, groups, fused=fused)
            elif rows is not None and fused:
                accumulate_product(weight, grad, rows)
            elif rows is not None:
                accumulate(weight, grad.t().mm(rows).to(weight.dtype))
            if needs_bias:
                parts = () if groups is None else grad.split_with_sizes(groups.counts)
                accumulate(bias, (torch.stack([one.sum(0) for one in parts]) if parts else grad.sum(0)).to(bias.dtype))

        if needs_weight or needs_bias:
            slot.defer(weight_grad)
        return grad_x, None, None, None, None


class SplitLinear:
    """The `forward` of one `nn.Linear` whose weight gradient can wait. Under autocast the weight is cast once and kept
    until it changes, not once per microbatch: see `forget`."""

    def __init__(self, module: nn.Linear | GroupedLinear, fused: bool = False) -> None:
        self.module, self._fused = module, fused
        self._low: tuple[int, Tensor, Tensor] | None = None  # the weight's version, its cast, the weight

    def __call__(self, input: Tensor, groups: Groups | None = None) -> Tensor:
        module, slot = self.module, current_slot()
        if slot is None or not _own(module):
            if groups is not None:
                return GroupedLinear.forward(cast(GroupedLinear, module), input, groups)
            return nn.Linear.forward(cast(nn.Linear, module), input)
        kind = input.device.type
        low = self.cast(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        how = slot, remade_of(input), self._fused, groups
        return _apply(_Linear, input, module.weight, module.bias, low, how)

    @property
    def low(self) -> Tensor | None:
        return None if self._low is None else self._low[1]

    def cast(self, dtype: torch.dtype) -> Tensor | None:
        """The weight in that type, cached until it changes; None if autocast leaves the weight as it is."""
        weight = self.module.weight
        if weight.dtype == torch.float64:  # autocast does not cast these either
            return None
        if weight.dtype == dtype:
            return weight.detach()
        version = weight._version
        low = self._low
        if low is None or low[0] != version or low[2] is not weight or low[1].dtype != dtype:
            self._low = low = version, weight.detach().to(dtype), weight
        return low[1]

    def adopt(self, dtype: torch.dtype) -> Tensor:
        """Installs an uninitialised tensor of that type as the cast, for a caller that gathers the cast and not the
        weight. Reuses the previous tensor if its bytes were freed."""
        weight, low = self.module.weight, self._low
        if low is None or low[0] != weight._version or low[1].dtype != dtype:
            self._low = low = weight._version, torch.empty_like(weight, dtype=dtype, requires_grad=False), weight
        elif not low[1].untyped_storage().nbytes():
            low[1].untyped_storage().resize_(low[1].nbytes)
        return low[1]

    def free(self) -> None:
        """Frees the bytes of the cast; graphs that need it for their backward keep the tensor object."""
        if self._low is not None:
            self._low[1].untyped_storage().resize_(0)

    def refill(self) -> None:
        """Casts again into the freed tensor, once the weight is resident."""
        if self._low is not None:
            _, low, weight = self._low
            low.untyped_storage().resize_(low.nbytes)
            low.data.copy_(weight.data)  # by `data`, since with a new version autograd would refuse those graphs

    def exchange(self, low: tuple[int, Tensor, Tensor] | None) -> tuple[int, Tensor, Tensor] | None:
        """Installs the cast of another version of the weight; returns the previous one."""
        before, self._low = self._low, low
        return before

    def forget(self) -> None:
        """Drops the cast; called after each optimizer step, since some writes do not change the weight's version."""
        self._low = None


class GroupedLinear(nn.Module):
    """A stack of linear layers of one size: (N, inputs) -> (N, outputs), each group of rows by its own layer. weight
    (E, outputs, inputs), bias (E, outputs); uninitialised. A rank may keep a part of them: those from `first` on of
    `all`."""

    def __init__(self, count: int, inputs: int, outputs: int, *, bias: bool, like: Tensor | None = None) -> None:
        super().__init__()
        self.all, self.first, self.in_features, self.out_features = count, 0, inputs, outputs
        empty = torch.empty if like is None else like.new_empty
        self.weight = nn.Parameter(empty((count, outputs, inputs)))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(count, outputs)) if bias else None)

    def forward(self, input: Tensor, groups: Groups) -> Tensor:
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind) and self.weight.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        bias = None if self.bias is None else self.bias.to(dtype)
        return grouped.forward(input.to(dtype), self.weight.to(dtype), bias, groups)

    def keep(self, first: int, stop: int) -> None:
        """Keeps the layers from `first` to before `stop`."""
        self.first = first
        for name, p in self.named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(p.detach()[first:stop].clone(), p.requires_grad))


# ---- any layer with one input, which keeps a graph of its own -------------------------------------------------


class _Leaf(torch.autograd.Function):
    """Runs `function(x)` as a graph of its own: B computes its input gradient, W its parameters' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], slot: Slot, *parameters: Tensor) -> Tensor:
        inner = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad():
            y = function(inner)
        ctx.slot, ctx.inner, ctx.edge = slot, inner, get_gradient_edge(y)
        ctx.parameters = tuple(p for p in parameters if p.requires_grad)
        ctx.wanted = tuple(p.requires_grad for p in parameters)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, edge, inner, parameters = grads[0], ctx.edge, ctx.inner, ctx.parameters
        ctx.edge = ctx.inner = None
        inputs = (inner,) if inner.requires_grad else ()
        if not ctx.slot.split:
            results = _grads(edge, (*inputs, *parameters), grad)
            grad_x = results[0] if inputs else None
            rest = iter(results[len(inputs) :])
            return grad_x, None, None, *(next(rest) if wanted else None for wanted in ctx.wanted)
        grad_x = _grads(edge, inputs, grad, keep=bool(parameters))[0] if inputs else None
        if parameters:
            ctx.slot.defer(lambda: _accumulate_all(parameters, _grads(edge, parameters, grad)))
        return grad_x, None, None, *(None for _ in ctx.wanted)


def _grads(edge: GradientEdge, inputs: tuple[Tensor, ...], grad: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
    return torch.autograd.grad([edge], inputs, [grad], retain_graph=keep, allow_unused=True)


def _accumulate_all(parameters: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            accumulate(parameter, grad)


class SplitLeaf:
    """The `forward` of any module with a single input, whose parameter gradients can wait."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward

    def __call__(self, input: Tensor) -> Tensor:
        parameters = tuple(self.module.parameters(recurse=False))
        slot = current_slot()
        needed = torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
        if slot is None or not needed or not _own(self.module):
            return self.forward(input)  # type: ignore[no-any-return]
        return _apply(_Leaf, input, self.forward, slot, *parameters)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    return function.apply(*args)  # type: ignore[no-any-return, no-untyped-call]


# ---- installing ----------------------------------------------------------------------------------------------

Patch = SplitLinear | SplitLeaf
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEAR: tuple[type[nn.Module], ...] = (nn.Linear, GroupedLinear)
SPLIT: tuple[type[nn.Module], ...] = (*LINEAR, nn.Embedding, *_CONVOLUTIONS)
# By name: importing torch.distributed.fsdp takes a second, and FSDP2 gives each wrapped module a class of its own.
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def split_backward(root: nn.Module, kinds: tuple[type[nn.Module], ...] = SPLIT, *, fused: bool = False) -> list[Patch]:
    """Lets every layer of `kinds` inside `root` defer its weight gradient; returns the installed patches. `fused`:
    linear layers add theirs to its sum inside the product.

    A module stays as it is, and its weight gradient is computed in B, if patching could change its behaviour: it has a
    forward of its own (subclass or instance), hooks, parametrizations, gradient hooks on its parameters, parameters
    without elements, sparse or renormalised embeddings, or lies inside a compiled module.
    """
    compiled = {id(inner) for outer in root.modules() if is_a(outer, "OptimizedModule") for inner in outer.modules()}
    installed: list[Patch] = []
    for module in root.modules():
        fit = isinstance(module, kinds) and id(module) not in compiled and plain(module)
        patch = _patch_for(module, fused) if fit else None
        if patch is not None:
            module.forward = patch
            installed.append(patch)
    return installed


def refuse_wrapped(name: str, layer: nn.Module) -> None:
    """Raises E509 for data-parallel wrappers and sharded parameters inside `layer`. Their hooks fire when autograd
    accumulates a gradient, which a deferred W bypasses: gradients would silently not be summed over ranks, and the
    collectives would run in an order unknown to the plan."""
    for path, module in layer.named_modules():
        wrapper = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is None and any(is_a(p, "DTensor") for p in module.parameters(recurse=False)):
            wrapper = "DTensor"
        if wrapper is not None:
            where = f"{name}.{path}" if path else name
            text = f"model: layer {where} uses {wrapper}, whose gradient exchange does not work inside a pipeline stage"
            raise ZbcError("E509", text, hint="return plain layers; copies of a stage are summed by the plan itself")


def _patch_for(module: nn.Module, fused: bool) -> Patch | None:
    forward = type(module).forward
    if isinstance(module, LINEAR) and forward in (nn.Linear.forward, GroupedLinear.forward):
        return SplitLinear(cast(nn.Linear | GroupedLinear, module), fused)
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        dense = module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
        return SplitLeaf(module) if dense else None
    if isinstance(module, _CONVOLUTIONS) and any(forward is cls.forward for cls in _CONVOLUTIONS):
        return SplitLeaf(module)
    return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def plain(module: nn.Module) -> bool:
    """Whether the module has its class's forward, plain leaf parameters, and no hooks."""
    if "forward" in module.__dict__ or any(getattr(module, hooks, None) for hooks in _HOOKS):
        return False
    own = module._parameters
    if own.get("weight") is None or ("bias" not in own and hasattr(module, "bias")):
        return False
    return all(p is None or _plain_parameter(p) for p in own.values())


def _own(module: nn.Module) -> bool:
    """Whether the weights of a module are parameters now. If torch.func.functional_call has replaced them by tensors,
    these pass gradients on through the graph and change from call to call. False while torch.vmap or another transform
    of torch.func runs."""
    if transforming():
        return False
    for parameter in module._parameters.values():
        if type(parameter) is not nn.Parameter and not (parameter is None or isinstance(parameter, nn.Parameter)):
            return False
    return True


def _plain_parameter(parameter: nn.Parameter) -> bool:
    hooks = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    fit = type(parameter) in (nn.Parameter, FakeTensor) and parameter.is_floating_point() and parameter.numel() > 0
    return fit and not hooks


def is_a(value: object, name: str) -> bool:
    """Whether a value is of a class of that name, which takes long to import."""
    return any(cls.__name__ == name for cls in type(value).__mro__)
