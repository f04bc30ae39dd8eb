"""The default table of `compare`: the best rows, in the six columns that decide a choice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from zbc.commands.console import table
from zbc.text import aligned, percent, unit_of, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.report.report import Report
    from zbc.compiler.whatif.compare import ComparedPlan

    Planned = tuple[ComparedPlan, Report]

MOST = 8  # rows of a world, unless the schedules were named
_TOKENS, _SAMPLES, _FACTOR = "tokens/s/rank", "samples/s", "vs 1F1B"
_SPARE = (_TOKENS, _SAMPLES, _FACTOR)


class Brief(NamedTuple):
    head: str
    cells: list[str]
    meaning: str  # "" if the head is clear


@dataclass(frozen=True)
class Shortlist:
    """The rows to show and the number of others; `name` gives the cells that tell rows apart."""

    shown: Sequence[Planned]
    left_out: int
    columns: Sequence[Brief]
    heads: Sequence[str]
    name: Callable[[ComparedPlan], list[str]]

    @classmethod
    def of(
        cls,
        planned: Sequence[Planned],
        heads: Sequence[str],
        name: Callable[[ComparedPlan], list[str]],
        *,
        everything: bool,
    ) -> Shortlist:
        """The shortlist of ranked rows; `everything`: show all."""
        worlds = groupby([] if everything else planned, key=lambda entry: entry[0].world)
        shown = planned if everything else [entry for _, group in worlds for entry in _best([*group])]
        columns = list(_columns(shown)) if shown else []
        labels = zip(heads, *(name(row) for row, _ in shown), strict=True)
        room = shutil.get_terminal_size((80, 24)).columns - sum(max(map(len, cells)) + 2 for cells in labels)
        return cls(shown, len(planned) - len(shown), _fitting(columns, room), heads, name)

    @property
    def cells(self) -> list[list[str]]:
        values = zip(*(column.cells for column in self.columns), strict=True)
        return [[*self.name(row), *cells] for (row, _), cells in zip(self.shown, values, strict=True)]

    def table(self) -> RenderableType:
        return by_world(self.shown, self.cells, self.heads, [column.head for column in self.columns])

    def legend(self) -> Iterator[str]:
        meanings = [f"{column.head}: {column.meaning}" for column in self.columns if column.meaning]
        yield from wrap(meanings, 78, between="; ")
        if any(row.bent for row, _ in self.shown):
            yield "*: memory rules out the partition that is most even in time"


def by_world(
    planned: Sequence[Planned], cells: Sequence[list[str]], names: Sequence[str], heads: Sequence[str]
) -> RenderableType:
    """All rows, with an empty one between two worlds; `names`: the heads of the cells that tell rows apart."""
    lines = list[list[str]]()
    for _, group in groupby(zip(planned, cells, strict=True), key=lambda entry: entry[0][0].world):
        lines += [*([[]] if lines else []), *(row for _, row in group)]
    return table([*names, *heads], lines, left=len(names))


def _fitting(columns: list[Brief], room: int) -> list[Brief]:
    """Without throughput and speed-up, which follow from the step time, if the terminal is too narrow for them."""
    widths = {column.head: max(map(len, (column.head, *column.cells))) + 2 for column in columns}
    for head in _SPARE:
        if sum(widths.values()) - 2 > room:
            widths.pop(head, None)
    return [column for column in columns if column.head in widths]


def _best(group: Sequence[Planned]) -> list[Planned]:
    """The first rows, and 1F1B as the baseline."""
    if len(group) <= MOST:
        return list(group)
    from zbc.compiler.whatif.others import BASELINE

    first = list(group[:MOST])
    base = next((entry for entry in group if entry[0].schedule == BASELINE), None)
    return first if base is None or base in first else [*first[:-1], base]


def _columns(planned: Sequence[Planned]) -> Iterator[Brief]:
    rows, reports = [row for row, _ in planned], [report for _, report in planned]
    times = [row.settled_ms for row in rows]
    if len({row.sequences for row in rows}) > 1:
        times = [row.settled_ms / row.sequences for row in rows]
        yield Brief("ms/seq", aligned(times), "ms per sequence, with the optimizer")
    else:
        yield Brief("step", aligned(times), "ms, with the optimizer")
    yield Brief(_FACTOR, _known([row.speedup for row in rows], "{:.2f}x"), "how many times as fast")
    yield _rate(reports)
    if any(report.copied is not None for report in reports):
        yield Brief("moved", [percent(report.moved) for report in reports], "activations that go to the host and back")
    yield Brief("idle", [percent(report.idle_rate) for report in reports], "of the makespan, mean over the ranks")
    if any(row.noisy is not None for row in rows):
        noisy = [None if row.noisy is None else 100 * row.noisy for row in rows]
        yield Brief("jitter", _known(noisy, "{:+.1f}%"), "longer on the mean, where op times vary")
    marks = ["*" if row.bent else " " if any(peer.bent for peer in rows) else "" for row in rows]
    if not all(report.bytes_known for report in reports):
        cells = [f"{report.peak_activation_units:.2f}" for report in reports]
        yield Brief("units", _marked(cells, marks), "activations of the fullest rank")
        return
    unit, scale = unit_of(max(report.peak_bytes for report in reports))
    cells = aligned([report.peak_bytes / scale for report in reports], 3)
    yield Brief(unit, _marked(cells, marks), "of the fullest rank")


def _marked(cells: Sequence[str], marks: Sequence[str]) -> list[str]:
    return [cell + mark for cell, mark in zip(cells, marks, strict=True)]


def _rate(reports: Sequence[Report]) -> Brief:
    """Tokens per second and rank; samples per second of all ranks if tokens are not known."""
    tokens = [report.rates.tokens_per_s_per_rank for report in reports]
    if any(value is not None for value in tokens):
        return Brief(_TOKENS, _known(tokens, "{:,.0f}"), "")
    return Brief(_SAMPLES, _known([report.rates.samples_per_s for report in reports], "{:.4g}"), "of all ranks")


def _known(values: Sequence[float | None], form: str) -> list[str]:
    return ["?" if value is None else form.format(value) for value in values]


def failures(rows: Sequence[ComparedPlan], label: Callable[[ComparedPlan], str]) -> Iterator[str]:
    """The names of rows without a plan, wrapped into few lines."""
    names = [label(row) for row in rows if row.error is not None]
    if names:
        words = ", ".join(names).split(" ")
        yield from wrap([f"{len(names)} not planned, or too large", "(-v says why):", *words], 78, between=" ")
