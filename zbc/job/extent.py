"""The largest jobs that are planned: beyond, planning would take hours or run out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.errors import ZbcError
from zbc.job.toml import Document

LAYERS = 100_000
RANKS = 100_000  # of a run, over all replicas of the pipeline
OPS = 10_000_000  # compute ops of a step, over all ranks: a quarter of an hour and some 19 GiB


def problems(document: Document, layers: int | None, ranks: int | None, ops: int | None) -> Iterator[ZbcError]:
    """E114 for more layers, ranks or ops of a step (None: not known) than zbc plans."""
    if layers is not None and layers > LAYERS:
        text = f"config: model.layers = {layers} are more than zbc plans, {LAYERS}"
        yield ZbcError("E114", text, where=document.where(("model", "layers")), hint=f"use {LAYERS} or fewer")
    elif ranks is not None and ranks > RANKS:
        text = f"config: the job has {ranks} ranks (pp dp tp), more than zbc plans for, {RANKS}"
        yield ZbcError("E114", text, where=document.where(("parallel", "dp")), hint="use fewer replicas or ranks")
    elif ops is not None and ops > OPS:
        text = f"config: a step of this job has {ops} ops, zbc plans up to {OPS}"
        hint = "use fewer microbatches (a larger microbatch_size), ranks or chunks"
        where, details = document.where(("schedule", "microbatches")), [f"= {OPS} take some 15 minutes and 19 GiB"]
        yield ZbcError("E114", text, where=where, hint=hint, details=details)
