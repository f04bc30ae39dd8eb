"""Batches made ready by a thread of their own, so that a stage that reads data does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zbc.course import Course
from zbc.runtime.data import Batches

AHEAD = 4  # tensors made ready before they are asked for

Want = tuple[str, int]  # "inputs" or "targets", and of which microbatch


class Prefetched:
    """Batches, ahead of the plan: `wants` is what a step of every leg of the course asks for, in its order.

    What is asked for in another order is made on the spot. An error in the thread is raised where its tensor is asked
    for. Tensors for a GPU are pinned, so that their copy does not block.
    """

    def __init__(self, batches: Batches, wants: Sequence[Sequence[Want]], *, pin: bool = False) -> None:
        self._batches, self._wants, self._pin = batches, [tuple(step) for step in wants], pin
        self._ready: dict[tuple[str, int, int], Future[Tensor]] = {}
        self.open()

    def open(self) -> None:
        """Make batches ahead, also after `close`."""
        self._places = [{want: place for place, want in enumerate(step)} for step in self._wants]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zbc-data")

    @property
    def count(self) -> int:
        return self._batches.count

    def inputs(self, step: int, mb: int) -> Tensor:
        return self._take("inputs", step, mb)

    def targets(self, step: int, mb: int) -> Tensor:
        return self._take("targets", step, mb)

    def follow(self, course: Course) -> None:
        """Have the steps begin where `course` says, with the same legs."""
        for waiting in self._ready.values():
            waiting.cancel()
        self._ready.clear()
        self._batches.follow(course)

    def close(self) -> None:
        """End the thread; what it reads at the moment is finished, and from now on all is made on the spot."""
        self._thread.shutdown(cancel_futures=True)
        self._places.clear()
        self._ready.clear()

    def _take(self, kind: str, step: int, mb: int) -> Tensor:
        ready = self._ready.pop((kind, step, mb), None)
        place = self._places[self._batches.course.leg(step)].get((kind, mb)) if self._places else None
        if place is not None:
            self._order(step, place + 1)
        return self._make(kind, step, mb) if ready is None else ready.result()

    def _order(self, step: int, place: int) -> None:
        """Have the next ones made; forget those that are no longer next."""
        coming: list[tuple[str, int, int]] = []
        while len(coming) < AHEAD:
            wants = self._wants[self._batches.course.leg(step)]
            coming += [(kind, step, mb) for kind, mb in wants[place : place + AHEAD - len(coming)]]
            step, place = step + 1, 0
        for key in self._ready.keys() - set(coming):
            self._ready.pop(key).cancel()
        for key in coming:
            if key not in self._ready:
                self._ready[key] = self._thread.submit(self._make, *key)

    def _make(self, kind: str, step: int, mb: int) -> Tensor:
        tensor = self._batches.inputs(step, mb) if kind == "inputs" else self._batches.targets(step, mb)
        return tensor.pin_memory() if self._pin and torch.cuda.is_available() else tensor
