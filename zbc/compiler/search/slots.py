"""Orders made of slots: every op of a microbatch at a fixed offset, microbatches at a fixed distance.

A slot is a turn, not a time. With S stages per pipe, a microbatch that starts at slot t runs

    F s at slot  t + s,    B s (or BW s) at slot  t + 2S - 1 - s,    W s right after its B

For any starts, the ops of each rank in the order of their slots are an order without deadlock: an op's inputs from
another rank have smaller slots, and ops that share a slot do not need each other.
"""

from __future__ import annotations

from collections.abc import Iterable

from zbc.ir import Op, Placement, Program
from zbc.ops import round_trip

Start = tuple[int, int]  # the slot at which a microbatch begins, and its pipe


def in_units(placement: Placement, m: int, unit: int) -> list[Start]:
    """Units of `unit` microbatches, dealt to the pipes in turn, two slots apart within a pipe.

    With even p and two pipes, or one, a unit of p fills the slots of every rank without two ops in one, and the next
    unit begins where its ops fit into the remaining slots.
    """
    pipes, stages = len(placement.pipes), placement.stages
    period = max(2 * stages, 2 * stages * unit // placement.ranks)
    starts = []
    for i in range(m):
        number, place = divmod(i, unit)
        j, pipe = divmod(place, pipes)
        starts.append((number * period + 2 * j, pipe))
    return starts


def steady(placement: Placement, m: int, distance: int, offset: int) -> list[Start]:
    """Microbatches of a pipe `distance` slots apart, without units; the second pipe `offset` slots after the first."""
    pipes = len(placement.pipes)
    return [(i // pipes * distance + i % pipes * offset, i % pipes) for i in range(m)]


def full_distance(placement: Placement) -> int:
    """The distance that just fills the slots of a rank, with fused backwards."""
    return 2 * placement.stages * len(placement.pipes) // placement.ranks


def program(placement: Placement, starts: Iterable[Start], name: str, *, split: bool = False) -> Program:
    """The order of slots as a program; microbatch i starts as `starts[i]` says."""
    stages = placement.stages
    slots: list[list[tuple[int, int, Op]]] = [[] for _ in range(placement.ranks)]
    count = 0
    for i, (start, pipe) in enumerate(starts):
        count += 1
        for s in range(stages):
            listed, back = slots[placement.rank_of(s, pipe)], start + 2 * stages - 1 - s
            ops = enumerate(Op(kind, s, i, pipe) for kind in round_trip(split=split))
            listed += [(back if k else start + s, k, op) for k, op in ops]
    return Program(placement, count, tuple(tuple(op for *_, op in sorted(listed)) for listed in slots), (name,))
