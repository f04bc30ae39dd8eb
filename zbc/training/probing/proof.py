"""Checks of compiled layers before training starts, on a microbatch of random numbers.

Each layer runs uncompiled and compiled, forward and backward, with a separate W if the plan has one. Outputs and the
gradients of input and parameters have to agree; otherwise the layer is refused by name. Weights, gradients, buffers and
random generators are left unchanged.
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
from zbc.runtime.seeding import seed_of, seeded
from zbc.training.models.compiled import first_line, not_compiled
from zbc.training.probing.trials import OUTPUT, apart, largest, there_and_back

# By dtype: the maximum relative distance (trials.py); and the share of the layer's largest gradient up to which
# differences of gradients count as rounding.
TOLERANCE = {"float32": (1e-4, 1e-6), "bfloat16": (5e-2, 5e-3), "float16": (5e-2, 5e-3)}


def prove(stage: Stage, dtype: str, *, splits: bool, tell: Callable[[str], None] = lambda text: None) -> None:
    """Compiles the layers of a stage that are to be compiled, and compares each with its uncompiled self.

    `tell` is called before each of them, since it takes long. Raises E509 for a layer that cannot be compiled or gives
    different results, E602 without a compiler.
    """
    if all(layer.compiled is None for layer in stage.layers):
        return
    with seeded(seed_of(stage.seed, "compile", stage.index)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # torch.compile reads it and warns
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by torch.compile's own code
        came = stage.came
        given = stage.takes.drawn(stage.device) if came is None else came.example(stage.device)
        x = stage.arrived(given).requires_grad_(stage.flows)
        last = max(index for index, layer in enumerate(stage.layers) if layer.compiled is not None)
        for layer in stage.layers[: last + 1]:
            plain = _run(stage, layer, layer.module, x, None)
            if layer.compiled is not None:
                tell(f"compiling {layer.name}")
                _hold(layer, plain, _compiled(stage, layer, x, None), dtype, "backward in one")
                if splits:
                    _hold(layer, plain, _compiled(stage, layer, x, Slot()), dtype, "B and W apart")
            x = plain[OUTPUT].detach().requires_grad_(plain[OUTPUT].requires_grad)


def _compiled(stage: Stage, layer: StageLayer, x: Tensor, slot: Slot | None) -> dict[str, Tensor]:
    """The results of the compiled layer for `x`. Raises E509 if other numbers make torch compile it again: every step
    would."""
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
        raise ZbcError("E509", text, hint=hint, details=[first_line(error)]) from error
    return found


def _run(
    stage: Stage, layer: StageLayer, call: Callable[[Tensor], Tensor], x: Tensor, slot: Slot | None
) -> dict[str, Tensor]:
    """One forward and backward of a layer, from its current buffers."""

    def forward(leaf: Tensor) -> Tensor:
        seed = seed_of(stage.seed, "compile", layer.name)
        with left_alone(layer.buffers), stage.autocast, seeded(seed, stage.device):
            return call(leaf.clone() if layer.traits.overwrites else leaf)

    def grad(y: Tensor) -> Tensor:
        with seeded(seed_of(stage.seed, "gradient", layer.name)):
            return TensorSpec.of(y).drawn(y.device)

    return there_and_back(layer.module, forward, x, grad, slot)


def _hold(layer: StageLayer, plain: dict[str, Tensor], found: dict[str, Tensor], dtype: str, way: str) -> None:
    """Raises E509 unless both are equal up to rounding."""
    share, floor = TOLERANCE[dtype]
    least = floor * max((largest(grad) for name, grad in plain.items() if name != OUTPUT), default=0.0)
    wrong = []
    for name in plain | found:
        expected, other = plain.get(name), found.get(name)
        alike = expected is not None and other is not None and expected.dtype is other.dtype
        if not alike or apart(expected, other, 0.0 if name == OUTPUT else least) > share:
            wrong.append(name)
    if wrong:
        text = f"model: layer {layer.name} compiled ({way}) is not what it is uncompiled: {', '.join(wrong[:4])} differ"
        hint = "set model.compile = false and plan again, or take what torch compiles wrongly out of the layer"
        raise ZbcError("E509", text if len(wrong) > 1 else f"{text}s", hint=hint)
