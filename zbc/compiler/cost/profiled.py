"""Costs of each layer of a job from a profile, in the terms of the cost model.

A layer kind that was timed as a stage of its own keeps its input. Inside a stage the tensor between two layers stays
for backward if the first keeps its output or the second its input; the first layer of a stage always keeps its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from zbc.compiler.cost.footprint import Footprint
from zbc.compiler.cost.machine import Machine
from zbc.ir import Placement
from zbc.job.profile import Host, LayerBytes, LayerProfile, Measured, Profile
from zbc.ops import SMALL


def timed(profile: Profile, machine: Machine) -> Profile:
    """The profile of a dry run with the times of its kernels on a machine."""
    layers = dict[str, LayerProfile]()
    for kind, layer in profile.layers.items():
        ms = {name: Measured(ms=machine.ms(found)) for name, found in layer.kernels.items()}
        none = dict.fromkeys(("f", "b", "w", "bw"), Measured(ms=0.0))
        layers[kind] = layer.model_copy(update={**none, **ms} if ms else {})
    return profile.model_copy(update={"layers": layers})


# What both say of a layer.
_ALIKE = [one.name for one in fields(Footprint) if one.name in LayerBytes.model_fields]


def footprint(z: LayerBytes, last: LayerBytes | None) -> Footprint:
    """That of a layer behind the `last` one."""
    kept = z.input if z.keeps_input or (last is not None and last.keeps_output) else 0
    alone = z.input if z.input < SMALL else 0
    came_b = z.gradients if z.gradients_b is None else z.gradients_b
    tensors = [z.kept_b] if z.tensors is None else z.tensors
    found = replace(
        Footprint(**{name: getattr(z, name) for name in _ALIKE}),
        stays=max(0, z.kept_b - sum(one for one in tensors if one >= SMALL)) + min(kept, alone),
        logits=0 if z.output else max(tensors, default=0),
        entry_stays=alone,
        tables=z.buffers,
        act_b=z.kept_b + kept + z.kv,
        act_w=z.kept_w,
        entry=z.input + z.kept_again,
        result=z.output,
        came_b=came_b,
        came_w=z.gradients - came_b,
        rise_b=z.more_b + came_b if z.rise_b is None else z.rise_b,
        rise_w=z.more_w + z.gradients - came_b if z.rise_w is None else z.rise_w,
        rise_bw=z.more_bw + z.gradients if z.rise_bw is None else z.rise_bw,
        whole=None,
        loose=z.input - kept,
        tail=z.output if z.keeps_output else 0,
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
