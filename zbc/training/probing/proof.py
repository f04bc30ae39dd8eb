"""Is a compiled layer the layer? Asked of each before training starts, on a microbatch of numbers drawn for it.

The layer runs as it is and compiled, forwards and backwards, with W apart where the plan has it apart. Outputs and the
gradients of input and parameters have to agree; a layer of which they do not is refused by name. Weights, gradients,
buffers and random generators are left as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.core.remembered import left_alone
from zbc.runtime.core.slot import Slot
from zbc.runtime.core.stage import Stage, StageLayer
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.seeding import drawing, seed_of, seeded
from zbc.training.models.compiled import first_line, not_compiled
from zbc.training.probing.contract import OUTPUT, apart, largest, there_and_back

# By dtype: how far two tensors may be apart, as a share of the largest number; and the share of the layer's largest
# gradient up to which differences of gradients are rounding.
TOLERANCE = {"float32": (1e-4, 1e-6), "bfloat16": (5e-2, 5e-3)}


def prove(stage: Stage, dtype: str, *, splits: bool, tell: Callable[[str], None] = lambda text: None) -> None:
    """Compile the layers of a stage that are to be compiled, and hold each against itself.

    `tell` is told before each of them, since it takes long. Raises E511 for a layer that cannot be compiled or comes
    out different, E617 without a compiler.
    """
    if all(layer.compiled is None for layer in stage.layers):
        return
    with seeded(seed_of(stage.seed, "compile", stage.index)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch.compile looks, and warns
        warnings.simplefilter("ignore", DeprecationWarning)  # of what it does itself
        came = stage.came
        given = stage.takes.drawn(stage.device) if came is None else came.example(stage.device)
        x = stage.arrived(given).requires_grad_(stage.flows)
        for layer in stage.layers:
            plain = _run(stage, layer, layer.module, x, None)
            if layer.compiled is not None:
                tell(f"compiling {layer.name}")
                _hold(layer, plain, _compiled(stage, layer, x, None), dtype, "backward in one")
                if splits:
                    _hold(layer, plain, _compiled(stage, layer, x, Slot()), dtype, "B and W apart")
            x = plain[OUTPUT].detach().requires_grad_(plain[OUTPUT].requires_grad)


def _compiled(stage: Stage, layer: StageLayer, x: Tensor, slot: Slot | None) -> dict[str, Tensor]:
    """What the compiled layer makes of `x`. Raises E511 if it is compiled again for other numbers: it would be all the
    time."""
    try:
        found = _run(stage, layer, layer.call, x, slot)
    except ZbcError:
        raise
    except Exception as error:
        raise not_compiled(layer.name, error) from error
    other = x.detach() * 1.25 if x.is_floating_point() or x.is_complex() else x.detach()
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            _run(stage, layer, layer.call, other.requires_grad_(x.requires_grad), slot)
    except RuntimeError as error:
        text = f"model: layer {layer.name} depends on its data: torch compiles it again for other numbers"
        hint = "set model.compile = false and plan again, or take what looks at values (item) out of its forward"
        raise ZbcError("E511", text, hint=hint, details=[first_line(error)]) from error
    return found


def _run(
    stage: Stage, layer: StageLayer, call: Callable[[Tensor], Tensor], x: Tensor, slot: Slot | None
) -> dict[str, Tensor]:
    """One forward and backward of a layer, of the buffers it has now."""

    def forward(leaf: Tensor) -> Tensor:
        seed = seed_of(stage.seed, "compile", layer.name)
        with left_alone(layer.buffers), stage.autocast, drawing(stage.device, seed):
            return call(leaf.clone() if layer.traits.overwrites else leaf)

    def grad(y: Tensor) -> Tensor:
        with seeded(seed_of(stage.seed, "gradient", layer.name)):
            return TensorSpec.of(y).drawn(y.device)

    return there_and_back(layer.module, forward, x, grad, slot)


def _hold(layer: StageLayer, plain: dict[str, Tensor], found: dict[str, Tensor], dtype: str, way: str) -> None:
    """Raise E511 unless both are the same up to rounding."""
    share, floor = TOLERANCE[dtype]
    least = floor * max((largest(grad) for name, grad in plain.items() if name != OUTPUT), default=0.0)
    wrong = []
    for name in plain | found:
        one, other = plain.get(name), found.get(name)
        alike = one is not None and other is not None and one.dtype is other.dtype
        if not alike or apart(one, other, 0.0 if name == OUTPUT else least) > share:
            wrong.append(name)
    if wrong:
        text = f"model: layer {layer.name} compiled ({way}) is not what it is uncompiled: {', '.join(wrong[:4])} differ"
        hint = "set model.compile = false and plan again, or take what torch compiles wrongly out of the layer"
        raise ZbcError("E511", text if len(wrong) > 1 else f"{text}s", hint=hint)
