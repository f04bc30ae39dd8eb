"""Checkpoints on disk: listing, completing, pruning and reading them.

    <dir>/step-00000100/
      rank-0000.safetensors   the tensors that rank 0 writes; one file per rank that has any
      index.json              the place of each part of each tensor, the training, and checksums of each file
      .complete               written last, in one rename: the sha256 of index.json

A folder without `.complete` is from a run that ended while it was writing, and is never read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zbc.errors import ZbcError
from zbc.host.linefile import replace_text
from zbc.job.wording import first_of

COMPLETE, INDEX = ".complete", "index.json"
FORMAT, VERSION = "zbc-checkpoint", 3
FOLDER = "checkpoints"  # in a run directory
_STEP = re.compile(r"step-(\d{8,})")
BLOCK = 2**23  # bytes read, written and checksummed at once
_Index = Annotated[int, Field(ge=0, lt=2**63)]
_Scale = Annotated[tuple[float, int], Field(strict=False)]  # of the next step; steps in a row without an overflow
_File = Annotated[str, Field(pattern=r"^rank-\d{4,}\.safetensors$")]  # next to the index, never elsewhere
Type = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class File(_Checked):
    bytes: _Index
    crc32: _Index  # to find damage, not forgery: a quarter of the time of sha256


class StoredPart(_Checked):
    """Elements of a tensor in memory order, and their place: a file, and the name of a tensor in it."""

    start: _Index
    count: _Index
    file: _File
    key: str


class StoredTensor(_Checked):
    dtype: Type
    shape: list[_Index]
    parts: list[StoredPart]

    def is_whole(self) -> bool:
        """Whether its parts, concatenated, are the whole tensor."""
        ends = [0, *itertools.accumulate(part.count for part in self.parts)]
        return [part.start for part in self.parts] == ends[:-1] and ends[-1] == math.prod(self.shape)


class Contents(_Checked):
    files: dict[_File, File]
    tensors: dict[str, StoredTensor]

    def wrong(self) -> str | None:
        """The reason why this is not a whole checkpoint; None if it is."""
        for name, tensor in self.tensors.items():
            if not tensor.is_whole():
                return f"the parts of {name} overlap or leave something out"
            for part in tensor.parts:
                if part.file not in self.files or part.count > self.files[part.file].bytes:
                    return f"{part.key} is not in {part.file}"
        return None


class Best(_Checked):
    """The best evaluation of a run: after which step, its loss or its metric `by`, and how many others came since."""

    step: _Index
    loss: float
    since: _Index = 0
    by: str | None = None


class Index(Contents):
    """`index.json`: the training of a checkpoint, and the places of its tensors."""

    format: str
    version: int
    step: _Index  # steps trained
    samples: _Index  # used by these steps
    data_samples: _Index | None  # in the dataset
    loss_scale: _Scale | None = None  # of float16
    seed: int
    optimizer: str
    trained: dict[str, dict[str, Any]] | None = None  # [model], [adapter], optimizer.state; None in older ones
    best: Best | None = None  # None: not evaluated yet
    plan: str
    schedule: str
    ranks: int
    copies: int
    run: str
    zbc_version: str
    torch_version: str


def folder_of(parent: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The number of steps of a checkpoint, from its name; None if that is not a checkpoint's."""
    match = _STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint in a folder was written to its end."""
    return os.path.isfile(folder / COMPLETE)


def complete(parent: Path) -> dict[int, Path]:
    """The complete checkpoints in `parent` by step, the oldest first."""
    folders = _all(parent)
    return {step: folders[step] for step in sorted(folders) if is_complete(folders[step])}


def newest(parent: Path) -> Path | None:
    """The complete checkpoint with the most steps in `parent`."""
    folders = complete(parent)
    return folders[max(folders)] if folders else None


def _all(parent: Path) -> dict[int, Path]:
    if not os.path.isdir(parent):
        return {}
    return {step: entry for entry in parent.iterdir() if (step := step_of(entry)) is not None and entry.is_dir()}


# ---- writing -------------------------------------------------------------------------------------------------


def write_index(folder: Path, index: Index) -> None:
    """Completes a checkpoint whose files are all written; deletes other files in its folder, of a failed attempt."""
    text = index.model_dump_json(indent=1) + "\n"
    for entry in folder.iterdir():
        if entry.name not in index.files:
            entry.unlink()
    marker = json.dumps({"index": hashlib.sha256(text.encode()).hexdigest()}) + "\n"
    for name, content in ((INDEX, text), (COMPLETE, marker)):
        replace_text(folder / name, content)
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to disk, if the system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(parent: Path, keep: int, newest: int, best: int | None = None) -> None:
    """Deletes all but the `keep` newest complete checkpoints up to step `newest` and that of step `best`, and
    incomplete ones before that.

    `newest` was written just now: a folder with a later name was named so by a user, and stays. `.complete` is deleted
    first, so that a half deleted checkpoint is never taken for a complete one.
    """
    kept = [step for step in complete(parent) if step <= newest][-keep:]
    for step, folder in _all(parent).items():
        # The target of a link is not ours.
        if step not in kept and step != best and step < newest and not folder.is_symlink():
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(checkpoint: Path) -> None:
    """Renames the complete checkpoints after this one, so that no run takes them for its newest."""
    for step, folder in complete(checkpoint.parent).items():
        if step > (step_of(checkpoint) or 0):
            names = (folder.with_name(f"{folder.name}.aside{n or ''}") for n in itertools.count())
            folder.rename(next(name for name in names if not os.path.lexists(name)))


# ---- reading -------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Index:
    """The index of a complete checkpoint. Raises E612 if it is not complete, damaged, or of another version."""
    if not is_complete(folder):
        text = f"run: {folder} is not a complete checkpoint"
        hint = "name one with the file .complete in it, or the run directory to have the newest of those"
        raise ZbcError("E612", text, hint=hint)
    marker, _ = _json(folder / COMPLETE)
    data, raw = _json(folder / INDEX)
    if not isinstance(marker, dict) or hashlib.sha256(raw).hexdigest() != marker.get("index"):
        raise damaged(folder / INDEX, "it is not what was written (sha256 differs)")
    version = data.get("version") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if version != VERSION:
        text = f"run: {folder} has checkpoint version {version!r}, this zbc reads {VERSION}"
        raise ZbcError("E612", text, hint="resume with the zbc that wrote it")
    try:
        index = Index.model_validate(data)
    except ValidationError as error:
        raise damaged(folder / INDEX, first_of(error)) from None
    if (wrong := index.wrong()) is not None:
        raise damaged(folder / INDEX, wrong)
    if step_of(folder) not in (None, index.step):
        raise damaged(folder / INDEX, f"it is of step {index.step}, and its folder is called {folder.name}")
    return index


def _json(path: Path) -> tuple[Any, bytes]:
    """The JSON content of a file, and its bytes. Raises E612."""
    try:
        raw = path.read_bytes()
        return json.loads(raw), raw
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, getattr(error, "strerror", None) or str(error)) from None


def check_file(folder: Path, name: str, told: File, alive: Callable[[], None] = lambda: None) -> None:
    """Raises E612 unless a file has the length and the bytes that were written; `alive` is called from time to time."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != told.bytes:
            raise damaged(path, f"it has {size} bytes, {told.bytes} were written")
        with path.open("rb") as file:
            crc = 0
            while block := file.read(BLOCK):
                crc = zlib.crc32(block, crc)
                alive()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    if crc != told.crc32:
        raise damaged(path, "its bytes are not those that were written (crc32 differs)")


def damaged(path: Path, why: str) -> ZbcError:
    """E612, with the previous checkpoint as a hint."""
    folder, step = path.parent, step_of(path.parent)
    before = [earlier for number, earlier in complete(folder.parent).items() if step is not None and number < step]
    hint = "there is no complete one before it"
    if before:
        hint = f"go on from the one before: --resume {shlex.quote(str(before[-1]))}"
    return ZbcError("E612", f"run: the checkpoint file {path} is damaged: {why}", hint=hint)
