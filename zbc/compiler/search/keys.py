"""Schedules as a few numbers: start times of each stage's ops in steady state, decoded by the list scheduler.

A microbatch walks 2v legs of p stages each (v = 2: down, up, and the same way back). A gene vector says how much longer
than its ops each step of a leg takes (`legs`, in mean op times), how long the microbatch rests between legs (`turns`),
and how the decoder uses these times: a period, caps, rules for gaps. Keys are then `start of op + i * period`, as the
building blocks of arXiv 2405.15362 repeat every period, but at real op times, and the decoder fills warm-up, drain and
every gap by itself. The vector does not depend on p, m or the times, so good ones transfer.

Gene vectors that do well on many instances, the starting points of the search, are in learned.json. They were found
offline by chains of mutations, then chosen by greedy cover: first for the published profiles and unit times (8 and 16
ranks, limits from half to twice the memory of 1F1B, both objectives), then for random instances around them (uneven
stages, 2 to 16 ranks, limits from 0.4). Times are rounded to 1/100 op. A row has legs, turns, cap, rules, period and
release. Policies of the list scheduler were chosen likewise, over a grid; their columns are mode, w_gap, w_slack,
first_b, look, pick_b, w_memory and reserve_later of listing.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from zbc.compiler.search.problem import Problem


class Genes(NamedTuple):
    """The gene vector, see the module; times are in mean op times of the problem."""

    legs: tuple[float, ...]  # 2v, extra time per step of a leg
    turns: tuple[float, ...]  # 2v - 1, rest between two legs
    cap: int  # -1: no cap on microbatches per stage; else the cap minus the number implied by the keys
    rules: tuple[float, ...]  # W_GAP, W_SLACK, FIRST_B, LOOK, W_MEMORY, RESERVE, RESERVE_LATER: see listing.py
    period: float  # times the work of the busiest rank per microbatch
    release: float  # start of an op before its key at most, in op times; 1e9: as early as possible


class Decoder:
    """Converts genes to the arguments of `list_schedule`, for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = problem.n_stages
        self.unit = sum(problem.f) / n or sum(problem.b) / n or 1.0
        per_microbatch = [0.0] * problem.p
        for s in range(n):
            per_microbatch[problem.rank[s]] += problem.f[s] + problem.b[s] + problem.w[s]
        self.period = max(per_microbatch)
        self._steps = [
            length + lag
            for length, lag in zip(
                [*problem.f, *reversed(problem.b)][:-1],
                [*problem.lag[1:], 0.0, *reversed(problem.lag[1:])],
                strict=True,
            )
        ]

    def keys(self, genes: Genes) -> tuple[list[float], list[float]]:
        """Start of F and of the first B of each stage for microbatch 0."""
        p, n = self.problem.p, self.problem.n_stages
        starts = [0.0]
        for i, step in enumerate(self._steps, start=1):
            leg, place = divmod(i, p)
            extra = genes.legs[leg] if place else genes.turns[leg - 1]
            starts.append(starts[-1] + step + self.unit * extra)
        turn = (self.problem.slices - 1) * self.period * genes.period  # its last slice comes back first
        return starts[:n], [start + turn for start in starts[n:][::-1]] if turn else starts[n:][::-1]

    def caps(self, genes: Genes, key_f: Sequence[float], key_b: Sequence[float]) -> list[int]:
        """Most microbatches between F and B per stage: the overlapping ones in steady state, and `genes.cap` more."""
        problem = self.problem
        if genes.cap < 0:
            return [problem.m] * problem.n_stages
        period = self.period * genes.period or 1.0
        return [
            max(1, min(problem.m, -int(-(end + length - start) // period) + genes.cap))
            for start, end, length in zip(key_f, key_b, problem.b, strict=True)
        ]

    def knobs(self, genes: Genes) -> list[float]:
        """The policy vector of `list_schedule`, mode 3."""
        times = self.period * genes.period, genes.release * self.unit
        return [3.0, *genes.rules[:4], 0.0, *genes.rules[4:], *times]


# ---- learned ones ----------------------------------------------------------------------------------------------------


@cache
def _rows() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("learned.json").read_text()))


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
