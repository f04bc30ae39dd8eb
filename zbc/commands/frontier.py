"""`compare --sweep KEY=...`: charts of step times against the numbers of a key, the memory limit also as text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from zbc.commands.console import table
from zbc.errors import ZbcError
from zbc.text import GIB, short
from zbc.viz.frontier import LETTERS, Axis, Curve, numbers, of_svg, of_text, values_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.whatif.compare import ComparedPlan, Setting

LIMIT = "schedule.memory_limit"
_UNITS = {
    "x": Axis("limit on activations (times what 1F1B holds)", "x"),
    "bytes": Axis("limit on activations (GiB)", " GiB"),
}
Name = Callable[["ComparedPlan", str], str]  # the name of a curve, without the key it is drawn against


class _Chart(NamedTuple):
    """Curves of one world, the fastest first."""

    world: tuple[Setting, ...]
    axis: Axis
    curves: list[Curve]


def drawn(rows: Sequence[ComparedPlan], name: Name) -> Iterator[RenderableType]:
    """A chart against the memory limit for each world, with its numbers."""
    for chart in _charts(rows, LIMIT, name):
        yield ""
        if chart.world:
            yield _told(chart.world)
        yield from of_text(chart.curves, chart.axis, shutil.get_terminal_size((80, 24)).columns)
        heads = (f"{short(value)}{chart.axis.unit}" for value in values_of(chart.curves))
        yield table(["", "", *heads], numbers(chart.curves), left=2)


def svg(rows: Sequence[ComparedPlan], name: Name) -> str:
    """The chart of the first world as SVG, against the limit or else the key with most numbers. Raises E109 if no key
    is swept over numbers."""
    keys = dict.fromkeys(key for row in rows for key, _ in row.settings)
    charts = [chart for key in keys for chart in _charts(rows, key, name)[:1]]
    if not charts:
        hint = """write --sweep schedule.memory_limit='"0.25x","0.5x","1x"', or --sweep hardware.link_gbps=50,100,400"""
        raise ZbcError("E109", "config: svg draws steps against two or more values of a key", hint=hint)
    best = max(charts, key=lambda chart: (chart.axis in _UNITS.values(), len(values_of(chart.curves))))
    title = "What less memory costs" if best.axis in _UNITS.values() else f"Steps by {best.axis.words}"
    worlds = f", {_told(best.world)}" if best.world else ""
    return of_svg(best.curves, best.axis, title + worlds)


def _told(world: Sequence[Setting]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in world)


def _charts(rows: Sequence[ComparedPlan], key: str, name: Name) -> list[_Chart]:
    """The charts of all worlds with at least two numbers of the key, of one unit."""

    def world(row: ComparedPlan) -> tuple[Setting, ...]:
        return tuple(setting for setting in row.world if setting[0] != key)

    charts = []
    for settings, group in groupby(sorted(rows, key=world), key=world):
        points, units = dict[str, dict[float, float]](), set[Axis]()
        some = [(row, amount) for row in group if row.report is not None and (amount := _amount(row, key)) is not None]
        per_sequence = len({row.sequences for row, _ in some}) > 1
        for row, (axis, value) in some:
            units.add(axis)
            points.setdefault(name(row, key), {})[value] = row.settled_ms / (row.sequences if per_sequence else 1)
        curves = [Curve(label, tuple(sorted(at.items()))) for label, at in points.items()]
        if len(units) == 1 and len(values_of(curves)) > 1:
            charts.append(_Chart(settings, units.pop()._replace(per_sequence=per_sequence), _best(curves)))
    return charts


def _amount(row: ComparedPlan, key: str) -> tuple[Axis, float] | None:
    """The axis and number of a swept value; None if it is no number."""
    from zbc.job.spec import parse_limit

    text = dict(row.settings).get(key, "").strip("\"'")
    if key == LIMIT:
        limit = parse_limit(text)
        return limit and (_UNITS[limit[1]], limit[0] / (GIB if limit[1] == "bytes" else 1))
    try:
        return Axis(key, ""), float(text)
    except ValueError:
        return None


def _best(curves: Sequence[Curve]) -> list[Curve]:
    """At most one curve per letter: first curves that are the fastest at most values, then those nearest to it."""
    least = {value: min(dict(c.points).get(value, float("inf")) for c in curves) for value in values_of(curves)}

    def rank(curve: Curve) -> tuple[int, float]:
        leads = sum(ms <= least[value] * (1 + 1e-9) for value, ms in curve.points)
        return -leads, min(ms / least[value] for value, ms in curve.points)

    return sorted(curves, key=rank)[: len(LETTERS)]
