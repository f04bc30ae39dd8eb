"""Batches prepared by a background thread, so that a stage that reads data does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zbc.plan.phases import Phases
from zbc.training.data.data import Batches
from zbc.training.data.pairs import Samples

CPU = torch.device("cpu")

Want = tuple[str, int]  # "inputs" or "targets", and the microbatch


class Prefetched(Batches):
    """Prefetched `Batches`: `wants` has the requests of a step of every phase, in order. While a step runs, a thread
    reads the next one.

    Others than these are read when they are requested, and so is a tensor that the thread failed to read: the error is
    raised where it belongs. Tensors for a GPU, `device`, are pinned, so that their copy does not block.
    """

    def __init__(
        self, samples: Samples, wants: Sequence[Sequence[Want]], device: torch.device = CPU, **how: Any
    ) -> None:
        super().__init__(samples, **how)
        self._wants, self._device = wants, device
        self.most = max(map(len, wants), default=0)  # tensors of a step
        self._thread: ThreadPoolExecutor | None = None
        self._steps: dict[int, Future[dict[Want, Tensor]]] = {}
        self.open()

    def open(self) -> None:
        super().open()
        self._thread = ThreadPoolExecutor(1, "zbc-data", _begin, (self._device,))  # not of `self`, which it would keep

    def inputs(self, step: int, mb: int) -> Tensor:
        return self._take(step, ("inputs", mb))

    def targets(self, step: int, mb: int) -> Tensor:
        return self._take(step, ("targets", mb))

    def follow(self, phases: Phases) -> None:
        """Starts the steps from the position of `phases`; the number of phases is unchanged."""
        self._forget({})
        super().follow(phases)

    def close(self) -> None:
        """The thread ends after its current read."""
        self._forget({})
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
        super().close()

    def _forget(self, but: dict[int, None]) -> None:
        for step in self._steps.keys() - but.keys():
            self._steps.pop(step).cancel()

    def _take(self, step: int, want: Want) -> Tensor:
        if self._thread is None:
            return self._make(step, want)
        if step + 1 not in self._steps:
            self._forget(dict.fromkeys((step - 1, step)))  # without a flush the next step begins before the end of one
            for ahead in {step, step + 1} - self._steps.keys():
                self._steps[ahead] = self._thread.submit(self._read, ahead)
        made = self._steps[step].result().pop(want, None) if step in self._steps else None
        return self._make(step, want) if made is None else made

    def _read(self, step: int) -> dict[Want, Tensor]:
        made = dict[Want, Tensor]()
        with suppress(Exception):
            for want in self._wants[self.phases.index(step)]:
                if self._thread is None:
                    break
                made[want] = self._make(step, want)
        return made

    def _make(self, step: int, want: Want) -> Tensor:
        kind, mb = want
        tensor: Tensor = getattr(super(), kind)(step, mb)
        return tensor.pin_memory() if self._device.type == "cuda" else tensor


def _begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread
