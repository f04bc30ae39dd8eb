"""`schedule.tokens`: a step whose microbatches are of unequal length.

Microbatch i has rows of `tokens[i]` tokens, at most `model.seq_len`. Times, activations and messages are estimated for
rows of that length. Given and measured times hold for rows of `model.seq_len` tokens, or of the longest microbatch if
the model has no length; they are scaled by tokens, and in blocks by the keys attended to (`zbc.job.cuts.flops`).
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.errors import ZbcError
from zbc.job.cuts import flops
from zbc.job.job import Draft, Job
from zbc.job.sections import Schedule
from zbc.job.slice_times import SliceTimes
from zbc.job.unread import asks


def shares_of(job: Job, tokens: int) -> dict[str, float]:
    """The time of F, B and W of a block with rows of `tokens` tokens, as shares of the time with whole rows."""
    times, whole = SliceTimes.of(job.profile), job.row_tokens
    if times is None:
        linear, attend = flops(job.model)
        row = tokens / whole
        mixed = row * (linear + attend * tokens / 2) / (linear + attend * whole / 2)
        return {"f": mixed, "b": mixed, "w": row}
    pairs = zip("fbw", times.each(0, tokens), times.each(0, whole), strict=True)
    return {name: ms / full if full else tokens / whole for name, ms, full in pairs}


def settle(draft: Draft) -> None:
    """Drops `schedule.tokens` if all microbatches are whole."""
    planned: Schedule | None = draft.sections.get("schedule")
    model = draft.sections.get("model")
    if planned is not None and planned.tokens and model is not None:
        whole = model.seq_len or max(planned.tokens)
        if set(planned.tokens) == {whole}:
            draft.sections["schedule"] = planned.model_copy(update={"tokens": None, "renumber": True})


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E103 and E110."""
    planned: Schedule | None = draft.sections.get("schedule")
    model = draft.sections.get("model")
    if planned is None:
        return
    where, tokens = draft.document.where, planned.tokens
    if tokens is None:
        if asks(planned, "renumber"):
            text = "config: schedule.renumber is for microbatches of unequal length, and schedule.tokens is not set"
            yield ZbcError("E110", text, where=where(("schedule", "renumber")), hint="set schedule.tokens, or drop it")
        return
    if len(tokens) != planned.microbatches:
        text = f"config: schedule.tokens has {len(tokens)} numbers, schedule.microbatches is {planned.microbatches}"
        hint = f"set microbatches = {len(tokens)}, or give {planned.microbatches} numbers"
        yield ZbcError("E103", text, where=where(("schedule", "tokens")), hint=hint if tokens else "drop tokens")
    elif model is not None and model.seq_len is not None and max(tokens) > model.seq_len:
        most = max(tokens)
        text = f"config: schedule.tokens has rows of {most} tokens, model.seq_len is {model.seq_len}"
        yield ZbcError("E103", text, where=where(("schedule", "tokens")), hint=f"set model.seq_len = {most}")
