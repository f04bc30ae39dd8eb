"""Building blocks for the V placement: one microbatch's ops at offsets that repeat every six slots.

With T_F = T_B = T_W a rank works 6 slots per microbatch (F, B, W of two stages). A block fixes the slot of each op of
one microbatch on each rank; if the six offsets of a rank differ modulo 6, blocks can follow one another every 6 slots.
Blocks differ in the steps between neighbouring ranks on the way down (ka slots for the first K steps, then kb) and in
the rests at the three turns; the way up takes one slot per rank. Short blocks hold little memory: V-Min, V-Half and
ZB-V are members. Source: arXiv 2405.15362, section 3; the enumeration is ours.

With fused backwards of two slots, the same step from rank to rank on each leg never keeps the offsets of all ranks
apart. Then colliding ops run one after the other; or the steps follow a walk through the 36 tilings of six slots with
two F and two backwards, each rank's tiling reached from its neighbour's with few rests (`Tiles`). A cycle of six ranks
rests least: 8 slots per rank over the four legs, 2/3 of 1F1B's memory, as 1F1B-V of arXiv 2405.15362.

Blocks make the best orders under tight memory, since a list scheduler loses a little in every period there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush, nsmallest
from itertools import pairwise, permutations, product
from typing import NamedTuple

from zbc.compiler.blocks import (
    LENGTHS,
    SLOTS,
    AnyBlock,
    BuildingBlock,
    Offsets,
    Tile,
    Tiles,
    apart,
    later,
    offsets_of,
    walking,
)
from zbc.compiler.search.listing import EPS, ROOM
from zbc.compiler.search.problem import Problem
from zbc.compiler.search.table import Table

WALKS = 4  # with the least rests, kept for each last tile


def fitting(problem: Problem) -> list[AnyBlock]:
    """The blocks whose steady state keeps to the limit on the first, middle and last rank, by descending memory. For V
    placements of two chunks; else nothing."""
    p = problem.p
    down, up = list(range(p)), list(range(p - 1, -1, -1))
    if problem.v != 2 or problem.rank != down + up or p < 2:
        return []
    found = []
    for place, (block, offsets) in enumerate(_blocks(p, not any(problem.w))):
        widened = later(offsets, problem.slices - 1)
        held = 0.0
        for rank in sorted({0, p // 2, p - 1}):
            most, limit = _most(problem, widened, rank)
            if most > limit + ROOM:
                break
            held += most
        else:
            found.append((-held, place, block))
    return [block for *_, block in sorted(found)]


def in_flight(problem: Problem) -> list[AnyBlock]:
    """The blocks whose F and B keep to the limit if each W followed its B; short walks first, the fullest first. For
    slices in V placements of two chunks; else nothing."""
    p = problem.p
    if problem.slices == 1 or problem.v != 2 or problem.rank != [*range(p), *reversed(range(p))] or p < 2:
        return []
    found = []
    for family, blocks in enumerate((walking(p), _blocks(p, whole=False))):
        for place, (block, offsets) in enumerate(blocks):
            held = [_most(problem, later(offsets, problem.slices - 1), rank, late=False) for rank in range(p)]
            if all(most <= limit + ROOM for most, limit in held):
                found.append((family, -sum(most for most, _ in held), place, block))
    return [block for *_, block in sorted(found)]


def expanded(problem: Problem, block: AnyBlock) -> list[int]:
    """All units, SLOTS apart, merged into one order per rank."""
    m, offsets = problem.m, later(offsets_of(problem.p, block), problem.slices - 1)
    order: list[int] = []
    for rank in range(problem.p):
        entries = _cycle(problem, offsets, rank)
        leads = [lead for lead, _, _ in entries]
        for n in range(min(leads), max(leads) + m):
            order += [op + n - lead for lead, op, _ in entries if 0 <= n - lead < m]
    return order


def _cycle(problem: Problem, offsets: Offsets, rank: int) -> list[tuple[int, int, float]]:
    """The six ops of a rank in the order of a period: how many periods late, the first op's number, and its change."""
    m, n = problem.m, problem.n_stages
    stages = (rank, n - 1 - rank)
    changes = _changes(problem, rank)
    return [
        (lead, (family * n + stages[leg]) * m, changes[family][leg])
        for lead, family, leg in _period(tuple(times[rank] for times in offsets))
    ]


def _changes(problem: Problem, rank: int) -> tuple[tuple[float, float], ...]:
    """Changes of the units held by F, B and W of a rank's stages, down and up."""
    stages = (rank, problem.n_stages - 1 - rank)
    (kept, kept_up), (left, left_up) = ([of[s] for s in stages] for of in (problem.keep_b, problem.keep_w))
    return (kept, kept_up), (left - kept, left_up - kept_up), (-left, -left_up)


