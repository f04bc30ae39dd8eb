"""Handles failing standard streams: a reader that goes away (`zbc explain | head -1`), a full disk, a closed
terminal, and streams that are closed from the start."""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import TextIO

from zbc.errors import ZbcError
from zbc.text import visible

EXIT_PIPE = 141  # exit code in a shell of a program killed by SIGPIPE


def silence(stream: TextIO) -> None:
    """Redirects stdout or stderr to nowhere, so that Python does not complain when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def unwritten_stdout(error: OSError) -> ZbcError:
    """E608 for an answer that cannot be written; redirects the rest of it to nowhere."""
    silence(sys.stdout)
    text = f"cannot write to standard output: {error.strerror or error}"
    return ZbcError("E608", text, hint="make room where it goes to, or send it elsewhere")


def to_stdout(line: str) -> None:
    """Prints a line on stdout. If its reader has gone the command ends, as usual for commands. A closed terminal has
    sent SIGHUP, which ends the run in order unless ignored, so that case only silences stdout. Raises E608 if a line
    cannot be written for another reason."""
    try:
        sys.stdout.write(visible(line) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        raise SystemExit(EXIT_PIPE) from None
    except OSError as error:
        if not _is_hung_up(error):
            raise unwritten_stdout(error) from None
        silence(sys.stdout)


def _is_hung_up(error: OSError) -> bool:
    """Whether stdout was a terminal that has been closed."""
    return error.errno == errno.EIO and stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode)


def open_missing() -> None:
    """Opens /dev/null for those of stdin, stdout and stderr that are closed. Else the next files that are opened would
    get their numbers, and output of libraries would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
