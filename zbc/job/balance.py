"""`[data] balance`: the settings that it needs and excludes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zbc.errors import ZbcError
from zbc.job.job import Draft
from zbc.job.unread import asks

_ALONE = ("tokens_per_microbatch", "max_microbatches")


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E103 and E110 for settings that contradict it."""
    data, planned = draft.sections.get("data"), draft.sections.get("schedule")
    if data is None or planned is None:
        return
    where = draft.document.where
    if data.balance != "length":
        for key in _ALONE:
            if asks(planned, key):
                text = f'config: schedule.{key} goes with data.balance = "length", balance is "{data.balance}"'
                yield ZbcError("E110", text, where=where(("schedule", key)), hint="drop it, or balance samples")
    if data.balance == "none":
        return
    if data.kind == "text":
        text = "config: data.balance needs the length of each sample, and text is one long sample"
        hint = 'make documents of it with `zbc tokenize`, and use kind = "tokens"'
        yield ZbcError("E110", text, where=where(("data", "balance")), hint=hint)
    if data.balance == "tokens":
        return
    if planned.max_microbatches is not None and planned.max_microbatches < planned.microbatches:
        text = f"config: schedule.max_microbatches is {planned.max_microbatches}, less than the mean"
        hint = f"set it to {planned.microbatches} or more, or drop it"
        yield ZbcError("E103", text, where=where(("schedule", "max_microbatches")), hint=hint)
    yield from _room(draft, planned)


def _room(draft: Draft, planned: Any) -> Iterator[ZbcError]:
    model = draft.sections.get("model")
    room, where = planned.tokens_per_microbatch, draft.document.where(("schedule", "tokens_per_microbatch"))
    if model is None:
        return
    if model.seq_len is None:
        text = "config: data.balance packs samples into rows of model.seq_len tokens, which is not given"
        yield ZbcError("E110", text, where=draft.document.where(("data", "balance")), hint="set model.seq_len")
    elif room is not None and room % model.seq_len:
        text = f"config: schedule.tokens_per_microbatch is {room}, no multiple of model.seq_len, {model.seq_len}"
        fits = max(1, round(room / model.seq_len)) * model.seq_len
        yield ZbcError("E110", text, where=where, hint=f"set tokens_per_microbatch = {fits}")
    elif room is not None and asks(planned, "microbatch_size") and planned.microbatch_size * model.seq_len != room:
        text = f"config: a microbatch of {planned.microbatch_size} rows has room for "
        text += f"{planned.microbatch_size * model.seq_len} tokens, schedule.tokens_per_microbatch is {room}"
        yield ZbcError("E110", text, where=where, hint="drop one of them")