@lru_cache(maxsize=1 << 16)  # used under all costs and limits
def _period(times: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """The six ops by their slot: how many periods late, F, B or W, and whether down or up."""
    found = []
    for (family, leg), time in zip(((0, 0), (0, 1), (1, 1), (1, 0), (2, 1), (2, 0)), times, strict=True):
        lead, slot = divmod(time, SLOTS)
        found.append((slot, family, lead, leg))
    return tuple((lead, family, leg) for _, family, lead, leg in sorted(found))


def _most(problem: Problem, offsets: Offsets, rank: int, *, late: bool = True) -> tuple[float, float]:
    """A rank's peak units in steady state, and its limit; `late`: W in its slot, not after its B."""
    offsets = offsets if late else (*offsets[:4], *offsets[2:4])
    changes, entries = _changes(problem, rank), _period(tuple(times[rank] for times in offsets))
    held = most = -sum(lead * changes[family][leg] for lead, family, leg in entries)
    for _, family, leg in entries:
        held += changes[family][leg]
        most = max(most, held)
    return most, problem.limit[rank]


@lru_cache(maxsize=8)
def _blocks(p: int, whole: bool) -> list[tuple[AnyBlock, Offsets]]:
    """The blocks of p ranks; for many ranks only some of the places at which the step changes."""
    found: list[AnyBlock] = [*_tiled(p)] if whole else [*_with_split_backwards(p)]
    return [(block, offsets_of(p, block)) for block in found]


def _with_split_backwards(p: int) -> Iterator[BuildingBlock]:
    """Yields blocks without two ops in one slot."""
    places = range(1, p) if p <= 8 else (1, p // 2, p - 1)
    for ka in range(1, 6):
        for kb in range(1, ka + 1):
            for change in places if ka != kb else (p - 1,):
                for g1, g2, g3 in product(range(1, SLOTS + 1), repeat=3):
                    if _meet_at_the_ends(p, ka * change + kb * (p - 1 - change), g1, g2, g3):
                        continue
                    block = BuildingBlock((ka, kb, 1, 0, 1), change, (g1, g2, g3))
                    if apart(offsets_of(p, block, weights=False)):
                        yield block


def _meet_at_the_ends(p: int, way: int, g1: int, g2: int, g3: int) -> bool:
    """Whether two of the first four ops share a slot on the first rank or on the last; `way`: slots of F down."""
    first = (0, way + g1 + p - 1, way + g1 + p - 1 + g2, 2 * way + g1 + 2 * (p - 1) + g2 + g3)
    last = (way, way + g1, 2 * way + g1 + p - 1 + g2, 2 * way + g1 + p - 1 + g2 + g3)
    return any(len({slot % SLOTS for slot in ends}) < len(ends) for ends in (first, last))


def _tiled(p: int) -> list[Tiles]:
    """Walks with few rests over all ranks. The first tile begins with F0: a later start is the same block."""
    tiles = [_tile(at, turn) for at in range(SLOTS) for turn in permutations((1, 2, 3))]
    rests = [[_rests(a, b) for b in tiles] for a in tiles]
    walks: list[list[tuple[int, tuple[int, ...]]]] = [[] if tile[0] else [(0, (k,))] for k, tile in enumerate(tiles)]
    for _ in range(p - 1):
        walks = [
            nsmallest(WALKS, ((cost + rests[walk[-1]][k], (*walk, k)) for found in walks for cost, walk in found))
            for k in range(len(tiles))
        ]
    best = sorted(walk for found in walks for walk in found)
    return [Tiles(tuple(tiles[k] for k in walk)) for _, walk in best]


def _tile(at: int, turn: tuple[int, ...]) -> Tile:
    """F0 at a slot, followed by the others in this order."""
    slots = [at] * len(LENGTHS)
    for before, op in zip((0, *turn), turn, strict=False):
        slots[op] = slots[before] + LENGTHS[before]
    f0, f1, b1, b0 = (slot % SLOTS for slot in slots)
    return f0, f1, b1, b0


def _rests(near: Tile, far: Tile) -> int:
    """Slots that F and B of a microbatch rest between a rank and the next, down and up."""
    down, up = (0, 2), (1, 3)
    steps = [(far[op] - near[op] - LENGTHS[op]) % SLOTS for op in down]
    return sum(steps) + sum((near[op] - far[op] - LENGTHS[op]) % SLOTS for op in up)


class Played(NamedTuple):
    """The recipe of an order of F and B as in a building block of slices, with W in waits: see `played`."""

    block: AnyBlock


def played(problem: Problem, table: Table, order: Sequence[int]) -> list[int] | None:
    """A rank-major order like `order` but for its W, each of which fills a wait of its rank or frees full memory. None
    if it stops, for lack of memory or of an input. A block of slices has whole periods of rest between the last F of a
    slice and its first B, in which other slices run. At the beginning and at the end of a step there are none, so W in
    its slot would delay the following ops."""
    step = problem.n_stages * problem.m  # F, B and W have `step` numbers each, in this order
    todo = [deque(op for op in order[low:high] if op < 2 * step) for low, high in pairwise(table.first)]
    missing, ready = list(table.count), [0.0] * problem.size
    head, reader, lag, after = table.feeds
    due: list[deque[int]] = [deque() for _ in todo]
    made: list[list[int]] = [[] for _ in todo]
    held, free = [0.0] * problem.p, [0.0] * problem.p
    heap = [(0.0, r) for r in range(problem.p)]
    while heap:
        now, r = heappop(heap)
        if now < free[r] - EPS:
            continue
        op = todo[r][0] if todo[r] else -1
        runs = op >= 0 and not missing[op] and ready[op] <= now + EPS
        if runs and held[r] + table.change[op] > problem.limit[r] + ROOM:
            runs = False
        if runs:
            todo[r].popleft()
            if op >= step:
                due[r].append(op + step)
        elif due[r]:
            op = due[r].popleft()
        else:
            if op >= 0 and not missing[op] and ready[op] > now + EPS:
                heappush(heap, (ready[op], r))
            continue
        made[r].append(op)
        held[r] += table.change[op]
        end = free[r] = now + table.length[op]
        heappush(heap, (end, r))
        edge = head[op]
        while edge >= 0:
            other = reader[edge]
            missing[other] -= 1
            ready[other] = max(ready[other], end + lag[edge])
            if not missing[other]:
                heappush(heap, (ready[other], table.rank[other]))
            edge = after[edge]
    return [op for mine in made for op in mine] if sum(map(len, made)) == problem.size else None
