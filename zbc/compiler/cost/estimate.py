"""Costs of each layer: by its card, from the kernels, collectives and bytes of a dry run, at the speeds of machine.py.

Times are ms for one microbatch. Measured times, given in [costs] or by a profile, replace them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import truediv
from statistics import fmean
from typing import Any

from zbc.compiler.cost import cards, profiled
from zbc.compiler.cost.footprint import NOTHING, Footprint
from zbc.compiler.cost.machine import Machine
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.cuts import Cuts
from zbc.job.graph import names
from zbc.job.profile import FAMILY, Collective, LayerBytes, LayerProfile, Profile
from zbc.job.spec import Job, Model
from zbc.job.tokens import shares_of

# Sections that tables of layers are made of; tables in memory, as of cards.
_READ = ("model", "adapter", "optimizer", "costs", "data", "schedule", "parallel", "train", "hardware", "profile")
_MOST = 64
_tables: dict[tuple[int, ...], tuple[list[Any], list[Layer]]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer by a card or a profile: times in ms and bytes for one microbatch, parameters as a count."""

    name: str
    f: float
    b: float
    w: float
    bw: float  # b and w in one op
    again: float  # that recompute adds to its backward
    step: float | None = None  # the optimizer's step, with the share of the gradient norm; None: not measured
    tentative: float | None = None
    params: int = 0  # that train
    frozen: int = 0  # others
    parts: tuple[int, ...] = ()  # `params` by parameter; () if only their sum is known
    apart: tuple[int, ...] = ()  # of parts, those of experts, if replicas share these out
    matrices: tuple[tuple[int, int], ...] = ()  # shapes of those that Muon steps
    experts: int = 0  # that it has on a rank, whose matrices Muon steps together
    tied: int = 0  # the part of `params` in the weight that embedding and head share
    lent: int = 0  # the same of `frozen`
    size: Footprint = NOTHING
    held: LayerBytes | None = None  # bytes of weights and the like; None: nobody knows
    collectives: Mapping[str, Sequence[Collective]] = field(default_factory=dict)  # inside of its ops
    card: Callable[[str], Layer] | None = None  # it by its card, under a policy for activations; None: it has none
    plain: Callable[[], Layer] | None = None  # it without what B repeats, if B repeats anything
    cheap: float = 0.0  # the share of F that is run again, if this layer recomputes selectively
    part: float = 1.0  # the share of F's activations that it then keeps
    reruns: bool = False  # whether B runs all of its F again
    lengths: Mapping[int, Layer] = field(default_factory=dict)  # it with rows of so many tokens, where they are unequal

    def timed(self, f: float, b: float, w: float) -> Layer:
        """This layer with other times, which say nothing of two ops in one."""
        return replace(self, f=f, b=b, w=w, bw=b + w, again=f)

    def trained(self, layer: Layer) -> Layer:
        """This layer with the parameters of `layer`, of which it has more."""
        part, held = layer.params / self.params if self.params else 0.0, self.held
        names = ("weights", "gradients", "optimizer")
        held = held and held.model_copy(update={name: round(part * getattr(held, name)) for name in names})
        step, tentative = (None if ms is None else ms * part for ms in (self.step, self.tentative))
        return replace(self, held=held, step=step, tentative=tentative, params=layer.params, parts=layer.parts)

    @property
    def total(self) -> float:
        return self.f + self.b + self.w


@functools.lru_cache(maxsize=2**12)  # for each partition again
def selective(layer: Layer, attention: bool) -> Layer:
    """A layer with selective recompute; given or measured times take the share that its card has."""
    if layer.card is None:
        return layer
    plain = layer.card
    keep, other = plain(cards.KEEP), plain(cards.ATTENTION if attention else cards.CHEAP)
    cheap = max(0.0, other.b - keep.b) / keep.f if keep.f else 0.0
    more, part = cheap * layer.f, other.size.act_b / keep.size.act_b if keep.size.act_b else 1.0
    changed = replace(layer, b=layer.b + more, bw=layer.bw + more, size=other.size, collectives=other.collectives)
    return replace(changed, cheap=cheap, part=part, card=None, plain=lambda: plain(cards.GATHERED))


@functools.lru_cache(maxsize=2**12)
def recomputed(layer: Layer) -> Layer:
    """A layer whose B runs all of its F again, which keeps what it gathers."""
    return replace(layer, reruns=True, size=layer.size if layer.card is None else layer.card(cards.GATHERED).size)


def layers(job: Job) -> list[Layer]:
    """Every layer in order, with measured costs or given per-layer costs if the job has them; the same ones for jobs
    that differ in other sections."""
    read = [getattr(job, name) for name in _READ]
    key = (job.carded, *map(id, read))
    if key not in _tables:
        if len(_tables) >= _MOST:
            _tables.clear()
        _tables[key] = read, _made(job)
    return _tables[key][1]


