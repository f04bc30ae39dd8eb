"""Adapters (LoRA) of linear layers, and modules that train whole; all else is frozen: see zbc/job/adapter.py.

A linear layer keeps its name, and gets modules inside of it:

    layers.3.qkv.weight                         frozen
    layers.3.qkv.lora.q_proj.down.weight        (rank, inputs), drawn as nn.Linear draws it
    layers.3.qkv.lora.q_proj.up.weight          (outputs of q_proj, rank), 0 at first

A stack of experts' weights has them for each expert, `lora.stacked`, as stacks: down (E, rank, inputs), up (E, outputs,
rank).

`down` and `up` are linear layers like others: their W is deferred, they are cast once per step, and sharded with tensor
parallelism. B of the frozen layer is its input gradient only, and its F saves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError, raise_all
from zbc.job import hfmodel
from zbc.job.adapter import Adapter, Part, ends, parts, stack, unknown, whole
from zbc.job.spec import Model
from zbc.runtime.core.again import remade_of
from zbc.runtime.core.feature import Feature
from zbc.runtime.core.grouped import Groups
from zbc.runtime.core.split import GroupedLinear, SplitLinear, plain
from zbc.runtime.core.stage import Stage
from zbc.training.models.model import LayerPlan

STACKED = "stacked"  # the name of an adapter of a stack


class Lora(nn.Module):
    """`up(scale * down(drop(x)))`, for a part of a linear layer's outputs; or for the rows of each in a stack."""

    def __init__(self, of: nn.Linear | GroupedLinear, outputs: int, rank: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout  # by this name forwards are known to draw random numbers
        made: Any = partial(nn.Linear, device=of.weight.device, dtype=of.weight.dtype)  # with the same draws as peft
        if isinstance(of, GroupedLinear):
            made = partial(GroupedLinear, len(of.weight), like=of.weight)
        self.down, self.up = made(of.in_features, rank, bias=False), made(rank, outputs, bias=False)
        for matrix in self.down.weight.unbind() if isinstance(of, GroupedLinear) else ():
            nn.init.kaiming_uniform_(matrix, a=5**0.5)  # as nn.Linear
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor, scale: float, *groups: Groups) -> Tensor:
        inside = self.down(nn.functional.dropout(x, self.dropout, self.training) if self.dropout else x, *groups)
        return self.up(inside if scale == 1.0 else inside * scale, *groups)  # type: ignore[no-any-return]


class WithAdapters:
    """A frozen linear layer, or a stack of them, and adapters whose outputs are added to some of its own."""

    lora: nn.Module
    scale: float
    spans: tuple[tuple[str, int, int], ...]  # of each adapter its name, and the bounds of its outputs

    def pair(self, key: str) -> Lora:
        found: Lora = getattr(self.lora, key)
        return found

    @cached_property
    def frozen(self) -> SplitLinear:
        """The layer without adapters. Its cast is kept: the weight never changes."""
        return SplitLinear(self)  # type: ignore[arg-type]


class LoraLinear(WithAdapters, nn.Linear):
    untraced: Callable[[Tensor], Tensor] | None = None  # `frozen` for compiled code that splits its backward

    def forward(self, x: Tensor) -> Tensor:
        y, x = (self.untraced or self.frozen)(x), _cast(x)
        added, at = list[Tensor](), 0
        for key, start, stop in (*self.spans, ("", y.shape[-1], 0)):
            added += [y.new_zeros((*y.shape[:-1], start - at))] if at < start else []
            added += [self.pair(key)(x, self.scale)] if key else []
            at = stop
        return y + (added[0] if len(added) == 1 else torch.cat(added, -1))


class LoraStack(WithAdapters, GroupedLinear):
    """Beside the class of a frozen stack of linear layers: adapters of each."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        added: Tensor = self.pair(STACKED)(x, self.scale, groups)
        return self.frozen(x, groups) + added


def _cast(x: Tensor) -> Tensor:
    """The input of several layers, cast once to autocast's type."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype != torch.float32:
        return x
    low = x.to(torch.get_autocast_dtype(kind))
    if (remade := remade_of(x)) is not None:
        low._remade = remade  # type: ignore[attr-defined]
    return low


