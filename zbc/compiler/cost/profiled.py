"""Costs of each layer of a job from a profile, in the terms of the cost model.

A layer kind that was timed as a stage of its own keeps its input. Inside a stage the tensor between two layers stays
for backward if the first keeps its output or the second its input; the first layer of a stage always keeps its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zbc.compiler.cost.footprint import Footprint
from zbc.compiler.cost.machine import Machine
from zbc.ir import Placement
from zbc.job.profile import FAMILY, Collective, Host, LayerBytes, LayerProfile, Measured, Profile
from zbc.ops import SMALL


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured ms and bytes of one layer for one microbatch; None if not measured."""

    f: float
    b: float
    w: float
    bw: float
    again: float
    step: float | None  # the optimizer's step, with the share of the gradient norm
    tentative: float | None
    params: int  # that train
    frozen: int  # others
    parts: tuple[int, ...]  # elements of each parameter that trains; () if only their sum is known
    size: Footprint | None
    held: LayerBytes | None
    apart: tuple[int, ...] = ()  # of parts, those of experts that ranks share out
    matrices: tuple[tuple[int, int], ...] = ()  # shapes of those that Muon steps
    experts: int = 0  # in the largest stack of these
    collectives: Mapping[str, Sequence[Collective]] = field(default_factory=dict)  # inside of its ops, of a dry run


def timed(profile: Profile, machine: Machine) -> Profile:
    """The profile of a dry run with the times of its kernels on a machine."""
    device, layers = profile.on.device, dict[str, LayerProfile]()
    for kind, layer in profile.layers.items():
        ms = {name: Measured(ms=machine.ms_of(found, device)) for name, found in layer.kernels.items()}
        none = dict.fromkeys(("f", "b", "w", "bw"), Measured(ms=0.0))
        layers[kind] = layer.model_copy(update={**none, **ms} if ms else {})
    return profile.model_copy(update={"layers": layers})


def measurements(profile: Profile, names: Sequence[str], optimizer: str) -> list[Measurement]:
    """Measurements of each layer in order; `names` are "embed", "layers.0", ..., "head" of a family, else a factory's.

    Optimizer times are None if the job's `optimizer` is not the measured one.
    """
    kinds = profile.order
    if kinds == FAMILY and "embed" in names:
        kinds = [name if name in ("embed", "head") else "block" for name in names]
    if len(kinds) < len(names):  # a card of fewer layers, all alike
        kinds = [kinds[0], *[kinds[1]] * (len(names) - 2), kinds[-1]]
    found = [profile.layers[kind] for kind in kinds]
    before = [None, *found[:-1]]
    return [_one(layer, last, profile.optimizer == optimizer) for layer, last in zip(found, before, strict=True)]


def _one(layer: LayerProfile, last: LayerProfile | None, same_optimizer: bool) -> Measurement:
    size = None if layer.bytes is None else _footprint(layer.bytes, None if last is None else last.bytes)
    # Before all that trains nothing has a backward. Alone as a stage, a layer passes on a gradient there.
    passes = bool(layer.kernels) and size is not None and not (size.act_b or size.act_w)
    f, b = layer.f.ms, 0.0 if passes else layer.b.ms
    step, tentative = (_ms(layer.step), _ms(layer.tentative)) if same_optimizer else (None, None)
    norm = _ms(layer.norm) or 0.0
    rests = layer.bytes is not None and not layer.bytes.gradients  # none of them trains
    trained = 0 if rests else sum(layer.parts) or layer.parameters
    return Measurement(
        f=f,
        b=b,
        w=layer.w.ms,
        bw=max(b, b + layer.w.ms if layer.bw is None else layer.bw.ms),
        again=f if layer.again is None else layer.again.ms,
        step=None if step is None else step + norm,
        tentative=None if tentative is None else tentative + norm,
        params=trained,
        frozen=layer.parameters - trained,
        parts=tuple(layer.parts),
        size=size,
        held=layer.bytes,
        apart=tuple(layer.apart),
        matrices=tuple(layer.matrices),
        experts=layer.experts,
        collectives=layer.collectives,
    )


def _ms(time: Measured | None) -> float | None:
    return None if time is None else time.ms


def _footprint(z: LayerBytes, last: LayerBytes | None) -> Footprint:
    kept = z.input if z.keeps_input or (last is not None and last.keeps_output) else 0
    alone = z.input if z.input < SMALL else 0
    came_b = z.gradients if z.gradients_b is None else z.gradients_b
    tensors = [z.kept_b] if z.tensors is None else z.tensors
    found = Footprint(
        stays=max(0, z.kept_b - sum(one for one in tensors if one >= SMALL)) + min(kept, alone),
        logits=0 if z.output else max(tensors, default=0),
        entry_stays=alone,
        casts=z.casts,
        tables=z.buffers,
        act_b=z.kept_b + kept + z.kv,
        kv=z.kv,
        act_w=z.kept_w,
        entry=z.input + z.kept_again,
        result=z.output,
        more_f=z.more_f,
        more_alone=z.more_alone,
        more_b=z.more_b,
        more_w=z.more_w,
        more_bw=z.more_bw,
        came_b=came_b,
        came_w=z.gradients - came_b,
        rise_b=z.more_b + came_b if z.rise_b is None else z.rise_b,
        rise_w=z.more_w + z.gradients - came_b if z.rise_w is None else z.rise_w,
        rise_bw=z.more_bw + z.gradients if z.rise_bw is None else z.rise_bw,
        late=z.late,
        until_bw=z.until_bw,
        largest=z.largest,
        loose=z.input - kept,
        tail=z.output if z.keeps_output else 0,
        keeps_given=z.keeps_given,
        pair=z.pair,
        ends=(z.ends[0], z.ends[-1]) if z.ends else (0, 0),
    )
    if not z.whole:
        return found
    more, *_, rise = z.whole
    one = replace(found, more_bw=more, rise_bw=rise, until_bw=None, late=z.late | z.whole_late)
    return replace(found, whole=one)


def host_ms(host: Host, placement: Placement) -> dict[str, tuple[float, ...]]:
    """By column, ms of host time that a rank adds to each F, B, W and BW of a stage, without its messages."""
    us = {"f": host.f_us, "b": host.b_us, "w": host.w_us, "bw": host.b_us}
    return {column: (each / 1e3,) * placement.stages for column, each in us.items()}


def messages(placement: Placement, ms: Callable[[int, tuple[int, int]], float]) -> tuple[float, ...]:
    """ms for which the messages of an F or a B occupy the rank of each stage, the maximum over pipes; `ms` is a
    function of a pipe and an edge of it."""
    around = [0.0] * placement.stages
    for pipe in range(len(placement.pipes)):
        ends = [0.0] * placement.stages
        for a, b in placement.edges:
            if placement.crosses(a, b, pipe):
                one = ms(pipe, (a, b))
                ends[a], ends[b] = ends[a] + one, ends[b] + one
        around = list(map(max, around, ends))
    return tuple(around)


def agree_ms(host: Host, ranks: int) -> float:
    """ms in which `ranks` ranks end a step: they all-reduce a few numbers, in log2(ranks) rounds of pairs."""
    return (host.close_us + host.agree_us * (ranks - 1).bit_length()) / 1e3