def _made(job: Job) -> list[Layer]:
    table = _whole(job)
    if not job.tokens:
        return table
    each = {tokens: _of_length(job, table, tokens) for tokens in dict.fromkeys(job.tokens)}
    return [replace(one, lengths={tokens: found[i] for tokens, found in each.items()}) for i, one in enumerate(table)]


def on_the_mean(job: Job, table: Sequence[Layer]) -> Sequence[Layer]:
    """The table with the times of the mean of all microbatches."""
    return [_mean([one.lengths[tokens] for tokens in job.tokens]) for one in table] if job.tokens else table


def _mean(each: Sequence[Layer]) -> Layer:
    f, b, w, bw, again = (fmean(ms) for ms in zip(*((x.f, x.b, x.w, x.bw, x.again) for x in each), strict=True))
    by_card = [layer.card for layer in each if layer.card is not None]
    card = (lambda policy: _mean([of(policy) for of in by_card])) if by_card else None
    return replace(each[0], f=f, b=b, w=w, bw=bw, again=again, card=card)


def _whole(job: Job) -> list[Layer]:
    table, profile = _counted(job), job.profile
    if profile is None or job.carded:
        return _priced(job, table)
    profile = profile if profile.timed else profiled.timed(profile, Machine.of(job))
    found = of_profile(profile, [layer.name for layer in table], job.optimizer.name)
    found = _without_words(job, table, found) if job.vocabulary else found
    measured = [_measured(layer, one) for layer, one in zip(table, found, strict=True)]
    return measured if profile.timed else _priced(job, measured)


def _priced(job: Job, table: list[Layer]) -> list[Layer]:
    """The table with the times of each layer that the job gives, if it does."""
    if job.costs.per != "layer" or job.costs.f is None:
        return table
    ms = zip(*(each(times, table) for times in (job.costs.f, job.costs.b, job.costs.w)), strict=True)
    given = [layer.timed(*of) for layer, of in zip(table, ms, strict=True)]
    first, last = (layer.timed(0.0, 0.0, 0.0) for layer in (table[0], table[-1]))
    return [first, *given[1:-1], last] if job.vocabulary else given


def _without_words(job: Job, table: Sequence[Layer], found: Sequence[Layer]) -> list[Layer]:
    """Measured layers for jobs whose ranks share the vocabulary: the first and the last have the rest of theirs.

    The rest of a time is the share of the kernels that don't handle words, or measured in a run that shared them; bytes
    are counted.
    """
    profile, both = job.profile, list[Layer]()
    if not job.model.causal or profile is None:
        return list(found)
    if profile.words is not None and profile.on.source == "trace":
        wholes = [(one.f, one.b, one.w) for one in (found[0], found[-1])]
        words = profile.words.whole(job.model.vocab or 0)
        rests = [(f - of_f, b - of_b, w - of_w) for (f, b, w), (of_f, of_b, of_w) in zip(wholes, words, strict=True)]
    else:
        rests, wholes = map(_ends, (job, job.with_vocabulary("ends")))
    for k, of in enumerate(zip(rests, wholes, strict=True)):
        f, b, w = (min(1.0, max(0.0, part / ms)) if ms else 0.0 for part, ms in zip(*of, strict=True))
        one = found[-k]
        timed = replace(one.trained(table[-k]).timed(one.f * f, one.b * b, one.w * w), again=one.again * f)
        both.append(replace(timed, frozen=0, size=NOTHING))
    return [both[0], *found[1:-1], both[1]]


def _ends(job: Job) -> list[tuple[float, float, float]]:
    """ms of F, B and W of the first and the last layer by their card."""
    card = profiled.timed(cards.of(job)[0], Machine.of(job))
    return [(one.f.ms, one.b.ms, one.w.ms) for one in (card.layers[card.order[i]] for i in (0, -1))]


def paces_of_ends(job: Job, profile: Profile) -> list[float]:
    """Measured ms of the whole first and last layer, beside those by their card."""
    first, *_, last = of_profile(profile, _names(job.model), job.optimizer.name)
    counted = map(sum, _ends(job.with_vocabulary("ends")))
    return [(one.f + one.b + one.w) / ms if ms else 0.0 for one, ms in zip((first, last), counted, strict=True)]