# ---- a model with adapters -----------------------------------------------------------------------------------


def adapted(plans: Sequence[LayerPlan], adapter: Adapter, model: Model) -> list[LayerPlan]:
    """The layers with adapters, all else frozen; layers of one kind remain of one kind if they have the same adapters.
    Raises E110 for targets that match nothing."""
    if not adapter.rank:
        return list(plans)
    found, kinds, names, others = list[LayerPlan](), dict[str, list[Any]](), list[list[str]](), list[tuple[str, ...]]()
    stacked = list[list[str]]()
    for plan in plans:
        layer = plan.on_meta()
        owners = [name.rpartition(".")[0] for name, _ in layer.named_parameters(remove_duplicate=False)]
        full = {path: f"{plan.name}.{path}".removesuffix(".") for path in owners}
        kept = [path for path, name in full.items() if whole(adapter, model, name)]
        linears = {path: one.out_features for path, one in _linears(layer) if path not in kept}
        grouped = {path: one.out_features for path, one in _stacks(layer)}
        others += [ends(model, name) for name in full.values()]
        stacked += [[full[path], stack(model, full[path])] for path in grouped]
        names += [[full[path], theirs] for path in linears if (theirs := hfmodel.called(model, full[path]))]
        spans = {path: parts(adapter, model, full[path], count) for path, count in linears.items()}
        spans |= {path: parts(adapter, model, full[path], count, stacked=True) for path, count in grouped.items()}
        like, has = plan.like, [kept, *((path, [part[1:] for part in some]) for path, some in spans.items())]
        if like is not None:
            known = kinds.setdefault(like, [])
            known += [] if has in known else [has]
            like += f" {known.index(has) + 1}" if known.index(has) else ""
        found.append(replace(plan, like=like, alter=partial(_adapt, adapter, spans, kept)))
    if not model.builtin:  # built-in ones were checked before (job/adapter.py)
        raise_all(unknown(adapter, names, others, stacked))
    return found


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers with torch's own forward, by their path in a layer; "" is the layer itself."""
    return [
        (path, module)
        for path, module in layer.named_modules()
        if isinstance(module, LoraLinear) or (type(module) is nn.Linear and plain(module))
    ]


def _stacks(layer: nn.Module) -> list[tuple[str, GroupedLinear]]:
    """The stacks of experts' weights, by their path in a layer."""
    found = [(path, module) for path, module in layer.named_modules() if isinstance(module, GroupedLinear)]
    return [(path, module) for path, module in found if ".lora." not in path]


def _adapt(adapter: Adapter, spans: Mapping[str, Sequence[Part]], kept: Sequence[str], layer: nn.Module) -> None:
    """Freezes a layer but for its modules `kept`, and adds its adapters, whose weights are drawn now, also if the layer
    got adapters before: when a user returns it twice, or in a trial."""
    linears, stacked = dict(_linears(layer)), dict(_stacks(layer))
    if not any(isinstance(one, WithAdapters) for one in (*linears.values(), *stacked.values())):
        layer.requires_grad_(False)
        for parameter in (p for path in kept for p in layer.get_submodule(path).parameters(recurse=False)):
            parameter.requires_grad_(True)
        layer.__dict__[_DIGEST] = _digest(layer)
    for path, some in spans.items():
        one: Any = stacked.get(path, linears.get(path))
        if some and path in stacked:
            kind: Any = type(one)
            one.__class__ = kind if issubclass(kind, LoraStack) else type(kind.__name__, (LoraStack, kind), {})
            one.spans, dropout = ((STACKED, 0, one.out_features),), 0.0
        elif some:
            one.__class__ = LoraLinear  # in place, so that all references get the adapters
            one.spans, dropout = tuple((part.key, part.start, part.stop) for part in some), adapter.dropout
        if some:
            one.lora, one.scale = nn.Module(), adapter.scale
            for key, start, stop in one.spans:
                one.lora.add_module(key, Lora(one, stop - start, adapter.rank, dropout))


