"""What replicas that average their weights do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.errors import ZbcError
from zbc.job.job import Draft

_UNWRITTEN = "it has not been written"


def problems(draft: Draft) -> Iterator[ZbcError]:
    """E115 where there is nobody to average with, E118 for each setting that excludes it."""
    sections = draft.sections
    parallel = sections.get("parallel")
    if parallel is None or parallel.average is None:
        return
    where = draft.document.where(("parallel", "average"))
    if parallel.dp == 1 and parallel.world is None:
        text = "config: parallel.average averages the weights of replicas, and parallel.dp is 1"
        yield ZbcError("E115", text, where=where, hint="set parallel.dp to 2 or more, or drop average")
    if parallel.average.ema and not parallel.average.delay:
        text = f"config: parallel.average.ema = {parallel.average.ema} smooths what lands later, and delay is 0"
        yield ZbcError("E118", text, where=where, hint="set delay = 1, or drop ema")
    for key, why in _others(draft):
        text = f"config: parallel.average and {key} exclude each other: {why}"
        yield ZbcError("E118", text, where=where, hint="drop one of them")


def _others(draft: Draft) -> Iterator[tuple[str, str]]:
    """What the job has that stands against it, and why."""
    model, parallel, optimizer, schedule, data, freeze = (
        draft.sections.get(name) for name in ("model", "parallel", "optimizer", "schedule", "data", "freeze")
    )
    if parallel is not None:
        there = {
            f'shard = "{parallel.shard}"': parallel.shard != "none",
            "replicas": parallel.replicas is not None,
            'vocabulary = "shared"': parallel.vocabulary == "shared",
            'vocabulary = "auto"': parallel.vocabulary == "auto",
            "world": parallel.world is not None,
        }
        reasons = {"world": "it compares ranks by their samples alone"}
        yield from ((f"parallel.{key}", reasons.get(key, _UNWRITTEN)) for key in there if there[key])
    if model is not None:
        if model.tie_embeddings or model.ties:
            yield ("model.tie_embeddings" if model.tie_embeddings else "model.ties"), _UNWRITTEN
        if model.parameters != "float32":
            yield "model.parameters", "a rotating share of bfloat16 weights would lose what is added to it"
    if optimizer is not None:
        if optimizer.sync != "before-step":
            yield f'optimizer.sync = "{optimizer.sync}"', _UNWRITTEN
        if optimizer.zero1:
            yield "optimizer.zero1", "replicas with weights of their own have nothing to share out"
    if schedule is not None and schedule.ramp:
        yield "schedule.ramp", _UNWRITTEN
    if data is not None and data.balance != "none":
        yield "data.balance", "replicas of unequal work would count alike"
    if freeze is not None and freeze.most:
        yield "freeze.most", _UNWRITTEN
