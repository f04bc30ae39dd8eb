"""A timeline as SVG for papers: vector text, a title, an axis and a legend; readable in grey.

One row per rank, time to the right. The second stage of a rank has a bar along the lower edge of its blocks, the third
one along the upper, the fourth both; the second pipe of a bidirectional schedule is hatched; blocks have labels if they
fit. Very narrow blocks are drawn as cells of half a pixel that show the op that covers most of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

from zbc.compiler.memory.per_rank import peaks
from zbc.ir import Op
from zbc.text import short, visible, wrap
from zbc.viz.cells import by_time, inside, ticks
from zbc.viz.look import HIDDEN, IDLE, MEETING, chunk_entries, chunks_of, entries, label, look
from zbc.viz.strip import Drawn, Window, longest, signs
from zbc.viz.words import verdict

MARGIN, LEFT, RIGHT = 14, 38, 56  # px: around everything, for rank numbers, for peaks
_CHARACTER = 0.62  # of the font size: wider than the average letter of the fonts in use
_WIDE = {"W": 1.0, "w": 0.82, "M": 0.9, "m": 0.95, "D": 0.78, "Q": 0.8, ".": 0.32}
_FINE = 4_000  # most ops for which each block has a tooltip
_STYLE = (
    "text{font-family:Helvetica,Arial,'DejaVu Sans',sans-serif;fill:#111}"
    ".t{font-size:15px;font-weight:bold}.n{font-size:11px}.m{text-anchor:middle}.e{text-anchor:end}"
    ".i{stroke:#bbb;stroke-width:.6}.l{fill:#fff}.b{stroke:#fff;stroke-width:.6}"
)
_HATCH = (
    '<pattern id="up" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="1.6" height="5" fill="#000" fill-opacity=".45"/></pattern>'
)


@dataclass(frozen=True, slots=True)
class SvgView:
    """Options: `ranks` (all if None), the `zoom` window in ms, the width in px, and a title instead of the default."""

    width: int = 1000
    ranks: tuple[int, ...] | None = None
    zoom: Window | None = None
    title: str | None = None
    bubbles: bool = False  # show the papers' rates, too


class _Block(NamedTuple):
    op: Op
    x: float
    width: float
    tip: str


def draw(drawn: Sequence[Drawn], sheet: SvgView = SvgView()) -> str:
    """An SVG document of one plan, or of several below one another, on one time axis."""
    window = sheet.zoom or (0.0, longest([plan.strip for plan in drawn]))
    body: list[str] = []
    y = float(MARGIN)
    for plan in drawn:
        several = len(drawn) > 1
        name = sheet.title if sheet.title and not several else plan.heading(several=several)
        lines, y = _panel(plan, sheet, window, name, y)
        body += lines
    lines, y = _legend(drawn, sheet, y)
    body += lines
    height = round(y + MARGIN)
    size = f'viewBox="0 0 {sheet.width} {height}" width="{sheet.width}" height="{height}"'
    title = f"<title>{escape('; '.join(plan.title for plan in drawn))}</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{title}\n<style>{_STYLE}</style>'
    paper = f'<defs>{_HATCH}</defs><rect width="100%" height="100%" fill="#fff"/>'
    return visible("\n".join([head, paper, *body, "</svg>\n"]))


# ---- panels --------------------------------------------------------------------------------------------------


def _panel(one: Drawn, sheet: SvgView, window: Window, name: str, y: float) -> tuple[list[str], float]:
    """Title, rows and axis of one plan from `y` on, and the y of their end."""
    ranks = sheet.ranks if sheet.ranks is not None else tuple(range(one.strip.ranks))
    row = 22 if len(ranks) <= 8 else 16 if len(ranks) <= 24 else 11
    lines = [_text(MARGIN, y + 14, fitted(name, sheet.width - 2 * MARGIN, 15), "t")]
    y += 20
    said, width = verdict(one.strip.steps[0], bubbles=sheet.bubbles).split("; "), sheet.width - 2 * MARGIN
    for part in wrap(said, int(width / (_CHARACTER * 11)), between="; "):
        lines.append(_text(MARGIN, y + 12, part, "n"))
        y += 15
    lines += [_text(MARGIN + LEFT - 8, y + 14, "rank", "n e"), _text(sheet.width - MARGIN, y + 14, "peak", "n e")]
    y += 20
    top = y
    held = peaks(one.program, one.costs, one.strip.steps[0])
    plot = sheet.width - 2 * MARGIN - LEFT - RIGHT
    blocks = {rank: list(_blocks(one, rank, window, plot)) for rank in ranks}
    widths = sorted(block.width for row_blocks in blocks.values() for block in row_blocks)
    form = _form(one.program.microbatches, widths[len(widths) // 2] if widths else 0.0, row)
    for rank in ranks:
        middle = y + row / 2 + 3.8
        lines.append(_text(MARGIN + LEFT - 8, middle, str(rank), "n e"))
        lines.append(_text(sheet.width - MARGIN, middle, short(held[rank].units, 3), "n e"))
        lines += _row(one, rank, blocks[rank], plot, y, row, form)
        if one.strip.copying:
            y += row
            lines += _copies(one, rank, window, plot, y, row / 2)
            y -= row / 2
        if one.braided:
            lines += _shared(one, rank, window, plot, y + row, row / 4)
            y += row / 4
        y += row + (3 if row > 12 else 1.5)
    lines += _meetings(one, window, plot, top, y)
    lines += _axis(window, plot, y)
    return lines, y + 30


def _meetings(one: Drawn, window: Window, plot: float, top: float, bottom: float) -> Iterator[str]:
    """A line across all ranks at the end of each all-reduce of the vocabulary."""
    scale = plot / (window[1] - window[0])
    meetings = [piece for piece in one.strip.meetings() if window[0] <= piece.end <= window[1]]
    if len(meetings) * 4 > plot:
        return
    for piece in meetings:
        tip = f"{piece.op}: {short(piece.start)} to {short(piece.end)} ms"
        path = f"M{_px(MARGIN + LEFT + (piece.end - window[0]) * scale)} {_px(top - 2)}V{_px(bottom)}"
        yield f'<path d="{path}" stroke="{MEETING}" stroke-width="1.2" fill="none"><title>{escape(tip)}</title></path>'


def _row(
    one: Drawn, rank: int, blocks: Sequence[_Block], plot: float, y: float, height: float, form: _Form
) -> Iterator[str]:
    """The blocks of a rank, then their texts."""
    x0 = MARGIN + LEFT
    yield f'<rect x="{x0}" y="{_px(y)}" width="{_px(plot)}" height="{height}" fill="{IDLE}" class="i"/>'
    chunks = chunks_of(one.program.placement, rank)
    texts = []
    fine = one.program.size <= _FINE
    for block in blocks:
        op, appearance = block.op, look(block.op.kind)
        chunk = chunks.get((op.pipe, op.stage), 0)
        area = f'x="{_px(x0 + block.x)}" width="{_px(block.width)}"'
        tip = f"<title>{escape(block.tip)}</title>" if fine else ""
        border = ' class="b"' if block.width > 3 else ""
        rect = f'<rect {area} y="{_px(y)}" height="{height}" fill="{appearance.fills[op.mb % 2]}"{border}'
        yield f"{rect}>{tip}</rect>" if tip else f"{rect}/>"
        if op.pipe:
            yield f'<rect {area} y="{_px(y)}" height="{height}" fill="url(#up)"/>'
        if height > 12:
            for edge in _bars(chunk, height - 4, 1.6):
                yield f'<rect {area} y="{_px(y + edge)}" height="2.4" fill="{appearance.ink}" fill-opacity=".6"/>'
        text = _fitting(op, chunk % 2 == 1, block.width, form)
        if text:
            shift = (0.0, 1.5, -1.5, 0.0)[chunk] if height > 12 else 0.0
            at = f'x="{_px(x0 + block.x + block.width / 2)}" y="{_px(y + height / 2 + 0.36 * form.size - shift)}"'
            style = "m l" if appearance.ink == "#ffffff" else "m"
            texts.append(f'<text font-size="{form.size}" {at} class="{style}">{text}</text>')
    yield from texts


def _bars(chunk: int, below: float, above: float) -> list[float]:
    """The y of the bars for a rank's stage: `below`, `above`, or both."""
    return [edge for bit, edge in ((1, below), (2, above)) if chunk & bit]


