"""Which layers of a user can run in slices of a sequence, and whether a loss can: tried with made-up numbers.

A layer can if it treats every token alone, or mixes tokens through `zbc.attention` only. So it is run on a short
sequence as a whole and in slices; outputs and the gradients of inputs have to agree. Layers between which several
tensors pass are tried together. Weights are initial ones and noise on top: what begins at 0 would hide what it mixes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.userobject import FAILURES
from zbc.runtime.core.private import Dropouts
from zbc.runtime.core.route import slice_loss, stage_loss
from zbc.runtime.core.stage import Stage, StageLayer
from zbc.runtime.core.tensors import Loss, TensorSpec
from zbc.runtime.features.added import Adding, adding_to
from zbc.runtime.features.slicing import Inside, Part, Pasts, share_of, within
from zbc.runtime.seeding import seed_of, seeded
from zbc.training import frames
from zbc.training.models.model import LayerPlan
from zbc.training.probing.compare import apart
from zbc.training.probing.shapes import Shapes, with_values

TOKENS = 48  # of the made-up sequence, if the layers take one that short
NOISE = 0.05
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the largest number; of others 5e-2
ONE_SLICE = "or set schedule.slices = 1"
_HINT = f"mix tokens through zbc.attention(q, k, v) only, which is causal, {ONE_SLICE}"
_Tensors = tuple[Tensor, ...]


def try_layers(
    plans: Sequence[LayerPlan],
    stages: Iterable[Stage],
    shapes: Shapes,
    parts: Sequence[Part],
    lowered: torch.dtype | None,
) -> None:
    """Raise E512 for a layer of these stages that does not do in slices what it does as a whole; `plans` are all
    layers."""
    mine = {layer.name: layer for stage in stages for layer in stage.layers}
    known = set[object]()
    for group in groups_of(plans, shapes):
        held = [mine[plan.name] for plan in group if plan.name in mine]
        if not held:
            continue
        for layer in held:
            _refuse_memory(layer)
        what = shapes.before[group[0].name], tuple(map(_signature, held)) if len(held) == len(group) else group[0].name
        if what in known:
            continue
        known.add(what)
        # What layers add to the loss is of each slice, as of each microbatch; it need not be that of the whole.
        with seeded(seed_of("slices")), adding_to(Adding(0.0)):
            modules = [(plan.name, made_noisy(with_values(plan, lowered))) for plan in group]
            _try(modules, shapes.before[group[0].name].spec, parts)


def groups_of(plans: Sequence[LayerPlan], shapes: Shapes) -> Iterator[list[LayerPlan]]:
    """Neighbours between which several tensors pass, together."""
    group: list[LayerPlan] = []
    for plan in plans:
        group.append(plan)
        if shapes.packed[plan.name][1] is None:
            yield group
            group = []


def _refuse_memory(layer: StageLayer) -> None:
    names = (*layer.traits.remembers, *layer.traits.carries)
    if names:
        text = f"model: layer {layer.name} changes {names[0]} in its forward, which runs once for every slice"
        raise ZbcError("E512", text, hint=f"use a layer that keeps nothing of its forwards, {ONE_SLICE}")


def _signature(layer: StageLayer) -> str:
    """Layers with the same one differ in their weights only."""
    inner = [
        (path, type(module), {key: repr(value) for key, value in vars(module).items() if not key.startswith("_")})
        for path, module in layer.module.named_modules()
    ]
    sizes = [(name, tuple(p.shape), p.dtype) for name, p in layer.module.named_parameters()]
    return repr((inner, sizes))


def made_noisy(module: nn.Module) -> nn.Module:
    """Without dropout, and with weights that hide nothing."""
    for inner in module.modules():
        if isinstance(inner, Dropouts):
            inner.p = 0.0
        for name in ("dropout", "dropout_p"):
            if isinstance(getattr(inner, name, None), int | float):
                setattr(inner, name, 0.0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return module


# ---- layers --------------------------------------------------------------------------------------------------


def _try(modules: list[tuple[str, nn.Module]], takes: TensorSpec, parts: Sequence[Part]) -> None:
    """On a short sequence, or on one as long as in training if the layers take no other."""
    length, names = parts[-1].length, modules[-1][0]
    short = _cut(min(TOKENS, length))
    try:
        found, wanted = _both(modules, takes, short)
    except ZbcError:
        raise
    except FAILURES:
        try:
            found, wanted = _both(modules, takes, parts)
        except ZbcError:
            raise
        except FAILURES as error:
            text = f"model: layer {names} cannot run in slices of a sequence of {length} tokens"
            details = [f"{type(error).__name__}: {error}", *(frames.of_error(error) if frames.of_users(error) else ())]
            raise ZbcError("E512", text, hint=_HINT, details=details) from error
    for (what, one), (_, other) in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            text = f"{what}: of shape {list(one.shape)} in slices, {list(other.shape)} as a whole"
            raise ZbcError("E512", f"model: layer {text}", hint=_HINT)
        far = apart(other, one)
        if not far <= TOLERANCE.get(other.dtype, 5e-2):
            row = _first_row(one, other)
            text = f"model: layer {what} (they differ by {far:.2g} of the largest, from token {row} on)"
            raise ZbcError("E512", text, hint=_HINT)


def _cut(length: int) -> list[Part]:
    """Three slices of unequal length, if there are three tokens."""
    places = sorted({0, 5 * length // 12, 2 * length // 3, length})
    return [Part(number, start, stop, length) for number, (start, stop) in enumerate(pairwise(places))]


Named = list[tuple[str, Tensor]]  # what it is, and the tensor, whose first dimension is the tokens


def _both(modules: list[tuple[str, nn.Module]], takes: TensorSpec, parts: Sequence[Part]) -> tuple[Named, Named]:
    """What comes out in slices, and as a whole: outputs of all layers, then the gradient of the input."""
    length = parts[-1].length
    shape = (takes.shape[0], length, *takes.shape[2:])
    drawn = takes.dtype.is_floating_point or takes.dtype.is_complex
    x = torch.randn(shape, dtype=takes.dtype) if drawn else torch.randint(0, 2, shape).to(takes.dtype)
    leaf = x.clone().requires_grad_(drawn)
    whole = forward_of(modules, leaf, None)
    if not torch.equal(whole[-1][-1], forward_of(modules, leaf, None)[-1][-1]):
        return [], []  # it draws random numbers, and nobody can tell what is what
    grad = torch.randn(whole[-1][-1].shape, dtype=whole[-1][-1].dtype)
    pasts: Pasts = {}
    leaves = [part.of(x).clone().requires_grad_(drawn) for part in parts]
    cut = [forward_of(modules, one, Inside(part, pasts)) for one, part in zip(leaves, parts, strict=True)]
    found, wanted = Named(), Named()
    for index, (name, _) in enumerate(modules):
        for place, output in enumerate(whole[index]):
            along = 1 if output.dim() > 1 and output.shape[1] == length else 0
            if output.shape[along : along + 1] != (length,):
                if index == len(modules) - 1:
                    text = f"model: layer {name} returns {TensorSpec.of(output)} for {length} tokens: none for each"
                    raise ZbcError("E512", text, hint=_HINT)
                continue
            what = f"{name} mixes tokens of different slices"
            joined = torch.cat([one[index][place].detach() for one in cut], along)
            found.append((what, joined.movedim(along, 0)))
            wanted.append((what, output.detach().movedim(along, 0)))
    if drawn and whole[-1][-1].requires_grad:
        whole[-1][-1].backward(grad)  # type: ignore[no-untyped-call]
        for part, one in reversed([*zip(parts, cut, strict=True)]):
            one[-1][-1].backward(part.of(grad))  # type: ignore[no-untyped-call]
        what = f"{modules[-1][0]} mixes tokens of different slices in its backward"
        found.append((what, torch.cat([_gradient(one) for one in leaves], 1).movedim(1, 0)))
        wanted.append((what, _gradient(leaf).movedim(1, 0)))
    return found, wanted


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def forward_of(modules: list[tuple[str, nn.Module]], x: Tensor, inside: Inside | None) -> list[_Tensors]:
    """What each layer returns."""
    given: _Tensors = (x,)
    found = []
    for name, module in modules:
        with nullcontext() if inside is None else within(Inside(inside.part, inside.pasts, name)):
            y: Any = module(*given)
        given = y if isinstance(y, tuple) else (y,)
        found.append(given)
    return found


def _first_row(one: Tensor, other: Tensor) -> int:
    """The first token whose numbers are others; the tensors' first dimension is the tokens."""
    for row, (a, b) in enumerate(zip(one, other, strict=True)):
        if not apart(b, a) <= TOLERANCE.get(b.dtype, 5e-2):
            return row
    return 0


