"""Whether checkpoints can be written, asked before the first step instead of hours behind it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.together import together
from zbc.training.launch.board import Board


def try_out(board: Board, folder: Path) -> None:
    """Have every rank write into the folder of checkpoints, and read what rank 0 wrote; all ranks call this.

    Raises E611 if one cannot, or sees another folder under that name: machines that do not share a disk would each keep
    a part of every checkpoint.
    """
    first = disk.folder_of(folder, 0)  # what is said of a folder that cannot be written speaks of those beside it

    def leave() -> dict[str, Any]:
        if board.rank != 0:
            return {}
        name = f".shared-{uuid.uuid4().hex}"  # a new one: file systems remember that a name was not there
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("written by rank 0")
        return {"name": name}

    name = together(board, "a place for checkpoints", leave, first)[0]["name"]

    def look() -> dict[str, Any]:
        if not (folder / name).exists():
            text = f"run: rank {board.rank} does not see what rank 0 wrote to {folder}, where checkpoints go"
            raise ZbcError("E611", text, hint="set checkpoint.dir to a folder that all machines share")
        own = folder / f"{name}-{board.rank}"
        own.write_text("")
        own.unlink()
        return {}

    try:
        together(board, "a place for checkpoints, seen", look, first)
    finally:
        if board.rank == 0:
            (folder / name).unlink(missing_ok=True)
