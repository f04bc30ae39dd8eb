"""Checkpoints on disk: which there are, which one is complete, which may go.

    <dir>/step-00000100/
      rank-0000.safetensors   the tensors that rank 0 answers for; one file per rank that has any
      index.json              which part of which tensor is where, and what training this is; checksums of each file
      .complete               written last, in one rename: the sha256 of index.json

A folder without `.complete` is what a run left that ended while it was writing, and is never read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zbc.errors import ZbcError

COMPLETE, INDEX = ".complete", "index.json"
FORMAT, VERSION = "zbc-checkpoint", 2
FOLDER = "checkpoints"  # in a run directory
_STEP = re.compile(r"step-(\d{8,})")
BLOCK = 2**23  # bytes read, written and summed up in one go
_MOST = 2**62  # elements of a tensor
_Index = Annotated[int, Field(ge=0)]
_File = Annotated[str, Field(pattern=r"^rank-\d{4,}\.safetensors$")]  # beside the index, never elsewhere
Type = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)


class File(_Strict):
    """What was written into a file: its length, and the crc32 of each `block` bytes of it."""

    bytes: _Index
    block: Annotated[int, Field(ge=1, le=2**30)]
    crc32: list[_Index]


class Part(_Strict):
    """Elements of a tensor in memory order, and where they are: a file, and the name of a tensor in it."""

    start: _Index
    count: _Index
    file: _File
    key: str


class Whole(_Strict):
    """A tensor, in parts."""

    dtype: Type
    shape: list[_Index]
    parts: list[Part]


class Index(_Strict):
    """`index.json`: what training a checkpoint is of, and where its tensors are."""

    format: str
    version: int
    step: _Index  # steps trained
    samples: _Index  # that they took
    data_samples: int | None  # of all there are
    seed: int
    optimizer: str
    plan: str
    schedule: str
    ranks: int
    copies: int
    run: str
    zbc_version: str
    torch_version: str
    files: dict[_File, File]
    tensors: dict[str, Whole]


def folder_of(parent: Path, step: int) -> Path:
    """Where the checkpoint behind `step` steps is kept."""
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """How many steps are in a checkpoint, by its name; None if that is not a checkpoint's."""
    match = _STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def is_complete(folder: Path) -> bool:
    """Whether the checkpoint in a folder was written to its end."""
    return os.path.isfile(folder / COMPLETE)


def complete(parent: Path) -> dict[int, Path]:
    """The complete checkpoints in `parent` by step, the oldest first."""
    found = _all(parent)
    return {step: found[step] for step in sorted(found) if is_complete(found[step])}


def newest(parent: Path) -> Path | None:
    """The complete checkpoint with the most steps in `parent`."""
    found = complete(parent)
    return found[max(found)] if found else None


def _all(parent: Path) -> dict[int, Path]:
    if not os.path.isdir(parent):
        return {}
    return {step: entry for entry in parent.iterdir() if (step := step_of(entry)) is not None and entry.is_dir()}


# ---- writing -------------------------------------------------------------------------------------------------


def write_index(folder: Path, index: Index) -> None:
    """Complete a checkpoint whose files are all there; whatever else is in its folder is of an attempt that failed."""
    text = index.model_dump_json(indent=1) + "\n"
    for entry in folder.iterdir():
        if entry.name not in index.files:
            entry.unlink()
    _replace(folder / INDEX, text)
    _replace(folder / COMPLETE, json.dumps({"index": hashlib.sha256(text.encode()).hexdigest()}) + "\n")


def _replace(path: Path, text: str) -> None:
    """Put a small file in place in one rename that survives the machine."""
    part = path.with_name(f".{path.name.lstrip('.')}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(parent: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints, and incomplete ones that are older than the newest.

    A checkpoint loses its `.complete` first, so that one half deleted is never taken for a whole one.
    """
    whole = list(complete(parent))
    if not whole:
        return
    kept = set(whole[-keep:])
    for step, folder in _all(parent).items():
        if step not in kept and step < whole[-1] and not folder.is_symlink():  # what is elsewhere is somebody else's
            (folder / COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


# ---- reading -------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Index:
    """What a complete checkpoint says of itself. Raises E612 if it is not complete, damaged, or of another version."""
    if not is_complete(folder):
        text = f"run: {folder} is not a complete checkpoint"
        hint = "name one with the file .complete in it, or the run directory to have the newest of those"
        raise ZbcError("E612", text, hint=hint)
    try:
        marker = json.loads((folder / COMPLETE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(folder / COMPLETE, getattr(error, "strerror", None) or str(error)) from None
    try:
        raw = (folder / INDEX).read_bytes()
    except OSError as error:
        raise damaged(folder / INDEX, error.strerror or str(error)) from None
    if not isinstance(marker, dict) or hashlib.sha256(raw).hexdigest() != marker.get("index"):
        raise damaged(folder / INDEX, "it is not what was written (sha256 differs)")
    return _parse(folder, raw)


def _parse(folder: Path, raw: bytes) -> Index:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(folder / INDEX, str(error)) from None
    version = data.get("version") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if version != VERSION:
        text = f"run: {folder} has checkpoint version {version!r}, this zbc reads {VERSION}"
        raise ZbcError("E612", text, hint="resume with the zbc that wrote it")
    try:
        index = Index.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise damaged(folder / INDEX, f"{place}: {first['msg'].lower()}") from None
    for name, tensor in index.tensors.items():
        total = math.prod(tensor.shape)
        lost = [part.file for part in tensor.parts if part.file not in index.files]
        if lost:
            raise damaged(folder / INDEX, f"{name} is in {lost[0]}, which it does not list")
        if total > _MOST or any(part.start + part.count > total for part in tensor.parts):
            raise damaged(folder / INDEX, f"{name} has parts that its shape {tensor.shape} has no place for")
    return index


def check_file(folder: Path, name: str, told: File, alive: Callable[[], None] = lambda: None) -> None:
    """Raise E612 unless a file has the length and the bytes that were written; `alive` is called now and then."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != told.bytes:
            raise damaged(path, f"it has {size} bytes, {told.bytes} were written")
        with path.open("rb") as file:
            found = []
            while block := file.read(told.block):
                found.append(zlib.crc32(block))
                alive()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from None
    if found != told.crc32:
        raise damaged(path, "its bytes are not those that were written (crc32 differs)")


def damaged(path: Path, why: str) -> ZbcError:
    """E612, with the checkpoint before this one as the way out."""
    folder, step = path.parent, step_of(path.parent)
    before = [one for number, one in complete(folder.parent).items() if step is not None and number < step]
    hint = (
        f"go on from the one before: --resume {shlex.quote(str(before[-1]))}"
        if before
        else "there is no complete one before it"
    )
    return ZbcError("E612", f"run: the checkpoint file {path} is damaged: {why}", hint=hint)
