"""Temporary memory of a stage's ops, from the footprints of its layers, which run one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbc.compiler.cost.footprint import Footprint


@dataclass(frozen=True, slots=True)
class Rise:
    """Peak bytes in a backward of one stage beyond the bytes held before it, the incoming gradient included."""

    b: float = 0.0
    w: float = 0.0
    bw: float = 0.0


@dataclass(frozen=True, slots=True)
class _Turn:
    """Bytes at the start of a layer's backward inside a stage, beyond the bytes held before the stage's op."""

    layer: Footprint
    b: float
    w: float
    bw: float
    again: float  # temporaries of its second forward beyond the activations that it keeps
    behind: float  # activations of the later layers
    given: float  # the gradient from the next layer of the stage
    until: float = 0.0  # peak of its BW while weight gradients of later layers wait for a collective
    owed: float = 0.0  # these


def _turns(layers: Sequence[Footprint], again: int) -> list[_Turn]:
    """The turns of the layers, the last one's first. The first `again` layers run again; those after them have an input
    of their own, like a stage."""
    kept = [z.entry if k < again else z.act_b for k, z in enumerate(layers)]
    if again < len(layers):
        kept[again], kept[-1] = kept[again] + layers[again].loose, kept[-1] + layers[-1].tail
    there = [0.0 if z.ends_kv is None else z.kv for z in layers]
    kept = [(z.ends_kv or 0.0) + kept[k] - (0.0 if k < again else there[k]) for k, z in enumerate(layers)]
    found = list[_Turn]()
    behind = left = released = 0.0  # by later layers: kept by F, left for W beyond that, freed by W
    waiting = owed = 0.0  # by later layers until a collective in BW: what W needs, its gradients
    for k in reversed(range(len(layers))):
        z, inner, reruns = layers[k], k < len(layers) - 1, k < again
        # A second forward keeps all activations that the first one would have kept, input and output included.
        twice = z.act_b + z.loose + z.tail - z.entry - there[k] if reruns else 0.0
        result = z.result if inner else 0.0  # the gradient from the next layer; the last layer's is the stage's
        # With `keeps_given` the stage's gradient existed before, and `left` counts it.
        flowing = result - layers[-1].result if inner and layers[-1].keeps_given else result
        shared = z.tail if inner and not reruns else 0.0  # its output: in `behind` as the next input
        need = z.more_f + (0.0 if z.tail else z.result) if reruns else 0.0
        found.append(
            _Turn(
                *(z, twice + left + flowing, -released, twice - behind + shared + result, need, behind, result),
                *((waiting + z.until_bw, owed) if waiting and z.until_bw is not None else ()),
            )
        )
        # What experts' layers leave is less than what they free.
        waiting, owed = (waiting + z.act_w, owed + z.came_w) if z.until_bw is None else (0.0, 0.0)
        behind, left, released = behind + kept[k], left + z.act_w - kept[k], released + z.act_w
    return found


def more(layers: Sequence[Footprint], *, again: int) -> float:
    """Temporary bytes of the F of a stage of `layers`, beyond the larger of the bytes held before and after it."""
    given = layers[-1].result
    stays = layers[-1].tail > 0 and again < len(layers)  # its result is kept, else it is being sent
    f = 0.0
    for k, turn in zip(reversed(range(len(layers))), _turns(layers, again), strict=True):
        z, inner = turn.layer, k < len(layers) - 1
        # From the previous layer; the stage's input exists before. If a loss follows, that needs the most.
        entering = z.loose if k > again and z.result else 0.0
        made = z.result if inner or not stays else 0.0
        own = (z.more_alone if k < again else z.more_f) + entering + made
        f = max(f, own - (0.0 if stays else given) - turn.behind)
    return f


def rise(layers: Sequence[Footprint], *, again: int, first: bool) -> Rise:
    """The rise of a stage of `layers`; in the `first` backward of a step it includes gradients as they are made.

    A stage's incoming gradient exists from before B until B ends, used up or not.
    """
    turns = _turns(layers, again)
    if not first:
        return _most(turns)
    b = w = 0.0
    forms, coming = {id(z): z.coming for z in {id(z): z for z in layers}.values()}, list[_Turn]()  # many are alike
    for turn in turns:
        z, until = turn.layer, turn.until - turn.owed
        coming.append(replace(turn, layer=forms[id(z)], b=turn.b + b, w=turn.w + w, bw=turn.bw + b + w, until=until))
        b, w = b + z.came_b, w + z.came_w
    return _most(coming)


def _most(turns: Sequence[_Turn]) -> Rise:
    return Rise(
        b=max(
            0.0,
            *(turn.b + max(turn.layer.more_b, turn.again) for turn in turns),
            # W's output gradient may be that from the next layer itself.
            *(turn.b + turn.layer.later("b") - (0.0 if turn.layer.keeps_given else turn.given) for turn in turns),
        ),
        w=max(0.0, *(turn.w + turn.layer.more_w for turn in turns)),
        bw=max(
            0.0,
            *(turn.bw + max(turn.layer.more_bw, turn.again, turn.layer.later("bw") - turn.given) for turn in turns),
            *(turn.bw + turn.until for turn in turns),
        ),
    )


NO_RISE = Rise()
