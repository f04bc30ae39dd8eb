"""Memory of stages in bytes, from the memory of their layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Any, NamedTuple

from zbc.compiler.cost import stepping
from zbc.compiler.cost.estimate import Layer
from zbc.compiler.cost.footprint import GRAD_BYTES, NOTHING, Footprint
from zbc.compiler.cost.turns import needs
from zbc.ir import Placement
from zbc.job.sections import Parallel
from zbc.job.spec import Job
from zbc.plan import dealing

Stages = Sequence[Sequence[Layer]]  # the layers of each stage


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of one stage in bytes, without its activations of microbatches (`Costs.size`)."""

    weights: float
    gradients: float
    masters: float  # float32 weights in addition to the weights that forward reads
    optimizer: float
    needs: Mapping[str, float] = field(default_factory=dict)  # temporaries of ops (turns.py)
    whole: Mapping[str, float] = field(default_factory=dict)  # of a BW in plans that split none, if it differs
    early: float = 0.0  # the part of `gradients` that B makes if W is an op of its own
    tied: float = 0.0  # the part of `gradients` that is of a weight it shares with a stage of another rank
    largest: float = 0.0  # elements of its largest parameter
    step: float = 0.0  # temporaries of the optimizer step
    tentative: float = 0.0  # copies of the tentative step, a few parameters at a time
    logits: float = 0.0  # the part of F's kept activations with an entry per word of the vocabulary
    behind: float = 0.0  # bytes of the tensor between it and the next stage
    share: float = 0.0  # activations F keeps without recompute; activation units are shares of it
    stays: float = 0.0  # the part of F's kept activations that offload leaves on the device
    sent: float = 0.0  # the part of F's kept activations that is sent, too: a result that its own backward needs
    given: float = 0.0  # the part of its input that the stage before it keeps, and counts, on the same rank
    summed: float = 0.0  # the buffer REDUCE sends, into which the gradients move
    freed: float = 0.0  # weights that a rank gathers and frees if they are sharded
    casts: float = 0.0  # the part of `freed` that is copies in the autocast type, made from the gathered weights
    own: float = 0.0  # the rank's own shard of them, in storage of its own
    window: float = 0.0  # the window its replicas read and write if no messages are sent
    gathered: float = 0.0  # the messages of a GATHER

    @property
    def unsplit(self) -> StageBytes:
        """This stage in a plan that splits no backward of it."""
        return replace(self, needs={**self.needs, **self.whole})


NO_BYTES = StageBytes(0.0, 0.0, 0.0, 0.0)


def of_stages(job: Job, placement: Placement, stages: Stages) -> tuple[StageBytes, ...] | None:
    """Memory of each stage; None if a layer's sizes are not known before the model is built."""
    if not job.model.builtin and any(layer.held is None for part in stages for layer in part):
        return None
    return _with_given(placement, [_stage(job, placement, s, stages) for s in range(len(stages))])


def of_length(
    job: Job, placement: Placement, stages: Stages, like: Sequence[StageBytes], *, needs: bool
) -> tuple[StageBytes, ...]:
    """The same for rows of another length than those of `like`; without `needs` ops need as much as there."""
    found = [
        replace(one, **_kept(job, s, stages), **(_needs(placement, s, stages) if needs else {}))
        for s, one in enumerate(like)
    ]
    return _with_given(placement, found)


def _with_given(placement: Placement, found: Sequence[StageBytes]) -> tuple[StageBytes, ...]:
    pipes = range(len(placement.pipes))  # that all have the two stages of an edge on one rank
    near = [
        [a for a in placement.sources(s) if not any(placement.crosses(a, s, pipe) for pipe in pipes)]
        for s in range(len(found))
    ]
    return tuple(replace(one, given=sum((found[a].sent for a in near[s]), 0.0)) for s, one in enumerate(found))


def _stage(job: Job, placement: Placement, s: int, stages: Stages) -> StageBytes:
    """Memory of stage s."""
    sizes = [layer.size for layer in stages[s]]
    own = of_owner(job, placement, s, stages)
    return replace(
        own,
        weights=own.weights + sum(z.tables for z in sizes) - _shared(job, placement, s, stages),
        early=min(own.gradients, sum(z.came_b for z in sizes)),
        tied=float(GRAD_BYTES * _counted(placement, s, stages)[1]),
        largest=max((z.largest for z in sizes), default=0.0),
        **_needs(placement, s, stages),
        **_kept(job, s, stages),
    )