def _copies(one: Drawn, rank: int, window: Window, plot: float, y: float, height: float) -> Iterator[str]:
    """A lane of half the height: the offloads and reloads of a rank."""
    x0, scale = MARGIN + LEFT, plot / (window[1] - window[0])
    yield f'<rect x="{x0}" y="{_px(y)}" width="{_px(plot)}" height="{_px(height)}" fill="{IDLE}" class="i"/>'
    for piece in one.strip.copies(rank):
        start, end = max(window[0], piece.start), min(window[1], piece.end)
        if end > start:
            x, width = x0 + (start - window[0]) * scale, (end - start) * scale
            fill = look(piece.op.kind).fills[piece.op.mb % 2]
            area = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}" fill="{fill}"'
            tip = f"{piece.op}: {short(piece.start)} to {short(piece.end)} ms"
            yield f"<rect {area}><title>{escape(tip)}</title></rect>"
            text = label(piece.op)
            if height >= 8 and measured(text, height - 2) <= width - 1:
                at = f'x="{_px(x + width / 2)}" y="{_px(y + height - 2)}"'
                yield f'<text font-size="{_px(height - 2)}" {at} class="m">{text}</text>'


def _shared(one: Drawn, rank: int, window: Window, plot: float, y: float, height: float) -> Iterator[str]:
    """A thin lane below the ops: sums and swaps inside of ops; red if the rank waits for them."""
    x0, scale = MARGIN + LEFT, plot / (window[1] - window[0])
    for piece in one.strip.shared(rank, one.costs):
        start, end = max(window[0], piece.start), min(window[1], piece.end)
        if (end - start) * scale >= 0.1:
            area = f'x="{_px(x0 + (start - window[0]) * scale)}" width="{_px((end - start) * scale)}"'
            what = "hidden" if piece.hidden else "waited for"
            tip = f"sums of {piece.op}, {what}: {short(piece.start)} to {short(piece.end)} ms"
            rect = f'<rect {area} y="{_px(y)}" height="{_px(height)}" fill="{HIDDEN if piece.hidden else MEETING}"'
            yield f"{rect}><title>{escape(tip)}</title></rect>" if one.program.size <= _FINE else f"{rect}/>"


