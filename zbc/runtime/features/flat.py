"""Weights in one storage, whose bytes are freed and restored under the same parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

ALIGNED = 64  # bytes


class Flat:
    """The storage of `parameters` of one type, which become views of it. They keep their values."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._storage: torch.UntypedStorage | None = None
        if not parameters:
            return
        first = parameters[0]
        step = max(1, ALIGNED // first.element_size())
        sizes = [-(-p.numel() // step) * step for p in parameters]
        flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        for parameter, room in zip(parameters, torch.split(flat, sizes), strict=True):
            view = room[: parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self._storage = flat.untyped_storage()
        self._whole = self._storage.nbytes()

    @property
    def bytes(self) -> int:
        """The bytes allocated now."""
        return 0 if self._storage is None else self._storage.nbytes()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a part of the storage."""
        return self._storage is not None and tensor.untyped_storage().data_ptr() == self._storage.data_ptr()

    def free(self) -> None:
        if self._storage is not None:
            self._storage.resize_(0)

    def restore(self) -> None:
        """Allocates the bytes again, uninitialised."""
        if self._storage is not None and not self.bytes:
            self._storage.resize_(self._whole)
