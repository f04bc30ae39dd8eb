"""A timeline as one self-contained, interactive HTML file.

Ops are stored as numbers: per rank and op the kind, stage and microbatch, the gap to the op before it in billionths of
the longest plan, and the index of its duration among the plan's few durations. The page computes times from these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from html import escape
from importlib import resources
from typing import Any

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import over_time
from zbc.compiler.whatif.why import chain
from zbc.ir import Kind, Op
from zbc.ops import VALUES
from zbc.text import visible
from zbc.viz.look import chunk_entries, chunks_of, entries, look
from zbc.viz.strip import Drawn, longest, signs
from zbc.viz.words import verdict

SCRIPTS = ("draw.js", "memory.js", "input.js", "perfetto.js")
_FINE = 1e-9  # resolution of times, as a share of the longest plan
_FAR = 100_000  # a pipe and a stage as one number: pipe * _FAR + stage


def draw(drawn: Sequence[Drawn], ranks: Sequence[int] | None = None) -> str:
    """The page of one plan, or of several below one another on one time axis; `ranks` leaves out all others."""
    length = longest([plan.strip for plan in drawn])
    kinds = [kind for kind in Kind if any(kind in _kinds(plan) for plan in drawn)]
    names = [plan.heading(several=len(drawn) > 1) for plan in drawn]
    data = {
        "length": length,
        "unit": length * _FINE,
        "kinds": [_kind(kind) for kind in kinds],
        "panels": _panels(drawn, names, kinds, length, ranks),
    }
    heads = "\n".join(
        f'<h1>{escape(name)}</h1>\n<div class="soft">{escape(verdict(plan.strip.steps[0], bubbles=True))}</div>'
        for plan, name in zip(drawn, names, strict=True)
    )
    parts = {
        "title": escape("; ".join(names)),
        "heads": heads,
        "legend": _legend(drawn, kinds),
        "notes": escape(_notes(drawn)),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join(_file(name) for name in SCRIPTS),
    }
    # In one pass: a text that looks like a slot is none.
    return visible(re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], _file("page.html")))


def _file(name: str) -> str:
    return (resources.files("zbc.viz") / "page" / name).read_text(encoding="utf-8")


def _kinds(one: Drawn) -> set[Kind]:
    timeline = one.strip.steps[0]
    return {timeline.graph.ops[i].kind for rank in range(timeline.ranks) for i in timeline.ops(rank)}


def _kind(kind: Kind) -> dict[str, Any]:
    appearance = look(kind)
    return {
        "op": kind.value,
        **{name: getattr(appearance, name) for name in ("letter", "other", "name", "fills", "ink")},
        "fills_at_start": not any(VALUES[ref.what].memory == "activations" for ref in kind.row.frees),
        "alone": not kind.computes,
    }


def _panels(
    drawn: Sequence[Drawn], names: Sequence[str], kinds: Sequence[Kind], length: float, ranks: Sequence[int] | None
) -> list[dict[str, Any]]:
    """The panels; measured ones with their waits and delays, and a link to the prediction above them."""
    panels = [_panel(plan, name, kinds, length, ranks) for plan, name in zip(drawn, names, strict=True)]
    for plan, panel in zip(drawn, panels, strict=True):
        if plan.recorded is None:
            continue
        ids = [piece.id for rank in panel["names"] for piece in plan.strip.pieces(rank)]
        for name, ms in zip(("waited", "delayed"), plan.recorded.leads, strict=True):
            panel[name] = [float(f"{ms[i]:.4g}") for i in ids]
        if len(ids) == len(panels[0]["source"]):
            panel["twin"] = 0
    return panels


def _panel(one: Drawn, name: str, kinds: Sequence[Kind], length: float, ranks: Sequence[int] | None) -> dict[str, Any]:
    """The data of one plan. Ids count through the shown ranks, step after step within a rank."""
    strip, placement = one.strip, one.program.placement
    shown = list(ranks) if ranks is not None else list(range(strip.ranks))
    pieces = {rank: list(strip.pieces(rank)) for rank in shown}
    number = {piece.id: k for k, piece in enumerate(piece for rank in shown for piece in pieces[rank])}
    durations: dict[float, int] = {}
    rows = [_row(one, pieces[rank], kinds, durations, length) | _beside(one, rank, number) for rank in shown]
    sources = list(strip.sources())
    return {
        "title": name,
        "names": shown,
        "ranks": rows,
        "durations": [ms for ms in durations],
        "source": [number.get(sources[piece.id], -1) for rank in shown for piece in pieces[rank]],
        "apart": one.apart,
        "path": [number[i] for i in _path(one) if i in number],
        "held": [[_held(one.costs, Op(kind, stage)) for stage in range(placement.stages)] for kind in kinds],
        "comm": [list(pipe.values()) for pipe in one.costs.links],
        "chunks": {
            rank: {pipe * _FAR + stage: chunk for (pipe, stage), chunk in chunks_of(placement, rank).items() if chunk}
            for rank in shown
        },
        "sums": [
            {"rank": rank, "start": piece.start, "end": piece.end, "fill": look(piece.op.kind).fills[0]}
            for rank in shown
            for piece in strip.sums(rank)
            if piece.end > piece.start
        ],
    }


def _held(costs: Costs, op: Op) -> float | list[float]:
    """Activation units that ops like this add; microbatch by microbatch where these are unequal."""
    return [costs.held(op._replace(mb=mb)) for mb in range(costs.unequal)] if costs.unequal else costs.held(op)


def _beside(one: Drawn, rank: int, shown: Container[int]) -> dict[str, Any]:
    """Changes of memory by ops that are not drawn: [ms, units], from the ledger."""
    changes = []
    for step, timeline in enumerate(one.strip.steps):
        base = step * len(timeline.graph.ops)
        before = 0.0
        for point in over_time(timeline, rank, one.costs):
            if base + point.op not in shown:
                changes.append([point.ms - one.strip.begin, point.units - before])
            before = point.units
    return {"more": changes} if changes else {}


def _row(
    one: Drawn, pieces: Sequence[Any], kinds: Sequence[Kind], durations: dict[float, int], length: float
) -> dict[str, Any]:
    ops = [piece.op for piece in pieces]
    ends = [0.0, *(piece.end for piece in pieces)]
    lengths = [float(f"{piece.end - piece.start:.9g}") for piece in pieces]
    order = {kind: k for k, kind in enumerate(kinds)}
    row: dict[str, Any] = {
        "k": [order[op.kind] for op in ops],
        "s": [op.stage for op in ops],
        "m": [op.mb for op in ops],
        "d": [durations.setdefault(ms, len(durations)) for ms in lengths],
        "g": [max(0, round((piece.start - end) / (length * _FINE))) for piece, end in zip(pieces, ends, strict=False)],
    }
    if len(one.program.placement.pipes) > 1:
        row["u"] = [op.pipe for op in ops]
    if one.program.slices > 1:
        row["x"] = [op.slice for op in ops]
    if one.program.freezes:
        row["w"] = [op.share for op in ops]
    return row


def _path(one: Drawn) -> list[int]:
    """The ids of the critical path of every step, the last one first."""
    if one.recorded is not None:
        return one.recorded.path()
    ids: list[int] = []
    for step in reversed(range(len(one.strip.steps))):
        timeline = one.strip.steps[step]
        rank = max(range(timeline.ranks), key=timeline.closes)
        begin = min(timeline.first_start(r) for r in range(timeline.ranks))
        count = len(timeline.graph.ops)
        ids += [step * count + i for i in chain(timeline, rank, begin) if i < count]
    return ids


def _legend(drawn: Sequence[Drawn], kinds: Sequence[Kind]) -> str:
    shown, two, *_ = signs(drawn)
    words = []
    for appearance, text in entries({kind for kind in kinds if kind in shown or not kind.computes}, two=two):
        words.append(f'<span class="swatch" style="background:{appearance.fills[0]}"></span>{escape(text)}')
    for appearance, _ in entries({kind for plan in drawn for kind in plan.strip.collectives}, two=two):
        swatch = f'<span class="swatch" style="background:{appearance.fills[0]}"></span>'
        words.append(f"{swatch}{escape(appearance.name)}, beside compute")
    return "".join(words)


def _notes(drawn: Sequence[Drawn]) -> str:
    notes = []
    _, two, chunks, second = signs(drawn)
    if chunks > 1:
        bars = ("lower case and a bar below", "a bar above", "both")
        notes += [f"{bar}: {words}" for bar, (words, _) in zip(bars, chunk_entries(chunks), strict=False)]
    if two:
        notes.append(f"second letters and hatching: the {second}")
    steps = len(drawn[0].strip.steps)
    if steps > 1:
        notes.append(f"{steps} steps in a row")
    return "; ".join(notes)
