"""Batches that are read before they are asked for: by a background thread, or several at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zbc.plan.phases import Phases
from zbc.runtime.seeding import reading
from zbc.training.data.data import Batches
from zbc.training.data.pairs import Samples

CPU = torch.device("cpu")
_EARLY_S = 0.001  # for which other microbatches of a step are read, too

Want = tuple[str, int]  # "inputs" or "targets", and the microbatch


class Together(Batches):
    """`Batches` of which `wants` has the requests of a step of every phase, in order. What is read quickly is read
    several at a time, since seeding generators for a user's samples costs more than they do.

    Others are read when they are requested, and so is one that could not be read ahead: the error is raised where it
    belongs.
    """

    def __init__(self, samples: Samples, wants: Sequence[Sequence[Want]], **how: Any) -> None:
        super().__init__(samples, **how)
        self._wants, self._ahead = wants, True
        self._steps: dict[int, Any] = {}  # what is there of a step, and what is left to read

    def open(self) -> None:
        self._ahead = True

    def close(self) -> None:
        self._ahead = False
        self._steps.clear()

    def follow(self, phases: Phases) -> None:
        self._steps.clear()
        super().follow(phases)

    def inputs(self, step: int, mb: int) -> Any:
        return self._take(step, ("inputs", mb))

    def targets(self, step: int, mb: int) -> Any:
        return self._take(step, ("targets", mb))

    def _take(self, step: int, want: Want) -> Any:
        if step not in self._steps:
            self._forget(step)
            self._steps[step] = {}, [*reversed(self._wants[self.phases.index(step)])]
        made, left = self._steps[step]
        if want in made:
            return made.pop(want)
        until = time.monotonic() + _EARLY_S
        with reading():
            found = self._make(step, want)
            while self._ahead and left and time.monotonic() < until:
                with suppress(Exception):
                    if (other := left.pop()) != want:
                        made[other] = self._make(step, other)
        return found

    def _forget(self, step: int) -> None:
        """Of earlier steps: without a flush the next step begins before the end of one."""
        for old in self._steps.keys() - {step - 1, step}:
            del self._steps[old]

    def _make(self, step: int, want: Want) -> Any:
        kind, mb = want
        return getattr(super(), kind)(step, mb)


class Prefetched(Together):
    """The same of samples that any thread may read: while a step runs, one reads the next. Tensors for a GPU, `device`,
    are pinned, so that their copy does not block."""

    def __init__(
        self, samples: Samples, wants: Sequence[Sequence[Want]], device: torch.device = CPU, **how: Any
    ) -> None:
        super().__init__(samples, wants, **how)
        self._device, self.most = device, max(map(len, wants), default=0)  # tensors of a step
        self.open()

    def open(self) -> None:
        super().open()
        self._thread = ThreadPoolExecutor(1, "zbc-data", _begin, (self._device,))  # not of `self`, which it would keep

    def close(self) -> None:
        """The thread ends after its current read."""
        super().close()
        self._thread.shutdown(cancel_futures=True)

    def _take(self, step: int, want: Want) -> Tensor:
        if not self._ahead:
            return self._make(step, want)
        if step + 1 not in self._steps:
            self._forget(step)
            for ahead in {step, step + 1} - self._steps.keys():
                self._steps[ahead] = self._thread.submit(self._read, ahead)
        made = self._steps[step].result().pop(want, None) if step in self._steps else None
        return self._make(step, want) if made is None else made

    def _read(self, step: int) -> dict[Want, Tensor]:
        made = dict[Want, Tensor]()
        with suppress(Exception):
            for want in self._wants[self.phases.index(step)]:
                if not self._ahead:
                    break
                made[want] = self._make(step, want)
        return made

    def _make(self, step: int, want: Want) -> Tensor:
        tensor: Tensor = super()._make(step, want)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def _begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread
