"""One run at a time writes into a folder of checkpoints.

Rank 0 holds a lock of the system (`fcntl`) on a file there while its process lives: however that ends, the lock does
too, so nothing is ever left behind that somebody would have to remove. Network file systems share such locks; on one
that has none, nothing is checked, and two runs in one folder are noticed when a checkpoint is read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Board

NAME = ".writer"  # its text is for whoever is refused: who writes here
_HELD = (errno.EACCES, errno.EAGAIN)
_PATIENCE_S = 5.0  # for a process that is just ending
_LEASE_S = 90.0  # for one of this launch, whose machine may be gone: a file server then keeps its locks for a while
_TICK_S = 0.1


@contextmanager
def owned(board: Board, folder: Path | None, who: str, launch: str = "") -> Iterator[None]:
    """Keep other runs out of `folder` inside of the block, which all ranks enter together. Raises E614 on all of them.

    `folder`: None if it is not there yet, so that no other run can know it. `launch` is the same for all restarts.
    """
    locks: list[int] = []

    def take() -> dict[str, Any]:
        lock = None if board.rank or folder is None else _lock(folder, who, launch)
        locks.extend([] if lock is None else [lock])
        return {}

    together(board, "a folder of its own", take)
    try:
        yield
    finally:
        for lock in locks:
            os.close(lock)


def _lock(folder: Path, who: str, launch: str) -> int | None:
    """An open file with the lock on it; None where there is no such thing. Raises E614 if another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        return None  # whoever tries the folder out will say so
    began = time.monotonic()
    while not _locked(file):
        other, _, theirs = os.pread(file, 4096, 0).decode(errors="replace").strip().partition("\n")
        if time.monotonic() - began > (_LEASE_S if launch and theirs == launch else _PATIENCE_S):
            os.close(file)
            text = f"run: another run writes its checkpoints into {folder} now"
            hint = "wait for it to end, or give this run another --out or checkpoint.dir"
            raise ZbcError("E614", text, hint=hint, details=[other] if other else [])
        time.sleep(_TICK_S)
    os.ftruncate(file, 0)
    os.pwrite(file, f"{who}\n{launch}\n".encode(), 0)
    return file


def _locked(file: int) -> bool:
    """Take the lock; False if another process has it. Where the file system has no locks that counts as taken."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD
    return True
