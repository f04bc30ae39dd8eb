"""SIGINT, SIGTERM and SIGHUP (a terminal that is closed): the first one asks to stop, a second one forces it.

Python runs signal handlers in the main thread between two bytecodes, and a rank's main thread may be blocked in a
transfer until its peer is ready. But the C-level handler writes to the wakeup descriptor at once, and a thread reads
it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
_EXIT_CODE = 49  # index of the field in /proc/PID/stat after the command's name


def handled() -> list[signal.Signals]:
    """The signals that ask this process to end; without SIGHUP if it is ignored, as under `nohup`."""
    return [*_ALWAYS, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else [])]


class Signals:
    """A context in which the first signal calls `asked(name)` and a later one `insisted(name)`, in a thread.

    `apart`: seconds before another signal counts as a second one. `repeated`: the launcher forwards a Ctrl-C that its
    children got from the terminal already, so one more is not the user's, however late it comes. Does nothing outside
    of the main thread, where signals cannot be handled.
    """

    def __init__(
        self,
        asked: Callable[[str], None],
        insisted: Callable[[str], None],
        *,
        apart: float = 1.0,
        repeated: bool = False,
    ) -> None:
        self._asked, self._insisted, self._apart, self._repeated = asked, insisted, apart, repeated
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Signals:
        if self._active:
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._old = [(number, signal.signal(number, _nothing)) for number in handled()]
            self._thread = threading.Thread(target=self._watch, name="zbc-signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._active:
            for number, handler in self._old:
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_fd)
            os.close(self._write)
            self._thread.join()
            os.close(self._read)

    def _watch(self) -> None:
        first, expected = None, self._repeated
        while byte := os.read(self._read, 1):
            if byte[0] not in dict(self._old):
                continue
            now, name = time.monotonic(), signal.Signals(byte[0]).name
            if first is None:
                first = now
                self._asked(name)
            elif now - first <= self._apart or expected:
                expected = False
            else:
                self._insisted(name)


def shares_terminal() -> bool:
    """Whether this process and its parent both get the signals of a terminal."""
    parent = os.getppid()  # 0 if it is outside of this container
    try:
        return parent != 0 and os.getpgid(parent) == os.getpgid(0)
    except OSError:
        return False


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: a Python handler has to be installed for the wakeup descriptor to be written to."""


def killed_by(pid: int) -> str | None:
    """The signal that ended a process that its parent has not reaped yet."""
    with suppress(OSError, ValueError, IndexError):
        code = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_EXIT_CODE])
        return signal.Signals(os.WTERMSIG(code)).name if os.WIFSIGNALED(code) else None
    return None
