"""When a run is written down, and how: now, or beside the steps that follow.

    step k       copy the state aside (not at all if steps wait for the disk), and go on training
    beside it    write this rank's file; meet the others; rank 0 compares copies and completes the checkpoint
    step k + n   the next save waits for the one before; what went wrong meanwhile ends the run, on every rank alike

Until `.complete` is in place the checkpoint before is the newest, and it stays until then.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zbc
from zbc.errors import ZbcError
from zbc.job import spec
from zbc.runtime.state import Worker
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.planning import Whole, complete, make_whole, write_parts
from zbc.training.checkpoint.state import Entry, entries
from zbc.training.checkpoint.storage import SafetensorsWriter, digest
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Board

_LOOK_S = 1.0
_PARTS = "parts of a checkpoint"  # what ranks have written, for rank 0


@dataclass
class Checkpoints:
    """One rank's part in the checkpoints of a run.

    `board` is for it alone: one thread at a time meets the other ranks there. `tell` takes what rank 0 has to say.
    """

    worker: Worker
    board: Board
    options: spec.Checkpoint
    folder: Path
    run: str = ""  # the run directory, for those who resume
    tell: Callable[[str], None] = lambda line: None
    last: int = 0  # steps in the newest checkpoint, or in the one this run began with

    _count: int = 0
    _told: list[Any] | None = None  # the parts this rank told the last time
    _parts: list[list[Any]] = field(default_factory=list)  # on rank 0: those of every rank
    _whole: Whole | None = None  # on rank 0: what they make
    _aside: dict[str, Tensor] = field(default_factory=dict)
    _running: Future[str] | None = None
    _beats: int = 0

    def __post_init__(self) -> None:
        self._writer = SafetensorsWriter(self.worker.rank, self._alive)
        if self.options.every:
            entries(self.worker)  # what the files cannot hold is known before the first step

    def due(self, step: int, *, last: bool, stopping: bool = False) -> bool:
        """Whether the state behind step `step` (from 0) is to be written down.

        `last`: the run ends with it. `stopping`: it ends with it because it was asked to.
        """
        every = self.options.every
        if not every or step + 1 <= self.last:
            return False
        return stopping or (step + 1) % every == 0 or (last and self.options.at_end)

    def save(self, step: int) -> None:
        """Write down the state behind step `step`, which is final on all ranks; all of them call this.

        Raises E611 (the disk refuses; from the save before, if that went on in the background) or E705 (copies differ).
        """
        self.wait()
        self.last, self._count = step + 1, self._count + 1
        progress = self.worker.progress
        progress.index, progress.op = 0, f"writing the checkpoint of step {step + 1}"
        found = entries(self.worker)
        if not self.options.asynchronous:
            self._said(self._save(found, step + 1, self._count))
            return
        staged = self._stage(found)
        number = self._count
        self._running = _beside(lambda: self._save(staged, step + 1, number))

    def wait(self) -> None:
        """Wait until what is being written is complete. Raises what went wrong with it."""
        running, progress = self._running, self.worker.progress
        if running is None:
            return
        progress.index, progress.op, progress.waiting = 0, f"waiting for the checkpoint of step {self.last}", True
        try:
            beats = -1
            while not _done(running):
                if self._beats != beats:  # the watchdog is to find what hangs, not a slow disk
                    beats, progress.since = self._beats, time.monotonic()
        finally:
            progress.waiting, self._running = False, None
        self._said(running.result())

    def check(self) -> None:
        """Raise what has gone wrong in the background; does not wait."""
        if self._running is not None and self._running.done():
            self.wait()

    def _said(self, line: str) -> None:
        if line:
            self.tell(line)

    # ---- what happens beside the steps ---------------------------------------------------------------------------

    def _stage(self, found: Sequence[Entry]) -> list[Entry]:
        """Copies on the CPU, in memory that is used again by the next save."""
        staged = []
        for entry in found:
            place = f"{entry.name}[{entry.start}]"
            aside = self._aside.get(place)
            if aside is None or aside.shape != entry.tensor.shape or aside.dtype != entry.tensor.dtype:
                pinned = entry.tensor.is_cuda
                aside = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype, pin_memory=pinned)
                self._aside[place] = aside
            aside.copy_(entry.tensor, non_blocking=True)
            staged.append(Entry(entry.name, entry.shape, entry.start, aside, entry.holders, entry.writer))
        if self.worker.device.type == "cuda":
            torch.cuda.current_stream(self.worker.device).synchronize()
        return staged

    def _save(self, found: Sequence[Entry], step: int, number: int) -> str:
        """Write, meet, complete; what rank 0 says when it is done."""
        began, rank = time.monotonic(), self.worker.rank
        folder = disk.folder_of(self.folder, step)
        self._writer.reset(folder)
        together(self.board, f"checkpoint {number} written", lambda: self._write(found), folder)
        together(self.board, f"checkpoint {number} complete", lambda: self._complete(step), folder)
        size = sum(one.bytes for one in self._writer.files.values())
        return f"wrote {_shown(folder)}: {size / 1e6:.1f} MB in {time.monotonic() - began:.2f} s" if rank == 0 else ""

    def _write(self, found: Sequence[Entry]) -> dict[str, Any]:
        mine = [entry.part(entry.tensor) for entry in found if entry.writer == self.worker.rank]
        copies: dict[str, str] = {}
        for entry in found:
            if len(entry.holders) > 1:
                copies[entry.name] = digest(entry.tensor)
                self._alive()
        said = {**write_parts(self._writer, mine), "copies": copies, **self._own()}
        if said["parts"] == self._told:
            del said["parts"]  # rank 0 remembers
        else:
            self._told = said["parts"]
        self.board.leave(_PARTS, json.dumps(said))
        return {}

    def _own(self) -> dict[str, Any]:
        batches = self.worker.batches
        return {} if batches is None else {"data_samples": batches.count}

    def _complete(self, step: int) -> dict[str, Any]:
        if self.worker.rank != 0:
            return {}
        told = [json.loads(text) for text in self.board.collect(_PARTS)]
        check_copies([one["copies"] for one in told], self.worker.plan.manifest.topology.name)
        if self._whole is None or any("parts" in one for one in told):
            self._parts = [one["parts"] if "parts" in one else self._parts[rank] for rank, one in enumerate(told)]
            self._whole = make_whole(self._parts)
        files = {name: file for one in told for name, file in one["files"].items()}
        complete(self._writer, self._whole, files, self._about(step, told))
        disk.prune(self.folder, self.options.keep)
        return {}

    def _about(self, step: int, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What index.json says besides where tensors are."""
        manifest = self.worker.plan.manifest
        counts = [one["data_samples"] for one in told if "data_samples" in one]
        return {
            "step": step,
            "samples": self.worker.course.position(step),
            "data_samples": counts[0] if counts else None,
            "seed": manifest.training["train"]["seed"],
            "optimizer": manifest.training["optimizer"]["kind"],
            "plan": manifest.id,
            "schedule": manifest.schedule,
            "ranks": manifest.ranks,
            "copies": manifest.copies,
            "run": self.run,
            "zbc_version": zbc.__version__,
            "torch_version": torch.__version__,
        }

    def _alive(self) -> None:
        self._beats += 1
        if self._running is None:
            self.worker.progress.since = time.monotonic()


