"""Layers to stages: contiguous, embedding on the first stage and head on the last, balanced on real costs.

What has to be even is the work of a rank over all its stages. With one stage per rank the best cut is exact; with more,
the cut that is best by stages is improved by moving layers between stages until no move helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from zbc.compiler.estimate import Layer
from zbc.errors import ZbcError
from zbc.interop import megatron_layout
from zbc.ir import Placement
from zbc.spec import Job

Stages = tuple[tuple[int, ...], ...]  # stage -> indices of its layers


def partition(job: Job, placement: Placement, table: Sequence[Layer]) -> Stages:
    """Cut `table` for the stages of `placement` as `[partition]` asks. Raises E130 (too few layers) or E131 (sums)."""
    stages = placement.stages
    blocks = [i for i, layer in enumerate(table) if layer.name not in ("embed", "head")]
    given = job.partition.layers_per_stage
    if given is not None:
        return _listed(job, stages, table, blocks, given)
    if job.partition.layout is not None:
        counts = megatron_layout.loads(job.partition.layout, job.where("partition", "layout"))
        return _listed(job, stages, table, blocks, list(counts), key="layout")
    # Costs given per rank or stage say what a stage costs whatever it holds, so layers only have to be spread.
    even = job.partition.mode == "uniform" or (job.costs.f is not None and job.costs.per != "layer")
    available = len(blocks) if even else len(table)
    if available < stages:
        text = f"partition: {stages} stages need {stages} layers, the model has {available}"
        hint = f"use model.layers = {stages} or more, or fewer ranks or chunks"
        raise ZbcError("E130", text, where=job.where("model", "layers"), hint=hint)
    if even:
        return _with_ends(_counts(len(blocks), stages), table, blocks)
    # A stage that recomputes runs each forward once more, so where a layer lies decides what it costs.
    plain, again = [layer.total for layer in table], [layer.total + layer.f for layer in table]
    weights = [again if job.memory.of(s) == "recompute" else plain for s in range(stages)]
    cuts = even_ranks(weights, balance(weights), placement)
    return tuple(tuple(range(a, b)) for a, b in pairwise(cuts))


def _listed(
    job: Job,
    stages: int,
    table: Sequence[Layer],
    blocks: list[int],
    given: list[int],
    key: Literal["layers_per_stage", "layout"] = "layers_per_stage",
) -> Stages:
    where = job.where("partition", key)
    if len(given) != stages:
        text = f"partition: {key} has {len(given)} {'entries' if key != 'layout' else 'stages'}"
        hint = f"give {stages} numbers" if key != "layout" else f"it needs {stages - 1} bars"
        raise ZbcError("E131", f"{text}, the schedule has {stages} stages", where=where, hint=hint)
    if sum(given) != len(blocks):
        text = "partition: layers do not add up"
        hint = f"{key} = {given} sums to {sum(given)}, model.layers is {len(blocks)}"
        raise ZbcError("E131", text, where=where, hint=f"{hint} ({job.where('model', 'layers')})")
    parts = _with_ends(given, table, blocks)
    for stage, part in enumerate(parts):
        if not part:
            text = f"partition: stage {stage} has no layers"
            raise ZbcError("E131", text, where=job.where("partition", key, stage))
    return parts


def _counts(layers: int, stages: int) -> list[int]:
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def _with_ends(counts: Sequence[int], table: Sequence[Layer], blocks: list[int]) -> Stages:
    """Blocks by count; the embedding joins the first stage, the head the last."""
    cuts = [0, *accumulate(counts)]
    parts = [blocks[a:b] for a, b in pairwise(cuts)]
    parts[0] = [*range(blocks[0]), *parts[0]]
    parts[-1] = [*parts[-1], *range(blocks[-1] + 1, len(table))]
    return tuple(map(tuple, parts))


def balance(weights: Sequence[Sequence[float]]) -> list[int]:
    """Cut points of the contiguous split with the smallest largest part, and of those the most even one.

    `weights[k]` is what every item weighs in part k. Returns parts + 1 indices from 0 to the number of items; no part
    is empty. Exact: the smallest largest part by a dynamic programme over (parts, prefix), then the least sum of
    squares among splits that keep to it.
    """
    parts, n = len(weights), len(weights[0])
    prefixes = _prefixes(weights)
    bound = _smallest_largest(prefixes) * (1 + 1e-12) + 1e-12
    infinity = float("inf")
    best = [0.0] + [infinity] * n
    choice: list[list[int]] = []
    for part in range(parts):
        row, pick, prefix = [infinity] * (n + 1), [0] * (n + 1), prefixes[part]
        for end in range(part + 1, n - (parts - part - 1) + 1):
            start = end - 1
            while start >= part and (size := prefix[end] - prefix[start]) <= bound:
                value = best[start] + size * size
                if value < row[end]:
                    row[end], pick[end] = value, start
                start -= 1
        best = row
        choice.append(pick)
    cuts = [n]
    for pick in reversed(choice):
        cuts.append(pick[cuts[-1]])
    return cuts[::-1]


def _prefixes(weights: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[0.0, *accumulate(part)] for part in weights]


def even_ranks(weights: Sequence[Sequence[float]], cuts: list[int], placement: Placement) -> list[int]:
    """Move layers between stages while that lowers the largest load of a rank, or evens out ranks, then stages.

    `weights[s]` is what every layer weighs in stage s. A move takes one layer from one stage and gives one to another;
    the stages between shift by a layer.
    """
    if placement.ranks == placement.stages:
        return cuts
    prefixes = _prefixes(weights)
    best = _score(prefixes, cuts, placement)
    while True:
        candidates = [(_score(prefixes, moved, placement), moved) for moved in _moves(prefixes, cuts, placement)]
        score, moved = min(candidates, default=(best, cuts))
        if score >= best:
            return cuts
        best, cuts = score, moved


def _moves(prefixes: Sequence[Sequence[float]], cuts: list[int], placement: Placement) -> Iterator[list[int]]:
    """Cuts with one layer fewer on a stage of a most loaded rank."""
    loads = _loads(prefixes, cuts, placement)
    fullest = max(range(len(loads)), key=lambda r: loads[r])
    for giver in placement.stages_of(fullest):
        for taker in range(placement.stages):
            step = -1 if taker > giver else 1
            moved = list(cuts)
            for k in range(min(giver, taker) + 1, max(giver, taker) + 1):
                moved[k] += step
            if giver != taker and all(a < b for a, b in pairwise(moved)):
                yield moved


def _score(prefixes: Sequence[Sequence[float]], cuts: list[int], placement: Placement) -> tuple[float, float, float]:
    loads = _loads(prefixes, cuts, placement)
    stages = [prefixes[s][b] - prefixes[s][a] for s, (a, b) in enumerate(pairwise(cuts))]
    # Rounded, so that sums that differ in their last bits do not keep the search going.
    return tuple(round(x, 9) for x in (max(loads), sum(x * x for x in loads), sum(x * x for x in stages)))  # type: ignore[return-value]


def _loads(prefixes: Sequence[Sequence[float]], cuts: list[int], placement: Placement) -> list[float]:
    """Work per rank; a stage held by several ranks counts for each."""
    loads = [0.0] * placement.ranks
    for stage, (a, b) in enumerate(pairwise(cuts)):
        for rank in placement.holders(stage):
            loads[rank] += prefixes[stage][b] - prefixes[stage][a]
    return loads


def _smallest_largest(prefixes: Sequence[list[float]]) -> float:
    """The least possible largest part over contiguous splits into non-empty parts."""
    parts, n = len(prefixes), len(prefixes[0]) - 1
    row = list(prefixes[0])
    for part in range(1, parts):
        prefix = prefixes[part]
        fresh = [float("inf")] * (n + 1)
        start = part
        for end in range(part + 1, n + 1):
            # As `end` grows the best last cut never moves left: row grows with its index, the last part shrinks.
            start = max(start, part)
            while start < end - 1 and _worse(row, prefix, start, end) >= _worse(row, prefix, start + 1, end):
                start += 1
            fresh[end] = _worse(row, prefix, start, end)
        row = fresh
    return row[n]


def _worse(row: list[float], prefix: list[float], cut: int, end: int) -> float:
    return max(row[cut], prefix[end] - prefix[cut])
