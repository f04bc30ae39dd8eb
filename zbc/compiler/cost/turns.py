"""Temporary memory of a stage's ops, from the footprints of its layers, which run one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zbc.compiler.cost.footprint import Footprint


class _Turn(NamedTuple):
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


def needs(layers: Sequence[Footprint], *, again: int) -> dict[str, float]:
    """Temporary bytes of the ops of a stage of `layers`, of which the first `again` run again: of "f" beyond the larger
    of the bytes held before and after it, of "b", "w" and "bw" beyond those held before it, the incoming gradient
    included; as "first b" and so on with gradients as they are made, in the first backward of a step.

    A stage's incoming gradient exists from before B until B ends, used up or not.
    """
    turns = _turns(layers, again)
    return {"f": _forward(turns, again), **_backward(turns, "more_"), **_backward(turns, "rise_")}


def _turns(layers: Sequence[Footprint], again: int) -> list[_Turn]:
    """The turns of the layers, the last one's first. The first `again` layers run again; those after them have an input
    of their own, like a stage."""
    kept = [z.ends_kv + (z.entry if k < again else z.act_b - z.kv) for k, z in enumerate(layers)]
    if again < len(layers):
        kept[again], kept[-1] = kept[again] + layers[again].loose, kept[-1] + layers[-1].tail
    found = list[_Turn]()
    behind = left = released = 0.0  # by later layers: kept by F, left for W beyond that, freed by W
    waiting = owed = 0.0  # by later layers until a collective in BW: what W needs, its gradients
    for k in reversed(range(len(layers))):
        z, inner, reruns = layers[k], k < len(layers) - 1, k < again
        # A second forward keeps all activations that the first one would have kept, input and output included.
        twice = z.act_b + z.loose + z.tail - z.entry - z.kv if reruns else 0.0
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


def _forward(turns: Sequence[_Turn], again: int) -> float:
    last, f = turns[0].layer, 0.0
    stays = last.tail > 0 and again < len(turns)  # its result is kept, else it is being sent
    for k, turn in zip(reversed(range(len(turns))), turns, strict=True):
        z, inner = turn.layer, k < len(turns) - 1
        # From the previous layer; the stage's input exists before. If a loss follows, that needs the most.
        entering = z.loose if k > again and z.result else 0.0
        made = z.result if inner or not stays else 0.0
        own = (z.more_alone if k < again else z.more_f) + entering + made
        f = max(f, own - (0.0 if stays else last.result) - turn.behind)
    return f


def _backward(turns: Sequence[_Turn], field: str) -> dict[str, float]:
    """The peaks of backwards by fields of layers: "rise_" in the first of a step, "more_" in the others."""
    first, b, w, bw = field == "rise_", 0.0, 0.0, 0.0
    key, came_b, came_w = "rise_" if first else "", 0.0, 0.0  # by later layers: gradients
    for turn in turns:
        z, late = turn.layer, turn.layer.late
        of_b, of_w, of_bw = (getattr(z, field + op) for op in ("b", "w", "bw"))
        # W's output gradient may be that from the next layer itself.
        after = late.get(key + "b", 0.0) - (0.0 if z.keeps_given else turn.given)
        b = max(b, turn.b + came_b + max(of_b, turn.again, after))
        w = max(w, turn.w + came_w + of_w)
        after = max(late.get(key + "bw", 0.0) - turn.given, turn.until - first * turn.owed)
        bw = max(bw, turn.bw + came_b + came_w + max(of_bw, turn.again, after))
        came_b, came_w = (came_b + z.came_b, came_w + z.came_w) if first else (0.0, 0.0)
    names = ("b", "w", "bw")
    return {f"first {name}" if first else name: ms for name, ms in zip(names, (b, w, bw), strict=True)}