def _blocks(one: Drawn, rank: int, window: Window, plot: float) -> Iterator[_Block]:
    """The blocks of a rank in the window, in px; cells instead of ops if ops are too narrow."""
    scale = plot / (window[1] - window[0])
    pieces = inside(one.strip, rank, window)
    if len(pieces) > plot / 1.5:
        grid = by_time(one.strip, window, int(2 * plot), exactly=True, only=rank)
        for cell in grid.rows[rank]:
            yield _Block(cell.op, cell.first / 2, cell.cells / 2, "")
        return
    for piece in pieces:
        start, end = max(window[0], piece.start), min(window[1], piece.end)
        if end > start:
            tip = f"{piece.op}: {short(piece.start)} to {short(piece.end)} ms"
            yield _Block(piece.op, (start - window[0]) * scale, (end - start) * scale, tip)


class _Form(NamedTuple):
    """Labels of blocks: letters and numbers, or numbers alone; the font size in px, 0 for no labels."""

    letters: bool
    size: int


def _form(microbatches: int, width: float, height: float) -> _Form:
    """The largest labels that fit a block of that width."""
    largest = 11 if height > 18 else 9 if height > 12 else 7
    if measured(f"W{microbatches - 1}", largest) < width:
        return _Form(True, largest)
    number = str(microbatches - 1)
    return _Form(False, next((size for size in range(largest, 5, -2) if measured(number, size) <= width - 1), 0))


def _fitting(op: Op, odd: bool, width: float, form: _Form) -> str:
    """The longest of label, number, letter and "" that fits into a block."""
    full = label(op, odd=odd)
    texts = [full, full[1:], full[:1]] if form.letters or not full[1:] else [full[1:]]
    return next((text for text in texts if text and form.size and measured(text, form.size) <= width - 1), "")


