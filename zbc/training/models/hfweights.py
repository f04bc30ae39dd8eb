"""Weights of a model of transformers from a folder, layer by layer, and back.

transformers itself knows the names in a folder, and which of its tensors make a weight: the renamings and operations of
its loader are applied to the tensors of a layer alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from zbc.errors import ZbcError
from zbc.job.hffolder import opened, refuse, tensor_files
from zbc.job.spec import Model
from zbc.runtime.core.private import valued
from zbc.training.models.model import LayerPlan
from zbc.training.models.pretrained import misfit
from zbc.training.models.transformers import TakenApart, apart, layers

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def fill(plans: Sequence[LayerPlan], model: Model, folder: Path) -> list[LayerPlan]:
    """The layers with the weights of `folder`, which are read when they are built. Raises E520."""
    weights = Weights(apart(model.args["config"]), folder)
    weights.check()
    return [replace(plan, fill=weights.fill) for plan in plans]


class Weights:
    """The tensors of a folder, by their names in the model. Raises E520."""

    def __init__(self, model: TakenApart, folder: Path) -> None:
        self.folder, self.root, self._files = folder, model.root, tensor_files(folder)
        self.known: dict[str, Tensor] = self.root.state_dict(keep_vars=True)
        rules = get_model_conversion_mapping(self.root)
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        renamings, prefix = [rule for rule in rules if isinstance(rule, WeightRenaming)], self.root.base_model_prefix
        self._made_of: dict[str, list[tuple[str, str | None]]] = {}  # by the first weight that they make
        self._first: dict[str, str] = {}  # weight -> the first of those that are made with it
        for name in sorted(self._files, key=dot_natural_key):
            weight, pattern = rename_source_key(name, renamings, self._converters, prefix, self.known)
            if weight not in self.known and name in self.known:
                weight, pattern = rename_source_key(name, [], [], prefix, self.known)
            self._made_of.setdefault(weight, []).append((name, pattern))
            ends = ["", ""] if pattern is None else self._converter(pattern).target_patterns
            self._first.update({weight.replace(ends[0], end, 1) if end else weight: weight for end in ends})
        self.root._weight_conversions = [rule for rule in rules if rule.was_used()] or None
        there = {id(tensor): name for name, tensor in self.known.items() if name in self._first}
        for name, tensor in self.known.items():
            if id(tensor) in there:
                self._first.setdefault(name, self._first[there[id(tensor)]])

    def check(self) -> None:
        """Raises E520 unless the folder has all weights of the model, in whole files; of those that are one tensor in a
        file the shape, too."""
        spared = self.root._keys_to_ignore_on_load_missing or ()
        missing = [n for n in self.known if n not in self._first and not any(re.search(s, n) for s in spared)]
        refuse(self.folder, "lacks", missing)
        plain = {made[0][0]: self.known.get(first) for first, made in self._made_of.items() if made[0][1] is None}
        for name, file in self._opened([*self._files]):
            found, like = file.get_slice(name), plain.get(name)
            if like is not None and list(like.shape) != found.get_shape():
                raise misfit(name, self._files[name], f"{found.get_dtype()} {found.get_shape()}", like)

    @torch.no_grad()
    def fill(self, part: Any) -> None:
        """Overwrites the weights of a layer, on the CPU, in their own type."""
        wanted: dict[str, Tensor] = {name: tensor for _, name, tensor in part.theirs() if valued(tensor)}
        for first in dict.fromkeys(self._first[name] for name in wanted if name in self._first):
            for name, made in self.made(first).items():
                for target in (of for other, of in wanted.items() if self.known[other] is self.known.get(name)):
                    if target.shape != made.shape:
                        raise misfit(name, self._files[self._made_of[first][0][0]], made, target)
                    target.copy_(made)

    def made(self, name: str) -> dict[str, Tensor]:
        """A weight and those that are made together with it."""
        sources = self._made_of[first := self._first[name]]
        tensors = [file.get_tensor(name) for name, file in self._opened([name for name, _ in sources])]
        if sources[0][1] is None:
            return {first: tensors[0]}
        converter = deepcopy(self._converter(sources[0][1]))
        for (name, pattern), tensor in zip(sources, tensors, strict=True):
            converter.add_tensor(first, name, pattern, tensor)
        made = converter.convert(first, model=self.root, config=self.root.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def _converter(self, pattern: str) -> WeightConverter:
        return next(rule for rule in self._converters if pattern in rule.source_patterns)

    def _opened(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Names with the open file of each. Raises E520."""
        with ExitStack() as stack:
            files = dict[Path, Any]()
            for name in names:
                path = self._files[name]
                if path not in files:
                    files[path] = stack.enter_context(opened(path))
                yield name, files[path]


def tensors_of(model: Model, parameters: Mapping[str, Tensor], source: Path | None) -> dict[str, Tensor]:
    """Parameters of whole layers as the tensors of a folder, by their names there, on the CPU; with the buffers that
    belong to them, which training does not change: those of `source`, or initial ones."""
    whole = apart(model.args["config"])
    weights = None if source is None else Weights(whole, source)
    builders, found = layers(model.args["config"]), dict[str, Tensor]()
    stacks, first = dict[str, dict[int, Tensor]](), dict[str, int]()
    for name, tensor in parameters.items():
        if (expert := _EXPERT.fullmatch(name)) is None:
            stacks[name] = {-1: tensor}
        else:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
    own = dict.fromkeys(int(name.split(".")[1]) for name in stacks)
    for place in own:
        with torch.device("meta"):
            part = builders[place]()
        buffers = {name for name, _ in part.named_buffers()}
        for local, theirs, like in part.theirs():
            given = stacks.get(f"layers.{place}.{local}")
            if given is not None:
                tensor = given[-1] if -1 in given else torch.stack([given[key] for key in sorted(given)])
                found[theirs] = (tensor if like is part.get_parameter(local) else tensor.mT).detach().cpu()
                if -1 not in given and min(given):
                    first[theirs.rpartition(".")[0]] = min(given)
            elif local in buffers and weights is not None:
                found[theirs] = weights.made(theirs)[theirs]
            elif local in buffers:
                found[theirs] = next(value for _, name, value in builders[place]().theirs() if name == theirs)
    made = revert_weight_conversion(whole.root, found)
    return {_moved(name, first): tensor.contiguous() for name, tensor in made.items()}


def refuse_parts(model: Model) -> None:
    """Raises E524 if a folder has all experts of a layer in one tensor, of which ranks have parts."""
    root = apart(model.args["config"]).root
    stacks = {name: p for name, p in root.named_parameters() if ".experts." in name}
    whole = [name for name in revert_weight_conversion(root, stacks) if not _EXPERT.fullmatch(name)]
    if whole:
        text = f"run: {whole[0]} has all experts, and with parallel.ep a rank has a part of them"
        raise ZbcError("E524", text, hint="write a checkpoint, and continue it with ep = 1 and --save-hf")


def _moved(name: str, first: Mapping[str, int]) -> str:
    """The name of an expert's tensor on a rank whose experts do not begin with the first."""
    expert = _EXPERT.fullmatch(name)
    return name if expert is None else f"{expert[1]}.{int(expert[2]) + first.get(expert[1], 0)}.{expert[3]}"
