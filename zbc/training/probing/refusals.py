"""Layers that a plan cannot train as one process would, refused by name before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from zbc.errors import ZbcError
from zbc.ir import Key, Op
from zbc.plan.directory import Manifest
from zbc.runtime.core.stage import Stage, StageLayer


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
