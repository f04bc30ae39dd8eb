"""Layers, data and losses that do not go with what a plan asks for, as far as a rank can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zbc import excludes
from zbc.errors import raise_all
from zbc.ir import COPY, Kind
from zbc.plan.directory import FROZEN, Manifest, RankPlan
from zbc.runtime.core.stage import Stage
from zbc.runtime.features.slicing import Part
from zbc.training.building.context import LOWERED, Settings, parts_of
from zbc.training.data.data import KINDS, Samples
from zbc.training.models import model
from zbc.training.probing.packable import try_packed, try_padding
from zbc.training.probing.shapes import Shapes
from zbc.training.probing.sliceable import refuse_others, try_layers, try_loss


def refuse(
    settings: Settings,
    manifest: Manifest,
    parts: Sequence[RankPlan],
    plans: Sequence[model.LayerPlan],
    stages: Mapping[int, Stage],
    samples: Samples | None,
    shapes: Shapes,
    *,
    last: bool,
) -> None:
    """Raise E110, E406, E512, E513 or E515 for what the plan asks for and this rank cannot; `last`: it has the loss."""
    slices = parts_of(manifest)
    if slices:
        _refuse_slices(settings, plans, stages, samples, shapes, slices, last=last)
    if manifest.balance is not None:
        _refuse_rows(settings, plans, stages, samples, shapes, last=last)
    _refuse_pairs(manifest, parts, settings)


def _refuse_slices(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    stages: Mapping[int, Stage],
    samples: Samples | None,
    shapes: Shapes,
    slices: Sequence[Part],
    *,
    last: bool,
) -> None:
    """Raise E110, E512 or E513 for data, layers or a loss that cannot be cut into slices, as far as they are here."""
    targets = None
    if samples is not None and settings.data.kind not in KINDS:
        some = range(min(len(samples), 8))
        targets = samples.targets(some)
        for what, found in (("inputs", samples.inputs(some)), ("targets", targets)):
            refuse_others(settings.data.kind, what, found, slices[-1].length)
    if not settings.model.builtin:
        try_layers(plans, stages.values(), shapes.before, slices, LOWERED[settings.model.parameters])
    if last and samples is not None and settings.model.loss not in model.LOSSES:
        known = samples.targets(range(min(len(samples), 8))) if targets is None else targets
        try_loss(settings.model.loss, model.loss(settings.model.loss), shapes.output, known)


def _refuse_rows(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    stages: Mapping[int, Stage],
    samples: Samples | None,
    shapes: Shapes,
    *,
    last: bool,
) -> None:
    """Raise E512 or E513 for layers or a loss that take the samples of a row for one, as far as they are here."""
    if not settings.model.builtin:
        try_packed(plans, stages.values(), shapes.before, LOWERED[settings.model.parameters])
    if last and samples is not None and settings.model.loss not in model.LOSSES:
        target = samples.targets(range(min(len(samples), 8)))
        try_padding(settings.model.loss, model.loss(settings.model.loss), shapes.output, target)


def _refuse_pairs(manifest: Manifest, parts: Sequence[RankPlan], settings: Settings) -> None:
    """Raise E406 or E515 for a plan of features that do not go together, which was not made by this zbc."""
    kinds = {op.kind for part in parts for op in part.ops}
    has = {
        "freeze": FROZEN in manifest.capabilities,
        "copies": len(manifest.placement[0]) > 1,
        "tied embeddings": manifest.tied,
        "slices": manifest.slices > 1,
        "shared vocabulary": manifest.vocabulary is not None,
        "post-validate": Kind.REDO in kinds,
        "compile": settings.model.compile,
        "offload": not kinds.isdisjoint(COPY),
    }
    raise_all(excludes.of_plan({name for name, there in has.items() if there}))
