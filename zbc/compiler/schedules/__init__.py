"""Every schedule by name, with its card: the literal registry. What cards tell readers is in cards.toml."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from zbc.compiler.schedules import searched
from zbc.compiler.schedules.braid import braid_v
from zbc.compiler.schedules.dualpipe import dualpipe, dualpipe_v
from zbc.compiler.schedules.lagged import eager_1f1b, gpipe, one_f_one_b, zb_h1, zb_h2
from zbc.compiler.schedules.looped import breadth_first, gis, interleaved_1f1b
from zbc.compiler.schedules.replicated import REPLICATED
from zbc.compiler.schedules.request import Generator, Request, ScheduleCard, texts_of
from zbc.compiler.schedules.waves import bitpipe, chimera, hanayo, split_pipes, two_pipes
from zbc.errors import ZbcError
from zbc.ir import Placement, Program

BUDGET, PIPES_BUDGET = 4.0, 2.0  # seconds of schedules that are only searched; of two pipes, if none reaches the bound


def _card(
    placement: Callable[[int, int], Placement],
    placement_name: str,
    chunks: tuple[int, int | None],
    name: str,
    make: Generator,
    *,
    split: bool = True,
    **more: Any,
) -> ScheduleCard:
    """The card of a schedule with its texts; stages per rank are 2 by default, where that is possible."""
    default = min(2, chunks[1] or 2)
    return ScheduleCard(name, make, placement, placement_name, chunks, default, split, **texts_of(name), **more)


def _searched(
    card: partial[ScheduleCard], name: str, make: Callable[..., Program], budget: float = BUDGET, **more: Any
) -> ScheduleCard:
    """The card of a schedule that is searched on its placement."""
    return card(name, partial(make, name, card.args[0]), searched=True, budget=budget, **more)


def _linear(p: int, v: int) -> Placement:
    return Placement.linear(p)


def _v(p: int, v: int) -> Placement:
    return Placement.vshape(p)


# Cards by placement, with its name, and the fewest and most stages per rank.
_LINEAR = partial(_card, _linear, "linear", (1, 1))
_LOOPED = partial(_card, Placement.looped, "looped", (1, None))
_V = partial(_card, _v, "V", (2, 2))
_VSHAPE = partial(_card, Placement.vshape, "V", (1, None))
_WAVES = partial(_card, Placement.vshape, "waves", (2, None))
_TWO = partial(_card, two_pipes, "two pipes", (1, 1))
_TWO_V = partial(_card, two_pipes, "two V pipes", (2, None))

_ALL = (
    _LINEAR("gpipe", gpipe, split=False, branches=True),
    _LINEAR("1f1b", one_f_one_b, split=False, branches=True, steady=True),
    _LOOPED("interleaved-1f1b", interleaved_1f1b, split=False, steady=True, options=("group", "early", "overlap")),
    _LOOPED("breadth-first", breadth_first, split=False),
    _LOOPED("gis", gis, steady=True, options=("group",), groups=lambda p: range(-(-p // 2), p + 1)),
    _LINEAR("zb-h1", zb_h1, branches=True),
    _LINEAR("zb-h2", zb_h2, branches=True),
    _LINEAR("eager-1f1b", eager_1f1b, split=False, branches=True),
    _V("zb-v", searched.zb_v, searched=True),
    _V("braid-v", braid_v, whole=True, grouped=True),
    _searched(_LINEAR, "zb-auto", searched.found, branches=True),
    _searched(_VSHAPE, "v-auto", searched.found),
    _searched(_V, "v-half", searched.found),
    _searched(_V, "v-min", searched.found),
    _searched(_VSHAPE, "1f1b-v", partial(searched.found, split=False), split=False),
    _searched(_LOOPED, "looped-zb", searched.found),
    _TWO("chimera", chimera, split=False, whole=True, options=("group", "early")),
    _TWO_V("bitpipe", bitpipe, split=False, whole=True, options=("group", "early")),
    _TWO("dualpipe", dualpipe, whole=True, options=("overlap",), ranks_in=2),
    _card(Placement.vshape, "V", (2, 2), "dualpipe-v", dualpipe_v, whole=True, options=("overlap",)),
    _WAVES("hanayo", hanayo, split=False, whole=True, options=("group", "early"), chunks_in=2),
    _searched(_TWO, "chimera-zb", split_pipes, PIPES_BUDGET, whole=True),
    _searched(_TWO_V, "bitpipe-zb", split_pipes, PIPES_BUDGET, whole=True),
)
# In addition: REPLICATED, whose placement depends on parallel.replicas, so that it is not compared with others.
SCHEDULES: dict[str, ScheduleCard] = {schedule.name: schedule for schedule in _ALL}
LIMITS = {"zb-1p": "1.0x", "zb-2p": "2.0x"}  # aliases that also set a `memory_limit`
AUTO = "auto"  # the best of all placements; no schedule of its own, see compiler/order.py
_ALIASES = {alias.lower(): schedule.name for schedule in _ALL for alias in (schedule.name, *schedule.aliases)}

__all__ = ["AUTO", "LIMITS", "SCHEDULES", "Generator", "Request", "ScheduleCard", "find", "several"]


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
