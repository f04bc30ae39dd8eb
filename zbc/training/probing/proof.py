"""Is a compiled layer the layer? Asked of each before training starts, on a microbatch of numbers drawn for it.

The layer runs as it is and compiled, forwards and backwards, with W apart where the plan has it apart. Outputs and the
gradients of input and parameters have to agree; a layer of which they do not is refused by name. Then the whole stage
runs once as it will in training, so that nothing is left to compile later. Weights, gradients, buffers and random
generators are left as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.remembered import present, put_back, renew
from zbc.runtime.seeding import drawing, seed_of, seeded
from zbc.runtime.slot import Slot, using
from zbc.runtime.stage import Layer, Stage
from zbc.runtime.tensors import TensorSpec
from zbc.training.models.compiled import first_line, not_compiled

# By dtype: how far two tensors may be apart, as a share of their norm, and the share of the largest norm below which a
# gradient is taken for rounding (that of a bias in front of a softmax is nothing else).
TOLERANCE = {"float32": (1e-4, 1e-6), "bfloat16": (5e-2, 5e-3)}
_FUSED, _APART = "backward in one", "B and W apart"


@dataclass(frozen=True)
class _Ran:
    output: Tensor
    grads: dict[str, Tensor]  # of the input ("input") and of each parameter that got one


def prove(stage: Stage, dtype: str, *, splits: bool, tell: Callable[[str], None] = lambda text: None) -> None:
    """Compile the layers of a stage that are to be compiled, and hold each against itself.

    `tell` is told before each of them, since it takes long. Raises E511 for a layer that cannot be compiled or comes
    out different, E617 without a compiler.
    """
    if all(layer.compiled is None for layer in stage.layers):
        return
    with seeded(seed_of(stage.seed, "compile", stage.index)), _left_alone(stage), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch.compile looks, and warns
        warnings.simplefilter("ignore", DeprecationWarning)  # of what it does itself
        first = x = stage.arrived(_example(stage.takes, stage.device)).requires_grad_(stage.flows)
        for layer in stage.layers:
            plain = _run(stage, layer, layer.module, x, None)
            if layer.compiled is not None:
                tell(f"compiling {layer.name}")
                for slot in (None, Slot()) if splits else (None,):
                    _hold(layer, plain, _compiled(stage, layer, x, slot), dtype, _FUSED if slot is None else _APART)
                    _again(stage, layer, x, slot)
            x = plain.output.detach().requires_grad_(plain.output.requires_grad)
        tell(f"trying out stage {stage.index}")
        for slot in (None, Slot()) if splits else (None,):
            _whole(stage, first, slot)


def _example(takes: TensorSpec, device: torch.device) -> Tensor:
    """Numbers for a microbatch. Whole ones are zeros, which everything that looks them up knows."""
    if takes.dtype.is_floating_point or takes.dtype.is_complex:
        return torch.randn(takes.shape, dtype=takes.dtype).to(device)
    return takes.empty(device).zero_()


@contextmanager
def _left_alone(stage: Stage) -> Iterator[None]:
    """Afterwards parameters have no gradients, and places of buffers what they had."""
    places = [place for layer in stage.layers for place in layer.buffers]
    before = present(places)
    try:
        yield
    finally:
        put_back(places, before)
        _drop(stage)


def _drop(stage: Stage) -> None:
    for layer in stage.layers:
        for parameter in layer.module.parameters():
            parameter.grad = None


def _compiled(stage: Stage, layer: Layer, x: Tensor, slot: Slot | None) -> _Ran:
    try:
        return _run(stage, layer, layer.call, x, slot)
    except ZbcError:
        raise
    except Exception as error:
        raise not_compiled(layer.name, error) from error


def _again(stage: Stage, layer: Layer, x: Tensor, slot: Slot | None) -> None:
    """Raise E511 if other numbers have torch compile the layer anew: it would do so all the time."""
    other = x.detach() * 1.25 if x.is_floating_point() or x.is_complex() else x.detach()
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            _run(stage, layer, layer.call, other.requires_grad_(x.requires_grad), slot)
    except RuntimeError as error:
        text = f"model: layer {layer.name} depends on its data: torch compiles it anew for other numbers"
        hint = "set model.compile = false and plan again, or take what looks at values (item) out of its forward"
        raise ZbcError("E511", text, hint=hint, details=[first_line(error)]) from error


def _run(stage: Stage, layer: Layer, call: Callable[[Tensor], Tensor], x: Tensor, slot: Slot | None) -> _Ran:
    """One forward and backward of a layer, of the buffers it has now."""
    before = renew(layer.buffers)
    leaf = x.detach().requires_grad_(x.requires_grad)
    with using(slot), stage.autocast, drawing(stage.device, seed_of(stage.seed, "compile", layer.name)):
        y = call(leaf.clone() if layer.traits.overwrites else leaf)
    put_back(layer.buffers, before)
    if y.requires_grad:
        with seeded(seed_of(stage.seed, "gradient", layer.name)):
            grad = torch.randn(y.shape, dtype=y.dtype).to(y.device)
        with using(slot):
            if slot is not None:
                slot.split = True
            y.backward(grad)  # type: ignore[no-untyped-call]
            if slot is not None:
                slot.run()
    grads = {} if leaf.grad is None else {"input": leaf.grad}
    grads |= {name: p.grad for name, p in layer.module.named_parameters() if p.grad is not None}
    _drop(stage)
    return _Ran(y, grads)


def _whole(stage: Stage, x: Tensor, slot: Slot | None) -> None:
    y, tape = stage.forward(x.detach().requires_grad_(x.requires_grad), 0, 0, stage.fit, slot)
    if slot is not None:
        slot.split = True
    with using(slot):
        tape.backward(torch.ones_like(y))
    if slot is not None:
        slot.run()


def _hold(layer: Layer, plain: _Ran, found: _Ran, dtype: str, way: str) -> None:
    """Raise E511 unless both are the same up to rounding."""
    share, floor = TOLERANCE[dtype]
    wrong = [] if _error(plain.output, found.output, 0.0) <= share else ["its output"]
    if plain.output.dtype is not found.output.dtype or plain.output.requires_grad is not found.output.requires_grad:
        wrong = ["its output"]
    least = floor * max((_norm(grad) for grad in plain.grads.values()), default=0.0)
    for name in sorted(plain.grads.keys() | found.grads.keys()):
        one, other = plain.grads.get(name), found.grads.get(name)
        if one is None or other is None or not _error(one, other, least) <= share:
            wrong.append(f"the gradient of {name}" if name != "input" else "the gradient of its input")
    if wrong:
        text = f"model: layer {layer.name} compiled ({way}) is not what it is uncompiled: {', '.join(wrong[:4])} differ"
        hint = "set model.compile = false and plan again, or take what torch compiles wrongly out of the layer"
        raise ZbcError("E511", text if len(wrong) > 1 else f"{text}s", hint=hint)


def _error(plain: Tensor, found: Tensor, least: float) -> float:
    """The norm of the difference as a share of that of `plain`, or of `least` if that is more."""
    if plain.shape != found.shape:
        return float("inf")
    one, other = _wide(plain), _wide(found)
    if torch.equal(one.isfinite(), other.isfinite()):  # what a layer makes of numbers it was not meant for
        one, other = one[one.isfinite()], other[one.isfinite()]
    distance = _norm(one - other)
    return distance / max(_norm(one), least) if distance else 0.0


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)).item())


def _wide(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached.to(torch.complex128)) if tensor.is_complex() else detached.double()