def _shared(job: Job, placement: Placement, s: int, stages: Stages) -> float:
    """Bytes of a frozen weight of the last layer that its rank has with its first stage."""
    alone = stages[s] is not stages[-1] or not {*placement.holders(s)} <= {*placement.holders(0)}
    return 0.0 if alone else float((stepping.LOW if job.model.lowered else GRAD_BYTES) * stages[-1][-1].lent)


def _needs(placement: Placement, s: int, stages: Stages) -> dict[str, Any]:
    """The fields of `StageBytes` for the temporaries of ops."""
    sizes, again = [layer.size for layer in stages[s]], sum(layer.reruns for layer in stages[s])
    # Gradients that come from several stages are summed in a tensor of its own.
    total = sizes[-1].result if len(placement.sinks(s)) > 1 else 0.0

    def of(sizes: Sequence[Footprint]) -> dict[str, float]:
        return {name: size + total * name.endswith(("b", "bw")) for name, size in needs(sizes, again=again).items()}

    whole = of([z.whole or z for z in sizes]) if any(z.whole for z in sizes) else {}
    return {"needs": of(sizes), "whole": {name: whole[name] for name in whole if "bw" in name}}


def _kept(job: Job, s: int, stages: Stages) -> dict[str, Any]:
    """The fields of `StageBytes` for the activations and messages of a microbatch."""
    part, moves = stages[s], job.memory.offloads(s)
    kept = [layer.size for layer in part if not layer.reruns]
    return {
        "logits": sum((z.logits for z in kept), 0.0),
        "behind": [*boundaries(stages), 0.0][s],
        "share": kept_by([replace(layer, reruns=False) for layer in part], moves=moves),
        "stays": sum(one.size.entry_stays if one.reruns else one.size.stays for one in part),
        "sent": sum((z.tail for z in kept[-1:]), 0.0),
    }


def kept_by(layers: Sequence[Layer], *, moves: bool) -> float:
    """Bytes that F keeps for a microbatch in a stage of these layers, of which the first may run again; not its input
    where what it keeps `moves` to the host, unless a layer needs it."""
    kept = [one.size for one in layers if not one.reruns]
    own = sum(z.act_b for z in kept) + sum(z.loose for z in kept[:1] if not moves) + sum(z.tail for z in kept[-1:])
    return own + sum(one.size.entry for one in layers if one.reruns)


def owned(part: Sequence[int], table: Sequence[Layer], *, experts: bool = False) -> list[Layer]:
    """The layers of a stage without the parameters of experts that replicas share out, or with only these `experts`;
    what is held is that of all."""
    return [_owned_of(table[i], experts) for i in part]


@lru_cache(maxsize=2**12)  # for each partition again
def _owned_of(layer: Layer, experts: bool) -> Layer:
    if not layer.apart:
        return replace(layer, params=0, parts=(), matrices=(), size=NOTHING) if experts else layer
    apart, shapes, casts = Counter(layer.apart), Counter(layer.apart), 0.0
    parts, matrices = list[int](), list[tuple[int, int]]()
    for size, low in _lows(layer.parts, layer.size.casts):
        mine = apart[size] > 0
        apart[size] -= mine
        casts += stepping.LOW * size * (low and mine)
        parts += [size] if mine is experts else []
    for shape in layer.matrices:
        mine = shapes[math.prod(shape)] > 0
        shapes[math.prod(shape)] -= mine
        matrices += [shape] if mine is experts else []
    count = sum(layer.apart)
    params, casts = (count, casts) if experts else (layer.params - count, layer.size.casts - casts)
    held = replace(layer.size, casts=casts)
    return replace(layer, params=params, parts=tuple(parts), matrices=tuple(matrices), size=held)


def _lows(parts: Sequence[int], casts: float) -> Iterator[tuple[int, bool]]:
    """Yields the elements of parameters, and whether they have a cast: these are matrices, and so the largest."""
    left = casts / stepping.LOW
    for size in sorted(parts, reverse=True):
        low = 0 < size <= left
        left -= size * low
        yield size, low


