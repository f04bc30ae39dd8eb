"""What [freeze] does not go with yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zbc.errors import ZbcError
from zbc.job.job import Draft

_SHARED = "a gradient that is shared by layers is not the mean over the microbatches of one"


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E110 for each."""
    freeze = draft.sections.get("freeze")
    if freeze is None or not freeze.most:
        return
    for key, reason in _others(draft.sections):
        text = f"config: freeze.most and {key} do not go together: {reason}"
        where = draft.document.where(("freeze", "most"))
        yield ZbcError("E110", text, where=where, hint="drop one of them")


def _others(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a job has that stands against it, and why."""
    model, parallel, schedule, memory, optimizer = (
        sections.get(name) for name in ("model", "parallel", "schedule", "memory", "optimizer")
    )
    if model is not None:
        if model.tie_embeddings or model.ties:
            yield ("model.tie_embeddings" if model.tie_embeddings else "model.ties"), _SHARED
        if model.compile:
            yield "model.compile", "a compiled layer cannot leave out its weight gradients in some microbatches only"
    if parallel is not None and parallel.scatters:
        yield f'parallel.shard = "{parallel.shard}"', "gradients are summed over ranks before their mean is known"
    if parallel is not None and parallel.replicas is not None:
        yield "parallel.replicas", "the replicas of a stage do not know what the others have left out"
    if schedule is not None:
        if schedule.slices != 1:
            yield "schedule.slices", "slices of a microbatch would be trained in different layers"
        if schedule.overlap:
            yield "schedule.overlap", "what a group takes does not follow from the shares of its ops"
    if (data := sections.get("data")) is not None and data.balance != "none":
        yield "data.balance", "the shares are those of one number of microbatches"
    if optimizer is not None and optimizer.sync == "post-validate":
        yield 'optimizer.sync = "post-validate"', "a step that is made again would need what was left out"
    if memory is not None and any("offload" in one for one in memory.chosen()):
        yield "memory.activations with offload", "a frozen layer keeps less than the host has room for"