def _shown(path: Path) -> Path:
    """A path as it is called from here, unless the folder that is here was removed."""
    with suppress(FileNotFoundError):
        here = Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path
    return path


def _beside(work: Callable[[], str]) -> Future[str]:
    """Do it in a thread of its own, which does not keep a process alive that is to end."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="zbc-checkpoint", daemon=True).start()
    return future


def _done(running: Future[str]) -> bool:
    """Whether it is over; waits a little for it."""
    wait([running], _LOOK_S)
    return running.done()


def check_copies(copies: Sequence[Mapping[str, str]], name: Callable[[int], str]) -> None:
    """Raise E705 unless all ranks that hold a copy of something hold the same bits."""
    seen: dict[str, dict[str, list[int]]] = {}
    for rank, found in enumerate(copies):
        for entry, value in found.items():
            seen.setdefault(entry, {}).setdefault(value, []).append(rank)
    wrong = {entry: values for entry, values in seen.items() if len(values) > 1}
    if not wrong:
        return
    lines = [
        f"{entry}: " + ", but ".join(f"{', '.join(map(name, ranks))} alike" for ranks in values.values())
        for entry, values in sorted(wrong.items())
    ]
    first = next(iter(sorted(wrong)))
    text = f"run: copies of {first} differ between ranks, so there is no one checkpoint of them"
    hint = "weights changed outside of the optimizer, or a device computes wrongly; resume from the checkpoint before"
    raise ZbcError("E705", text, hint=hint, details=[*lines[:6], *([f"and {len(lines) - 6} more"] * (len(lines) > 6))])
