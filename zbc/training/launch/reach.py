"""Can the machines of a run reach each other? Asked before the process groups are made, which would wait for long."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from zbc.errors import ZbcError
from zbc.training.launch.board import Board
from zbc.training.launch.interface import Interface

_CONNECT_S = 20.0
_HINT = (
    "open the ports between the machines, or set GLOO_SOCKET_IFNAME on each to the interface that reaches the others"
)


@dataclass(frozen=True)
class Doorstep:
    """Where a rank is found by those of other machines."""

    interface: Interface
    first: bool  # of the ranks on its machine: it opens a door for all of them


def check_reach(board: Board, here: Doorstep, limit: timedelta, name: Callable[[int], str]) -> None:
    """Connect to every other machine of the run, all ranks together. Raises E615 that names who does not reach whom."""
    with ExitStack() as stack:
        port = 0
        if here.first:
            door = stack.enter_context(socket.create_server((here.interface.address, 0), backlog=1024))
            port = door.getsockname()[1]
        mine = {"host": socket.gethostname(), **here.interface._asdict(), "port": port}
        said = [json.loads(text) for text in board.meet("doorstep", limit, json.dumps(mine))]
        others = [rank for rank, one in enumerate(said) if one["port"] and one["address"] != here.interface.address]
        found = [(rank, why) for rank in others if (why := _try(said[rank])) is not None]
        failures = [json.loads(text) for text in board.meet("reached", limit, json.dumps(found))]
    if any(failures):
        raise _unreachable(failures, said, name)


def _try(other: dict[str, Any]) -> str | None:
    """Why a door cannot be reached; None if it can."""
    try:
        socket.create_connection((other["address"], other["port"]), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def unconnected(who: str, error: BaseException) -> ZbcError:
    """torch's own words for a group that cannot be made, with what to do about it."""
    text = f"run: {who} cannot connect to the others"
    return ZbcError("E615", text, hint=_HINT, details=[str(error).partition("\n")[0]])


def _unreachable(failures: list[list[Any]], said: list[dict[str, Any]], name: Callable[[int], str]) -> ZbcError:
    def where(rank: int) -> str:
        one = said[rank]
        return f"{name(rank)} ({one['host']}, {one['name']} {one['address']})"

    lines = [f"{where(a)} cannot reach {where(b)}: {why}" for a, found in enumerate(failures) for b, why in found]
    details = [*lines[:8], *([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])]
    return ZbcError("E615", "run: the machines of this run cannot reach each other", hint=_HINT, details=details)
