"""The contents of files that others may have made: bounded, and without waiting for somebody to write them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST = 2**30  # bytes; a plan of ten million ops has files of some MB each


def contents(path: Path, *, pipe: bool = False) -> bytes:
    """The bytes of a regular file; `pipe`: also of a pipe that the user has named. Raises OSError for a file of another
    kind, and for more than a GiB."""
    flags = 0 if pipe else os.O_NONBLOCK  # else opening a pipe that nobody writes to would wait
    with open(path, "rb", opener=lambda name, how: os.open(name, how | flags)) as file:
        kind = os.fstat(file.fileno())
        if not (stat.S_ISREG(kind.st_mode) or (pipe and stat.S_ISFIFO(kind.st_mode))):
            raise OSError(errno.EINVAL, "it is no regular file")
        found = bytearray()
        while part := file.read(2**20):
            found += part
            if len(found) > MOST:
                raise OSError(errno.EFBIG, f"it has more than {MOST} bytes")
    return bytes(found)
