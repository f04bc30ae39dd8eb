"""Whether a program also survives ranks that wait for more than the proof assumes.

A GPU is driven by a host that enqueues the ops of its rank in order and goes on; each channel has a stream of its own.
Then a program runs as proved. Two things make a rank wait for more:

- The host waits for the whole device in the middle of a step: memory is short and the allocator returns blocks to the
  driver, a kernel is loaded at its first use, a user's layer calls torch.cuda.synchronize(). Then an op waits for every
  transfer and every collective that its rank has started, also for a receive that was posted early.
- All streams of a device share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1). Then an op that cannot start blocks
  all later ops that its rank has enqueued; a transfer cannot start before the earlier ones of its channel are
  completed, a collective not before the earlier collectives are.

A plan need not survive either: a run must then not do the one and must not set the other.
"""

from __future__ import annotations

from typing import NamedTuple

from zbc.compiler.graph import Graph, happens, of_steps, run
from zbc.ops import Lane


class Survival(NamedTuple):
    """Conditions that a program also survives."""

    blocking_sends: bool  # a SEND blocks its rank until its message has moved
    device_waits: bool  # any op waits for all started transfers and collectives of its rank
    one_queue: bool  # an op that cannot start blocks all later ones enqueued by its rank

    def __and__(self, other: Survival) -> Survival:
        return Survival(*(a and b for a, b in zip(self, other, strict=True)))

    def as_json(self) -> dict[str, bool]:
        return {f"survives_{name}": holds for name, holds in self._asdict().items()}


def survival(g: Graph) -> Survival:
    """The survival of a program that passed every check; for steps without a flush, of three in a row."""
    g = g if g.cyclic is None else of_steps(g.cyclic, 3)
    waits, queued = _behind(g)
    return Survival(
        happens(g, run(g, blocking_sends=True)[1]), *(happens(g, run(g, behind=more)[1]) for more in (waits, queued))
    )


def _behind(g: Graph) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """For each op that takes its rank's time, the events that its rank has started since the previous one; for each
    transfer or collective, the previous event on its stream: of its channel, or of all collectives."""
    waits, queued = dict[int, list[int]](), dict[int, list[int]]()
    lanes = [*(row.lane for row in g.rows), None]  # the last is for ops without a row
    row_of, party, line_of, n = g.row_of, g.party, g.line_of, len(g.ops)
    for rank in range(len(g.first) - 1):
        started, last = list[int](), dict[int, int]()
        for i in g.mine(rank):
            lane, event = lanes[row_of[i]], party[i]
            if lane is Lane.COMPUTE:
                if started:
                    waits[i], started = started, []
            elif event >= 0 and (lane is Lane.LINK or lane is Lane.COLLECTIVE):
                started.append(event)
                stream = line_of[event - n] if lane is Lane.LINK else -1
                if stream in last:
                    queued[i] = [last[stream]]
                last[stream] = event
    return waits, queued
