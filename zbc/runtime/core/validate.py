"""The vector by which ranks agree on the result of a step: one all-reduce over all ranks.

Each rank fills its own entries and leaves the others zero, so the sum is exact and every rank reads the same numbers:

    per chunk of each parameter, by name  sum of squares of its gradient     the rank of pipe 0 that holds it
    per microbatch                        its loss                           the rank that ran its last stage
    one                                   1 to stop after this step          any rank
    per rank                              busy seconds                       the rank
    per rank                              peak bytes                         the rank

Since the norm is computed from one number per chunk, it is the same double for every partition of the model and of its
optimizer state. Of several replicas the first one reports the gradients, and each one the losses of its own
microbatches; if replicas do not sum gradients, each has its own gradient entries.
"""

from __future__ import annotations

import functools
import math
import resource
import sys
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from zbc.plan.dealing import CHUNK
from zbc.runtime.core.private import norms_of
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.tensors import constant, to_device

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class VectorLayout:
    """The meaning of each entry of the vector."""

    parameters: tuple[str, ...]  # of the whole model, sorted
    microbatches: int  # of all replicas
    ranks: int  # of all replicas
    sizes: tuple[int, ...] = ()  # elements of each parameter; by default each has one chunk
    apart: int = 1  # replicas that do not sum their gradients
    weighted: bool = False  # losses are parts of the step's loss, not means of equal microbatches
    routed: int = 0  # experts of all blocks
    tell: int = 1  # ranks that each report a mean over their own tokens as the loss of a microbatch

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """The index of the first entry of each parameter."""
        counts = map(chunks, self.sizes) if self.sizes else (1 for _ in self.parameters)
        starts = list(accumulate(counts, initial=0))
        return dict(zip(self.parameters, starts, strict=False)) | {"": starts[-1]}

    @property
    def _count(self) -> int:
        return self._places[""]

    @property
    def _norms(self) -> int:
        """The number of entries before the losses."""
        return self._count * self.apart

    @property
    def size(self) -> int:
        return self._flag + 1 + 2 * self.ranks

    @property
    def _flag(self) -> int:
        """The index of the stop flag: after losses of microbatches, auxiliary losses of layers, loads of experts."""
        return self._norms + self.microbatches + 1 + self.routed

    def vector(
        self,
        squares: Mapping[str, Tensor],
        losses: Mapping[int, Tensor | float],
        *,
        rank: int,
        stop: bool,
        busy: float,
        peak: int,
        device: torch.device,
        replica: int = 0,
    ) -> Tensor:
        """One rank's entries, on `device`: sums of squares per chunk by parameter name; losses by microbatch, and after
        them, keyed by the number of microbatches, the auxiliary losses of layers, then loads of experts.
        `replica`: the replica of these gradients, if replicas do not sum them."""
        count, flag = self._norms, self._flag
        base, places = replica * self._count, self._places
        where = [base + places[name] + k for name, value in squares.items() for k in range(value.numel())]
        widths = ((mb, loss.numel() if isinstance(loss, Tensor) else 1) for mb, loss in losses.items())
        where += [count + mb + k for mb, width in widths for k in range(width)]
        where += [flag, flag + 1 + rank, flag + 1 + self.ranks + rank]
        values, own = [*squares.values(), *losses.values()], [float(stop), busy, float(peak)]
        make = _written if device.type == "cpu" else _copied
        return make(self.size, where, values, own, device)

    def read(self, vector: Tensor, replica: int = 0) -> StepResult:
        """The result of a step from its summed vector; with the gradients of `replica`, if they are not summed."""
        values = vector.tolist()
        count, flag = self._norms, self._flag
        end = count + self.microbatches
        own = values[replica * self._count : (replica + 1) * self._count]
        loss = 0.0
        for value in values[count:end]:  # in order; the built-in sum compensates on some versions of Python only
            loss += value
        norm, pieces = math.sqrt(math.fsum(own)), zip(self.parameters, pairwise(self._places.values()), strict=True)
        bad = (name for name, (a, b) in pieces if not all(map(math.isfinite, own[a:b])))
        return StepResult(
            skipped=not math.isfinite(norm),
            loss=loss if self.weighted else loss / (self.microbatches * self.tell),
            grad_norm=norm,
            stop=values[flag] > 0,
            busy_seconds=tuple(values[flag + 1 : flag + 1 + self.ranks]),
            peak_bytes=tuple(map(int, values[flag + 1 + self.ranks :])),
            bad_gradients=() if math.isfinite(norm) else tuple(bad),
            bad_losses=tuple(mb for mb in range(self.microbatches) if not math.isfinite(values[count + mb])),
            added=values[end] / self.apart,
            routed=tuple(values[end + 1 : flag]),
        )


