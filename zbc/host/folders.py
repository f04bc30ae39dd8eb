"""Creates the parent folders of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RUNS = Path("runs")  # of run directories, and of the plans of jobs that `zbc run` plans


@contextmanager
def folders_for(path: Path, *, keep: bool = True) -> Iterator[None]:
    """Creates the parent folders of `path`. Raises OSError if that fails. If the body raises, and always without
    `keep`, removes those of the created folders that are empty."""
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
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
