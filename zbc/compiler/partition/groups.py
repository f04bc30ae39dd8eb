"""The stages of a graph of groups of layers: each is a run of layers of one group, and the largest stage is least.

Each group begins with one stage, and each further rank goes to the group with the largest: since more stages never make
the largest of a group larger, no other way has a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from zbc.compiler.cost import estimate
from zbc.compiler.partition.balance import balance
from zbc.compiler.partition.initial import Stages, is_open, times
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.graph import spans
from zbc.job.spec import Job

Runs = list[list[int]]  # per group the number of layers of each of its stages


def stages_of(job: Job) -> tuple[Stages, Placement]:
    """The layers of each stage and the graph of stages, one on each rank. Raises E110, E130."""
    groups, table = spans(job.model), estimate.layers(job)
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
        ms = times(job, estimate.on_the_mean(job, table), [1.0])[0] if is_open(job) else [1.0] * len(table)
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
    runs = [split(ms, 1) for ms in groups]
    while sum(map(len, runs)) < ranks:
        more = [g for g, ms in enumerate(groups) if len(runs[g]) < len(ms)]
        g = max(more, key=lambda g: _largest(groups[g], runs[g]))
        runs[g] = split(groups[g], len(runs[g]) + 1)
    return runs


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
