"""What steps without a flush do not go with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zbc.errors import ZbcError
from zbc.job.job import Draft
from zbc.job.unread import asks

FLUSHLESS = ("two-versions", "asynchronous")


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E125 for a norm of all gradients, E118 for each switch that excludes them."""
    optimizer = draft.sections.get("optimizer")
    if optimizer is None:
        return
    where, sync = draft.document.where, optimizer.sync
    if sync not in FLUSHLESS and optimizer.clip_stage_norm is not None:
        text = f'config: optimizer.clip_stage_norm is for steps without a flush, optimizer.sync is "{sync}"'
        yield ZbcError("E118", text, where=where(("optimizer", "clip_stage_norm")), hint="use clip_grad_norm")
    for key in ("every", "lookahead") if sync != "asynchronous" else ():
        if asks(optimizer, key):
            text = f'config: optimizer.{key} goes with sync = "asynchronous", sync is "{sync}"'
            yield ZbcError("E118", text, where=where(("optimizer", key)), hint="drop it")
    if sync not in FLUSHLESS:
        return
    if optimizer.clip_grad_norm is not None:
        text = f'config: clip_grad_norm needs the gradients of all ranks, and with sync = "{sync}" none waits for them'
        hint = 'set clip_stage_norm, a limit for each stage, or sync = "post-validate"'
        yield ZbcError("E125", text, where=where(("optimizer", "clip_grad_norm")), hint=hint)
    for key, reason in _others(draft.sections):
        text = f'config: optimizer.sync = "{sync}" and {key} exclude each other: {reason}'
        yield ZbcError("E118", text, where=where(("optimizer", "sync")), hint="drop one of them")
    if sync == "asynchronous":
        yield from _asynchronous(draft)


def _asynchronous(draft: Draft) -> Iterator[ZbcError]:
    optimizer, parallel, schedule = (draft.sections.get(name) for name in ("optimizer", "parallel", "schedule"))
    where = draft.document.where
    if parallel is not None and parallel.dp > 1:
        text = 'config: optimizer.sync = "asynchronous" and parallel.dp exclude each other: replicas would wait'
        yield ZbcError("E118", text, where=where(("parallel", "dp")), hint="set dp = 1")
    if schedule is not None and optimizer is not None and schedule.microbatches % optimizer.every:
        text = f"config: optimizer.every = {optimizer.every} does not divide {schedule.microbatches} microbatches"
        yield ZbcError("E118", text, where=where(("optimizer", "every")), hint="set a number that does")


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
            'kind = "auto"': (schedule.kind or "").lower() == "auto",
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