def _written(
    size: int, where: Sequence[int], found: Sequence[Tensor | float], own: Sequence[float], device: torch.device
) -> Tensor:
    """A float64 vector of zeros, except for the numbers of `found` and then `own` at the indices `where`. A kernel that
    runs once per step takes ten times as long as in a loop, so on the CPU this uses none."""
    row = array("d", bytes(8 * size))
    numbers = [number for one in found for number in (one.view(-1).tolist() if isinstance(one, Tensor) else (one,))]
    for at, number in zip(where, (*numbers, *own), strict=True):
        row[at] = number
    return torch.frombuffer(row, dtype=torch.float64)


def _copied(
    size: int, where: Sequence[int], found: Sequence[Tensor | float], own: Sequence[float], device: torch.device
) -> Tensor:
    """As `_written`, without waiting for the device: `where` is a constant there, `own` comes from pinned memory."""
    tensors = [torch.as_tensor(value, device=device).view(-1).double() for value in found]
    tensors.append(to_device(torch.frombuffer(array("d", own), dtype=torch.float64), device))
    vector = torch.zeros(size, dtype=torch.float64, device=device)
    return vector.index_copy_(0, constant(tuple(where), torch.int64, device), torch.cat(tensors))


def chunks(size: int) -> int:
    return max(1, -(-size // CHUNK))


def squares_of(grads: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
    """Sum of squares of each chunk of each gradient, as a float64 vector on its device. Each sum depends on its chunk
    alone (and on the number of threads inside torch's kernels)."""
    imaginary = {name: grad.imag for name, grad in grads.items() if grad.is_complex()}
    rows = {name: (grad.real if name in imaginary else grad).detach().reshape(-1) for name, grad in grads.items()}
    parts = {name: torch.split(row, CHUNK) if len(row) > CHUNK else (row,) for name, row in rows.items()}
    sums = (_together if all(grad.is_cuda for grad in grads.values()) else _one_by_one)(parts)
    for name, squares in squares_of(imaginary).items() if imaginary else ():
        sums[name] = sums[name] + squares
    return sums


def _one_by_one(parts: Mapping[Name, Sequence[Tensor]]) -> dict[Name, Tensor]:
    sums = {name: [_square(part.double()) for part in some] for name, some in parts.items()}
    return {name: torch.stack(some) if len(some) > 1 else some[0].view(1) for name, some in sums.items()}


def _square(wide: Tensor) -> Tensor:
    return torch.dot(wide, wide)  # a call, since a name would keep it while the next one is made


def _together(parts: Mapping[Name, Sequence[Tensor]]) -> dict[Name, Tensor]:
    """As `_one_by_one`, for a GPU, where a launch takes longer than most of the sums."""
    if not parts:
        return {}
    norms = norms_of([part for some in parts.values() for part in some])
    squares = torch.split(norms * norms, [len(some) for some in parts.values()])
    return dict(zip(parts, squares, strict=True))


# Sizes are the process's either way; RUSAGE_SELF takes twice as long, since it adds up the other values of all threads.
_ANY = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


def peak_bytes(device: torch.device) -> int:
    """Peak of device memory allocated since `reset_peak` on cuda; on cpu the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(_ANY).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    """Resets the peak that `peak_bytes` returns, on cuda; a CPU's cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
