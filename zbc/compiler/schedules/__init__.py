"""Every schedule by name, with its card: the literal registry."""

from __future__ import annotations

import difflib
from functools import partial

from zbc.compiler.schedules import searched
from zbc.compiler.schedules.bidirectional import BIDIRECTIONAL
from zbc.compiler.schedules.braid import braid_v
from zbc.compiler.schedules.lagged import eager_1f1b, gpipe, one_f_one_b, zb_h1, zb_h2
from zbc.compiler.schedules.looped import breadth_first, gis, interleaved_1f1b
from zbc.compiler.schedules.replicated import REPLICATED
from zbc.compiler.schedules.request import Generator, Request, ScheduleCard
from zbc.errors import ZbcError
from zbc.ir import Placement, Program

BUDGET = 4.0  # seconds of search for schedules that are only searched


def _linear(p: int, v: int) -> Placement:
    return Placement.linear(p)


def _v(p: int, v: int) -> Placement:
    return Placement.vshape(p)


# Cards by placement: name, and stages per rank.
_LINEAR = partial(ScheduleCard, placement=_linear, placement_name="linear", chunks=(1, 1), default_chunks=1)
_LOOPED = partial(ScheduleCard, placement=Placement.looped, placement_name="looped", chunks=(1, None), default_chunks=2)
_V = partial(ScheduleCard, placement=_v, placement_name="V", chunks=(2, 2), default_chunks=2)
_VSHAPE = partial(ScheduleCard, placement=Placement.vshape, placement_name="V", chunks=(1, None), default_chunks=2)
_ALL = (
    _LINEAR(
        name="gpipe",
        branches=True,
        make=gpipe,
        splits_backward=False,
        summary="all forwards, then all backwards",
        source="GPipe, arXiv 1811.06965",
        makespan="3m + 3(p-1)",
        span="3m + 3(p-1)",
        memory="m",
        sliced="m",
        aliases=("ScheduleGPipe",),
    ),
    _LINEAR(
        name="1f1b",
        branches=True,
        steady=True,
        make=one_f_one_b,
        splits_backward=False,
        summary="one forward, one backward; the least memory of the classic schedules",
        source="PipeDream-Flush / Megatron-LM, arXiv 2104.04473",
        makespan="3m + 3(p-1)",
        span="3m + 3(p-1)",
        memory="p",
        sliced="(p + k-1)/k",
        aliases=("Schedule1F1B", "one-f-one-b"),
    ),
    _LOOPED(
        name="interleaved-1f1b",
        steady=True,
        make=interleaved_1f1b,
        splits_backward=False,
        summary="1F1B with v stages per rank; less bubble, more transfers",
        source="Megatron-LM, arXiv 2104.04473",
        makespan="3m + 3(p-1)/v",
        span="3m + 3(p-1)/v",
        memory="p + (p-1)/v",
        sliced="(p + (p+k-2)/v)/k",
        aliases=("ScheduleInterleaved1F1B", "1f1b-i", "interleaved"),
        needs="closed forms hold when p divides m; any m runs; a group below p: less memory, more bubble",
        options=("group", "early", "overlap"),
    ),
    _LOOPED(
        name="breadth-first",
        make=breadth_first,
        splits_backward=False,
        summary="all microbatches through one chunk before the next; few, large bursts of traffic",
        source="arXiv 2211.05953",
        makespan="3m + 3(p-1)/v",
        span="3m + 3(p-1)/v",
        memory="m",
        sliced="m",
        aliases=("ScheduleLoopedBFS", "looped-bfs"),
        needs="closed forms hold from m >= p on; any m runs",
    ),
    _LOOPED(
        name="gis",
        steady=True,
        make=gis,
        splits_backward=True,
        summary="interleaved 1F1B with W after each B: shorter warm-up, and less memory with a smaller group",
        source="PipeOffload, arXiv 2503.01328",
        makespan="3m + 2(p-1)/v",
        span="3m + 2(p-1)/v",
        memory="p",
        sliced="(p + (k-1)/v)/k",
        aliases=("generalized-interleaved-schedule",),
        needs="closed forms hold when p divides m; any m runs; a group from p/2 up: (p + (v-1) group)/v",
        options=("group",),
        groups=lambda p: range(-(-p // 2), p + 1),
    ),
    _LINEAR(
        name="zb-h1",
        branches=True,
        make=zb_h1,
        splits_backward=True,
        summary="1F1B with the weight gradients put off into the bubble",
        source="Zero Bubble, arXiv 2401.10241, section 2.2",
        makespan="3m + (p-1)",
        span="3m + (p-1)",
        memory="p",
        sliced="(p + k-1)/k",
        aliases=("zbh1",),
    ),
    _LINEAR(
        name="zb-h2",
        branches=True,
        make=zb_h2,
        splits_backward=True,
        summary="no bubble within a rank's span, for twice the activations",
        source="Zero Bubble, arXiv 2401.10241, section 2.2",
        makespan="3m + (p-1)",
        span="3m",
        memory="2p-1",
        sliced="(2p + k-2)/k",
        aliases=("zbh2",),
        needs="closed forms hold from m >= 2p-1 on; any m runs",
    ),
    _LINEAR(
        name="eager-1f1b",
        branches=True,
        make=eager_1f1b,
        splits_backward=False,
        summary="1F1B with twice the warm-up, so that transfers hide behind compute",
        source="AlpaComm, arXiv 2211.05322",
        makespan="3m + 3(p-1)",
        span="3m + 3(p-1)",
        memory="2p-1",
        sliced="(2p + k-2)/k",
    ),
    _V(
        name="zb-v",
        make=searched.zb_v,
        splits_backward=True,
        summary="no bubble within a rank's span at the memory of 1F1B; first and last stage share rank 0",
        source="Zero Bubble, arXiv 2401.10241, section 6; arXiv 2405.15362",
        makespan="3m + (p-1)/2",
        span="3m",
        memory="p",
        sliced="(p + k-1)/k",
        aliases=("zbv", "ScheduleZBVZeroBubble"),
        needs="closed forms hold from m >= 2p on; any m runs; fitted to the job's costs",
        searched=True,
    ),
    _V(
        name="braid-v",
        whole=True,
        make=braid_v,
        splits_backward=True,
        summary="pairs of ops as groups that hide the sums of tensor-parallel ranks; twice the memory of 1F1B",
        source="Synergistic Tensor and Pipeline Parallelism, arXiv 2510.27257",
        makespan="3m + (p-1)/2",
        span="the same",
        memory="2p - 1/2",
        needs="closed forms hold from m >= 3p on; any m runs; fewer: the best of a few lists at the job's costs",
        grouped=True,
    ),
    _LINEAR(
        name="zb-auto",
        branches=True,
        make=partial(searched.found, "zb-auto", _linear),
        splits_backward=True,
        summary="the best order of one stage per rank for the job's costs and memory limit",
        source='search; memory_limit = "1.0x" is ZB-1p and "2.0x" is ZB-2p of arXiv 2401.10241',
        makespan="3m + (p-1)",
        span="3m",
        memory="the limit",
        aliases=("zb-1p", "zb-2p"),  # these set a limit as well: see LIMITS
        searched=True,
        budget=BUDGET,
    ),
    _VSHAPE(
        name="v-auto",
        make=partial(searched.found, "v-auto", Placement.vshape),
        splits_backward=True,
        summary="the best order of the V placement for the job's costs and memory limit",
        source="search; building blocks of arXiv 2405.15362 and our own",
        makespan="3m + (p-1)/2",
        span="3m",
        memory="the limit",
        searched=True,
        budget=BUDGET,
    ),
    _V(
        name="v-half",
        make=partial(searched.found, "v-half", _v),
        splits_backward=True,
        summary="the V placement with half the activations of 1F1B",
        source="arXiv 2405.15362, section 3",
        makespan="~ 3m + p",
        span="~ 3m + p",
        memory="(p+2)//2",
        searched=True,
        budget=BUDGET,
    ),
    _V(
        name="v-min",
        make=partial(searched.found, "v-min", _v),
        splits_backward=True,
        summary="the V placement with a third of the activations of 1F1B",
        source="arXiv 2405.15362, section 3",
        makespan="~ 3m + 2p",
        span="~ 3m + 2p",
        memory="(p+4)//3",
        searched=True,
        budget=BUDGET,
    ),
    _VSHAPE(
        name="1f1b-v",
        make=partial(searched.found, "1f1b-v", Placement.vshape, split=False),
        splits_backward=False,
        summary="the V placement with backwards in one piece",
        source="search; arXiv 2405.15362 calls the placement V-shape",
        makespan="by limit",
        span="by limit",
        memory="the limit",
        searched=True,
        budget=BUDGET,
    ),
    _LOOPED(
        name="looped-zb",
        make=partial(searched.found, "looped-zb", Placement.looped),
        splits_backward=True,
        summary="interleaved stages with backwards split, for the job's costs and memory limit",
        source="search; at memory_limit 1.0x the generalized interleaved schedule of arXiv 2503.01328 or better",
        makespan="3m + (p-1)/v",
        span="3m",
        memory="the limit",
        aliases=("generalized-interleaved", "ScheduleInterleavedZeroBubble"),
        searched=True,
        budget=BUDGET,
    ),
    *BIDIRECTIONAL,
)

# In addition: REPLICATED, whose placement depends on parallel.replicas, so that it is not compared with others.
SCHEDULES: dict[str, ScheduleCard] = {schedule.name: schedule for schedule in _ALL}
LIMITS = {"zb-1p": "1.0x", "zb-2p": "2.0x"}  # aliases that also set a `memory_limit`
AUTO = "auto"  # the best of all placements; no schedule of its own, see compiler/order.py
_ALIASES = {alias.lower(): schedule.name for schedule in _ALL for alias in (schedule.name, *schedule.aliases)}

__all__ = ["AUTO", "BUDGET", "LIMITS", "SCHEDULES", "Generator", "Request", "ScheduleCard", "find", "several"]


def several(program: Program, steps: int, *, group: int | None = None, early: int | None = None) -> Program | None:
    """`steps` steps of a schedule's program as one, with these options; None if it has no steady state."""
    card = None if program.placement.branches else find(program.history[0])
    if card is None or not card.steady:
        return None
    p, m, v = program.placement.ranks, program.microbatches * steps, program.placement.chunks or 1
    return card.make(Request(p, m, v, group=group, early=early, slices=program.slices))


def find(name: str) -> ScheduleCard:
    """The schedule of that name or alias, in any case. Raises E104 with the nearest name."""
    if name.lower() == REPLICATED.name:
        return REPLICATED
    canonical = _ALIASES.get(name.lower())
    if canonical is None:
        close = difflib.get_close_matches(name.lower(), _ALIASES, n=1)
        hint = f'did you mean "{_ALIASES[close[0]]}"?' if close else f"one of: {', '.join([*SCHEDULES, AUTO])}"
        raise ZbcError("E104", f'config: unknown schedule "{name}"', hint=hint)
    return SCHEDULES[canonical]
