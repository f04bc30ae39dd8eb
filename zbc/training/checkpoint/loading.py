"""Begin behind the steps of a checkpoint, whatever plan it was made under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.runtime.state import Worker
from zbc.training.checkpoint.state import restore
from zbc.training.checkpoint.storage import SafetensorsReader
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Board


@dataclass(frozen=True)
class Loaded:
    """`steps` are trained; `notes` are for the console."""

    steps: int
    notes: tuple[str, ...] = ()


def load(worker: Worker, board: Board, folder: Path, alive: Callable[[], None] = lambda: None) -> Loaded:
    """Overwrite the state of all ranks, which call this together, before the first step; it calls `alive` meanwhile.

    Raises E612 (damaged; the ranks share out the files and look at every byte), E613 (of another model, optimizer or
    seed).
    """
    manifest = worker.plan.manifest
    found: list[SafetensorsReader] = []

    def look() -> dict[str, Any]:
        reader = SafetensorsReader(folder, alive)
        _check_training(reader, manifest.training)
        reader.check_files(range(worker.rank, len(reader.index.files), manifest.topology.world))
        found.append(reader)
        return {} if worker.batches is None else {"data_samples": worker.batches.count}

    told = together(board, "checkpoint checked", look)
    reader = found[0]

    def fill() -> dict[str, Any]:
        restore(worker, reader)
        return {}

    together(board, "checkpoint loaded", fill)
    steps = reader.index.step
    worker.resume(steps, reader.index.samples)
    counts = {one["data_samples"] for one in told if "data_samples" in one}
    return Loaded(steps, _notes(reader, counts))


def _check_training(reader: SafetensorsReader, training: dict[str, Any]) -> None:
    """Raise E613 where training could not go on as it was."""
    ours = {"train.seed": training["train"]["seed"], "optimizer.kind": training["optimizer"]["kind"]}
    theirs = {"train.seed": reader.index.seed, "optimizer.kind": reader.index.optimizer}
    for key, value in ours.items():
        if theirs[key] != value:
            text = f"run: {reader.folder} was trained with {key} = {theirs[key]}, this job has {value}"
            raise ZbcError("E613", text, hint=f"plan with --set {key}={theirs[key]}")


def _notes(reader: SafetensorsReader, counts: set[int]) -> tuple[str, ...]:
    before = reader.index.data_samples
    if before is None or not counts or before in counts:
        return ()
    now = counts.pop()
    return (f"the data has {now} samples, {before} when the checkpoint was written: their order is another now",)
