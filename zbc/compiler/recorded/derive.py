"""Derives a profile from a recorded run: costs of layers that explain the measured times of stages.

Stages are measured, layers are wanted. Layers of one kind cost the same everywhere, so the stages of a run are
equations for the kinds in them. They are solved from the previous assumptions (a profile, or the cost model) by the
steps of Richardson and Lucy: each kind is multiplied by the ratio of measured to explained time of its stages. This
converges to the best solution, keeps costs nonnegative, and keeps proportions that the equations leave open.

If they do not hold, since a rank is slower than the others or layers of one kind do not cost the same after all, the
layers of every stage are kinds of their own, and each has its share of its stage's time.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from zbc.compiler import recall
from zbc.compiler.cost import estimate, profiled
from zbc.compiler.cost.estimate import Layer
from zbc.compiler.cost.machine import Machine
from zbc.compiler.cost.stage_bytes import boundaries
from zbc.compiler.recorded.times import Times, median_ms, times_of
from zbc.compiler.recorded.view import typical
from zbc.ir import Kind
from zbc.job.profile import FAMILY, Host, LayerProfile, LinkProfile, Measured, Origin, Point, Profile, WordTimes, spread
from zbc.job.profile import about as about_job
from zbc.job.spec import Job
from zbc.job.tokens import shares_of
from zbc.ops import round_trip
from zbc.plan.directory import Manifest
from zbc.plan.reading import job_of
from zbc.trace.recording import Trace

_ROUNDS = 3000
_SURE = 1e-9  # the correction, as a share, below which a round is the last
_OFF = 0.05  # of a stage's time; beyond that its layers differ from those of other stages

Counts = list[Counter[str]]  # stage -> number of layers of each kind


@dataclass(frozen=True)
class Derived:
    """The profile, and notes on the parts of it that the run did not reveal."""

    profile: Profile
    notes: tuple[str, ...]


def derive(trace: Trace, base: Profile | None = None) -> Derived:
    """The profile of a recorded run; `base`, by default the profile its plan was made with, supplies the rest."""
    steps = typical(trace)
    times = times_of(steps, recall.costs_of(trace.plan.manifest))
    return derive_from(trace.plan.manifest, times, rounds=len(steps), device=trace.device, base=base)


def derive_from(manifest: Manifest, times: Times, *, rounds: int, device: str, base: Profile | None = None) -> Derived:
    """The profile from the times of the steps that count."""
    job = job_of(manifest)
    base = base or job.profile
    work = _Work(manifest, replace(job, profile=base), times, base)
    layers = work.layers()
    if work.off > _OFF:
        work = _Work(manifest, replace(job, profile=base), times, base, by_stage=True)
        layers = work.layers()
    about, words = None if base is None else base.on, _words(job, times)
    if words is not None:
        layers = _with_words(job, layers, work.kinds, words)
    profile = Profile(
        on=Origin(
            source="trace",
            device="cuda" if device == "cuda" else "cpu",
            name="" if about is None else about.name,
            threads=1 if about is None else about.threads,
            together=manifest.topology.world,
            rounds=rounds,
            torch="" if about is None else about.torch,
        ),
        **about_job(job),
        layers=layers,
        order=FAMILY if {*work.kinds} == {*FAMILY} else work.kinds,
        link=work.link(),
        sums=None,
        copies=None if base is None else base.copies,
        words=words,
        reserve_bytes=None if base is None else base.reserve_bytes,
        host=work.host(),
        tokens=list(manifest.tokens),
    )
    return Derived(profile, tuple(work.notes))


def _words(job: Job, times: Times) -> WordTimes | None:
    """Times of vocabulary ops, if ranks share the vocabulary; for the other number of sums by operation counts."""
    # Names kinds: each column of a profile is solved from other columns, in a way of its own.
    if not job.vocabulary:
        return None
    s, t, i, e = (
        statistics.median(median_ms(times.cost[kind, r]) for r in range(job.parallel.pp) if times.cost.get((kind, r)))
        for kind in (Kind.S, Kind.T, Kind.I, Kind.E)
    )
    both = (s, s / 2), (t, t + s / 2)
    if job.vocabulary == 2:
        both = (2 * s, s), (max(0.0, t - s), t)
    rows = -(-(job.model.vocab or 0) // job.parallel.pp)
    return WordTimes(rows=rows, s=list(both[0]), t=list(both[1]), i=i, e=e)


def _with_words(
    job: Job, layers: Mapping[str, LayerProfile], kinds: Sequence[str], words: WordTimes
) -> dict[str, LayerProfile]:
    """Adds the vocabulary's times to embedding and output layer, of which the run had only the rest."""
    whole = estimate.layers(replace(job.with_vocabulary("ends"), profile=None))
    profiles = dict(layers)
    ends = (kinds[0], whole[0]), (kinds[-1], whole[-1])
    for (kind, layer), ms in zip(ends, words.whole(job.model.vocab or 0), strict=True):
        row = profiles[kind]
        f, b, w = (
            old.model_copy(update={"ms": old.ms + plus}) for old, plus in zip((row.f, row.b, row.w), ms, strict=True)
        )
        bw = row.bw and row.bw.model_copy(update={"ms": row.bw.ms + ms[1] + ms[2]})
        sizes = {"parameters": layer.params, "parts": list(layer.parts)}
        profiles[kind] = row.model_copy(update={"f": f, "b": b, "w": w, "bw": bw, **sizes})
    return profiles


