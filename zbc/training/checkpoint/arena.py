"""The staging memory of a rank's state before it is written: one allocation, reused by every save."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_STEP = 64  # bytes; where a tensor may begin


class Arena:
    """Memory for copies of tensors, by key. `pinned`: a GPU copies into it asynchronously.

    It is ordinary memory that is pinned afterwards: torch's pinned allocations are powers of two, up to twice the size.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._laid: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}
        self._places: dict[Hashable, Tensor] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def places(self, tensors: Mapping[str, Tensor]) -> Mapping[Hashable, Tensor]:
        """A contiguous tensor on the CPU for each; overwrites those of the previous call."""
        laid: dict[Hashable, tuple[torch.Size, torch.dtype]] = {k: (t.shape, t.dtype) for k, t in tensors.items()}
        if laid != self._laid:
            self._lay(tensors)
            self._laid = laid
        return self._places

    def _lay(self, tensors: Mapping[str, Tensor]) -> None:
        starts = list(accumulate((math.ceil(t.nbytes / _STEP) * _STEP for t in tensors.values()), initial=0))
        self._places.clear()
        self.close()
        self._memory = torch.empty(starts[-1], dtype=torch.uint8)
        if self._pinned:
            self._pin()
        for (key, tensor), start in zip(tensors.items(), starts, strict=False):
            raw = self._memory[start : start + tensor.nbytes]
            self._places[key] = raw.view(tensor.dtype).view(tensor.shape)

    def _pin(self) -> None:
        if self._memory.nbytes:
            register = _driver().cudaHostRegister
            torch.cuda.check_error(int(register(self._memory.data_ptr(), self._memory.nbytes, 0)))

    def close(self) -> None:
        """Frees the memory."""
        if self._pinned and self._memory.nbytes:
            torch.cuda.check_error(int(_driver().cudaHostUnregister(self._memory.data_ptr())))
        self._memory = torch.empty(0, dtype=torch.uint8)


def copy_beside(device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
    """Copies the second of each pair into the first, which is on the CPU.

    On a GPU copies overlap with compute: sources must be kept alive and unchanged until the event has completed.
    """
    if device.type != "cuda":
        for place, tensor in pairs:
            place.copy_(tensor)
        return None
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for place, tensor in pairs:
            place.copy_(tensor, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
    return event


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
