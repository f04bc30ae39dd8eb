"""The stages of a graph of groups of layers: each is a run of layers of one group, and the largest stage is least.

A bound on the largest stage gives the number of stages of each group: as few as keep to it. The least bound with no
more stages than ranks is found among the times of all runs; remaining ranks halve the largest stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zbc.compiler.cost.estimate import Layer, on_the_mean
from zbc.compiler.partition.balance import balance
from zbc.compiler.partition.initial import Stages, is_open, times
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.graph import spans
from zbc.job.spec import Job

Runs = list[list[int]]  # per group the number of layers of each of its stages
_ROOM = 1e-9


def stages_of(job: Job, table: Sequence[Layer]) -> tuple[Stages, Placement]:
    """The layers of each stage and the graph of stages, one on each rank. Raises E110, E130."""
    groups = spans(job.model)
    ranks = job.parallel.pp
    if len(groups) > ranks or ranks > job.model.layers:
        fewest, most = len(groups), job.model.layers
        text = f"partition: each rank has layers of one group, parallel.pp is {ranks}"
        text += f", and there are {fewest} groups of {most} layers"
        hint = f"set parallel.pp = {f'{fewest} or more' if ranks < fewest else f'{most} or less'}"
        raise ZbcError("E110", text, where=job.where("parallel", "pp"), hint=hint)
    if isinstance(job.partition.layers_per_stage, list):
        runs = _listed(job, groups, job.partition.layers_per_stage)
    else:
        ms = times(job, on_the_mean(job, table), [1.0])[0] if is_open(job) else [1.0] * len(table)
        runs = even([[ms[i] for i in layers] for layers in groups.values()], ranks)
    counts = [count for run in runs for count in run]
    stages = tuple(tuple(range(a, b)) for a, b in pairwise([0, *accumulate(counts)]))
    firsts = dict(zip(groups, accumulate(map(len, runs), initial=0), strict=False))
    lasts = {name: firsts[name] + len(run) - 1 for name, run in zip(groups, runs, strict=True)}
    edges = [(a, b) for name in groups for a, b in pairwise(range(firsts[name], lasts[name] + 1))]
    edges += [(lasts[source], firsts[name]) for name in groups for source in job.model.reads[name]]
    return stages, Placement((tuple(range(ranks)),), tuple(sorted(edges)))


def even(groups: Sequence[Sequence[float]], ranks: int) -> Runs:
    """Splits layers of `groups`, in ms, into `ranks` stages in all, of at least a layer each."""
    sums = sorted({sum(ms[a:b]) for ms in groups for a in range(len(ms)) for b in range(a + 1, len(ms) + 1)})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        fits = sum(len(_packed(ms, sums[middle])) for ms in groups) <= ranks
        fits = fits and max(map(max, groups)) <= sums[middle] + _ROOM
        low, high = (low, middle) if fits else (middle + 1, high)
    counts = [len(_packed(ms, sums[low])) for ms in groups]
    while sum(counts) < ranks:
        open_ = [g for g, ms in enumerate(groups) if counts[g] < len(ms)]
        counts[max(open_, key=lambda g: _largest(groups[g], split(groups[g], counts[g])))] += 1
    return [split(ms, count) for ms, count in zip(groups, counts, strict=True)]


def _packed(ms: Sequence[float], most: float) -> list[int]:
    """Layers of as few stages as keep to `most`, filled one after the other."""
    counts, held = [0], 0.0
    for cost in ms:
        if counts[-1] and held + cost > most + _ROOM:
            counts.append(0)
            held = 0.0
        counts[-1] += 1
        held += cost
    return counts


def split(ms: Sequence[float], count: int) -> list[int]:
    """The layers of `count` nonempty stages of one group, with the least largest stage."""
    return [b - a for a, b in pairwise(balance([ms] * count))]


def _largest(ms: Sequence[float], counts: Sequence[int]) -> float:
    ends = [0, *accumulate(counts)]
    return max(sum(ms[a:b]) for a, b in pairwise(ends))


def _listed(job: Job, groups: dict[str, range], given: Sequence[int]) -> Runs:
    """partition.layers_per_stage, split at the ends of groups."""
    where = job.where("partition", "layers_per_stage")
    if len(given) != job.parallel.pp or sum(given) != job.model.layers:
        text = f"partition: layers_per_stage has {len(given)} entries for {sum(given)} layers"
        hint = f"give {job.parallel.pp} numbers, {job.model.layers} in all"
        raise ZbcError("E130", text, where=where, hint=hint)
    runs, left = list[list[int]](), [*given]
    for name, layers in groups.items():
        run: list[int] = []
        while left and sum(run) < len(layers):
            run.append(left.pop(0))
        if sum(run) != len(layers) or 0 in run:
            text = f"partition: layers_per_stage = {list(given)} does not end a stage where group {name} ends"
            hint = f"its {len(layers)} layers come after {layers.start} others; no stage is empty"
            raise ZbcError("E130", text, where=where, hint=hint)
        runs.append(run)
    return runs
