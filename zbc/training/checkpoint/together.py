"""What all ranks do together about a checkpoint, and how the failure of one becomes the failure of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.training.checkpoint import folder as disk
from zbc.training.launch.board import Board

_LIMIT = timedelta(hours=24)  # for ranks to meet: a slow disk is no failure, and a dead rank is found by others


def together(
    board: Board, name: str, work: Callable[[], dict[str, Any]], folder: Path | None = None
) -> list[dict[str, Any]]:
    """What `work` returned on each rank, as plain data; the first rank's error, if there is one, is raised on all.

    An OSError becomes E611, of a file in `folder`.
    """
    try:
        said: dict[str, Any] = {"fine": work()}
    except ZbcError as error:
        said = {"error": error.as_json()}
    except OSError as error:
        said = {"error": unwritable(error, folder).as_json()}
    except Exception as error:
        board.meet(name, _LIMIT, json.dumps({"error": ZbcError("E703", f"run: {error!r}").as_json()}))
        raise
    heard = [json.loads(text) for text in board.meet(name, _LIMIT, json.dumps(said))]
    for one in heard:
        if "error" in one:
            told = one["error"]
            where, hint, details = told["where"], told["hint"], told["details"]
            raise ZbcError(told["code"], told["message"], where=where, hint=hint, details=details)
    return [one["fine"] for one in heard]


def unwritable(error: OSError, folder: Path | None) -> ZbcError:
    """E611, with what is safe."""
    place = error.filename or folder or "the checkpoint"
    before = None if folder is None else disk.newest(folder.parent)
    safe = [] if before is None else [f"the newest complete checkpoint is {before}"]
    hint = "make room, or name another place with checkpoint.dir; --resume auto goes on from the newest checkpoint"
    return ZbcError("E611", f"run: cannot write {place}: {error.strerror or error}", hint=hint, details=safe)
