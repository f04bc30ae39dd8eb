"""Gene vectors and policies that do well on many instances (learned.json): the starting points of the search.

Gene vectors were found offline by chains of mutations, then chosen by greedy cover: first for the published profiles
and unit times (8 and 16 ranks, limits from half to twice the memory of 1F1B, both objectives), then for random
instances around them (uneven stages, 2 to 16 ranks, limits from 0.4). Times are rounded to 1/100 op. A row has legs,
turns, and cap, rules, period and release, as in `keys.Genes`. Policies of the list scheduler were chosen likewise, over
a grid; their columns are mode, w_gap, w_slack, first_b, look, pick_b, w_memory and reserve_later of listing.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from zbc.compiler.search.keys import Genes


@cache
def _rows() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_suffix(".json").read_text()))


def learned(v: int) -> list[Genes]:
    """Starting points for v chunks per rank; vectors of two chunks are stretched over more."""
    if v == 1:
        return [_genes(*row) for row in _rows()["one chunk"]]
    return [_stretch(_genes(*row), v) for row in _rows()["two chunks"]]


def _genes(legs: list[float], turns: list[float], knobs: list[float]) -> Genes:
    cap, *rules, period, release = knobs
    return Genes(tuple(legs), tuple(turns), int(cap), tuple(rules), period, release)


def _stretch(genes: Genes, v: int) -> Genes:
    """The first and last leg each way unchanged, the ones between like the first; turns likewise."""
    if v == 2:
        return genes
    down, up, back_up, back_down = genes.legs
    first, middle, last = genes.turns
    legs = (*(down,) * (v - 1), up, back_up, *(back_down,) * (v - 1))
    turns = (*(first,) * (v - 1), middle, *(last,) * (v - 1))
    return genes._replace(legs=legs, turns=turns)


def policies(v: int) -> list[tuple[float, ...]]:
    """Policy vectors for v chunks per rank."""
    rows = _rows()["policies of one chunk" if v == 1 else "policies of several"]
    return [tuple(float(x) for x in (*row[:7], 1.0, row[7], 0.0, 0.0)) for row in rows]


def paces(*, split: bool) -> list[list[float]]:
    """Of two pipes: the distance of a pipe's microbatches as a share of the full one, the offset of the second pipe in
    slots, and how many ops to look ahead and how long to wait, as in `follow.Manner`."""
    return list(_rows()["paces of split backwards" if split else "paces of whole ones"])