# ---- frozen weights ------------------------------------------------------------------------------------------


_DIGEST = "_frozen_digest"


def _digest(layer: nn.Module) -> int:
    """A digest of all bits of its frozen parameters, independent of their order: a sum."""
    found = torch.zeros((), dtype=torch.int64)
    for parameter in (p.detach() for p in layer.parameters() if not (p.is_meta or p.requires_grad)):
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        for piece in torch.split(real.reshape(-1), 1 << 22):
            found += piece.view(torch.int16).sum(dtype=torch.int64)
    return int(found)


class Frozen(Feature):
    """Frozen weights are not in checkpoints: they are loaded from their source again, and checkpoints have a digest per
    layer. `trained`: the names of all other weights."""

    def __init__(self, stages: Mapping[int, Stage], trained: Collection[str]) -> None:
        self.trained = frozenset(trained)
        self._own = {
            s: {layer.name: torch.tensor(layer.module.__dict__.get(_DIGEST, 0)) for layer in stage.layers}
            for s, stage in stages.items()
        }
        self.kept = {s: {name: value.clone() for name, value in own.items()} for s, own in self._own.items()}

    def check(self) -> None:
        """Raises E613 if a checkpoint has the digest of other frozen weights."""
        for stage, own in self._own.items():
            for name, value in own.items():
                if not value.equal(self.kept[stage][name].cpu()):
                    text = f"run: the frozen weights of {name} are not those that the checkpoint's adapters are for"
                    raise ZbcError("E613", text, hint="resume with the model.pretrained that it began with")


# ---- files ---------------------------------------------------------------------------------------------------

_SIDES = {"down": "lora_A", "up": "lora_B"}
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(.*)")  # the name of an expert's weight in a stack


def _of_file(adapter: Adapter, model: Model, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Part]]:
    """The linear layer, the key and the part of each adapter among the parameters."""
    for name in parameters:
        linear, there, rest = name.partition(".lora.")
        if there and rest == f"{STACKED}.down.weight" and (expert := _EXPERT.fullmatch(linear)) is not None:
            outputs, (experts, number, own) = len(parameters[f"{linear}.weight"]), expert.groups()
            for part in parts(adapter, model, f"{experts}.{own}", outputs, stacked=True):
                yield linear, STACKED, part._replace(name=f"{part.name}.{number}")
        elif there and rest.endswith(".down.weight"):
            some = parts(adapter, model, linear, len(parameters[f"{linear}.weight"]))
            yield from ((linear, part.key, part) for part in some if f"{part.key}.down.weight" == rest)


def tensors_of(adapter: Adapter, model: Model, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters and whole modules that trained among the parameters, by the tensor names of peft, on the CPU."""
    owners = {name: whole(adapter, model, name.rpartition(".")[0]) for name in parameters}
    trained = {f"{there}.{name.rpartition('.')[2]}": parameters[name] for name, there in owners.items() if there}
    return {f"base_model.model.{name}": parameter.detach().cpu() for name, parameter in trained.items()} | {
        f"base_model.model.{part.name}.{theirs}.weight": parameters[f"{linear}.lora.{key}.{ours}.weight"].detach().cpu()
        for linear, key, part in _of_file(adapter, model, parameters)
        for ours, theirs in _SIDES.items()
    }


def merged(adapter: Adapter, model: Model, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters with adapters merged into the weights of their layers, in float32."""
    found = {name: p for name, p in parameters.items() if ".lora." not in name}
    for linear, key, part in _of_file(adapter, model, parameters):
        down, up = (parameters[f"{linear}.lora.{key}.{side}.weight"].detach().float() for side in _SIDES)
        whole = found[f"{linear}.weight"].detach().clone()
        rows = whole[part.start : part.stop]
        rows.copy_(rows.float() + adapter.scale * (up @ down))
        found[f"{linear}.weight"] = nn.Parameter(whole, requires_grad=False)
    return found
