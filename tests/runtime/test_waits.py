"""Ops of the runtime wait exactly as in the proof, so nothing else can hang a proven plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.composed import beside, planned
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.graph import Graph, build
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.hub import Hub, Round
from zbc.runtime.transports.transport import Offer

SMALL = {"parallel__pp": 2, "model__layers": 4}
JOBS: list[tuple[tuple[str, ...], str]] = [
    (("shared vocabulary", "sharded gradients"), "zb-v"),
    (("shared vocabulary", "sharded all"), "interleaved-1f1b"),
    (("sharded gradients",), "zb-v"),
    (("sharded all", "tied embeddings"), "chimera"),
    (("sharded optimizer", "slices"), "1f1b"),
    (("average",), "zb-h1"),
    (("post-validate", "sharded optimizer"), "zb-v"),
    (("offload", "sharded weights"), "gis"),
    (("replicas",), "replicated-1f1b"),
]


class Watched(Hub):
    """Records which op of which rank waits for a collective that another op started."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.workers: dict[int, Worker] = {}
        self.made: dict[tuple[int, int], int] = {}  # rank, meeting -> the op that started it
        self.waits: set[tuple[int, int, int]] = set()  # rank, the op that waits, the op whose collective it waits for
        self.meetings: list[Round] = []  # kept, so that no two have one id

    def join(self, rank: int, offer: Offer, ranks: tuple[int, ...]) -> Round:
        meeting = super().join(rank, offer, ranks)
        if rank in self.workers:
            self.meetings.append(meeting)
            self.made[rank, id(meeting)] = self.workers[rank].progress.index
        return meeting

    def complete(self, rank: int, meeting: Round) -> None:
        if not meeting.over and (rank, id(meeting)) in self.made:
            self.waits.add((rank, self.workers[rank].progress.index, self.made[rank, id(meeting)]))
        super().complete(rank, meeting)


def unknown(g: Graph, part: int, waits: set[tuple[int, int]]) -> list[str]:
    """The waits of a rank (the later op, the earlier op) that follow from no row.

    A rank's collectives complete in order, so a wait for one is a wait for those before it, too. A barrier, and the end
    of a step, come after all of them.
    """
    first, last = g.first[part], g.first[part + 1] - 1
    started = {g.party[i]: i for i in range(first, last + 1) if g.ops[i].kind.is_collective}
    found = []
    for i, j in sorted((first + later, first + earlier) for later, earlier in waits):
        behind = max((started.get(node, -1) for node in g.pred[g.ptr[i] : g.ptr[i + 1]]), default=-1)
        if j in started.values() and j > behind and i != last and not g.rows[g.row_of[i]].row.blocks:
            found.append(f"{g.ops[i]} waits for {g.ops[j]}")
    return found


@pytest.mark.always("('sharded all', 'tied embeddings')-chimera", "('shared vocabulary', 'sharded gradients')-zb-v")
@pytest.mark.parametrize(("traits", "kind"), few(JOBS, [JOBS[0], JOBS[3]]), ids=str)
def test_ops_wait_for_collectives_of_their_rows_only(traits, kind):
    changes: dict[str, Any] = {} if "replicas" in traits else SMALL
    plan = planned(beside(*traits, schedule__kind=kind, **changes)[0])
    hub, g = Watched(plan.manifest.topology.world), build(plan.program)
    run_threads(plan, 2, hub=hub, setup=lambda worker: hub.workers.update({worker.rank: worker}))
    assert hub.waits
    for rank in hub.workers:
        part = plan.manifest.topology.of(rank).pp
        mine = {(i, j) for r, i, j in hub.waits if r == rank and i < len(plan.program.ranks[part])}
        assert not unknown(g, part, mine)
