"""Collective tasks of all ranks for checkpoints: common errors, a check of the folder, its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.training.checkpoint import folder as disk
from zbc.training.launch.board import Board

_LIMIT = timedelta(hours=24)  # for ranks to meet: a slow disk is no failure, and dead ranks are detected elsewhere


def together(
    board: Board, name: str, work: Callable[[], dict[str, Any] | None], folder: Path | None = None
) -> dict[str, Any]:
    """The results of `work` on all ranks, as plain data, each entry of the first rank that has it; an error of the
    first failed rank is raised on all. An OSError becomes E611, for a file in `folder`."""
    try:
        said: dict[str, Any] = {"fine": work() or {}}
    except ZbcError as error:
        said = {"error": error.as_json()}
    except OSError as error:
        said = {"error": _unwritable(error, folder).as_json()}
    except Exception as error:
        board.meet(name, _LIMIT, json.dumps({"error": ZbcError("E703", f"run: {error!r}").as_json()}), _first)
        raise
    told = json.loads(board.meet(name, _LIMIT, json.dumps(said), _first))
    if "error" in told:
        raise ZbcError(**told["error"])
    found: dict[str, Any] = told["fine"]
    return found


def _first(texts: list[str]) -> str:
    """The first error, else the results together."""
    said = [json.loads(text) for text in reversed(texts)]
    failed = [answer for answer in said if "error" in answer]
    return json.dumps(failed[-1] if failed else {"fine": {k: v for answer in said for k, v in answer["fine"].items()}})


def _unwritable(error: OSError, folder: Path | None) -> ZbcError:
    """E611, with the newest complete checkpoint."""
    place = error.filename or folder or "the checkpoint"
    before = None if folder is None else disk.newest(folder.parent)
    safe = [] if before is None else [f"the newest complete checkpoint is {before}"]
    hint = "make room, or name another place with checkpoint.dir; --resume auto goes on from the newest checkpoint"
    return ZbcError("E611", f"run: cannot write {place}: {error.strerror or error}", hint=hint, details=safe)


# ---- before the first step -----------------------------------------------------------------------------------


_SHARED = ".shared-"


def try_out(board: Board, folder: Path) -> None:
    """Checks that every rank can write into the folder of checkpoints, and sees rank 0's file; all ranks call this.

    Raises E611 if one cannot, or has another folder of that name: machines without a shared disk would each keep a part
    of every checkpoint.
    """
    first = disk.folder_of(folder, 0)  # an error about it names the newest checkpoint next to it

    def leave() -> dict[str, Any] | None:
        if board.rank != 0:
            return None
        name = f"{_SHARED}{uuid.uuid4().hex}"  # a new one: file systems cache that a name did not exist
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_SHARED}*"):  # of a run that was killed here; no other run uses the folder now
            left.unlink(missing_ok=True)
        (folder / name).write_text("written by rank 0")
        return {"name": name}

    name = together(board, "a place for checkpoints", leave, first)["name"]

    def look() -> None:
        if not (folder / name).exists():
            text = f"run: rank {board.rank} does not see what rank 0 wrote to {folder}, where checkpoints go"
            raise ZbcError("E611", text, hint="set checkpoint.dir to a folder that all machines share")
        own = folder / f"{name}-{board.rank}"
        own.write_text("")
        own.unlink()

    try:
        together(board, "a place for checkpoints, seen", look, first)
    finally:
        if board.rank == 0:
            (folder / name).unlink(missing_ok=True)


# ---- one run at a time ---------------------------------------------------------------------------------------
#
# Rank 0 holds a system lock on a file in the folder for the life of its process, however that ends. Network file
# systems share such locks. On one without locks, two runs in one folder are detected when a checkpoint is read.

WRITER = ".writer"  # its text names the owner, for runs that are refused
_PATIENCE_S = 5.0  # for a process that is just ending
_LEASE_S = 90.0  # for one of this launch, whose machine may be gone: a file server keeps its locks for a while
_TICK_S = 0.1


@contextmanager
def owned(board: Board, folder: Path | None, who: str, launch: str = "") -> Iterator[None]:
    """Locks `folder` against other runs inside of the block, which all ranks enter together. Raises E614 on all.
    `folder`: None if it does not exist yet, so that no other run can use it. `launch` is the same for all restarts."""
    locks: list[int] = []

    def take() -> None:
        if board.rank == 0 and folder is not None and (lock := _lock(folder, who, launch)) is not None:
            locks.append(lock)

    together(board, "a folder of its own", take)
    try:
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _lock(folder: Path, who: str, launch: str) -> int | None:
    """An open file with the lock; None if it cannot be created. Raises E614 if another process has the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        return None  # `try_out` reports it
    began = time.monotonic()
    while not _locked(file):
        owner, _, theirs = os.pread(file, 4096, 0).decode(errors="replace").strip().partition("\n")
        if time.monotonic() - began > (_LEASE_S if launch and theirs == launch else _PATIENCE_S):
            os.close(file)
            text = f"run: another run writes its checkpoints into {folder} now"
            hint = "wait for it to end, or give this run another -o or checkpoint.dir"
            raise ZbcError("E614", text, hint=hint, details=[owner] if owner else [])
        time.sleep(_TICK_S)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{who}\n{launch}\n".encode(), 0)
    return file


def _locked(file: int) -> bool:
    """Takes the lock; False if another process has it. True if the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
