"""Standard streams that fail: a reader that goes away (`zbc schedules | head -1`), a full disk, a terminal that is
gone, and streams that are closed from the beginning."""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import TextIO

from zbc.errors import ZbcError
from zbc.text import visible

EXIT_PIPE = 141  # what a shell reports of a program that a closed pipe ended


def silence_stdout() -> None:
    """What is still to be written goes nowhere; else Python complains when it flushes in the end."""
    _silence(sys.stdout)


def silence_stderr() -> None:
    """The same of messages."""
    _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def unwritten_stdout(error: OSError) -> ZbcError:
    """E608 for an answer that cannot be written; the rest of it goes nowhere."""
    silence_stdout()
    text = f"cannot write to standard output: {error.strerror or error}"
    return ZbcError("E608", text, hint="make room where it goes to, or send it elsewhere")


def to_stdout(line: str) -> None:
    """A line for whoever reads this command. Without a reader the run ends, as any command does.

    A terminal that is gone has sent SIGHUP, which asks the run to end in order, if it is to end. Raises E608 where a
    line cannot be written for another reason.
    """
    try:
        sys.stdout.write(visible(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        raise SystemExit(EXIT_PIPE) from None
    except OSError as error:
        if not _is_hung_up(error):
            raise unwritten_stdout(error) from None
        silence_stdout()


def _is_hung_up(error: OSError) -> bool:
    """Whether stdout was a terminal, which is gone."""
    return error.errno == errno.EIO and stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)


def open_missing() -> None:
    """Have stdin, stdout and stderr lead nowhere where they are closed.

    Python has None for those, and the next files that are opened get their numbers: what libraries say would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
