"""Layers compiled by torch.compile (`model.compile`).

If a plan has separate B and W, the layers that split their backward (split.py) stay uncompiled: the graph is broken
around each of them. It would otherwise be one node of autograd's graph, with all of its backward in B. Deferred work
holds tensors returned by compiled code, which it never writes into again; buffers inside of it, which it does reuse,
are not visible outside.

Shapes are those of the plan and never change, so each kind of layer is compiled once for each way it is called; layers
of one kind share the code. Random numbers are drawn as without compiling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.runtime.core.private import compile_here
from zbc.runtime.core.split import Patch
from zbc.training.models.adapters import LoraLinear
from zbc.training.models.experts import Experts

BACKEND: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
_WAYS = 8  # of calling one kind of layer, torch's own limit; beyond its limit torch silently compiles no more
_NO_COMPILER = ("InvalidCxxCompiler", "TritonMissing", "GPUTooOldForTriton")


def compile_layer(layer: nn.Module, patches: Sequence[Patch]) -> Callable[[Tensor], Tensor]:
    """The forward of `layer`, compiled when it first runs, but for experts in it, whose numbers of rows change, and for
    `patches`, with frozen layers beside adapters: traced code would know whether the current backward is split."""
    for patch in patches:
        patch.module.forward = partial(_outside, patch)
    for module in layer.modules():
        if isinstance(module, Experts):
            module.forward = partial(_outside, module.forward)  # type: ignore[method-assign]
        elif patches and isinstance(module, LoraLinear):
            module.untraced = partial(_outside, module.frozen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of modules that torch imports for it
        compiled: Callable[[Tensor], Tensor] = torch.compile(layer, dynamic=False, **BACKEND)
    return compiled


def make_room(layers: int) -> None:
    """Raises torch's limits for `layers` layers, which may all be of one class and of different kinds."""
    compile_here(_WAYS * layers, _WAYS * _WAYS * layers)


# Calls a forward without tracing it, in compiled code.
_outside: Callable[..., Tensor] = torch.compiler.disable(lambda forward, *x: forward(*x))  # type: ignore[no-untyped-call]


def not_compiled(layer: str, error: Exception) -> ZbcError:
    """E509 or E602 for a layer that torch cannot compile, with torch's messages."""
    chain: list[BaseException] = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    details = [f"{type(cause).__name__}: {first_line(cause)}" for cause in chain]
    if any(cls.__name__ in _NO_COMPILER for cause in chain for cls in type(cause).__mro__):
        hint = "install g++ or clang (on CUDA: triton), name one in CXX, or set model.compile = false and plan again"
        text = "run: model.compile needs a compiler, and torch finds none that works"
        return ZbcError("E602", text, hint=hint, details=details)
    text = f"model: torch.compile fails for layer {layer}"
    return ZbcError("E509", text, hint="set model.compile = false and plan again", details=details)


def first_line(error: BaseException) -> str:
    """The first line of an error of torch's; the rest is its location in torch."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
