"""Shared memory of the processes of a host: a file that exists only until all of them have mapped it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zbc.errors import ZbcError

NAME = 256  # bytes of the message with which ranks exchange paths
_FOLDER = Path("/dev/shm")
COLLECTIVE = 'set parallel.exchange = "collective"'

Exchange = Callable[[bytes], list[bytes]]  # an all-gather over the ranks


def share(size: int, rank: int, ranks: tuple[int, ...], exchange: Exchange) -> list[Tensor]:
    """`size` zero bytes of each of `ranks`, which all call this. Raises E603 if one cannot make or map them."""
    made, problem = _make(size)
    names = exchange(b"" if made is None else os.fsencode(made))
    maps = list[Tensor]()
    for peer, name in zip(ranks, names, strict=True):
        if problem is not None:
            break
        if not name:
            problem = ZbcError("E603", f"run: rank {peer} cannot share memory with rank {rank}", hint=COLLECTIVE)
            break
        path = os.fsdecode(name)
        try:
            if not Path(path).exists():  # torch would create it
                raise FileNotFoundError(f"{path} is not there")
            maps.append(torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
        except (OSError, RuntimeError) as error:
            text = f"run: rank {rank} cannot see the memory of rank {peer}: they are on two hosts, or in two containers"
            problem = ZbcError("E603", text, details=[str(error).splitlines()[0][:200]], hint=COLLECTIVE)
    said = exchange(b"" if problem is None else b"!")  # all ranks have mapped all files
    if made is not None:
        Path(made).unlink(missing_ok=True)
    if problem is not None:
        raise problem
    if any(said):
        failed = ", ".join(str(peer) for peer, word in zip(ranks, said, strict=True) if word)
        raise ZbcError("E603", f"run: rank {failed} cannot share memory with rank {rank}", hint=COLLECTIVE)
    return maps


def _make(size: int) -> tuple[str | None, ZbcError | None]:
    folder = _FOLDER if os.access(_FOLDER, os.W_OK) else Path(tempfile.gettempdir())
    path = None
    try:
        handle, path = tempfile.mkstemp(prefix="zbc-", dir=folder)
        try:
            extend = getattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
            extend(handle, 0, size)  # too little memory is an error here, not later
        finally:
            os.close(handle)
        if len(os.fsencode(path)) >= NAME:
            raise OSError(f"the path {path} is too long")
    except OSError as error:
        if path is not None:
            Path(path).unlink(missing_ok=True)
        text = f"run: no {size:,} bytes of shared memory in {folder}: {error.strerror or error}"
        return None, ZbcError("E603", text, hint=f"make {folder} larger (docker: --shm-size), or {COLLECTIVE}")
    return path, None
