"""Installs the filler of a rank, from the job's [filler]; see runtime/features/filler.py."""

from __future__ import annotations

from collections.abc import Callable

from zbc.errors import ZbcError
from zbc.job import spec, userobject
from zbc.runtime.core.state import Worker
from zbc.runtime.features.filler import Filling
from zbc.text import GIB, size


def install(worker: Worker, tell: Callable[[str], None]) -> Filling | None:
    """Makes the task of [filler], and fills the worker's waits with it; None if there is no task, or too little memory.

    The factory gets `rank` and `ranks` (of the run) and filler.args. Raises E502 (it cannot be imported, or fails).
    """
    manifest = worker.plan.manifest
    asked = spec.Filler.model_validate(manifest.training.get("filler", {}), strict=False)
    if asked.task is None:
        return None
    name = manifest.topology.name(worker.rank)
    given = {"rank": worker.rank, "ranks": manifest.topology.world, **asked.args}
    factory = userobject.load(asked.task, "filler.task")
    task = userobject.call(factory, given, asked.task, "filler.task")
    if not callable(getattr(task, "step", None)):
        text = f"run: filler.task = {asked.task} made {type(task).__name__}, which has no step()"
        raise ZbcError("E502", text, hint="return an object with step() -> None")
    free, needs = _room(worker), int(getattr(task, "bytes", 0) or 0)
    if free is not None and needs > free:
        tell(f"{name} has no filler: it needs {size(needs)}, and {size(free)} are free")
        return None
    filling = Filling(worker.transport, task, worker.device, lambda said: tell(f"{name} {said}"))
    worker.transport = filling
    return filling


def _room(worker: Worker) -> int | None:
    """Bytes that the plan leaves free on this rank's device; None if unknown."""
    manifest = worker.plan.manifest
    memory = manifest.planning.get("hardware", {}).get("memory_gib")
    rows = manifest.predicted.get("per_rank", [])
    if memory is None or not rows:
        return None
    memory = memory[worker.plan.rank] if isinstance(memory, list) else memory
    return max(0, int(memory * GIB - rows[worker.plan.rank]["peak_bytes"]))