def slowness(job: Job) -> list[float]:
    """The time of each pipeline rank's ops relative to the fastest rank's."""
    given, count = job.hardware, job.parallel.pp
    slow = given.slow or [1.0] * count
    if not given.unequal or not (job.counted or isinstance(given.tflops, list)):
        return slow
    if not job.counted:
        assert isinstance(given.tflops, list)
        return [k * max(given.tflops) / one for k, one in zip(slow, given.tflops, strict=True)]
    card = cards.of(job)[0] if job.profile is None or job.model.builtin else job.profile
    every = [layer for kind, layer in card.layers.items() if kind not in ("embed", "head")]
    kernels = [one for layer in every for name in "fbw" for one in layer.kernels.get(name, ())]
    ms = [Machine.of(job, given.of(rank)).ms(kernels) for rank in range(count)]
    best = Machine.of(job).ms(kernels) or 1.0
    return [k * one / best for k, one in zip(slow, ms, strict=True)]


def slow_of(job: Job, placement: Placement) -> list[float]:
    """The slowness of each stage's ranks, on average; 1 if times were given for stages or ranks, which include it."""
    return [sum(each) / len(each) for each in zip(*_by_pipe(job, placement), strict=True)]


def paces_of(job: Job, placement: Placement) -> tuple[tuple[float, ...], ...]:
    """For each pipe, the time of its rank of a stage relative to that stage's mean; () with one pipe, or no
    difference."""
    each, mean = _by_pipe(job, placement), slow_of(job, placement)
    found = tuple(tuple(map(truediv, one, mean)) for one in each)
    return found if any(pace != 1.0 for pipe in found for pace in pipe) else ()


def _by_pipe(job: Job, placement: Placement) -> list[list[float]]:
    if not job.hardware.unequal or (job.costs.f is not None and job.costs.per != "layer"):
        return [[1.0] * placement.stages]
    each = slowness(job)
    return [[each[rank] for rank in pipe] for pipe in placement.pipes]


def _counted(job: Job, cuts: Cuts = (), part: int = 0) -> list[Layer]:
    """The layers by their cards, in a `part` of microbatches that are cut into slices at `cuts`."""
    if not (job.model.builtin or job.carded):  # layers of a factory that nobody has run: equal, with no bytes
        return [Layer(name, 1.0, 1.0, 1.0, bw=2.0, again=1.0) for name in names(job.model)]

    @functools.cache
    def table(policy: str) -> list[Layer]:
        again = policy in (cards.ATTENTION, cards.CHEAP) or (policy == cards.KEEP and job.parallel.regathers)
        return _of_card(job, cards.of(job, policy, cuts)[part], again=again)

    def of(i: int) -> Callable[[str], Layer]:
        return lambda policy: table(policy)[i]

    again = job.parallel.regathers  # B gathers the tokens again
    return [
        replace(one, card=of(i), plain=functools.partial(of(i), cards.GATHERED) if again else None)
        for i, one in enumerate(table(cards.KEEP))
    ]


def _names(model: Model) -> list[str]:
    return ["embed", *names(model), "head"] if model.builtin else names(model)


def _of_card(job: Job, card: Profile, *, again: bool = False) -> list[Layer]:
    """The layers of a model by a card, with the times of its kernels; `again`: B runs some of them again."""
    each = of_profile(profiled.timed(card, Machine.of(job)), _names(job.model), job.optimizer.name)
    found = [replace(one, bw=one.b + one.w) for one in each]
    if job.vocabulary and not again:  # F frees what was looked up
        found[0] = replace(found[0], size=replace(found[0].size, loose=0.0))
    ends = job.model.tie_embeddings or job.model.tied_layers == {0, len(found) - 1}
    shared = card.layers[card.order[-1]].tied if ends and not job.vocabulary else 0
    tied, lent = (0, shared) if job.adapter.rank else (shared, 0)
    for end in (0, -1):
        found[end] = replace(found[end], tied=tied, lent=lent)
    return found


def of_profile(profile: Profile, names: Sequence[str], optimizer: str) -> list[Layer]:
    """The layers in order by a profile; `names` are "embed", "layers.0", ..., "head" of a family, else a factory's.

    Optimizer times are None if the job's `optimizer` is not the measured one.
    """
    kinds = profile.order
    if kinds == FAMILY and "embed" in names:
        kinds = [name if name in ("embed", "head") else "block" for name in names]
    if len(kinds) < len(names):  # a card of fewer layers, all as the last of them
        kinds = [*kinds[:-2], *[kinds[-2]] * (len(names) - len(kinds) + 1), kinds[-1]]
    found, same = [profile.layers[kind] for kind in kinds], profile.optimizer == optimizer
    return [_one(*of, same) for of in zip(names, found, [None, *found[:-1]], strict=True)]


