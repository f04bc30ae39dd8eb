"""Saving checkpoints: synchronously, or in the background of the following steps.

    step k       copies the state to host memory (not if steps wait for the disk), and goes on training
    background   writes this rank's file; synchronises; rank 0 compares replicas and completes the checkpoint
    step k + n   the next save waits for the previous one; an error of it ends the run, on every rank

Until `.complete` exists the previous checkpoint is the newest, and it is kept until then.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zbc
from zbc.errors import ZbcError
from zbc.job import spec
from zbc.runtime.core.feature import Pause
from zbc.runtime.core.state import Worker
from zbc.runtime.cuda import Pinned
from zbc.runtime.features.scaling import Scaling
from zbc.runtime.transports.background import Background
from zbc.text import few
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.files import digest, put_together, write_parts
from zbc.training.checkpoint.state import HeldPart, entries
from zbc.training.checkpoint.together import together
from zbc.training.guest import Guest
from zbc.training.launch.board import Board

_LOOK_S = 1.0
_PARTS = "parts of a checkpoint"  # key of the ranks' contents, for rank 0
_STEP = 64  # bytes; where a tensor of an arena may begin


class Arena:
    """Memory for copies of tensors. `pinned`: a GPU copies into it asynchronously."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned, self._memory = pinned, torch.empty(0, dtype=torch.uint8)
        self._held: Pinned | None = None

    def places(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A contiguous tensor on the CPU for each, by the same key; overwrites those of the previous call."""
        starts = list(accumulate((math.ceil(t.nbytes / _STEP) * _STEP for t in tensors.values()), initial=0))
        if starts[-1] != len(self._memory):
            self.close()
            self._held = Pinned(starts[-1]) if self._pinned else None
            self._memory = torch.empty(starts[-1], dtype=torch.uint8) if self._held is None else self._held.memory
        places = zip(tensors.items(), starts, strict=False)
        return {k: self._memory[at : at + t.nbytes].view(t.dtype).view(t.shape) for (k, t), at in places}

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
        self._held, self._memory = None, torch.empty(0, dtype=torch.uint8)


def copy_beside(device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copies the second of each pair into the first, which is on the CPU. On a GPU copies overlap with compute: sources
    must be kept alive and unchanged until the event has completed."""
    if device.type != "cuda":
        for place, tensor in pairs:
            place.copy_(tensor)
        return None
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for place, tensor in pairs:
            place.copy_(tensor, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
    return event


@dataclass
class Checkpoints(Guest):
    """Saves one rank's part of the checkpoints of a run. `board` is used by it only: one thread at a time meets the
    other ranks there. `tell` receives messages of rank 0."""

    worker: Worker
    board: Board
    options: spec.Checkpoint
    folder: Path
    run: str = ""  # the run directory, stored for a resume
    tell: Callable[[str], None] = lambda line: None
    last: int = 0  # steps in the newest checkpoint, or in the one this run began with
    best: Callable[[], disk.Best | None] = lambda: None  # the best evaluation so far

    _aside: Arena | None = None
    _running: Future[str] | None = None
    _beats: int = 0
    _best: disk.Best | None = None  # when the checkpoint that is being written was saved

    def __post_init__(self) -> None:
        if self.options.every:
            entries(self.worker)  # raises before the first step for types that the files cannot store

    def due(self, step: int, *, last: bool, stopping: bool = False) -> bool:
        every = self.options.every
        if not every or step + 1 <= self.last:
            return False
        best = self.best() if self.options.keep_best else None
        better = best is not None and best.step == step + 1
        return stopping or (step + 1) % every == 0 or last or better

    def after(self, step: int) -> None:
        for feature in self.worker.features:
            feature.pauses(self.worker, Pause(equal=True))
        self.save(step)

    def save(self, step: int) -> None:
        """Saves the state after step `step`, which is final on all ranks; all of them call this. Raises E611 (cannot
        write; also for the previous save, if that ran in the background) or E705 (replicas differ)."""
        self.wait()
        self.last, self._best = step + 1, self.best()
        progress = self.worker.progress
        progress.index, progress.op = 0, f"writing the checkpoint of step {step + 1}"
        held = entries(self.worker)
        staged, copied = self._stage(held)
        work = partial(self._save, held, staged, copied, step + 1)
        self._running = Background("zbc-checkpoint").start(work)  # in a thread of its own

    def wait(self) -> None:
        running, progress = self._running, self.worker.progress
        if running is None:
            return
        progress.index, progress.op, progress.waiting = 0, f"waiting for the checkpoint of step {self.last}", True
        try:
            beats = -1
            while not wait([running], _LOOK_S).done:
                if self._beats != beats:  # the watchdog is to report hangs, not a slow disk
                    beats, progress.since = self._beats, time.monotonic()
        finally:
            progress.waiting, self._running = False, None
        line = running.result()
        if self.worker.rank == 0:
            self.tell(line)

    def check(self) -> None:
        if self._running is not None and self._running.done():
            self.wait()

    # ---- in the background of steps ------------------------------------------------------------------------------

    def _stage(self, found: Sequence[HeldPart]) -> tuple[list[HeldPart], torch.cuda.Event | None]:
        """Copies on the CPU, in memory that the next save reuses; on a GPU complete once the event is, for which the
        next update of weights waits."""
        if self._aside is None:
            self._aside = Arena(pinned=self.worker.device.type == "cuda")
        places = self._aside.places({entry.part.key: entry.part.tensor for entry in found})
        pairs = [(places[entry.part.key], entry.part.tensor) for entry in found]
        self.worker.copied = copied = copy_beside(self.worker.device, pairs)
        return [replace(e, part=e.part._replace(tensor=places[e.part.key])) for e in found], copied

    def _save(
        self, found: list[HeldPart], staged: Sequence[HeldPart], copied: torch.cuda.Event | None, step: int
    ) -> str:
        """Writes, synchronises, completes; returns the message about it."""
        if self.worker.device.type == "cuda":
            torch.cuda.set_device(self.worker.device)  # the current device is per thread
        if copied is not None:
            copied.synchronize()
        found.clear()  # held until here, since forwards replace buffers
        began, folder = time.monotonic(), disk.folder_of(self.folder, step)
        together(self.board, f"checkpoint {step} written", lambda: self._write(folder, staged), folder)
        done = together(self.board, f"checkpoint {step} complete", lambda: self._complete(folder, step), folder)
        return f"wrote {_shown(folder)}: {done['bytes'] / 1e6:.1f} MB in {time.monotonic() - began:.2f} s"

    def _write(self, folder: Path, found: Sequence[HeldPart]) -> None:
        rank, batches = self.worker.rank, self.worker.batches
        kept = {entry.part.key: entry.part for entry in found if entry.writer == rank}  # a tied weight is in two stages
        copies: dict[str, str] = {}
        for entry in found:
            if len(entry.holders) > 1:
                copies[entry.part.key] = digest(entry.part.tensor)
                self._alive()
        written = write_parts(folder, rank, list(kept.values()), self._alive)
        count = None if batches is None else batches.count
        said = {"written": written.model_dump(), "copies": copies, "data_samples": count}
        self.board.leave(_PARTS, json.dumps(said))

    def _complete(self, folder: Path, step: int) -> dict[str, Any] | None:
        if self.worker.rank != 0:
            return None
        told = [json.loads(text) for text in self.board.collect(_PARTS)]
        check_copies([answer["copies"] for answer in told], self.worker.plan.manifest.topology.name)
        whole = put_together(disk.Contents.model_validate(answer["written"]) for answer in told)
        counts = [answer["data_samples"] for answer in told if answer["data_samples"] is not None]
        disk.write_index(folder, self._index(step, whole, counts[0] if counts else None))
        kept = self._best.step if self.options.keep_best and self._best is not None else None
        disk.prune(self.folder, self.options.keep, step, kept)
        return {"bytes": sum(file.bytes for file in whole.files.values())}

    def _index(self, step: int, whole: disk.Contents, data_samples: int | None) -> disk.Index:
        manifest = self.worker.plan.manifest
        return disk.Index(
            format=disk.FORMAT,
            version=disk.VERSION,
            step=step,
            samples=self.worker.phases.position(step),
            data_samples=data_samples,
            loss_scale=None if (scaling := self.worker.features.find(Scaling)) is None else scaling.scale,
            seed=manifest.training["train"]["seed"],
            optimizer=manifest.training["optimizer"]["kind"],
            trained={key: manifest.planning[key] for key in ("model", "adapter") if key in manifest.planning}
            | {"optimizer": {"state": manifest.training["optimizer"].get("state", "float32")}},
            best=self._best,
            plan=manifest.id,
            schedule=manifest.schedule,
            ranks=manifest.ranks,
            copies=manifest.copies,
            run=self.run,
            zbc_version=zbc.__version__,
            torch_version=torch.__version__,
            files=whole.files,
            tensors=whole.tensors,
        )

    def _alive(self) -> None:
        self._beats += 1
        if self._running is None:
            self.worker.progress.since = time.monotonic()


def _shown(path: Path) -> Path:
    """A path relative to the current directory if possible; unchanged if that was removed."""
    with suppress(FileNotFoundError):
        here = Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path
    return path


def check_copies(copies: Sequence[Mapping[str, str]], name: Callable[[int], str]) -> None:
    """Raises E705 unless all replicas of an entry have the same bits."""
    seen: dict[str, dict[str, list[int]]] = {}
    for rank, digests in enumerate(copies):
        for entry, value in digests.items():
            seen.setdefault(entry, {}).setdefault(value, []).append(rank)
    wrong = {entry: values for entry, values in seen.items() if len(values) > 1}
    if not wrong:
        return
    lines = [
        f"{entry}: " + ", but ".join(f"{', '.join(map(name, ranks))} alike" for ranks in values.values())
        for entry, values in sorted(wrong.items())
    ]
    text = f"run: copies of {min(wrong)} differ between ranks, so there is no one checkpoint of them"
    hint = "weights changed outside of the optimizer, or a device computes wrongly; resume from the checkpoint before"
    raise ZbcError("E705", text, hint=hint, details=few(lines, 6))
