"""ZB-V: two stages per rank in V placement, no bubble inside any rank's span with the memory of 1F1B.

Stage r (chunk 0, "down") and stage 2p-1-r (chunk 1, "up") share rank r, so the last stage sits on rank 0 and the first
backward starts where the first forward did. With T_F = T_B = T_W, rank r runs (f and b are one op on its down chunk, F
and B on its up chunk, w and W the weight gradients):

    phase      ops                                          length
    fill       f                                            2(p-r) - 1
    turn       F f                                          r
    first      F B W                                        p - r
    steady     f b w F B W                                  until every forward has run
    drain      b B, then b w, then the W left over          r, p - r

Source: arXiv 2401.10241, section 6; the memory argument is arXiv 2405.15362. Fewer than 2p - 1 microbatches use the
order of 2p - 1 with the ops of the missing ones left out.
"""

from __future__ import annotations

from collections import Counter

from zbc.compiler.schedules.request import Request
from zbc.ir import Kind, Op, Placement, Program
from zbc.ops import round_trip


class _VshapeRank:
    """Ops of one rank as they are emitted; each (kind, chunk) counts its own microbatches."""

    def __init__(self, r: int, p: int) -> None:
        self.stages = (r, 2 * p - 1 - r)
        self.done = Counter[tuple[Kind, int]]()
        self.ops: list[Op] = []

    def run(self, *steps: tuple[Kind, int], times: int = 1) -> None:
        for step in steps * times:
            self.ops.append(Op(step[0], self.stages[step[1]], self.done[step]))
            self.done[step] += 1


def zb_v(request: Request) -> Program:
    """The hand-made order of the paper; exact at uniform costs, legal at any."""
    p, m = request.p, request.m
    ranks = [tuple(op for op in _rank_ops(r, p, max(m, 2 * p - 1)) if op.mb < m) for r in range(p)]
    return Program(Placement.vshape(p), m, tuple(ranks), history=("zb-v",))


def _rank_ops(r: int, p: int, m: int) -> list[Op]:
    rank = _VshapeRank(r, p)
    (f, b, w), (up_f, up_b, up_w) = ([(kind, pipe) for kind in round_trip(split=True)] for pipe in (0, 1))
    rank.run(f, times=2 * (p - r) - 1)
    rank.run(up_f, f, times=r)
    rank.run(up_f, up_b, up_w, times=p - r)
    while rank.done[up_f] < m:
        if rank.done[f] < m:
            rank.run(f)
        rank.run(b, w, up_f, up_b, up_w)
    rank.run(b, up_b, times=r)
    rank.run(b, w, times=p - r)
    rank.run(up_w, times=m - rank.done[up_w])
    rank.run(w, times=m - rank.done[w])
    return rank.ops
