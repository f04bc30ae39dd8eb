"""Layers that a plan cannot train as one process would, refused by name before training starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Op
from zbc.plan.directory import Manifest
from zbc.runtime.stage import Traits


def refuse_untrainable(name: str, layer: nn.Module) -> None:
    """Raise E509 for parameters that have no size yet and for what cannot be looked into."""
    for path, module in layer.named_modules():
        where = f"{name}.{path}" if path else name
        if isinstance(module, torch.jit.ScriptModule):
            text = f"model: layer {where} is TorchScript, of which nobody sees what its forward does"
            raise ZbcError("E509", text, hint="return the module that it was made from")
        if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
            text = f"model: layer {where} is lazy: its parameters have no size before its first forward"
            raise ZbcError("E509", text, hint="give the sizes to the constructor")


def refuse_hooks(manifest: Manifest, stage: int, layer: str, module: nn.Module) -> None:
    """Raise E509 if a hook sees accumulated gradients of a layer, and those are of one copy of its stage only."""
    if manifest.holders(stage) == 1:
        return
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            text = f"model: layer {layer} has a hook on the accumulated gradient of {name}, and several ranks hold a"
            text += f" copy of stage {stage}: each would see its own share"
            hint = "use register_hook, which sees the gradient of each microbatch, or a plan that has the stage once"
            raise ZbcError("E509", text, hint=hint)


def refuse_forwards(
    manifest: Manifest, ops: Sequence[Op], stage: int, layer: str, traits: Traits, *, recompute: bool
) -> None:
    """Raise E509 if what a layer keeps from one forward to the next would not be that of one process: in buffers, in
    attributes that its output follows, or in attributes that its backward needs."""
    order = [op.mb for op in ops if op.kind is Kind.F and op.stage == stage]
    ordered, copies = order == sorted(set(order)), manifest.holders(stage) > 1
    if traits.remembers and not (ordered and not copies):
        text = f"model: layer {layer} changes its buffer {traits.remembers[0]} in its forward, and "
        if copies:
            text += f"several ranks hold a copy of stage {stage}: each would keep other values"
        else:
            text += f"the plan does not run the forwards of stage {stage} in the order of the microbatches"
        hint = "use a layer without running statistics, as GroupNorm or LayerNorm, or track_running_stats=False"
        raise ZbcError("E509", text, hint=hint)
    why = _loses_track(manifest, recompute=recompute, ordered=ordered and not copies)
    if traits.carries and why is not None:
        names = ", ".join(traits.carries[:3])
        text = f"model: the output of layer {layer} depends on attributes that its forward changes ({names}), and {why}"
        hint = "keep such state in buffers (register_buffer), or use a plan where each forward runs once, in order"
        raise ZbcError("E509", text, hint=hint)
    if traits.mixes and overlaps(ops, stage):
        names = ", ".join(traits.mixes[:3])
        text = f"model: layer {layer} keeps what its output or its backward needs in attributes ({names}), and"
        text += f" forwards of other microbatches change them before the backward in stage {stage}"
        hint = "make such tensors in every forward; a torch.autograd.Function hands them on with ctx.save_for_backward"
        raise ZbcError("E509", text, hint=hint)


def _loses_track(manifest: Manifest, *, recompute: bool, ordered: bool) -> str | None:
    """Why attributes would not follow the forwards of a stage as in one process; None where they do."""
    training = manifest.training
    if recompute:
        return "recompute runs its forwards twice"
    if training.get("optimizer", {}).get("sync") == "post-validate":
        return "without the barrier forwards may run again"
    if not ordered:
        return "its forwards do not run in the order of the microbatches on one rank"
    return "checkpoints do not hold attributes" if training.get("checkpoint", {}).get("every", 0) else None


def overlaps(ops: Sequence[Op], stage: int) -> bool:
    """Whether a forward of a stage runs before everything of the one before it has been used."""
    waiting = set[Key]()
    for op in ops:
        if op.stage == stage and op.kind is Kind.F:
            if waiting:
                return True
            waiting.add(op.key)
        elif op.stage == stage and op.kind.makes_part:
            waiting.discard(op.key)
    return False
