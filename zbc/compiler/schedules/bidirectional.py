"""Schedules of two pipes in opposite directions with B and W apart, and the cards of all bidirectional and wave ones.

    name         pipes   legs   makespan at T_F = T_B = T_W = 1    limit on activations, unless the job gives one
    chimera-zb   2       1      3m + (p-1)//2                      that of Chimera: p units
    bitpipe-zb   2       v      3m + ((p-1)//2)/v                  that of BitPipe: p units

No order of these placements is faster: the ranks in the middle cannot start before (p-1)//2 forwards. The orders are
found by search for the job's costs and limit; m >= p, and for some p and m it stays one or two ops behind.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.dualpipe import dualpipe, dualpipe_v
from zbc.compiler.schedules.request import Request, ScheduleCard
from zbc.compiler.schedules.searched import found
from zbc.compiler.schedules.waves import bitpipe, chimera, hanayo, two_pipes
from zbc.compiler.search.pipes import paced
from zbc.ir import Placement, Program

BUDGET = 2.0  # seconds of annealing if no order reaches the bound


def _found(name: str, request: Request) -> Program:
    placement, limits = two_pipes(request.p, request.v), request.limits() or [float(request.p)] * request.p
    costs = request.costs or Costs.uniform(placement)
    orders = paced(placement, request.m, costs, limits, split=True)
    return found(name, two_pipes, replace(request, memory_limit=tuple(limits)), orders=orders)


_PIPES = partial(ScheduleCard, whole=True, placement=two_pipes)
_TWO = partial(_PIPES, placement_name="two pipes", chunks=(1, 1), default_chunks=1)
_TWO_V = partial(_PIPES, placement_name="two V pipes", chunks=(2, None), default_chunks=2)
BIDIRECTIONAL = (
    _TWO(
        name="chimera",
        make=chimera,
        splits_backward=False,
        summary="two 1F1B pipes in opposite directions; every rank holds two stages of twice as many weights",
        source="Chimera, arXiv 2107.06925",
        makespan="3m + (p-2)(1 + m/p)",
        span="the same",
        memory="p",
        needs="closed form for even p that divides m; any p and m run",
        options=("group", "early"),
    ),
    _TWO_V(
        name="bitpipe",
        make=bitpipe,
        splits_backward=False,
        summary="two interleaved V-shaped pipes in opposite directions; weights twice",
        source="BitPipe, arXiv 2410.19367; between units as in its figure, as in its code with early = 1",
        makespan="3m + 2(p-2)/v at m = p",
        span="the same",
        memory="p",
        needs="closed form for even p; any p and m run",
        options=("group", "early"),
    ),
    _TWO(
        name="dualpipe",
        make=dualpipe,
        splits_backward=True,
        summary="two pipes whose forwards and backwards meet in pairs; weights twice",
        source="DeepSeek-V3, arXiv 2412.19437",
        makespan="3m + (p/2 - 1)",
        span="the same",
        memory="p + 1",
        needs="an even number of ranks; closed form for even m >= 2p; any m runs; pairs as groups: 3m + (p - 2)",
        options=("overlap",),
        ranks_in=2,
    ),
    ScheduleCard(
        name="dualpipe-v",
        whole=True,
        make=dualpipe_v,
        placement=Placement.vshape,
        placement_name="V",
        chunks=(2, 2),
        default_chunks=2,
        splits_backward=True,
        summary="one half of DualPipe: a V whose two legs meet in pairs; weights once",
        source="DualPipeV, the cut-in-half of arXiv 2412.19437",
        makespan="3m + (p-1)/2",
        span="the same",
        memory="p + 1/2",
        aliases=("dualpipev", "ScheduleDualPipeV"),
        needs="closed form for m >= 2p; any m runs; pairs as groups: 3m + (p - 1)",
        options=("overlap",),
    ),
    ScheduleCard(
        name="hanayo",
        whole=True,
        make=hanayo,
        placement=Placement.vshape,
        placement_name="waves",
        chunks=(2, None),
        default_chunks=2,
        splits_backward=False,
        summary="W waves down and up the ranks (chunks = 2W) in units of p microbatches; W = 1 is half a Chimera",
        source="Hanayo, arXiv 2308.15762",
        makespan="3m + 4(p-1)/v at m = p",
        span="the same",
        memory="p",
        needs="closed form when p divides m; any m runs",
        options=("group", "early"),
        chunks_in=2,
    ),
    _TWO(
        name="chimera-zb",
        make=partial(_found, "chimera-zb"),
        splits_backward=True,
        summary="Chimera with backwards split, for the job's costs and memory limit",
        source="search",
        makespan="3m + (p-1)//2",
        span="3m + (p-1)//2",
        memory="p, or the limit",
        searched=True,
        budget=BUDGET,
    ),
    _TWO_V(
        name="bitpipe-zb",
        make=partial(_found, "bitpipe-zb"),
        splits_backward=True,
        summary="BitPipe with backwards split, for the job's costs and memory limit",
        source="search",
        makespan="3m + ((p-1)//2)/v",
        span="3m",
        memory="p, or the limit",
        searched=True,
        budget=BUDGET,
    ),
)
