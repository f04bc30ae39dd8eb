"""Settings that exclude steps without a flush, and those that need them."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.errors import ZbcError
from zbc.job.job import Draft
from zbc.job.unread import asks


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E110 for settings of another `optimizer.sync`."""
    optimizer = draft.sections.get("optimizer")
    if optimizer is None:
        return
    where, sync = draft.document.where, optimizer.sync
    for key in ("every", "lookahead") if sync != "asynchronous" else ():
        if asks(optimizer, key):
            text = f'config: optimizer.{key} goes with sync = "asynchronous", sync is "{sync}"'
            yield ZbcError("E110", text, where=where(("optimizer", key)), hint="drop it")
    if sync != "two-versions" and optimizer.feedback:
        text = f'config: optimizer.feedback goes with sync = "two-versions", sync is "{sync}"'
        yield ZbcError("E110", text, where=where(("optimizer", "feedback")), hint="drop it")
    if sync == "asynchronous":
        yield from _asynchronous(draft)


def _asynchronous(draft: Draft) -> Iterator[ZbcError]:
    optimizer, schedule = draft.sections.get("optimizer"), draft.sections.get("schedule")
    where = draft.document.where
    if schedule is not None and optimizer is not None and schedule.microbatches % optimizer.every:
        text = f"config: optimizer.every = {optimizer.every} does not divide {schedule.microbatches} microbatches"
        yield ZbcError("E110", text, where=where(("optimizer", "every")), hint="set a number that does")
