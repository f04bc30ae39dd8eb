"""Schedules: the list of all, and the card of one, with a picture."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zbc.commands.console import labelled, show, show_json, table
from zbc.commands.picture import columns_here
from zbc.text import wrap

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from zbc.compiler.schedules import ScheduleCard

_EVERYTHING = 1000  # columns of a list off a terminal
_CARD = (4, 6)  # ranks and microbatches of the picture on a schedule's card


def schedules(name: str, *, json: bool, quiet: bool) -> None:
    """Prints all schedules, or the card of one. Raises E104 for an unknown one."""
    from zbc.compiler.schedules import AUTO, SCHEDULES, find

    cards = [*SCHEDULES.values()] if not name else [] if name.lower() == AUTO else [find(name)]
    if json:
        show_json({"format": "zbc-schedules", "version": 1, "schedules": [_card(card) for card in cards]})
    elif not quiet and not name:
        show(*_list(cards, AUTO))
    elif not quiet:
        show(*(card_parts(cards[0], columns_here()) if cards else _AUTO))


def _card(card: ScheduleCard) -> dict[str, Any]:
    low, high = card.chunks
    texts = ("name", "summary", "source", "makespan", "span", "memory", "needs")
    return {
        **{key: getattr(card, key) for key in texts},
        "aliases": list(card.aliases),
        "placement": card.placement_name,
        "chunks": [low, high],
        "splits_backward": card.splits_backward,
        "searched": card.searched,
    }


_AUTO = (
    "auto: the best of all schedules, for the job's costs and memory",
    "",
    "Never worse than any of them by name with the same --budget. looped-zb is tried",
    "with two to four stages per rank, or with those of schedule.chunks.",
)
_UNITS = (
    "p ranks, m microbatches, v chunks (stages per rank); one rank's F, B and W of",
    "a microbatch take 1 each, transfers nothing; memory is the peak of activations,",
    "1 = one rank's share of one microbatch. The bubble is what a makespan or span",
    "has beyond 3m. `zbc explain NAME` shows one of them.",
)


def _list(cards: Sequence[ScheduleCard], auto: str) -> Iterator[RenderableType]:
    """All schedules, with the columns that fit the terminal."""
    rows = [("name", "placement", "chunks", "makespan", "span", "memory", "B, W")]
    for card in cards:
        split = "apart" if card.splits_backward else "as one"
        rows.append((card.name, card.placement_name, _chunks(card), card.makespan, card.span, card.memory, split))
    rows.append((auto, "any", "1+", "the best", "the best", "the limit", "apart"))
    columns, left_out = list(zip(*rows, strict=True)), list[str]()
    room = shutil.get_terminal_size((_EVERYTHING, 24)).columns
    for name in ("chunks", "span"):
        if sum(max(map(len, column)) + 2 for column in columns) - 2 > room:
            columns = [column for column in columns if column[0] != name]
            left_out.append(name)
    heads, *cells = zip(*columns, strict=True)
    yield table(heads, cells, left=len(heads))
    yield ""
    yield from _UNITS
    if left_out:
        yield f"No room for: {', '.join(left_out)}."


def _chunks(card: ScheduleCard) -> str:
    low, high = card.chunks
    return f"{low}" if low == high else f"{low}+" if high is None else f"{low}-{high}"


def card_parts(card: ScheduleCard, width: int) -> Iterator[str | Text]:
    """The facts about one schedule, and a picture of its order."""
    from zbc.compiler.lowering import Lowering
    from zbc.compiler.schedules import Request
    from zbc.compiler.sim.context import Context
    from zbc.viz.strip import Drawn, once
    from zbc.viz.terminal import View, draw

    p, m = _CARD
    shown = Lowering().lower(Context.of(card.make(Request(p, m, card.default_chunks))))
    yield from wrap(f"{card.name}: {card.summary}".split(" "), 80, between=" ")
    yield ""
    yield labelled("source", *wrap(card.source.split(" "), 69, between=" "))
    if card.aliases:
        yield labelled("also", ", ".join(card.aliases))
    yield labelled("placement", f"{card.placement_name}; stages per rank: {_chunks(card)}")
    yield labelled("backward", "B and W are ops of their own" if card.splits_backward else "B and W are one op")
    yield labelled("makespan", card.makespan)
    yield labelled("span", card.span)
    yield labelled("memory", f"{card.memory}; in activation units, on the fullest rank")
    if card.sliced:
        yield labelled("slices", f"in k slices, up to p: the bubble over k, memory {card.sliced}")
    yield labelled("needs", *wrap(card.needs.split(" "), 69, between=" "))
    yield ""
    picture = Drawn(card.name, shown.program, once(shown.timeline), shown.costs)
    yield draw([picture], View(width=width, by="slot", unicode=False))