def of_owner(job: Job, placement: Placement, s: int, stages: Stages, *, experts: bool = False) -> StageBytes:
    """Parameter memory of a stage without the experts that replicas share out, or of these `experts`."""
    layers = owned(range(len(stages[s])), stages[s], experts=experts)
    shares = dealt(job, placement, s, stages, experts=experts)
    largest = max((size for layer in layers for size in layer.parts), default=0)
    sizes = [Footprint(largest=largest)] if experts else [layer.size for layer in layers]
    params = _counted(placement, s, stages, experts=experts)[0]
    weights, gradients, masters, state = _parameters(job, stages[s], layers, params)
    each, ahead = gradients / params if params else 0.0, job.optimizer.sync == "post-validate"
    casts = sum(layer.size.casts for layer in layers)
    low = GRAD_BYTES * lowered(job, layers) if shares.ranks > 1 else 0.0  # weights that exist as casts alone
    message = weights / params * shares.row if params else 0.0
    message = _message(job, layers, shares, params, stages[-1][-1].tied) if low else message
    sums, sent = each * shares.summed, not job.parallel.one_sided
    versions = {"two-versions": 2, "asynchronous": 3 if job.optimizer.lookahead else 1}.get(job.optimizer.sync, 1)
    stays = experts and shares.ranks == 1  # no other rank has it
    copied = stepping.master(job.model) + stepping.kept(job.optimizer)
    inside = min(params, stepping.elements(job.optimizer, layers))  # Muon's, a batch apart
    ends = [min(shares.copied, count) for count in (params - inside, inside)]
    wide = [stepping.widened(job.optimizer, job.model, matrix=matrix) for matrix in (False, True)]
    widened = stepping.WIDE * float(max(map(mul, wide, ends)))
    return StageBytes(
        weights=versions * weights - low + casts + (versions == 2) * casts,
        gradients=gradients,
        masters=shares.most * masters,
        optimizer=shares.most * state + averaging(job, params),
        step=GRAD_BYTES * shares.most * params * bool(job.optimizer.feedback)
        + widened
        + _temporaries(job, sizes, layers),
        tentative=float(copied * shares.copied) if ahead else 0.0,
        freed=0.0 if stays or not params else weights * (1 - shares.whole / params) - low + casts,
        casts=0.0 if stays else casts,
        own=weights / params * shares.row if params else 0.0,
        window=0.0 if sent else message + sums,
        summed=sums if sent else 0.0,
        gathered=message * (shares.ranks + 1) if sent else 0.0,
    )


def lowered(job: Job, layers: Sequence[Layer]) -> float:
    """Elements of sharded weights of layers that these read only as 16-bit casts: they are gathered in 16 bits."""
    model = job.model
    if not (job.parallel.frees and model.builtin and model.dtype != "float32" and not model.lowered):
        return 0.0
    return sum((layer.size.casts for layer in layers if not layer.tied), 0.0) / stepping.LOW


def _message(job: Job, layers: Sequence[Layer], shares: Dealt, params: int, tied: int) -> float:
    """Bytes that each rank sends of such weights: as many as the rank with most, of either type."""
    own = [one for layer in layers for one in _lows(layer.parts, stepping.LOW * lowered(job, [layer]))]
    while sum(size for size, _ in own) > params - shares.whole and (tied, False) in own:
        own.remove((tied, False))  # all ranks step it
    uncut = {*map(math.prod, stepping.matrices(job.optimizer, layers))}
    kinds = [(b - a, low) for size, low in own for a, b in dealing.cut(size, size if size in uncut else dealing.CHUNK)]
    if not kinds:
        return (GRAD_BYTES + stepping.LOW) / 2 * shares.row
    dealt = dealing.deal([size for size, _ in kinds], shares.ranks)
    most = [max(sum(kinds[k][0] for k in share if kinds[k][1] is low) for share in dealt) for low in (False, True)]
    return float(GRAD_BYTES * most[0] + stepping.LOW * most[1])


def averaging(job: Job, params: float) -> float:
    """Buffers for averaging weights over replicas: the share sent and received, and the average received last."""
    asked = job.parallel.average
    if asked is None:
        return 0.0
    return GRAD_BYTES * params * ((2 / asked.parts if asked.delay else 0.0) + (1.0 if asked.smooth else 0.0))


def _counted(placement: Placement, s: int, stages: Stages, *, experts: bool = False) -> tuple[int, int]:
    """Parameters that a rank holds for stage s, without the experts that replicas share out, or of these `experts`; and
    how many of them all of its holders step."""
    apart, tied = (sum(each) for each in zip(*((sum(layer.apart), layer.tied) for layer in stages[s]), strict=True))
    if experts:
        return apart, 0
    params = sum(layer.params for layer in stages[s]) - apart
    if stages[s] is stages[-1] and tied and set(placement.holders(s)) <= set(placement.holders(0)):
        return params - stages[-1][-1].tied, 0  # the rank holds the shared weight with its first stage
    return params, tied if placement.stages > 1 else 0