class _Work:
    """The kinds of layers of a run, their costs so far, and their solution."""

    def __init__(
        self, manifest: Manifest, job: Job, times: Times, base: Profile | None, *, by_stage: bool = False
    ) -> None:
        self.manifest, self.job, self.times, self.base, self.by_stage = manifest, job, times, base, by_stage
        self.notes: list[str] = []
        self._f: dict[str, float] = {}
        self.placement = manifest.to_placement()
        self.table = estimate.layers(job)
        self.stages = stages = recall.stages_of(manifest, self.table)
        stage_of = [s for s, part in enumerate(stages) for _ in part]
        alike = self._kinds(stage_of)
        self.kinds = _apart(alike, stage_of) if by_stage else alike
        self._alike = dict(zip(self.kinds, alike, strict=True))  # kind -> its name in the base
        self._took, self._explained = ([0.0] * len(stages) for _ in range(2))
        self.counts: Counts = [Counter(self.kinds[i] for i in part) for part in stages]
        self.first: dict[str, Layer] = {}
        for kind, layer in zip(self.kinds, self.table, strict=True):
            self.first.setdefault(kind, layer)
        if base is None:
            self.notes.append("memory is that of the cost model, for want of a profile of layers")
        if by_stage:
            self.notes.append("stages differ by more than their kinds of layers: each layer has the share of its stage")

    @property
    def off(self) -> float:
        """The largest relative difference between a stage's time and the time its layers explain."""
        pairs = zip(self._took, self._explained, strict=True)
        return max((abs(took / meant - 1) for took, meant in pairs if meant > 0), default=0.0)

    def _kinds(self, stage_of: Sequence[int]) -> list[str]:
        """The kind of each layer; a factory's layers without measurements are one kind per stage."""
        if self.base is not None and self.base.order != FAMILY:
            return list(self.base.order)
        if self.job.model.builtin:
            return ["embed", *["block"] * self.job.model.layers, "head"]
        self.notes.append("which layers are alike is not known: those of a stage share its time evenly")
        return [f"stage-{stage}" for stage in stage_of]

    # ---- times of layers ---------------------------------------------------------------------------------------

    def layers(self) -> dict[str, LayerProfile]:
        f = self._f = self._solved(Kind.F, {kind: layer.f for kind, layer in self.first.items()})
        b, w, bw = self._backward()
        steps = self._steps()
        profiles = {}
        for kind, layer in self.first.items():
            base = self._known(kind)
            wide = self._spread(kind)
            profiles[kind] = LayerProfile(
                f=Measured(ms=f[kind], spread=wide[Kind.F]),
                b=Measured(ms=b[kind], spread=max(wide[Kind.B], wide[Kind.BW])),
                w=Measured(ms=w[kind], spread=max(wide[Kind.W], wide[Kind.BW])),
                bw=None if bw is None else Measured(ms=bw[kind], spread=wide[Kind.BW]),
                again=None if base is None else base.again,
                step=None if steps is None else Measured(ms=steps[kind]),
                norm=None,
                tentative=None if base is None else base.tentative,
                parameters=layer.params,
                parts=list(layer.parts),
                bytes=None if base is None else base.bytes,
            )
        return profiles

    def _backward(self) -> tuple[dict[str, float], dict[str, float], dict[str, float] | None]:
        """B, W and BW of each kind; the last None if neither the run nor the base has it. A kind for which only one
        form ran, split or fused, has the other in proportion to it."""
        b = {kind: layer.b for kind, layer in self.first.items()}
        w = {kind: layer.w for kind, layer in self.first.items()}
        bw = {kind: layer.bw for kind, layer in self.first.items()}
        ran = {kind for kind in (Kind.B, Kind.W, Kind.BW) if any(key[0] is kind for key in self.times.cost)}
        if Kind.B in ran:
            whole = solve(bw, self.counts, self._totals(Kind.BW))
            by_whole = {kind: _ratio(whole[kind], bw[kind]) for kind in b}
            split_b = self._solved(Kind.B, {kind: b[kind] * by_whole[kind] for kind in b})
            split_w = self._solved(Kind.W, {kind: w[kind] * by_whole[kind] for kind in b})
            fused = {kind: bw[kind] * _ratio(split_b[kind] + split_w[kind], b[kind] + w[kind]) for kind in b}
            if Kind.BW in ran:
                return split_b, split_w, self._solved(Kind.BW, fused)
            self.notes.append("no backward ran in one piece: B and W together")
            return split_b, split_w, None if self.base is None else fused
        self.notes.append("B and W never ran apart: their proportions are those assumed before")
        after = self._solved(Kind.BW, bw)
        scale = {kind: _ratio(after[kind], bw[kind]) for kind in b}
        return {k: b[k] * scale[k] for k in b}, {k: w[k] * scale[k] for k in b}, after

    def _solved(self, op: Kind, prior: Mapping[str, float]) -> dict[str, float]:
        """ms of each kind in an op; stages in which it did not run keep the assumed time."""
        totals = self._totals(op)
        ms = solve(prior, self.counts, totals)
        for stage, (counts, total) in enumerate(zip(self.counts, totals, strict=True)):
            if total is not None:
                self._took[stage] += total
                self._explained[stage] += sum(count * ms[kind] for kind, count in counts.items())
        return ms

    def _totals(self, op: Kind) -> list[float | None]:
        """ms of the layers of each stage in an op; None if it did not run."""
        added = self._host()

        def moved(pipe: int, edge: tuple[int, int]) -> float:
            busy = self._behind[edge[0]] / (self._gbps * 1e3) if added.transfer_share else 0.0  # us of its link
            return 0.0 if op.takes is None else (added.transfer_us + added.transfer_share * busy) / 1e3

        around = profiled.messages(self.placement, moved)
        host = tuple(map(add, profiled.host_ms(added, self.placement)[op.row.cost], around))
        totals: list[float | None] = []
        for stage in range(len(self.counts)):
            samples = self.times.cost.get((op, stage))
            if not samples:
                totals.append(None)
                continue
            again = 0.0  # the time that recompute adds to a backward
            if op.is_backward:
                part = self.stages[stage]
                first = self.job.memory.again(stage, [self.table[i].name for i in part])
                for kind, count in Counter(self.kinds[i] for i in part[:first]).items():
                    base = self._known(kind)
                    again += count * (self._f[kind] if base is None or base.again is None else base.again.ms)
            ms = max(0.0, median_ms(samples) - self.manifest.slices * host[stage] - again)
            totals.append(ms * self._whole(op, stage))
        return totals

    def _whole(self, op: Kind, stage: int) -> float:
        """The time of a microbatch with whole rows over that of the median one, as assumed before."""
        if not self.job.tokens:
            return 1.0
        mine, row, each = [self.table[i] for i in self.stages[stage]], self.job.row_tokens, list[float]()
        for tokens in (*self.job.tokens, row):
            shares = shares_of(self.job, tokens)
            parts = [estimate.part_of(layer, None, shares, tokens / row) for layer in mine]
            each.append(sum(getattr(part, name) for part in parts for name in op.row.cost))  # of "bw": both
        return _ratio(each[-1], statistics.median(each[:-1]))

    def _known(self, kind: str) -> LayerProfile | None:
        """The base's profile of a kind."""
        return None if self.base is None else self.base.layers[self._alike[kind]]

    def _steps(self) -> dict[str, float] | None:
        """ms of the optimizer's step of each kind; None if the run does not have it."""
        closing = [self.times.closing.get(("step", s)) for s in range(len(self.counts))]
        if not any(closing):
            return None
        prior = {kind: float(layer.params) or 1.0 for kind, layer in self.first.items()}
        return solve(prior, self.counts, [median_ms(samples) if samples else None for samples in closing])

    def _spread(self, kind: str) -> dict[Kind, float]:
        """The widest spread of each op among the stages that hold a kind."""
        widest = {}
        for op in (*round_trip(split=True), *round_trip(split=False)):
            columns = [self.times.cost.get((op, s), []) for s, held in enumerate(self.counts) if kind in held]
            widest[op] = max((spread(column) for column in columns), default=0.0)
        return widest

    # ---- the link, and host times --------------------------------------------------------------------------------

    def link(self) -> LinkProfile | None:
        """The base's link, with the median latency of the run's messages."""
        base = None if self.base is None else self.base.link
        points = [
            Point(bytes=max(1, round(self._behind[edge])), us=statistics.median(samples) / 1e3, spread=spread(samples))
            for (_, edge), samples in sorted(self.times.lags.items())
            if samples
        ]
        if not points:
            return base
        rest = 1 - 2 * self._host().transfer_share  # the ends spend the others inside of ops
        latency = statistics.median(max(0.0, point.us - rest * point.bytes / (self._gbps * 1e3)) for point in points)
        self.notes.append("the bandwidth of the link is that assumed before, the latency that of the run's messages")
        return LinkProfile(latency_us=latency, gbps=self._gbps, points=points)

    @functools.cached_property
    def _gbps(self) -> float:
        known = None if self.base is None else self.base.link
        return known.gbps if known is not None else Machine.of(self.job).near.speed / 1e6

    @functools.cached_property
    def _behind(self) -> list[float]:
        """Bytes of the tensor behind each stage, for the median microbatch."""
        share = statistics.median(self.job.tokens or [1]) / (self.job.row_tokens if self.job.tokens else 1)
        return [share * size for size in boundaries([[self.table[i] for i in part] for part in self.stages])]

    def _host(self) -> Host:
        """The base's host times, with this run's transfer times: the mean of senders and receivers. On a GPU the
        compute stream does not reveal these."""
        base = Host() if self.base is None else self.base.host
        moves = [] if self.job.hardware.device == "cuda" else list(map(median_ms, self.times.moves.values()))
        return base.model_copy(update={"transfer_us": 1e3 * statistics.fmean(moves)}) if moves else base

    def host(self) -> Host:
        """Host times; those included in the times of layers stay there; the norm is a part of the end of a step."""
        if not self.times.norm:
            return self._host()
        rounds = max(1, (self.manifest.topology.world - 1).bit_length())
        close, agree = 1e3 * median_ms(self.times.norm), 1e3 * median_ms(self.times.sums) / rounds
        return self._host().model_copy(update={"close_us": close, "agree_us": agree})