def _one(name: str, layer: LayerProfile, last: LayerProfile | None, same_optimizer: bool) -> Layer:
    size = NOTHING if layer.bytes is None else profiled.footprint(layer.bytes, None if last is None else last.bytes)
    # Before all that trains nothing has a backward. Alone as a stage, a layer passes on a gradient there.
    passes = bool(layer.kernels) and layer.bytes is not None and not (size.act_b or size.act_w)
    f, b, w = layer.f.ms, 0.0 if passes else layer.b.ms, layer.w.ms
    norm = 0.0 if layer.norm is None else layer.norm.ms
    steps = (one if same_optimizer else None for one in (layer.step, layer.tentative))
    step, tentative = (None if one is None else one.ms + norm for one in steps)
    rests = layer.bytes is not None and not layer.bytes.gradients  # none of them trains
    trained = 0 if rests else sum(layer.parts) or layer.parameters
    return Layer(
        name,
        f,
        b,
        w,
        bw=max(b, b + w if layer.bw is None else layer.bw.ms),
        again=f if layer.again is None else layer.again.ms,
        step=step,
        tentative=tentative,
        params=trained,
        frozen=layer.parameters - trained,
        parts=tuple(layer.parts),
        apart=tuple(layer.apart),
        matrices=tuple(layer.matrices),
        experts=layer.experts,
        size=size,
        held=layer.bytes,
        collectives=layer.collectives,
    )


def of_slice(
    job: Job, table: Sequence[Layer], cuts: Cuts, part: int, share: Mapping[str, float], rows: float
) -> list[Layer]:
    """The table for one slice of a microbatch, `part` of those at `cuts`.

    Given or measured times of whole microbatches are multiplied by `share` (f, b and w of a block) or `rows` (any other
    layer), bytes that no card has by `rows`.
    """
    try:
        own = _counted(job, cuts, part)
    except ZbcError:  # layers of a factory that do not run in slices, as a run would say
        own = None
    return _parts_of(job, table, own, share, rows)


def _of_length(job: Job, table: Sequence[Layer], tokens: int) -> list[Layer]:
    """The table of layers for rows of `tokens` tokens, from the table for whole rows."""
    unit = job.parallel.unit  # rows are filled up
    own = None if job.carded else _counted(job.of_length(-(-tokens // unit) * unit))
    return _parts_of(job.of_length(tokens), table, own, shares_of(job, tokens), tokens / job.row_tokens)


def _parts_of(
    job: Job, table: Sequence[Layer], own: list[Layer] | None, share: Mapping[str, float], rows: float
) -> list[Layer]:
    """The layers for a part of the tokens: `own` are by its card, which times that were given or measured precede."""
    counted = job.carded or (job.model.builtin and job.profile is None)
    if own is not None and counted and not (job.costs.per == "layer" and job.costs.f is not None):
        return own
    known = own if own is not None and job.model.builtin else [None] * len(table)
    return [part_of(layer, one, share, rows) for layer, one in zip(table, known, strict=True)]


def part_of(layer: Layer, own: Layer | None, share: Mapping[str, float], rows: float) -> Layer:
    """A layer for a part of the tokens; `own` is the layer by the card of the part, None if there is none."""
    part = share if layer.name.startswith("layers.") else dict.fromkeys("fbw", rows)
    f, b, w = (getattr(layer, name) * part[name] for name in "fbw")
    both = (b + w) / (layer.b + layer.w) if layer.b + layer.w else part["b"]
    size, card = (layer.size.scaled(rows), None) if own is None else (own.size, own.card)
    return replace(layer, f=f, b=b, w=w, bw=layer.bw * both, again=layer.again * part["f"], size=size, card=card)


def _measured(layer: Layer, one: Layer) -> Layer:
    """A layer by a profile; what the profile lacks is that of its card."""
    if layer.apart and one.params > layer.params:  # measured with all experts: a rank has some
        one = one.trained(layer)
    known = one.params or one.frozen
    return replace(
        one,
        params=one.params if known else layer.params,
        frozen=one.frozen if known else layer.frozen,
        parts=one.parts or (layer.parts if one.params in (0, layer.params) else ()),
        apart=layer.apart or one.apart,
        matrices=layer.matrices or one.matrices,
        experts=layer.experts or one.experts,
        tied=layer.tied,
        lent=layer.lent,
        size=layer.size if one.size is NOTHING else replace(one.size, result=one.size.result or layer.size.result),
        held=one.held or layer.held,
        collectives=one.collectives or layer.collectives,
        card=layer.card,
        plain=layer.plain,
    )


def each(value: float | list[float] | None, table: Sequence[Layer]) -> list[float]:
    """A number of `[costs]` of each layer: one number is of each block, as a list of so many; embedding and head have
    numbers in a list with two more."""
    if isinstance(value, list) and len(value) == len(table):
        return [float(number) for number in value]
    blocks = [layer.name not in ("embed", "head") for layer in table]
    numbers = iter(value if isinstance(value, list) else [value or 0.0] * sum(blocks))
    return [float(next(numbers)) if block else 0.0 for block in blocks]