class Dealt(NamedTuple):
    """How the replicas of a stage share out its optimizer."""

    ranks: int  # that hold it
    most: float  # the share of its parameters that one rank steps, at most
    copied: float  # elements that one rank steps tentatively at a time, at most
    summed: float  # elements that REDUCE sends: with ZeRO-1 a row for each rank
    row: float  # elements in a row: as many for each rank as for the rank with most
    whole: int = 0  # elements that all ranks step


def dealt(job: Job, placement: Placement, s: int, stages: Stages, *, experts: bool = False) -> Dealt:
    """The shares of the holder dealt most (dealing.py), without the `experts` that replicas share out, or of these.

    A message says after its elements which have gradients.
    """
    copies = job.parallel.of_experts if experts else job.parallel.copies
    ranks = copies * (1 if by_pipe(job.parallel) else len(set(placement.holders(s))))
    params, whole = _counted(placement, s, stages, experts=experts)
    layers = owned(range(len(stages[s])), stages[s], experts=experts)
    counts = [count for layer in layers for count in layer.parts]
    matrices = [math.prod(shape) for shape in stepping.matrices(job.optimizer, layers)]
    while sum(counts) > params - whole and stages[-1][-1].tied in counts:
        counts.remove(stages[-1][-1].tied)
    known = sum(counts) == params - whole
    if job.parallel.shard == "none" or ranks == 1:
        copied = dealing.batch([whole, *counts] if known else [params])
        return Dealt(ranks, 1.0, copied, params - whole + (len(counts) if known else 0), 0.0)
    alone, pieces = dealing.most(counts, ranks, matrices) if known else ((params - whole) / ranks, 0)
    share = (alone + whole) / params if params else 1 / ranks
    return Dealt(ranks, share, max(whole, min(alone + whole, dealing.BATCH)), ranks * (alone + pieces), alone, whole)


def by_pipe(parallel: Parallel) -> bool:
    """Whether replicas of each rank share weights out for themselves, where a pipeline has a stage several times: that
    is so where they meet to gather these."""
    return parallel.frees and not parallel.one_sided


def _temporaries(job: Job, sizes: Sequence[Footprint], layers: Sequence[Layer]) -> float:
    """Temporary bytes of the optimizer as it steps the parameters of some layers, of these `sizes`.

    On a CPU torch steps one parameter after the other, with temporaries as large as it; fused kernels have none. Adam
    has two, and frees the last one only after it has made the two for the next parameter; weight decay through
    gradients (not AdamW's) takes one more.
    """
    options = job.optimizer
    muon = stepping.needs(options, layers, job.parallel.tp)
    if job.hardware.device == "cuda":
        return muon
    if options.kind == "sgd":
        return GRAD_BYTES * max((z.largest for z in sizes), default=0.0) if options.weight_decay else 0.0
    decayed = options.kind == "adam" and options.weight_decay > 0
    most = max(((z.pair or 2 * z.largest) + decayed * z.largest for z in sizes), default=0.0)
    across = (before.ends[1] + (2 + decayed) * z.ends[0] for before, z in pairwise(sizes))
    return max(muon, GRAD_BYTES * max(most, *across, 0.0))


def boundaries(stages: Stages) -> list[float]:
    """Bytes of the tensor after each stage but the last."""
    return [part[-1].size.result for part in stages[:-1]]


def _parameters(
    job: Job, layers: Sequence[Layer], own: Sequence[Layer], params: int
) -> tuple[float, float, float, float]:
    """Bytes of weights, gradients, masters and optimizer state of `params` parameters of layers: those in `own`."""
    options = job.optimizer
    apart = options.sync == "post-validate" or (job.model.lowered and job.model.master)
    master = stepping.master(job.model) * apart
    per = stepping.state_bytes(options, own, params)
    held = [layer.held for layer in layers if layer.held is not None]
    known = sum(layer.params for layer in layers)
    part = params / known if known else 1.0
    weights, gradients = (
        part * sum(z.weights - z.casts - z.buffers for z in held),
        part * sum(z.gradients for z in held),
    )
    same = job.profile is not None and job.profile.optimizer == options.name
    state = part * sum(z.optimizer for z in held) if same else per * gradients / (GRAD_BYTES * params or 1)
    return weights, gradients, gradients * master / GRAD_BYTES, state
