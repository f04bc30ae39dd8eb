"""Microbatches with rows of unequal length: in each step their ops take the routes of stages for these lengths."""

from __future__ import annotations

from zbc.ir import Op
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.route import route_of
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import Length


class Lengths(Feature):
    """`_now`: the length for which each op has a route."""

    def __init__(self) -> None:
        self._now: dict[Op, Length | None] = {}

    def opens(self, worker: Worker) -> None:
        run, now = worker.phase_run, self._now
        for op in run.routes:  # without a flush also those of the next step
            step = worker.step if run.ending.due(worker, op.mb) else worker.step + 1
            length = worker.work.length(step, worker.number(op.mb))
            if now.get(op) != length and (route := route_of(worker, run, op, length)) is not None:
                run.routes[op], now[op] = route, length


def build(context: Context) -> Lengths | None:
    return Lengths() if context.unequal else None
