"""DualPipe and DualPipeV: microbatches that meet, and forwards paired with backwards of the other direction.

DualPipe runs two pipes of one leg each in opposite directions. Ranks r and p-1-r do the same on mirrored pipes, so an
order for half of the ranks suffices; folded together at the middle, the two pipes of that half are the two legs of a V:
that is DualPipeV. For rank r of h = p/2 (DualPipe) or h = p (DualPipeV) and n microbatches per direction (f, b, d, w
are F, B, BW and W of the direction that enters at the outer end, F, B, D and W of the other, f+D a pair):

    phase   ops                                     times
    1       f                                       2(h-1-r)
    2       f F                                     r + 1
    3       B W F                                   h-1-r
    4       f+D F+d                                 n - 2h + r + 1
    5       D F+d                                   h-1-r
    6       D d, from the middle on B b             r + 1
    7       W, b                                    h-1-r
    8       W                                       r + 1

    schedule     m from   makespan, pairs in two ops   pairs as one group    activations   source
    dualpipe     2p       3m + (p/2 - 1)               3m + (p - 2)          p + 1         DeepSeek-V3, arXiv 2412.19437
    dualpipe-v   2p       3m + (p-1)/2                 3m + (p - 1)          p + 1/2       the same, cut in half

at T_F = T_B = T_W = 1. The published bubble (p/2 - 1)(F&B + B - 3W) is of pairs as groups. Fewer or an odd number of
microbatches use the order of the next possible number without the ops of the missing ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.schedules.phases import ANY, Leg, Step, emitted, marked
from zbc.compiler.schedules.request import Request
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program

OUTER, INNER = 0, 1  # directions, by the end of the half at which they enter


def dualpipe(request: Request) -> Program:
    """Two pipes in opposite directions. Raises E110 for an odd number of ranks."""
    p, m = request.p, request.m
    if p % 2:
        raise ZbcError("E110", f"schedule: dualpipe needs an even number of ranks, not {p}")
    n = max(p, (m + 1) // 2)
    ranks = []
    for r in range(p):
        outer = min(r, p - 1 - r)
        pipe = int(r > outer)  # the pipe that enters at this end
        legs = (Leg(outer, pipe, 2, pipe), Leg(p - 1 - outer, 1 - pipe, 2, 1 - pipe))
        ranks.append(_ops(outer, p // 2, n, legs, request))
    return Program(Placement.bidirectional(range(p)), m, tuple(ranks), ("dualpipe",))


def dualpipe_v(request: Request) -> Program:
    """One half of DualPipe on 2p ranks, with the V placement."""
    p, m = request.p, request.m
    n = max(2 * p, m)
    ranks = (_ops(r, p, n, (Leg(r), Leg(2 * p - 1 - r)), request) for r in range(p))
    return Program(Placement.vshape(p), m, tuple(ranks), ("dualpipe-v",))


def _ops(r: int, h: int, n: int, legs: tuple[Leg, Leg], request: Request) -> tuple[Op, ...]:
    groups = emitted(_phases(r, h, n), legs, request.m)
    return tuple(op for group in groups for op in (marked(group) if request.overlap else group))


def _phases(r: int, h: int, n: int) -> Iterator[tuple[Step, ...]]:
    """The phases of the module's table. A W is the oldest pending one, of either direction."""
    rest = h - 1 - r
    f, inner_f, d, inner_d = ((kind, leg) for kind in (Kind.F, Kind.BW) for leg in (OUTER, INNER))
    b, inner_b, w = (Kind.B, OUTER), (Kind.B, INNER), (Kind.W, ANY)
    yield from [(f,)] * (2 * rest)
    yield from [(f,), (inner_f,)] * (r + 1)
    yield from [(inner_b,), (w,), (inner_f,)] * rest
    for i in range(n - 2 * h + r + 1):
        # At the middle, the first D works on its rank's previous result: in a group, f would have to wait for it.
        yield from [(f,), (inner_d,)] if i == 0 and rest == 0 else [(f, inner_d)]
        yield inner_f, d
    yield from [(inner_d,), (inner_f, d)] * rest
    yield from ([(inner_d,), (d,)] * (r + 1))[: r + 1]
    yield from ([(inner_b,), (b,)] * (r + 1))[r + 1 :]
    yield from [(w,), (b,)] * rest
    yield from [(w,)] * (r + 1)