def _apart(alike: Sequence[str], stages: Sequence[int]) -> list[str]:
    """Names that distinguish layers of different stages, as `block@2`; layers of one kind and stage share one."""
    names: dict[tuple[str, int], str] = {}
    for kind, stage in zip(alike, stages, strict=True):
        if (kind, stage) not in names:
            wanted = f"{kind.partition('@')[0]}@{stage}"
            same = sum(name.partition("'")[0] == wanted for name in names.values())
            names[kind, stage] = wanted + "'" * same
    return [names[pair] for pair in zip(alike, stages, strict=True)]


def solve(prior: Mapping[str, float], counts: Counts, totals: Sequence[float | None]) -> dict[str, float]:
    """The cost of each kind, from the total times of stages with `counts` layers of each (None: unknown). A kind
    assumed to cost nothing keeps that if another kind in its stages can explain their time. Kinds in stages of unknown
    time change by the overall factor of the others."""
    costs = {kind: float(ms) for kind, ms in prior.items()}
    rows = [(counted, total) for counted, total in zip(counts, totals, strict=True) if total is not None]
    for counted, total in rows:
        if total > 0 and not any(costs[kind] for kind in counted):
            costs |= {kind: total / counted.total() for kind in counted}
    weight = Counter[str]()
    for counted, _ in rows:
        weight.update(counted)
    for _ in range(_ROUNDS):
        correct = dict.fromkeys(costs, 0.0)
        for counted, total in rows:
            ratio = _ratio(total, sum(count * costs[kind] for kind, count in counted.items()))
            for kind, count in counted.items():
                correct[kind] += count * ratio
        factors = {kind: correct[kind] / count for kind, count in weight.items()}
        costs |= {kind: costs[kind] * factor for kind, factor in factors.items()}
        if all(abs(factor - 1) < _SURE for kind, factor in factors.items() if costs[kind] > 0):
            break
    before = sum(count * prior[kind] for kind, count in weight.items())
    overall = _ratio(sum(count * costs[kind] for kind, count in weight.items()), before)
    return {kind: ms if kind in weight else ms * overall for kind, ms in costs.items()}


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 1.0
