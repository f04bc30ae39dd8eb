"""`[data] balance`: the settings that it needs and excludes."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.errors import ZbcError
from zbc.job.job import Draft
from zbc.job.unread import asks


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E103 and E110 for settings that contradict it."""
    data, planned = draft.sections.get("data"), draft.sections.get("schedule")
    if data is None or planned is None:
        return
    where = draft.document.where
    if data.balance != "length" and asks(planned, "max_microbatches"):
        text = f'config: schedule.max_microbatches goes with data.balance = "length", balance is "{data.balance}"'
        yield ZbcError("E110", text, where=where(("schedule", "max_microbatches")), hint="drop it, or balance samples")
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
    model = draft.sections.get("model")
    if model is not None and model.seq_len is None:
        text = "config: data.balance packs samples into rows of model.seq_len tokens, which is not given"
        yield ZbcError("E110", text, where=where(("data", "balance")), hint="set model.seq_len")
