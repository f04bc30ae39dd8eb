"""Trials with random numbers whether a user's layers and loss can run on slices of a sequence, or on packed rows.

A layer can if it treats every token separately, or mixes tokens through `zbc.attention` only. So it runs on a short
sequence as a whole and in slices; outputs and the gradients of inputs have to agree. Or it runs on a row of two
samples, and once more with one of them replaced: the output for the other one has to stay the same. Weights are initial
ones plus noise, since weights that start at 0 would hide mixing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.userobject import FAILURES
from zbc.runtime.core.bundle import call, names_of
from zbc.runtime.core.private import Dropouts
from zbc.runtime.core.route import slice_loss, stage_loss
from zbc.runtime.core.stage import Stage, StageLayer
from zbc.runtime.core.tensors import Loss, Part, TensorSpec, share_of
from zbc.runtime.features.added import Adding, adding_to
from zbc.runtime.features.packing import packed
from zbc.runtime.features.slices.slicing import Inside, Pasts, within
from zbc.runtime.seeding import seed_of, seeded
from zbc.training import frames
from zbc.training.building.context import Site
from zbc.training.models.shared_words import trunk
from zbc.training.probing.shapes import with_values
from zbc.training.probing.trials import INPUT, OUTPUT, Changed, alike, apart, there_and_back, unmoved
from zbc.training.profiling.alike import chain, kinds

TOKENS = 48  # of the random sequence, if the layers accept one that short
NOISE = 0.05
ONE_SLICE = "or set schedule.slices = 1"
_ONLY = "mix tokens through zbc.attention(q, k, v) only, which is causal"
_HINT = f"{_ONLY}, {ONE_SLICE}"
_MEAN = "return the mean over all tokens whose target is not -100"
_ROWS = f'{_ONLY}, or set data.balance = "none"'


class _Together(nn.ModuleList):
    """Layers one after the other, as one."""

    def __init__(self, names: Sequence[str], layers: Iterable[nn.Module]) -> None:
        super().__init__(layers)
        self.name = " to ".join(dict.fromkeys((names[0], names[-1])))

    def forward(self, x: Tensor) -> Tensor:
        given: Any = x
        for index, layer in enumerate(self, 1):
            given = call(layer, given, names_of(layer.forward), later=frozenset() if index == len(self) else None)
        made: Tensor = given
        return made


def try_layers(site: Site, stages: Iterable[Stage]) -> None:
    """Raises E512 for a layer of these stages whose results in slices differ from those on the whole; ranks that share
    the tokens of rows need the same of it."""
    layers = _layers(stages)
    for layer in layers:
        if names := (*layer.traits.remembers, *layer.traits.carries):
            text = f"model: layer {layer.name} changes {names[0]} in its forward, which runs once for every slice"
            raise ZbcError("E512", text, hint=f"use a layer that keeps nothing of its forwards, {ONE_SLICE}")
    parts = site.slices or _cut(site.settings.model.seq_len or TOKENS)
    _try_each(site, layers, "slices", functools.partial(_try, parts=parts))


def try_padded(site: Site, stages: Iterable[Stage]) -> None:
    """Raises E512 for a layer of these stages in which the rows of a microbatch, of which some are padding, mix."""
    layers = _layers(stages)
    if seeing := [layer.name for layer in layers if layer.traits.remembers]:
        raise _padded(seeing[0], "keeps a buffer of all rows")
    _try_each(site, layers, "padding", _try_padded)


def try_packed(site: Site, stages: Iterable[Stage], *, behind: bool = False) -> None:
    """Raises E512 for a layer of these stages that mixes samples of one row; `behind`: only if one gets at what stands
    behind it."""
    _try_each(site, _layers(stages), "rows", functools.partial(_try_rows, behind=behind))


def _layers(stages: Iterable[Stage]) -> list[StageLayer]:
    return [layer for stage in stages for layer in stage.layers]


def _try_each(
    site: Site, layers: Iterable[StageLayer], what: str, attempt: Callable[[_Together, TensorSpec], None]
) -> None:
    """Tries these layers, each kind once. Layers with several tensors between them are tried together, one of each kind
    of them, on the ranks that have the last one."""
    mine, known = {layer.name for layer in layers}, set[object]()
    plans = site.layers if site.manifest.vocabulary is None else trunk(site.layers)
    inputs = [(site.shapes.before[plan.name], site.shapes.packed[plan.name][0]) for plan in plans]
    order, start = kinds(plans, inputs), 0
    for stop, plan in enumerate(plans, 1):
        if site.shapes.packed[plan.name][1] is None:
            kept = [start + i for i in chain(order[start:stop], inputs[start:stop])]
            same = tuple(order[i] for i in kept)
            if plan.name in mine and same not in known:
                known.add(same)
                # Auxiliary losses are per slice, as per microbatch; they need not equal those of the whole.
                with seeded(seed_of(what)), adding_to(Adding(0.0)):
                    modules = [_made_noisy(with_values(plans[i], site.settings.lowered)) for i in kept]
                    attempt(_Together([plans[i].name for i in kept], modules), inputs[start][0].spec)
            start = stop


def _made_noisy(module: nn.Module) -> nn.Module:
    """Disables dropout, and adds noise to the weights."""
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


def _try(layers: _Together, takes: TensorSpec, parts: Sequence[Part]) -> None:
    """Tries a short sequence, or one as long as in training if the layers accept no other."""
    length, name = parts[-1].length, layers.name
    for tried in (_cut(min(TOKENS, length)), parts):
        try:
            found = _both(layers, takes, tried)
            break
        except ZbcError:
            raise
        except FAILURES as error:
            if tried is parts:
                text = f"model: layer {name} cannot run in slices of a sequence of {length} tokens"
                raise ZbcError("E512", text, hint=_HINT, details=frames.raised(error)) from error
    for what, sliced, other in found:
        if sliced.shape != other.shape:
            text = f"{name} {what}: of shape {list(sliced.shape)} in slices, {list(other.shape)} as a whole"
            raise ZbcError("E512", f"model: layer {text}", hint=_HINT)
        if not alike(other, sliced):
            row = next((n for n, (a, b) in enumerate(zip(other, sliced, strict=True)) if not alike(a, b)), 0)
            far = f"{apart(other, sliced):.2g}"
            text = f"model: layer {name} {what} (they differ by {far} of the largest, from token {row} on)"
            raise ZbcError("E512", text, hint=_HINT)


def _cut(length: int) -> list[Part]:
    """Three slices of unequal length, if there are enough tokens."""
    places = sorted({0, 5 * length // 12, 2 * length // 3, length})
    return [Part(number, start, stop, length) for number, (start, stop) in enumerate(pairwise(places))]


def _both(layers: _Together, takes: TensorSpec, parts: Sequence[Part]) -> list[tuple[str, Tensor, Tensor]]:
    """The output and the gradient of the input, in slices and as a whole, tokens first, each behind what it means if
    they differ."""
    length, pasts = parts[-1].length, Pasts()
    x = takes._replace(shape=(takes.shape[0], length, *takes.shape[2:])).drawn(below=2)
    with torch.no_grad():
        y, again = (layers(x.clone()) for _ in range(2))
    if not torch.equal(y, again):
        return []  # it draws random numbers: results cannot be compared
    along = 1 if y.dim() > 1 and y.shape[1] == length else 0
    if y.shape[along : along + 1] != (length,):
        raise _none_for_each(layers.name, y, length, _HINT)

    def in_slices(leaf: Tensor) -> Tensor:  # autograd runs the backward of the last slice first
        cut = list[Tensor]()
        for part in parts:
            with within(Inside(part, pasts)):
                cut.append(layers(part.of(leaf).clone()))
        return torch.cat(cut, along)

    x, grad = x.requires_grad_(takes.numbers), TensorSpec.of(y).drawn(below=2)
    wanted = there_and_back(layers, lambda leaf: layers(leaf.clone()), x, lambda _: grad)
    found = there_and_back(layers, in_slices, x, lambda _: grad)
    nothing, mixes = torch.zeros_like(x), "mixes tokens of different slices"
    return [
        (what, found.get(key, nothing).movedim(at, 0), wanted.get(key, nothing).movedim(at, 0))
        for what, key, at in ((mixes, OUTPUT, along), (f"{mixes} in its backward", INPUT, 1))
    ]


def _none_for_each(name: str, output: Tensor, length: int, hint: str) -> ZbcError:
    text = f"model: layer {name} returns {TensorSpec.of(output)} for {length} tokens: none for each"
    return ZbcError("E512", text, hint=hint)


def _try_rows(layers: _Together, takes: TensorSpec, *, behind: bool) -> None:
    name, length = layers.name, takes.shape[1]
    cut = max(1, length // 3)
    ends = ((cut, length - cut) if length > 1 else (1,),) * takes.shape[0]

    def run(x: Tensor) -> Tensor:
        try:
            with packed(None if behind else ends):
                y: Tensor = layers(x)
        except FAILURES as error:
            text = f"model: layer {name} cannot run on rows of several samples"
            raise ZbcError("E512", text, hint=_ROWS, details=frames.raised(error)) from error
        if length > 1 and (y.dim() < 2 or y.shape[1] != length):
            raise _none_for_each(name, y, length, _ROWS)
        return y

    x, other = _two(takes)
    changed: list[Changed] = [(torch.cat([x[:, :cut], other[:, cut:]], 1), lambda y: y[:, :cut])]
    if not behind:
        changed.append((torch.cat([other[:, :cut], x[:, cut:]], 1), lambda y: y[:, cut:]))
    if not unmoved(run, x, changed if length > 1 else []):
        text = "tokens see what stands behind them" if behind else "samples of one row see each other"
        raise ZbcError("E512", f"model: in layer {name} {text}", hint=_ROWS)


def _try_padded(layers: _Together, takes: TensorSpec) -> None:
    x, other = _two(takes)
    changed: Changed = torch.cat([x[:-1], other[-1:]]), lambda y: y[:-1] if y.dim() and len(y) == len(x) else None
    if not unmoved(layers, x, [changed]):
        raise _padded(layers.name, "mixes the rows of a microbatch")


def _two(takes: TensorSpec) -> tuple[Tensor, Tensor]:
    """Two inputs that differ everywhere."""
    x = takes.drawn(below=2)
    return x, takes.drawn() if takes.numbers else 1 - x


def _padded(name: str, what: str) -> ZbcError:
    hint = "norms over features instead of batches, schedule.microbatch_size = 1, or no data.items"
    return ZbcError("E512", f"model: layer {name} {what}, some of which are padding", hint=hint)


# ---- the loss ------------------------------------------------------------------------------------------------


def try_loss(name: str, loss: Loss, output: TensorSpec, targets: Tensor) -> None:
    """Raises E513 if the losses of a microbatch's slices do not add up to its loss; `targets` (samples, length, ..)
    are real ones, of which some tokens from the whole sequence are used."""
    places = torch.linspace(0, targets.shape[1] - 1, min(TOKENS, targets.shape[1])).round().long()
    target = targets[:, places]
    with seeded(seed_of("slices")):
        made = torch.randn((len(target), len(places), *output.shape[2:]), dtype=output.dtype).requires_grad_()
    whole = stage_loss(loss, target, made)
    added = torch.zeros(())
    for part in _cut(len(places)):
        added = added + slice_loss(loss, part.of(target), share_of(target, part), part.of(made))
    losses, inputs = (whole, added), functools.partial(torch.autograd.grad, inputs=made, allow_unused=True)
    wanted, found = ((inputs(value)[0] if value.requires_grad else None) for value in losses)
    same = whole.isnan() and added.isnan()
    if not same and not (apart(whole, added) <= 1e-3 and apart(wanted, found) <= 1e-3):
        text = f"model: {name} is no mean over tokens: a microbatch has {whole.item():.6g}, its slices have"
        text += f" {added.item():.6g} in sum"
        raise ZbcError("E513", text, hint=f"{_MEAN}, each token's part its own, {ONE_SLICE}")


def try_padding(name: str, loss: Loss, output: TensorSpec, target: Tensor, padding: int) -> None:
    """Raises E513 for a loss in which targets of `padding` count; `target` (rows, tokens, ...) is a real one."""
    target = target.clone()
    half = max(1, target.shape[1] // 2)
    target[:, half:] = padding
    with seeded(seed_of("rows")):
        made = torch.randn((len(target), target.shape[1], *output.shape[2:]), dtype=output.dtype)
    try:
        whole, part = stage_loss(loss, target, made), stage_loss(loss, target[:, :half], made[:, :half])
    except FAILURES as error:
        text = f"model: {name} fails on rows with targets of {padding}, which stand for padding"
        hint = f"let it ignore {padding}, or give it an attribute count that does not count the target that it ignores"
        raise ZbcError("E513", text, hint=hint, details=frames.raised(error)) from error
    if not ((whole.isnan() and part.isnan()) or apart(whole, part) <= 1e-3):
        text = f"model: {name} is {whole.item():.6g} with padding behind the samples, {part.item():.6g} without"
        raise ZbcError("E513", text, hint=f'{_MEAN}, or set data.balance = "none"')


def refuse_others(name: str, what: str, found: Tensor, length: int) -> None:
    """Raises E110 for a batch of samples that are not sequences of `length` tokens; `what`: "inputs" or "targets"."""
    if found.dim() < 2 or found.shape[1] != length:
        spec = TensorSpec(tuple(found.shape[1:]), found.dtype)
        text = f"config: schedule.slices cuts sequences of {length} tokens, and {what} of {name} are {spec} each"
        raise ZbcError("E110", text, hint="set schedule.slices = 1")
