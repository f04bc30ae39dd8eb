"""Out-of-memory errors: how to recognise them, and memory reserved for reporting them.

The memory left then may not suffice for a thread, or for the text of an error. So a rank reserves some address space,
which costs no memory as long as it is not written to, and frees it when an allocation fails.
"""

from __future__ import annotations

import mmap
import re

import torch

from zbc.plan.directory import Manifest
from zbc.text import size

_ROOM = 64 * 2**20
_ASKED = re.compile(r"tried to allocate (?:(\d+) bytes|([\d.]+ [KMGT]iB))", re.IGNORECASE)
_kept: list[mmap.mmap] = []


def keep_room() -> None:
    """Reserves the address space, once per process."""
    if not _kept:
        _kept.append(mmap.mmap(-1, _ROOM))


def ran_out(error: BaseException) -> bool:
    """Whether `error` is an out-of-memory error, of a device or of the host; if so, frees the reserved space."""
    refused = isinstance(error, RuntimeError) and re.search("DefaultCPUAllocator|bad_alloc", str(error)) is not None
    exhausted = refused or isinstance(error, MemoryError | torch.OutOfMemoryError)
    if exhausted and _kept:
        _kept.pop().close()
    return exhausted


def asked(error: BaseException) -> str | None:
    """The size of the failed allocation, as text, if the error names it."""
    match = _ASKED.search(str(error))
    return None if match is None else match[2] or size(int(match[1]))


def predicted(manifest: Manifest, rank: int) -> str:
    """The plan's prediction of a rank's peak memory, as a note to an error."""
    per_rank = manifest.predicted.get("per_rank")
    peak = per_rank[manifest.topology.of(rank).pp]["peak_bytes"] if per_rank else 0
    if not peak:
        return "the plan does not know how much memory the layers take: `zbc profile` measures it"
    return f"the plan predicts a peak of {size(peak)} for this rank, beside what Python and torch take"
