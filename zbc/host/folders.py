"""Folders that are made for a file to be in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def folders_for(path: Path, *, keep: bool = True) -> Iterator[None]:
    """Make the folders that `path` is to be in. Raises OSError where that is not possible.

    If what follows raises, and in any case without `keep`, those that were made here and are empty are gone afterwards.
    """
    made = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        _drop(made)
        raise
    if not keep:
        _drop(made)


def _drop(folders: list[Path]) -> None:
    """Remove folders that are empty, from the innermost on."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