def measured(text: str, size: float) -> float:
    """The approximate width of a text in px, rather too large."""
    return float(size * sum(_WIDE.get(character, _CHARACTER) for character in text))


def _axis(window: Window, plot: float, y: float) -> Iterator[str]:
    x0, scale = MARGIN + LEFT, plot / (window[1] - window[0])
    yield f'<path d="M{x0} {_px(y)}h{_px(plot)}" stroke="#111" fill="none"/>'
    for time, text in _spaced(window, scale):
        x = x0 + (time - window[0]) * scale
        yield f'<path d="M{_px(x)} {_px(y)}v4" stroke="#111" fill="none"/>'
        yield _text(x, y + 16, text, "n m")
    yield _text(x0 + plot + RIGHT, y + 16, "ms", "n e")


def _spaced(window: Window, scale: float) -> list[tuple[float, str]]:
    """Ticks at round times whose texts do not touch."""
    least = 70.0
    while True:
        marks = ticks(*window, least / scale)
        widest = max((measured(text, 11) for _, text in marks), default=0.0)
        if len(marks) < 2 or (marks[1][0] - marks[0][0]) * scale > widest + 10:
            return marks
        least *= 1.5


# ---- legend --------------------------------------------------------------------------------------------------


def _legend(drawn: Sequence[Drawn], sheet: SvgView, y: float) -> tuple[list[str], float]:
    """Swatches with their names, in as many lines as needed, and the y of their end."""
    lines, x = [], float(MARGIN)
    for fill, extra, words in _entries(drawn):
        width = 20 + len(words) * _CHARACTER * 11 + 14
        if x > MARGIN and x + width > sheet.width - MARGIN:
            x, y = float(MARGIN), y + 18
        lines.append(f'<rect x="{_px(x)}" y="{_px(y + 2)}" width="14" height="12" fill="{fill}" stroke="#999"/>')
        for edge in _bars(int(extra) if extra.isdigit() else 0, 10, 3.6):
            area = f'x="{_px(x)}" y="{_px(y + edge)}" width="14" height="2.4"'
            lines.append(f'<rect {area} fill="#000" fill-opacity=".6"/>')
        if extra == "line":
            path = f"M{_px(x + 7)} {_px(y + 2)}v12"
            lines.append(f'<path d="{path}" stroke="{MEETING}" stroke-width="1.2" fill="none"/>')
        elif extra == "hatch":
            lines.append(f'<rect x="{_px(x)}" y="{_px(y + 2)}" width="14" height="12" fill="url(#up)"/>')
        lines.append(_text(x + 20, y + 12, words, "n"))
        x += width
    y += 18
    lines.append(_text(MARGIN, y + 12, "peak: activations, in shares of one microbatch per rank", "n"))
    return lines, y + 16


def _entries(drawn: Sequence[Drawn]) -> Iterator[tuple[str, str, str]]:
    kinds, two, most, second = signs(drawn)
    for appearance, text in entries(kinds, two=two):
        yield appearance.fills[0], "", text
    yield IDLE, "", "idle"
    for words, chunk in chunk_entries(most):
        yield "#fff", str(chunk), words
    if two:
        yield "#fff", "hatch", second
    if any(plan.braided for plan in drawn):
        yield HIDDEN, "", "sums and swaps inside of ops"
        yield MEETING, "", "those that their rank waits for"
    if any(True for plan in drawn for _ in plan.strip.meetings()):
        yield "#fff", "line", "all ranks have met for a microbatch's words"


# ---- text ----------------------------------------------------------------------------------------------------


def fitted(text: str, width: float, size: float) -> str:
    """The text, cut in the middle if it is wider than `width` px."""
    room = int(width / (_CHARACTER * size))
    return text if len(text) <= room else f"{text[: room // 2 - 2]} ... {text[-(room // 2 - 3) :]}"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{_px(x)}" y="{_px(y)}" class="{style}">{escape(text)}</text>'


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
