"""Ranks that wait for the test: what it does at a line of the console it does at that step, however late it reads it.

The main functions of a rank's process that stand here change what is decisive in that process, and do the usual then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.processes.plans import run_here
from zbc.runtime import local
from zbc.runtime.checkpoint import folder as disk
from zbc.runtime.metrics import RunLog

_TICK_S = 0.002
_usual = local._rank


def run_paced(
    folder: Path, ranks: int, out: Path, each: Callable[[str], None] = lambda line: None, **options: Any
) -> list[str]:
    """`run_here`, but no step is written down before `each` has seen the line of the one before.

    So `each` comes in time for what follows a step by one, and for a checkpoint before the last one for the next.
    """
    gates = _gates(out)
    gates.mkdir(exist_ok=True)

    def seen(line: str) -> None:
        each(line)
        if line.startswith("step "):
            (gates / line.split()[1].partition("/")[0]).touch()

    with mock.patch.object(local, "_rank", rank_that_waits):
        return run_here(folder, ranks, out, seen, **options)


def rank_that_waits(order: local.Order, pipe: Any) -> None:
    """Of `run_paced`."""
    record, gates = RunLog.record, _gates(order.options.out)

    def late(self: RunLog, result: Any) -> str | None:
        while result.step > self._settings.first and not (gates / str(result.step)).exists():
            time.sleep(_TICK_S)
        return record(self, result)

    with mock.patch.object(RunLog, "record", late):
        _usual(order, pipe)


def run_on_a_slow_disk(folder: Path, ranks: int, out: Path, **options: Any) -> list[str]:
    """`run_here`, but every checkpoint is there for a while before it is complete."""
    with mock.patch.object(local, "_rank", rank_with_a_slow_disk):
        return run_here(folder, ranks, out, **options)


def rank_with_a_slow_disk(order: local.Order, pipe: Any) -> None:
    """Of `run_on_a_slow_disk`."""
    write = disk.write_index

    def slowly(*args: Any) -> None:
        time.sleep(0.2)
        write(*args)

    with mock.patch.object(disk, "write_index", slowly):
        _usual(order, pipe)


def _gates(out: Path | None) -> Path:
    """Where the test leaves a file for every step whose line it has seen."""
    assert out is not None
    return out.with_name("gates")
