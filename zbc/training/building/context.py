"""What a rank is built from: the sections of its plan, the layers, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.plan.directory import Manifest
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.features.slicing import Inside, Part, within
from zbc.training.data.data import Samples, input_spec
from zbc.training.models import model, pretrained
from zbc.training.models.shared_words import table_sizes, trunk
from zbc.training.probing.shapes import Shapes, derive

LOWERED: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}  # float32: as they are made

_Section = TypeVar("_Section", bound=spec.Section)


@dataclass(frozen=True)
class Settings:
    """The sections of a plan that the runtime reads, checked again."""

    model: spec.Model
    data: spec.Data
    train: spec.Train
    optimizer: spec.Optimizer
    memory: spec.Memory
    checkpoint: spec.Checkpoint
    freeze: spec.Freeze
    pretrained: str | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Settings:
        planning, training = manifest.planning, manifest.training
        return cls(
            section(spec.Model, planning["model"]),
            section(spec.Data, training["data"]),
            section(spec.Train, training["train"]),
            section(spec.Optimizer, training["optimizer"]),
            section(spec.Memory, planning.get("memory", {})),
            section(spec.Checkpoint, training.get("checkpoint", {})),
            section(spec.Freeze, planning.get("freeze", {})),
            training.get("pretrained"),
        )


def section(section: type[_Section], values: Any) -> _Section:
    return section.model_validate(values, strict=False)  # JSON has lists where the models have tuples


def layer_plans(settings: Settings) -> list[model.LayerPlan]:
    """The layers of a plan, with pretrained weights where it names some."""
    plans = model.layers(settings.model, settings.train.seed)
    if settings.pretrained is None:
        return plans
    return pretrained.fill(plans, settings.model, Path(settings.pretrained))


def shapes_of(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    samples: Samples | None,
    manifest: Manifest,
    device: torch.device,
    rows: int | None = None,
) -> Shapes:
    """What the layers `plans` look like in training on `device`, in a slice of so many rows. Raises as `derive`."""
    lowered = LOWERED[settings.model.parameters]

    def given(layer: str) -> TensorSpec:
        group = group_of(settings.model, layer)
        found = input_spec(settings.data, settings.model, samples, manifest.microbatch_size, group)
        return found._replace(dtype=lowered) if lowered is not None and found.dtype.is_floating_point else found

    autocast = device if settings.model.dtype == "bfloat16" else None
    shared = manifest.vocabulary is not None
    if shared:  # the first layer begins with what all ranks looked up
        words = TensorSpec((*given("").shape, settings.model.hidden or 0), lowered or torch.get_default_dtype())
        plans = trunk(plans)
    look = partial(derive, manifest=manifest, autocast=autocast, lowered=lowered, flow=shared)

    def first(layer: str) -> TensorSpec:
        spec = words if shared else given(layer)
        return spec if rows is None else spec._replace(shape=(spec.shape[0], rows, *spec.shape[2:]))

    found = look(plans, first, rows=rows)
    if shares_sequence(manifest):
        found = found.of_tokens(manifest.topology.tp)
    if not shared:
        return found
    sizes = dict(zip(found.parameters, found.sizes, strict=True)) | table_sizes(settings.model)
    return replace(found, parameters=tuple(sorted(sizes)), sizes=tuple(sizes[name] for name in sorted(sizes)))


def shares_sequence(manifest: Manifest) -> bool:
    """Whether each of the ranks that share layers has its part of the tokens between them."""
    return bool(manifest.planning.get("parallel", {}).get("tp_sequence", False))


def group_of(chosen: spec.Model, layer: str) -> str:
    """The group of a layer of a graph; "" in a chain."""
    return layer.partition(".")[0] if chosen.graph else ""


def parts_of(manifest: Manifest) -> list[Part]:
    """The slices of a plan's microbatches; none where they are whole. Raises E406 where the plan says no places."""
    cuts = manifest.cuts
    if manifest.slices > 1 and not cuts:
        text = f"run: the plan cuts microbatches into {manifest.slices} slices, and does not say where"
        raise ZbcError("E406", text, hint="give model.seq_len, and plan again")
    return [Part(index, start, stop, cuts[-1]) for index, (start, stop) in enumerate(pairwise(cuts))]


def looks_of(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    samples: Samples | None,
    manifest: Manifest,
    device: torch.device,
    known: dict[int | None, Shapes],
) -> tuple[Shapes, list[Shapes]]:
    """What the layers look like in the longest slice of a microbatch, or in all of one, and in each; what is `known`
    already by the rows of a slice is not looked at again."""
    slices = parts_of(manifest)
    lengths: list[int | None] = [*sorted({part.rows for part in slices}, reverse=True)] or [None]
    for rows in lengths:
        with nullcontext() if rows is None else within(Inside(Part(0, 0, rows, rows))):
            if rows in known:
                known[rows].settle(plans if manifest.vocabulary is None else trunk(plans))
            else:
                known[rows] = shapes_of(settings, plans, samples, manifest, device, rows)
    longest = known[lengths[0]]
    return longest, [known[part.rows] for part in slices] or [longest]
