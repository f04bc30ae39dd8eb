"""Waits in tests that start processes and threads: limited, and without using their core."""

import faulthandler
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block after `seconds`; ends the process after twice as many."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def until(happened: Callable[[], object]) -> None:
    """Waits until the condition holds, sleeping in between."""
    while not happened():
        time.sleep(0.002)


def ended(*command: str, seconds: int = 60, **how: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with its exit code and what it said."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **how)