# ---- the loss ------------------------------------------------------------------------------------------------


def try_loss(name: str, loss: Loss, output: TensorSpec, targets: Tensor) -> None:
    """Raise E513 if what the slices of a microbatch add is not its loss; `targets` (samples, length, ..) are real ones,
    of which some tokens are taken, from all of the sequence."""
    places = torch.linspace(0, targets.shape[1] - 1, min(TOKENS, targets.shape[1])).round().long()
    target = targets[:, places]
    with seeded(seed_of("slices")):
        made = torch.randn((len(target), len(places), *output.shape[2:]), dtype=output.dtype).requires_grad_()
    whole = stage_loss(loss, target, made)
    added = torch.zeros(())
    for part in _cut(len(places)):
        added = added + slice_loss(loss, part.of(target), share_of(target, part), part.of(made))
    losses, inputs = (whole, added), functools.partial(torch.autograd.grad, inputs=made, allow_unused=True)
    wanted, found = ((inputs(one)[0] if one.requires_grad else None) for one in losses)
    same = whole.isnan() and added.isnan()
    if not same and not (apart(whole, added) <= 1e-3 and apart(wanted, found) <= 1e-3):
        text = f"model: {name} is no mean over tokens: a microbatch has {whole.item():.6g}, its slices have"
        text += f" {added.item():.6g} in sum"
        hint = "return the mean over all tokens whose target is not -100, each token's part its own"
        raise ZbcError("E513", text, hint=f"{hint}, {ONE_SLICE}")


def refuse_others(name: str, what: str, found: Tensor, length: int) -> None:
    """Raise E110 for samples (a batch of them) that are no sequences of so many tokens; `what`: inputs or targets."""
    if found.dim() < 2 or found.shape[1] != length:
        one = TensorSpec(tuple(found.shape[1:]), found.dtype)
        text = f"config: schedule.slices cuts sequences of {length} tokens, and {what} of {name} are {one} each"
        raise ZbcError("E110", text, hint="set schedule.slices = 1")
