"""`schedule.tokens`: a step whose microbatches are of unequal length.

Microbatch i has rows of `tokens[i]` tokens, at most `model.seq_len`. Times, activations and messages are estimated for
rows of that length. Given and measured times hold for rows of `model.seq_len` tokens, or of the longest microbatch if
the model has no length; they are scaled by tokens, and in blocks by the keys attended to (`zbc.job.cuts.flops`).
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.job.cuts import part_of
from zbc.job.job import Draft, Job
from zbc.job.model_section import Model
from zbc.job.section import Problem
from zbc.job.sections import Data, Schedule
from zbc.job.unread import asks


def shares_of(job: Job, tokens: int) -> dict[str, float]:
    """The time of F, B and W of a block with rows of `tokens` tokens, as shares of the time with whole rows."""
    whole = job.row_tokens
    pairs = zip("fbw", part_of(job, 0, tokens), part_of(job, 0, whole), strict=True)
    return {name: part / full if full else tokens / whole for name, part, full in pairs}


def recorded(draft: Draft) -> None:
    """Replaces "recorded" by the lengths in the profile; E110 if it has none."""
    planned: Schedule | None = draft.sections.get("schedule")
    if planned is None or planned.tokens != "recorded":
        return
    found = None if draft.profile is None else draft.profile.tokens
    if found:
        draft.sections["schedule"] = planned.model_copy(update={"tokens": found})
    else:
        what = "there is no --profile" if draft.profile is None else "the profile has no lengths"
        hint = "record a run with microbatches of unequal length, and zbc profile RUN"
        draft.add("E110", f'config: schedule.tokens is "recorded", and {what}', "schedule", "tokens", hint=hint)


def settle(draft: Draft) -> None:
    """Drops `schedule.tokens` if all microbatches are whole, and no samples are dealt by them."""
    planned: Schedule | None = draft.sections.get("schedule")
    model = draft.sections.get("model")
    if planned is not None and planned.lengths and model is not None:
        whole = model.seq_len or max(planned.lengths)
        data = draft.sections.get("data")
        if set(planned.lengths) == {whole} and (data is None or data.balance != "tokens"):
            draft.sections["schedule"] = planned.model_copy(update={"tokens": None, "renumber": True})


def problems(schedule: Schedule, model: Model | None = None, data: Data | None = None) -> Iterator[Problem]:
    """E103 and E110."""
    tokens, length = schedule.tokens, None if model is None else model.seq_len
    if data is not None and model is not None:
        if data.balance == "tokens" and (tokens is None or length is None):
            missing = "schedule.tokens" if tokens is None else "model.seq_len"
            text = f'data.balance = "tokens" deals samples by the lengths of microbatches, and {missing} is not set'
            yield "E110", "data.balance", text, f'set {missing}, or balance = "length"'
        own = data.kind not in ("text", "tokens", "synthetic") and data.items == "samples"
        if own and data.balance == "none" and tokens and length is not None:
            text = f"schedule.tokens has shorter microbatches, and nothing says which of {data.kind} they get"
            hint = 'set data.balance = "tokens", and give the dataset its lengths; or items = "steps"'
            yield "E110", "schedule.tokens", text, hint
    if tokens is None:
        if asks(schedule, "renumber"):
            text = "schedule.renumber is for microbatches of unequal length, and schedule.tokens is not set"
            yield "E110", "schedule.renumber", text, "set schedule.tokens, or drop it"
    elif tokens != "recorded" and len(tokens) != schedule.microbatches:  # `recorded` has refused the word
        text = f"schedule.tokens has {len(tokens)} numbers, schedule.microbatches is {schedule.microbatches}"
        hint = f"set microbatches = {len(tokens)}, or give {schedule.microbatches} numbers"
        yield "E103", "schedule.tokens", text, hint if tokens else "drop tokens"
    elif tokens != "recorded" and length is not None and max(tokens) > length:
        text = f"schedule.tokens has rows of {max(tokens)} tokens, model.seq_len is {length}"
        yield "E103", "schedule.tokens", text, f"set model.seq_len = {max(tokens)}"
