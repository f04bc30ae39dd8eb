"""`compare --sweep schedule.memory_limit=...`: what less memory costs, drawn."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from zbc.commands.console import table, write_text
from zbc.errors import ZbcError
from zbc.text import GIB, short
from zbc.viz.frontier import LETTERS, Curve, limits_of, numbers, of_svg, of_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.whatif.compare import ComparedPlan, Setting

LIMIT = "schedule.memory_limit"
UNITS = {"x": "times what 1F1B holds", "bytes": "GiB"}


def swept(rows: Sequence[ComparedPlan]) -> bool:
    """Whether there are limits to draw steps against."""
    return any(len(_curves(list(group))[0]) > 0 for _, group in _by_world(rows))


def drawn(rows: Sequence[ComparedPlan], name: Callable[[ComparedPlan], str]) -> Iterator[RenderableType]:
    """A chart for each world, with its numbers; `name` is what a curve is called, without its limit."""
    for world, group in _by_world(rows):
        curves, unit = _curves(list(group), name)
        if not curves:
            continue
        yield ""
        if world:
            yield ", ".join(f"{key} = {value}" for key, value in world)
        yield from of_text(curves, UNITS[unit], shutil.get_terminal_size((80, 24)).columns)
        sign = "x" if unit == "x" else " GiB"
        yield table(["", "", *(f"{short(limit)}{sign}" for limit in limits_of(curves))], numbers(curves), left=2)


def write(path: Path, rows: Sequence[ComparedPlan], name: Callable[[ComparedPlan], str]) -> None:
    """The chart of the first world as SVG. Raises E109 where no limit is swept."""
    for world, group in _by_world(rows):
        curves, unit = _curves(list(group), name)
        if curves:
            title = "What less memory costs" + "".join(f", {key} = {value}" for key, value in world)
            write_text(path, of_svg(curves, UNITS[unit], title))
            return
    refuse(path)


def refuse(path: Path) -> None:
    """Raises E109: there is nothing to draw."""
    hint = f"""write --sweep {LIMIT}='"0.25x","0.5x","1x"'"""
    raise ZbcError(
        "E109", f"config: --svg {path} draws steps against {LIMIT}, which takes two limits or more", hint=hint
    )


def _by_world(rows: Sequence[ComparedPlan]) -> Iterator[tuple[tuple[Setting, ...], Iterator[ComparedPlan]]]:
    ranked = sorted(rows, key=lambda row: row.world)
    return ((world, group) for world, group in groupby(ranked, key=lambda row: row.world))


def _curves(rows: Sequence[ComparedPlan], name: Callable[[ComparedPlan], str] = str) -> tuple[list[Curve], str]:
    """The curves of one world, the fastest first, and in what limits are. Nothing where fewer than two limits of one
    kind are swept."""
    from zbc.job.spec import parse_limit

    found, units = dict[str, dict[float, float]](), set[str]()
    per_sequence = len({row.sequences for row in rows if row.report is not None}) > 1
    for row in rows:
        limit = parse_limit(dict(row.settings).get(LIMIT, "").strip("\"'"))
        if limit is None or row.report is None:
            continue
        units.add(limit[1])
        amount = limit[0] / (GIB if limit[1] == "bytes" else 1)
        found.setdefault(name(row), {})[amount] = row.settled_ms / (row.sequences if per_sequence else 1)
    if len(units) != 1 or len({limit for points in found.values() for limit in points}) < 2:
        return [], ""
    curves = [Curve(label, tuple(sorted(points.items()))) for label, points in found.items()]
    return _best(curves), units.pop()


def _best(curves: Sequence[Curve]) -> list[Curve]:
    """As many as there are letters: those that are the fastest under some limit, then those that are fast under any."""
    least = {limit: min(dict(c.points).get(limit, float("inf")) for c in curves) for limit in limits_of(curves)}

    def rank(curve: Curve) -> tuple[int, float]:
        leads = sum(ms <= least[limit] * (1 + 1e-9) for limit, ms in curve.points)
        return -leads, min(ms / least[limit] for limit, ms in curve.points)

    return sorted(curves, key=rank)[: len(LETTERS)]
