"""Building blocks of the V placement: the slots of one microbatch's ops on each rank, which repeat every six.

search/patterns.py enumerates blocks and makes orders of them; this module defines a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

SLOTS = 6
Offsets = tuple[list[int], list[int], list[int], list[int], list[int], list[int]]  # F0 F1 B1 B0 W1 W0, by rank
Tile = tuple[int, int, int, int]  # slots of F0, F1, B1 and B0 modulo SLOTS
LENGTHS = (1, 1, 2, 2)  # of these ops, in slots


class BuildingBlock(NamedTuple):
    """Steps of F down, first and later, then of F up, B down and B up; the first rank of later steps; rests at the
    turns. It makes an order again for any number of microbatches."""

    steps: tuple[int, int, int, int, int]
    change: int
    turns: tuple[int, int, int]


class Tiles(NamedTuple):
    """By rank the slots of F0, F1, B1 and B0, backwards of two slots; no two overlap."""

    slots: tuple[Tile, ...]


AnyBlock = BuildingBlock | Tiles


@lru_cache(maxsize=8)
def walking(p: int) -> list[tuple[AnyBlock, Offsets]]:
    """The shortest block for each choice of four steps of one to four slots between ranks, one step for each leg."""
    found: list[tuple[AnyBlock, Offsets]] = []
    for down, climb, back_down, back_up in product(range(1, 5), repeat=4):
        if down + climb > SLOTS or back_down + back_up > SLOTS:
            continue
        for g1, g2, g3 in sorted(product(range(1, SLOTS + 1), repeat=3), key=sum):
            block = BuildingBlock((down, down, climb, back_down, back_up), p - 1, (g1, g2, g3))
            if apart(offsets_of(p, block, weights=False)):
                found.append((block, offsets_of(p, block)))
                break
    return found


def _laid(tiles: Sequence[Tile]) -> Offsets:
    """The earliest offsets of one microbatch with these slots."""
    down, up = list(range(len(tiles))), list(range(len(tiles) - 1, -1, -1))
    legs: list[list[int]] = []
    ready = 0
    for op, way in enumerate((down, up, down, up)):
        leg = [0] * len(tiles)
        for rank in way:
            leg[rank] = ready + (tiles[rank][op] - ready) % SLOTS
            ready = leg[rank] + LENGTHS[op]
        legs.append(leg)
    f0, f1, b1, b0 = legs
    return f0, f1, b1, b0, b1, b0


def offsets_of(p: int, block: AnyBlock, *, weights: bool = True) -> Offsets:
    """The offsets of a block; `steps` of B down that are 0 mean those of F down."""
    if isinstance(block, Tiles):
        return _laid(block.slots)
    ka, kb, climb, back_down, back_up = block.steps
    way, back, up = [0], [0], list(range(p - 1, -1, -1))
    for i in range(p - 1):
        way.append(way[-1] + (ka if i < block.change else kb))
        back.append(back[-1] + (back_down or (ka if i < block.change else kb)))
    g1, g2, g3 = block.turns
    f1 = [way[-1] + g1 + climb * u for u in up]
    b1 = [f1[0] + g2 + w for w in back]
    b0 = [b1[-1] + g3 + back_up * u for u in up]
    w1, w0 = _weights(p, way, f1, b1, b0) if weights else ([], [])
    return way, f1, b1, b0, w1, w0


def later(offsets: Offsets, periods: int) -> Offsets:
    """Offsets with `periods` more periods between the last F and the first B, one for each further slice: whole periods
    collide with nothing, and each keeps one more unit."""
    if not periods:
        return offsets
    late = SLOTS * periods
    f0, f1, b1, b0, w1, w0 = offsets
    return f0, f1, *([slot + late for slot in each] for each in (b1, b0, w1, w0))  # type: ignore[return-value]


def apart(offsets: Offsets) -> bool:
    """Whether no two of F and B share a slot on any rank."""
    return all(len({slot % SLOTS for slot in slots}) == 4 for slots in zip(*offsets[:4], strict=True))


def _weights(p: int, f0: list[int], f1: list[int], b1: list[int], b0: list[int]) -> tuple[list[int], list[int]]:
    """The two free slots of each rank to its two W, so that they wait least."""
    w1, w0 = [0] * p, [0] * p
    for r in range(p):
        used = {f0[r] % SLOTS, f1[r] % SLOTS, b1[r] % SLOTS, b0[r] % SLOTS}
        x, y = (slot for slot in range(SLOTS) if slot not in used)
        first = (b1[r] + (x - b1[r]) % SLOTS, b0[r] + (y - b0[r]) % SLOTS)
        second = (b1[r] + (y - b1[r]) % SLOTS, b0[r] + (x - b0[r]) % SLOTS)
        w1[r], w0[r] = min(first, second, key=sum)
    return w1, w0
