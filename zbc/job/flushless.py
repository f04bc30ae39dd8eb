"""What `optimizer.sync = "two-versions"` does not go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zbc.errors import ZbcError
from zbc.job.job import Draft

SYNC = "two-versions"


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E125 for a norm of all gradients, E118 for each switch that excludes it."""
    optimizer = draft.sections.get("optimizer")
    if optimizer is None:
        return
    where = draft.document.where
    if optimizer.sync != SYNC:
        if optimizer.clip_stage_norm is not None:
            text = f'config: optimizer.clip_stage_norm goes with sync = "{SYNC}", sync is "{optimizer.sync}"'
            yield ZbcError("E118", text, where=where(("optimizer", "clip_stage_norm")), hint="use clip_grad_norm")
        return
    if optimizer.clip_grad_norm is not None:
        text = f'config: clip_grad_norm needs the gradients of all ranks, and with sync = "{SYNC}" none waits for them'
        hint = 'set clip_stage_norm, a limit for each stage, or sync = "post-validate"'
        yield ZbcError("E125", text, where=where(("optimizer", "clip_grad_norm")), hint=hint)
    for key, reason in _others(draft.sections):
        text = f'config: optimizer.sync = "{SYNC}" and {key} exclude each other: {reason}'
        yield ZbcError("E118", text, where=where(("optimizer", "sync")), hint="drop one of them")


_UNWRITTEN = "it has not been written"


def _others(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a job has that stands against it, and why."""
    model, parallel, schedule, memory, optimizer = (
        sections.get(name) for name in ("model", "parallel", "schedule", "memory", "optimizer")
    )
    if model is not None:
        if model.tie_embeddings or model.ties:
            yield ("model.tie_embeddings" if model.tie_embeddings else "model.ties"), "stages step at other times"
        if model.compile:
            yield "model.compile", _UNWRITTEN
        if model.dtype != "float32" or model.parameters != "float32":
            yield ("model.dtype" if model.dtype != "float32" else "model.parameters"), _UNWRITTEN + " for bfloat16"
    if parallel is not None:
        there = {
            "tp": parallel.tp > 1,
            f'shard = "{parallel.shard}"': parallel.shard != "none",
            "replicas": parallel.replicas is not None,
            "world": parallel.world is not None,
            'vocabulary = "shared"': parallel.vocabulary == "shared",
        }
        yield from ((f"parallel.{key}", _UNWRITTEN) for key in there if there[key])
    if optimizer is not None and optimizer.zero1:
        yield "optimizer.zero1", "a gathered weight would be of another step"
    if schedule is not None:
        asked = {
            "slices": schedule.slices != 1,
            "ramp": bool(schedule.ramp),
            "file": schedule.file is not None,
            "plugin": schedule.plugin is not None,
            "overlap": bool(schedule.overlap),
            "group": schedule.group is not None,
        }
        yield from ((f"schedule.{key}", _UNWRITTEN) for key in asked if asked[key])
    if memory is not None and any("offload" in one for one in memory.chosen()):
        yield "memory.activations with offload", _UNWRITTEN
    if (data := sections.get("data")) is not None and data.balance != "none":
        yield "data.balance", "steps of other numbers of microbatches do not follow one another without a flush"
    if (freeze := sections.get("freeze")) is not None and freeze.most:
        yield "freeze.most", _UNWRITTEN
    if (filler := sections.get("filler")) is not None and filler.task is not None:
        yield "filler.task", "there is little to fill"
