"""Decides the open settings of a job that change the work of its ops: schedule.slices = "auto", then
parallel.vocabulary = "auto", then parallel.replicas = "auto", then the layers of each stage that run again.

Each is decided by the step that the fastest search finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

from zbc import excludes
from zbc.compiler.check.memory import check_memory, shares
from zbc.compiler.cost import estimate
from zbc.compiler.cost.cards import with_card
from zbc.compiler.memory.per_rank import RankMemory
from zbc.compiler.order import order
from zbc.compiler.partition.initial import is_open
from zbc.compiler.partition.setup import limited
from zbc.compiler.schedules import AUTO, find
from zbc.compiler.schedules.replicated import NAME
from zbc.errors import ZbcError
from zbc.job.cuts import multiple_of
from zbc.job.rules import fewest_microbatches, unshareable
from zbc.job.sections import ENDS, OPEN_LAYERS
from zbc.job.spec import Job

WORTH = 0.002  # of a step: least saving for twice as many slices, or for vocabulary parallelism
MOST = 64  # slices
CHUNK = 1024  # tokens whose logits a loss makes at once
LOGIT = 16  # bytes that a logit takes at most, in both types and with its gradient
_REPLICAS, _TINY = 60, 1e-9  # numbers of ranks of stages that are planned, about


def decided(job: Job) -> Job:
    """The job with these settings decided. If nothing fits it gets the plain ones, and planning reports why."""
    if job.schedule.slices == "auto":
        job = _shortest(map(job.in_slices, _counts(job)), while_shorter=True) or job.in_slices(1)
    if job.parallel.vocabulary == "auto":
        ends, shared = job.with_vocabulary("ends"), job.with_vocabulary("shared")
        job = (_shortest((ends, shared)) if shareable(job) else None) or ends
    if job.parallel.replicas == "auto" and job.schedule.kind.lower() == NAME:
        job = _replicated(job)
    return _by_layers(job) if OPEN_LAYERS in job.memory.chosen() else job


def _shortest(jobs: Iterable[Job], *, worth: float = WORTH, while_shorter: bool = False) -> Job | None:
    """The first of the jobs with the shortest step, each shorter by `worth` than the previous best; None if none fits.
    With `while_shorter`, up to the first that is no shorter."""
    best, least = None, float("inf")
    for job in jobs:
        step = quick_ms(job)
        if step is not None and step < least * (1 - worth):
            best, least = job, step
        elif step is not None and while_shorter:
            break
    return best


def _by_layers(job: Job) -> Job:
    """The job with the fewest layers of each stage that run again: of each rank as few as fit. If its order changes
    with them, it is searched, as many of all stages as make the step shortest. All layers if nothing fits."""
    kind, table = job.schedule.kind.lower(), estimate.layers(job)
    most = -(-len(table) // job.parallel.pp) if limited(job) else 0

    def of(*counts: int) -> Job:
        """With this count for each stage, or for all; more than there are: whole stages."""
        named = ["recompute" if n > most else f"recompute {n}" if n else "keep" for n in counts]
        if len(named) > 1:
            return replace(job, memory=job.memory.with_choice(named, OPEN_LAYERS))
        given = job.memory.activations if isinstance(job.memory.activations, dict) else {}
        chosen: Any = {s: named[0] if what == OPEN_LAYERS else what for s, what in given.items()} or named[0]
        return replace(job, memory=job.memory.model_copy(update={"activations": chosen}))

    if not most:
        return of(0)
    elsewhere = job.schedule.file is not None or job.schedule.plugin is not None
    if not elsewhere and (kind == AUTO or find(kind).searched):
        some = {0, most, most + 1, *(k << n for n in range(most.bit_length()) for k in (1, 3) if k << n < most)}
        return _shortest(map(of, sorted(some)), worth=0.0, while_shorter=True) or of(most + 1)
    found = order(of(most + 1), 0.0)
    placement, layers = found.program.placement, [sum(table[i].name not in ENDS for i in part) for part in found.stages]
    pinned = {"layers_per_stage": layers} if is_open(job) else {}
    few, many = [0] * placement.ranks, [most + 1] * placement.ranks
    while few != many:
        half = [(a + b) // 2 for a, b in zip(few, many, strict=True)]
        look = of(*(max(half[rank] for rank in placement.holders(s)) for s in range(placement.stages)))
        look = replace(look, partition=job.partition.model_copy(update=pinned))
        found = order(look, 0.0)
        for rank, share in enumerate(shares(look, found.memory, found.costs)):
            few[rank], many[rank] = (
                (few[rank], half[rank]) if share <= 1 else (min(half[rank] + 1, many[rank]), many[rank])
            )
    found_job = of(*(max(few[rank] for rank in placement.holders(s)) for s in range(placement.stages)))
    return found_job if quick_ms(found_job) is not None else of(max(few))


def quick_ms(job: Job) -> float | None:
    """ms of a step by the fastest search; None if it finds none that fits."""
    try:
        found = order(job, 0.0)
        check_memory(job, found.memory, found.costs)
    except ZbcError:
        return None
    return found.step_ms(job)


def shareable(job: Job) -> bool:
    """Whether the job can use vocabulary parallelism, and has several ranks."""
    kind = job.schedule.kind.lower()
    shared = job.with_vocabulary("shared")
    traits = frozenset[str]() if kind == AUTO else find(kind).traits
    apart = (pair for pair in excludes.clashes(vars(shared), traits) if "shared vocabulary" in pair[:2])
    return job.parallel.pp > 1 and not any(apart) and not any(unshareable(vars(job)))


def chunked(job: Job, memory: Sequence[RankMemory] = ()) -> Job | None:
    """The job with a loss that makes the logits of some tokens at a time, for one that does not fit without. None if it
    says what its loss does, if that is impossible, or if a rank of this `memory` is too large by more than logits."""
    model, tokens = job.model, job.schedule.microbatch_size * (job.model.seq_len or 1)
    words = model.causal and model.loss == "cross_entropy" and model.vocab
    measured = job.profile is not None and not job.carded
    if not words or measured or job.hardware.memory_gib is None or model.loss_chunk or tokens < 2:
        return None
    logits = LOGIT * (model.vocab or 0) * tokens / (job.parallel.tp * job.parallel.cp)
    if any(
        rank.bytes - (1 + rank.in_flight) * logits > room for rank, room in zip(memory, job.rooms or (), strict=False)
    ):
        return None
    job = job.with_vocabulary("ends") if job.parallel.vocabulary == "auto" else job
    model = model.model_copy(update={"loss_chunk": min(CHUNK, tokens // 2)})
    found = with_card(replace(job, model=model, profile=None, carded=False))
    return None if found.uncounted or any(excludes.clashes(vars(found))) else found


def _counts(job: Job) -> list[int]:
    """1, 2, 4, ..: each further slice shortens the bubble, and adds the start-up time of its kernels and messages."""
    most = min(MOST, (job.model.seq_len or 1) // multiple_of(job.hardware, job.parallel) or 1)
    return [1 << n for n in range(most.bit_length())]


def _replicated(job: Job) -> Job:
    """The job with the numbers of ranks of each stage of the shortest step, from equal ones to ever better neighbours;
    with the most stages if none fits."""
    pp, (fewest, _), layers = job.parallel.pp, fewest_microbatches(vars(job)), len(estimate.layers(job))
    asked = set[tuple[int, ...]]()
    near = [(pp // count,) * count for count in range(1, min(pp, layers) + 1) if pp % count == 0]
    best, least = job.with_replicas(near[-1]), float("inf")
    while near and len(asked) < _REPLICAS:
        new = [counts for counts in near if counts not in asked and max(counts) <= fewest]
        asked.update(new)
        near = []
        for counts in new:
            step = quick_ms(made := job.with_replicas(counts))
            if step is not None and step < least * (1 - _TINY):
                best, least, near = made, step, [*_beside(counts)]
    return best


def _beside(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields counts with a rank moved between two stages, with two neighbours as one stage, and with one as two."""
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            yield tuple(count + (at == taker) - (at == giver) for at, count in enumerate(counts))
    for at, (one, other) in enumerate(pairwise(counts)):
        yield (*counts[:at], one + other, *counts[at + 2 :])
    for at, count in enumerate(counts):
        yield from ((*counts[:at], part, count - part, *counts[at + 1 :]) for part in range(1, count))
