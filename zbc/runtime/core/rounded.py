"""Steps of what is stored in bfloat16: moments (`optimizer.state`), and weights without masters (`model.parameters`).

A few parameters at a time are widened to the type of their gradients, stepped by the optimizer as it is, and rounded to
nearest. Each element's result depends on its own numbers alone: it is the same in a shard and in a tentative step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zbc.plan import dealing
from zbc.runtime.core.bucket import gradient_type

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # in the state of a parameter, of its shape
TYPES = {"float32": None, "bfloat16": torch.bfloat16}  # by optimizer.state; None: the type of the gradients


@torch.no_grad()
def step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, in parts if moments, `stored` in a group's type, or weights have another than gradients."""
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    grads = {p: p.grad for _, params in groups for p in params if p.grad is not None}
    if all(group["stored"] is None for group, _ in groups) and all(p.dtype == gradient_type(p) for p in grads):
        optimizer.step()
        return
    for parameter in grads:
        parameter.grad = None  # hooks after a part take it for one that stays
    for group, _ in groups:
        group["params"] = []
    for group, params in groups:
        stepped = [p for p in params if p in grads]
        for part in dealing.batches([p.numel() for p in stepped]):
            group["params"] = stepped[part.start : part.stop]
            _step(optimizer, {p: grads[p] for p in group["params"]}, group["stored"])
        group["params"] = []
    for group, params in groups:
        group["params"] = params
    for parameter, grad in grads.items():
        parameter.grad = grad


def _step(optimizer: torch.optim.Optimizer, grads: Mapping[nn.Parameter, Tensor], stored: torch.dtype | None) -> None:
    """Steps these parameters, which have no gradients after it."""
    before = [(p, p.data, _moments(optimizer.state[p])) for p in grads]
    for p, data, moments in before:
        p.data, p.grad = data.to(gradient_type(p)), grads[p]
        optimizer.state[p].update({key: value.to(gradient_type(p)) for key, value in moments.items()})
    optimizer.step()
    for p, data, moments in before:
        for key, value in _moments(state := optimizer.state[p]).items():
            state[key] = moments[key].copy_(value) if key in moments else value.to(_type(p, stored))
        p.data, p.grad = data if p.dtype == data.dtype else data.copy_(p.data), None


def _moments(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: state[key] for key in MOMENTS if state.get(key) is not None}


def _type(parameter: nn.Parameter, stored: torch.dtype | None) -> torch.dtype:
    return stored if stored is not None and parameter.is_floating_point() else gradient_type(parameter)


def load(optimizer: torch.optim.Optimizer, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
    """Overwrites the state. torch's own `load_state_dict` would cast all moments to the types of the weights."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for p in (p for p in group["params"] if p in states):
            for key, value in states[p].items():
                kind = value.dtype if key == "step" else _type(p, group["stored"] if key in MOMENTS else None)
                on_host = key == "step" and not group.get("fused")
                optimizer.state[p][key] = value if on_host else value.to(p.device, kind)
