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

from collections.abc import Iterator

from zbc.compiler.schedules.phases import Leg, Step, emitted
from zbc.compiler.schedules.request import Request
from zbc.ir import Placement, Program
from zbc.ops import round_trip


def zb_v(request: Request) -> Program:
    """The hand-made order of the paper; exact at uniform costs, legal at any."""
    p, m = request.p, request.m
    steps = [[(step,) for step in _phases(r, p, max(m, 2 * p - 1))] for r in range(p)]
    ranks = (emitted(steps[r], (Leg(r), Leg(2 * p - 1 - r)), m) for r in range(p))
    return Program(Placement.vshape(p), m, tuple(tuple(op for (op,) in groups) for groups in ranks), history=("zb-v",))


def _phases(r: int, p: int, m: int) -> Iterator[Step]:
    """The phases of the module's table."""
    (f, b, w), (up_f, up_b, up_w) = ([(kind, leg) for kind in round_trip(split=True)] for leg in (0, 1))
    yield from [f] * (2 * (p - r) - 1)
    yield from [up_f, f] * r
    yield from [up_f, up_b, up_w] * (p - r)
    for k in range(m - p):
        yield from [f] * (k < m - 2 * p + r + 1)
        yield from [b, w, up_f, up_b, up_w]
    yield from [b, up_b] * r
    yield from [b, w] * (p - r)
    yield from [up_w] * r
    yield from [w] * r
