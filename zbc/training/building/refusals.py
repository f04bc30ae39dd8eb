"""Refusals of layers, data and losses that are incompatible with a plan's features, as far as a rank can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zbc import excludes
from zbc.errors import ZbcError, raise_all
from zbc.ir import COPY
from zbc.plan.directory import FROZEN
from zbc.runtime.core.muon import is_called
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.tensors import Length
from zbc.training.building.context import Site
from zbc.training.data.data import KINDS
from zbc.training.data.split import Steps
from zbc.training.models import model
from zbc.training.probing.mixing import refuse_others, try_layers, try_loss, try_packed, try_padded, try_padding


def refuse(site: Site, stages: Mapping[int, Stage]) -> None:
    """Raises E110, E406, E512 or E513 for features of the plan that this rank cannot run."""
    settings, data = site.settings, site.settings.data.kind
    name, loss, users = settings.model.loss, model.loss(settings.model.loss), not settings.model.builtin
    if name in model.LOSSES and site.shapes.ends is not None:
        text = f"run: the last layer returns {site.shapes.ends}, and model.loss = {name} takes one tensor"
        raise ZbcError("E505", text, hint='return it, or set model.loss = "package.module:function", which gets all')
    if (site.slices or site.manifest.balance is not None) and site.shapes.ends is not None:
        text = f"run: the last layer returns {site.shapes.ends}; slices and packed rows with several outputs"
        hint = 'return one tensor, or set schedule.slices = 1 and data.balance = "none"'
        raise ZbcError("E110", f"{text} are not written yet", hint=hint)
    if users and site.manifest.tokens and site.unequal:
        _refuse_unlike(site, stages)
    if users and isinstance(site.samples, Steps) and site.manifest.microbatch_size > 1:
        try_padded(site, stages.values())
    if site.slices:
        if site.samples is not None and data not in KINDS:
            some = range(min(len(site.samples), 8))
            read: Any = site.samples
            for what, found in (("inputs", read.inputs(some)), ("targets", read.targets(some))):
                refuse_others(data, what, found, site.ranks * site.slices[-1].length)
        if site.some_targets is not None:
            try_loss(name, loss, site.shapes.output, site.some_targets)
    if users and (site.slices or site.tokens is not None):
        try_layers(site, stages.values())
    if site.dealer is not None:
        if users and site.manifest.balance is not None:
            try_packed(site, stages.values())
        if site.some_targets is not None:
            try_padding(name, loss, site.shapes.output, site.some_targets, site.dealer.documents.padding)
    if settings.model.dtype == "fp8":
        text = 'run: model.dtype = "fp8" is for plans alone: nothing here multiplies in it yet'
        raise ZbcError("E110", text, hint='plan again with model.dtype = "bfloat16"')
    for name in (name for group in settings.optimizer.groups for name in group.names):
        if not any(is_called(known, name) for known in site.shapes.parameters):
            text = f"run: no parameter of the model is called {name}, which optimizer.groups names"
            near = ", ".join(site.shapes.parameters[:4])
            raise ZbcError("E110", text, hint=f"they are called as in {near}; * stands for any letters")
    _refuse_pairs(site)


def _refuse_unlike(site: Site, stages: Mapping[int, Stage]) -> None:
    """Raises E110 or E512 for layers of users that do not run on rows of another length."""
    shapes, wanted = site.shapes, site.settings.model.seq_len or 1
    several = next((name for name, both in shapes.packed.items() if any(both)), None)
    if several is not None:
        text = f"run: schedule.tokens and layers with several tensors between them, as at {several}, do not go together"
        raise ZbcError("E110", f"{text} yet", hint="let layers take and return one tensor, or drop schedule.tokens")
    length = Length(min(site.manifest.tokens), wanted)
    found = site.look(length.tokens)
    for stage, (whole, cut) in enumerate(zip(shapes.inputs, found.inputs, strict=True)):
        if len(whole.shape) < 2 or whole.of_rows(length) != cut:
            text = f"run: the input of stage {stage} is {whole} for {wanted} tokens, and {cut} for {length.tokens}"
            raise ZbcError("E512", text, hint="keep tokens in the second dimension, or drop schedule.tokens")
    if site.dealer is not None:
        try_packed(site, stages.values(), behind=True)


def _refuse_pairs(site: Site) -> None:
    """Raises E406 for a plan with incompatible features, which was not made by this zbc."""
    kinds, manifest = {op.kind for part in site.parts for op in part.ops}, site.manifest
    has = {
        "freeze": FROZEN in manifest.capabilities,
        "copies": len(manifest.placement[0]) > 1,
        "tied embeddings": manifest.tied,
        "slices": manifest.slices > 1,
        "shared vocabulary": manifest.vocabulary is not None,
        "post-validate": any(kind.row.closes == "ahead" for kind in kinds),
        "compile": site.settings.model.compile,
        "offload": not kinds.isdisjoint(COPY),
    }
    raise_all(excludes.of_plan({name for name, there in has.items() if there}))
