"""What ranks agree on at the end of a step: one vector, summed over all ranks.

Each rank fills its own entries and leaves the others zero, so the sum is exact and every rank reads the same numbers:

    per parameter of the model, by name   sum of squares of its gradient     the rank of pipe 0 that holds it
    per microbatch                        its loss                           the rank that ran its last stage
    one                                   1 to stop after this step          any rank
    per rank                              busy seconds                       the rank
    per rank                              peak bytes                         the rank

Since the norm is made of one number per parameter, it is the same double for every cut of the model.
"""

from __future__ import annotations

import functools
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**22  # elements widened to float64 at a time


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks agreed on; see `StepResult`."""

    loss: float
    grad_norm: float
    stop: bool
    busy_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def skipped(self) -> bool:
        """Whether no rank may step: a gradient is not finite."""
        return not math.isfinite(self.grad_norm)

    def clip(self, largest: float | None) -> float | None:
        """What to multiply gradients with so that their norm is at most `largest`; None to leave them.

        As torch.nn.utils.clip_grad_norm_: min(1, largest / (norm + 1e-6)).
        """
        if largest is None or self.skipped:
            return None
        scale = largest / (self.grad_norm + 1e-6)
        return scale if scale < 1.0 else None


@dataclass(frozen=True)
class Layout:
    """Which entry of the vector means what."""

    parameters: tuple[str, ...]  # of the whole model, sorted
    microbatches: int
    ranks: int

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.parameters)}

    @property
    def size(self) -> int:
        return len(self.parameters) + self.microbatches + 1 + 2 * self.ranks

    def fill(
        self,
        vector: Tensor,
        squares: Mapping[str, Tensor],
        losses: Mapping[int, Tensor],
        *,
        rank: int,
        stop: bool,
        busy: float,
        peak: int,
    ) -> None:
        """Write one rank's entries: sums of squares by parameter name, losses by microbatch."""
        count, flag = len(self.parameters), len(self.parameters) + self.microbatches
        entries = {self._places[name]: value for name, value in squares.items()}
        entries |= {count + mb: loss for mb, loss in losses.items()}
        if entries:
            where = torch.tensor(list(entries), device=vector.device)
            vector[where] = torch.stack([value.double() for value in entries.values()])
        vector[flag] = float(stop)
        vector[flag + 1 + rank] = busy
        vector[flag + 1 + self.ranks + rank] = float(peak)

    def read(self, vector: Tensor) -> Verdict:
        """The verdict in a summed vector."""
        values = vector.tolist()
        count, flag = len(self.parameters), len(self.parameters) + self.microbatches
        loss = 0.0
        for value in values[count:flag]:  # in order; the built-in sum compensates on some versions of Python only
            loss += value
        return Verdict(
            loss=loss / self.microbatches,
            grad_norm=math.sqrt(math.fsum(values[:count])),
            stop=values[flag] > 0,
            busy_seconds=tuple(values[flag + 1 : flag + 1 + self.ranks]),
            peak_bytes=tuple(map(int, values[flag + 1 + self.ranks :])),
        )


def sum_of_squares(grad: Tensor) -> Tensor:
    """Sum of squares as a float64 scalar tensor on the device of `grad`.

    Depends on the gradient alone (and on the number of threads inside torch's kernels), not on the other parameters.
    """
    flat = grad.detach().reshape(-1)
    parts = [_square(flat[start : start + _CHUNK].double()) for start in range(0, max(1, len(flat)), _CHUNK)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _square(wide: Tensor) -> Tensor:
    return torch.dot(wide, wide)


def peak_bytes(device: torch.device) -> int:
    """Device memory allocated at most since `reset_peak` on cuda; on cpu the largest resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def flatten(grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Gradients as one vector, zeros where there is none; behind them one entry each that says whether there is one."""
    flat = [
        torch.zeros_like(p, dtype=p.grad_dtype).reshape(-1) if g is None else g.reshape(-1)
        for g, p in zip(grads, like, strict=True)
    ]
    present = torch.tensor([0.0 if g is None else 1.0 for g in grads], dtype=flat[0].dtype, device=flat[0].device)
    return torch.cat([*flat, present])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
    """What `flatten` put together, in the shapes of `like`; None where no rank had a gradient."""
    *parts, present = torch.split_with_sizes(flat, [*(p.numel() for p in like), len(like)])
    some = present.tolist()
    return [part.view_as(p) if there > 0 else None for part, p, there in zip(parts, like, some, strict=True)]
