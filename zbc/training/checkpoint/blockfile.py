"""A file written in large blocks, past the page cache where the system can do that, with a checksum of each block.

Beside steps that use every core, what a write costs is what it takes of them. Through the page cache the kernel copies
every byte and writes it back later, on whatever core is computing: 15 ms of a core for 50 MB on the machine of
`bench/checkpoint.py`, and as much behind the scenes; past it, 3. Few large blocks also mean that the writing thread
seldom asks for Python's lock. crc32 takes a quarter of the time of sha256: it is to find damage, not forgery.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from zbc.training.checkpoint import folder as disk

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
_PAGE = 4096  # what such writes have to be aligned to: place in memory, place in the file, length
_SHORT = 2**16  # bytes that are copied faster than the lock is given away and taken again
_SYNCED = 2**28  # bytes after which the disk is waited for, so that no wait is long


class Blocks:
    """Memory for one block; it is used by one file after the other."""

    def __init__(self) -> None:
        self.size = disk.BLOCK
        self._memory = mmap.mmap(-1, self.size)
        self.view = memoryview(self._memory)

    def fill(self, start: int, data: memoryview) -> None:
        """Copy bytes into the block; many at once without Python's lock."""
        if len(data) < _SHORT:
            self.view[start : start + len(data)] = data
        else:
            ctypes.memmove(ctypes.byref(ctypes.c_char.from_buffer(self.view, start)), _address(data), len(data))


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class BlockFile:
    """A new file at `path`, in whose place nothing may be; it is on the disk when the context ends without an error.

    `sums` are the checksums of its blocks, `bytes` its length. `alive` is called for every block.
    """

    def __init__(self, path: Path, blocks: Blocks, alive: Callable[[], None] = lambda: None) -> None:
        self._blocks, self._alive = blocks, alive
        self._filled = 0
        self.bytes, self.sums = 0, list[int]()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._path, self._direct = path, self._set_direct(True)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
                os.fsync(self._file)
        except OSError as failure:
            raise self._named(failure) from None
        finally:
            os.close(self._file)

    def add(self, data: memoryview) -> None:
        """Append these bytes. Raises OSError where the disk refuses."""
        start = 0
        while start < len(data):
            take = min(len(data) - start, self._blocks.size - self._filled)
            self._blocks.fill(self._filled, data[start : start + take])
            self._filled, start = self._filled + take, start + take
            if self._filled == self._blocks.size:
                try:
                    self._flush()
                except OSError as failure:
                    raise self._named(failure) from None

    def _flush(self) -> None:
        """Write what the block holds; what is no whole page, at the end of the file, goes through the page cache."""
        block = self._blocks.view[: self._filled]
        if not block:
            return
        self.sums.append(zlib.crc32(block))
        done = 0
        while done < len(block):
            pages = (len(block) - done) // _PAGE * _PAGE
            if self._direct and (done % _PAGE or not pages):
                self._direct = self._set_direct(False)
            done += self._write(block[done : done + pages] if self._direct else block[done:])
        before, self.bytes, self._filled = self.bytes, self.bytes + len(block), 0
        if not self._direct and self.bytes // _SYNCED > before // _SYNCED:
            os.fsync(self._file)
        self._alive()

    def _write(self, part: memoryview) -> int:
        try:
            return os.write(self._file, part)
        except OSError as error:
            if not self._direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._direct = self._set_direct(False)  # this file system cannot
            return os.write(self._file, part)

    def _set_direct(self, wanted: bool) -> bool:
        """Whether writes go past the page cache from now on."""
        if not _DIRECT:
            return False
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
        except OSError:
            return False
        return wanted

    def _named(self, failure: OSError) -> OSError:
        return OSError(failure.errno, failure.strerror, str(self._path))
