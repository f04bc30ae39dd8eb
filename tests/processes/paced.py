"""Ranks that wait for the test: its action at a console line happens at that step, even if it reads the line late.

The main functions for ranks in this file patch their process, then run as usual.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.processes.plans import run_here
from zbc.training.checkpoint import folder as disk
from zbc.training.launch import local
from zbc.training.launch.board import Place
from zbc.training.launch.launch import RunOptions

_TICK_S = 0.002
_usual = local._rank


def run_paced(
    folder: Path, ranks: int, out: Path, each: Callable[[str], None] = lambda line: None, **options: Any
) -> list[str]:
    """`run_here`, but rank 0 continues after a line only when `each` has seen it."""
    gates = _gates(out)
    gates.mkdir(exist_ok=True)

    def seen(line: str) -> None:
        each(line)
        (gates / _name(line)).touch()

    with mock.patch.object(local, "_rank", rank_that_waits):
        return run_here(folder, ranks, out, seen, **options)


def rank_that_waits(place: Place, options: RunOptions, pipe: Any) -> None:
    """The main function of a rank in `run_paced`."""
    send, gates = local._send, _gates(options.out)

    def patiently(pipe: Any, said: tuple[str, Any]) -> None:
        send(pipe, said)
        while said[0] == "line" and not (gates / _name(said[1])).exists():
            time.sleep(_TICK_S)

    with mock.patch.object(local, "_send", patiently):
        _usual(place, options, pipe)


def run_on_a_slow_disk(folder: Path, ranks: int, out: Path, **options: Any) -> list[str]:
    """`run_here`, but every checkpoint exists for a while before it is complete."""
    with mock.patch.object(local, "_rank", rank_with_a_slow_disk):
        return run_here(folder, ranks, out, **options)


def rank_with_a_slow_disk(place: Place, options: RunOptions, pipe: Any) -> None:
    """The main function of a rank in `run_on_a_slow_disk`."""
    write = disk.write_index

    def slowly(*args: Any) -> None:
        time.sleep(0.2)
        write(*args)

    with mock.patch.object(disk, "write_index", slowly):
        _usual(place, options, pipe)


def _gates(out: Path | None) -> Path:
    """The folder in which the test creates a file for every line that it has seen."""
    assert out is not None
    return out.with_name("gates")


def _name(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
