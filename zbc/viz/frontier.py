"""The predicted step against a number, such as the limit on activations: one curve per choice.

In a terminal each curve has a letter at its points and dots between them; as SVG a line with its points. Steps have a
logarithmic axis, since they grow without bound below some limit, and so have values that are far apart. A choice has no
point at values at which it cannot be planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple
from xml.sax.saxutils import escape

from zbc.text import aligned, short, visible

LETTERS = "ABCDEFGH"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f5f00", "#56b4e9", "#111111", "#888888")
ROWS, LINES = 14, 6
_FAR = 10  # largest over least value from which on the axis of values is logarithmic, too
_SVG, _LEFT, _RIGHT, _TOP, _DEEP = (640, 400), 62, 20, 34, 46  # px: size, and margins of the curves


class Axis(NamedTuple):
    """The horizontal axis: its name, and the unit after its numbers."""

    words: str
    unit: str
    per_sequence: bool = False  # ms per sequence, not per step

    @property
    def step(self) -> str:
        return "ms per sequence" if self.per_sequence else "step in ms"


class Curve(NamedTuple):
    """A choice with the values at which it can be planned, ascending, and ms of a step at each."""

    name: str
    points: tuple[tuple[float, float], ...]


def of_text(curves: Sequence[Curve], axis: Axis, width: int) -> Iterator[str]:
    """A chart of at most `width` columns, with the numbers below it."""
    limits, low, high = _extent(curves)
    heads = aligned([low, high])
    room = min(width, 100) - max(map(len, heads)) - 4
    cells = [[" "] * room for _ in range(ROWS)]

    def place(limit: float, ms: float) -> tuple[int, int]:
        across = (limit - limits[0]) / ((limits[-1] - limits[0]) or 1.0)
        up = math.log(ms / low) / (math.log(high / low) or 1.0)
        return round((ROWS - 1) * (1 - up)), round((room - 1) * across)

    for curve in curves:
        for (a, x), (b, y) in pairwise(curve.points):
            first, last = place(a, x)[1], place(b, y)[1]
            for column in range(first, last + 1):
                share = (column - first) / ((last - first) or 1)
                row = place(a, x * (y / x) ** share)[0]
                cells[row][column] = "." if cells[row][column] == " " else cells[row][column]
    for letter, curve in reversed([*zip(LETTERS, curves, strict=False)]):
        for point in curve.points:
            row, column = place(*point)
            cells[row][column] = letter
    yield f"{axis.step}, by the {axis.words}"
    margin = max(map(len, heads))
    for row, line in enumerate(cells):
        head = heads[1] if row == 0 else heads[0] if row == ROWS - 1 else ""
        yield f"{head:>{margin}} |{''.join(line)}".rstrip()
    ends = f"{short(limits[0])}", f"{short(limits[-1])}"
    yield f"{'':>{margin}} +{'-' * room}"
    yield f"{'':>{margin}}  {ends[0]}{ends[1]:>{room - len(ends[0])}}"


def numbers(curves: Sequence[Curve]) -> list[list[str]]:
    """A row of texts per curve: its letter, its name, and ms at every value; `-` without a plan."""
    limits, _, _ = _extent(curves)
    rows = [[letter, curve.name] for letter, curve in zip(LETTERS, curves, strict=False)]
    for limit in limits:
        times = [dict(curve.points).get(limit) for curve in curves]
        texts = iter(aligned([ms for ms in times if ms is not None]))
        for row, ms in zip(rows, times, strict=False):
            row.append("-" if ms is None else next(texts))
    return rows


def values_of(curves: Sequence[Curve]) -> list[float]:
    """Every value with a point, ascending."""
    return sorted({limit for curve in curves for limit, _ in curve.points})


def of_svg(curves: Sequence[Curve], axis: Axis, title: str) -> str:
    """The chart as an SVG document."""
    limits, low, high = _extent(curves)
    width, height = _SVG
    low, high = 0.95 * low, 1.05 * high
    far = limits[0] > 0 and limits[-1] / limits[0] >= _FAR

    def x(limit: float) -> float:
        first, at, last = (math.log(value) if far else value for value in (limits[0], limit, limits[-1]))
        return _LEFT + (width - _LEFT - _RIGHT) * (at - first) / ((last - first) or 1.0)

    def y(ms: float) -> float:
        return _TOP + (height - _TOP - _DEEP) * math.log(high / ms) / math.log(high / low)

    body = [f'<text x="{_LEFT}" y="20" class="t">{escape(title)}</text>']
    for k in range(LINES + 1):
        ms = low * (high / low) ** (k / LINES)
        body.append(f'<path d="M{_LEFT} {y(ms):.1f}H{width - _RIGHT}" stroke="#ddd"/>')
        body.append(f'<text x="{_LEFT - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{short(ms, 3)}</text>')
    body += [f'<text x="{x(num):.1f}" y="{height - 28}" text-anchor="middle">{short(num)}</text>' for num in limits]
    middle = (width + _LEFT - _RIGHT) / 2
    named = f"{escape(axis.words)}; {axis.step}"
    body.append(f'<text x="{middle:.1f}" y="{height - 10}" text-anchor="middle">{named}</text>')
    for k, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        line = " ".join(f"{x(limit):.1f},{y(ms):.1f}" for limit, ms in curve.points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for limit, ms in curve.points:
            tip = f"<title>{escape(curve.name)}, {short(limit)}{escape(axis.unit)}: {short(ms)} ms</title>"
            body.append(f'<circle cx="{x(limit):.1f}" cy="{y(ms):.1f}" r="3.5" fill="{colour}">{tip}</circle>')
        at = _TOP + 16 * k + 8
        body.append(
            f'<text x="{width - _RIGHT}" y="{at}" text-anchor="end" fill="{colour}">{escape(curve.name)}</text>'
        )
    style = "text{font:12px Helvetica,Arial,'DejaVu Sans',sans-serif}.t{font-size:15px;font-weight:bold}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    whole = f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
    return visible("\n".join([f'{head} role="img"><title>{escape(title)}</title>{whole}', *body, "</svg>\n"]))


def _extent(curves: Sequence[Curve]) -> tuple[list[float], float, float]:
    """All limits, and the least and the most ms."""
    steps = [ms for curve in curves for _, ms in curve.points]
    return values_of(curves), min(steps), max(steps)
