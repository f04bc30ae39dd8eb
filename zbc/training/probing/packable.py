"""Which layers of a user keep the samples of a row apart, and whether a loss leaves out padding: tried with made-up
numbers.

A layer does if it treats every token alone, or mixes tokens through `zbc.attention` only. So it runs on a row of two
samples, of which one is another the second time: what comes out for the other one has to stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.userobject import FAILURES
from zbc.runtime.core.route import stage_loss
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.tensors import Loss, TensorSpec
from zbc.runtime.features.packing import packed
from zbc.runtime.features.words import IGNORED
from zbc.runtime.seeding import seed_of, seeded
from zbc.training import frames
from zbc.training.models.model import LayerPlan
from zbc.training.probing.compare import apart
from zbc.training.probing.shapes import Shapes, with_values
from zbc.training.probing.sliceable import TOLERANCE, forward_of, groups_of, made_noisy

_HINT = 'mix tokens through zbc.attention(q, k, v) only, which is causal, or set data.balance = "none"'


def try_packed(
    plans: Sequence[LayerPlan], stages: Iterable[Stage], shapes: Shapes, lowered: torch.dtype | None
) -> None:
    """Raise E512 for a layer of these stages in which samples of one row see each other; `plans` are all layers."""
    mine = {layer.name for stage in stages for layer in stage.layers}
    for group in groups_of(plans, shapes):
        if any(plan.name in mine for plan in group):
            with seeded(seed_of("rows")):
                modules = [(plan.name, made_noisy(with_values(plan, lowered))) for plan in group]
                _try(modules, shapes.before[group[0].name].spec)


def _try(modules: list[tuple[str, nn.Module]], takes: TensorSpec) -> None:
    name, length = modules[-1][0], takes.shape[1]
    cut = max(1, length // 3)
    ends = ((cut, length - cut),) * takes.shape[0] if length > 1 else ((1,),) * takes.shape[0]
    drawn = takes.dtype.is_floating_point or takes.dtype.is_complex
    one, other = (
        torch.randn(takes.shape, dtype=takes.dtype) if drawn else torch.randint(0, 2, takes.shape).to(takes.dtype)
        for _ in range(2)
    )
    if not drawn:
        other = 1 - one
    try:
        with packed(ends), torch.no_grad():
            whole = forward_of(modules, one, None)[-1][-1]
            if length == 1 or not torch.equal(whole, forward_of(modules, one, None)[-1][-1]):
                return  # it draws random numbers, and nobody can tell what is what
            first = forward_of(modules, torch.cat([other[:, :cut], one[:, cut:]], 1), None)[-1][-1]
            second = forward_of(modules, torch.cat([one[:, :cut], other[:, cut:]], 1), None)[-1][-1]
    except FAILURES as error:
        text = f"model: layer {name} cannot run on rows of several samples"
        details = [f"{type(error).__name__}: {error}", *(frames.of_error(error) if frames.of_users(error) else ())]
        raise ZbcError("E512", text, hint=_HINT, details=details) from error
    if whole.dim() < 2 or whole.shape[1] != length:
        text = f"model: layer {name} returns {TensorSpec.of(whole)} for {length} tokens: none for each"
        raise ZbcError("E512", text, hint=_HINT)
    near = TOLERANCE.get(whole.dtype, 5e-2)
    if not (apart(whole[:, cut:], first[:, cut:]) <= near and apart(whole[:, :cut], second[:, :cut]) <= near):
        raise ZbcError("E512", f"model: in layer {name} samples of one row see each other", hint=_HINT)


def try_padding(name: str, loss: Loss, output: TensorSpec, target: Tensor) -> None:
    """Raise E513 for a loss in which targets of padding count; `target` (rows, tokens, ...) is a real one."""
    target = target.clone()
    half = max(1, target.shape[1] // 2)
    target[:, half:] = IGNORED
    with seeded(seed_of("rows")):
        made = torch.randn((len(target), target.shape[1], *output.shape[2:]), dtype=output.dtype)
    whole, part = stage_loss(loss, target, made), stage_loss(loss, target[:, :half], made[:, :half])
    if not ((whole.isnan() and part.isnan()) or apart(whole, part) <= 1e-3):
        text = f"model: {name} is {whole.item():.6g} with padding behind the samples, {part.item():.6g} without"
        hint = 'return the mean over all tokens whose target is not -100, or set data.balance = "none"'
        raise ZbcError("E513", text, hint=hint)
