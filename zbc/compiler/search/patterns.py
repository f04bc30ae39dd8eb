"""Building blocks for the V placement: one microbatch's ops at offsets that repeat every six slots without colliding.

With T_F = T_B = T_W a rank works 6 slots per microbatch (F, B, W of two stages). A block fixes the slot of each op of
one microbatch on each rank; if the six offsets of a rank differ modulo 6, blocks can follow one another every 6 slots.
Blocks differ in the steps between neighbouring ranks on the way down (ka slots for the first K steps, then kb) and in
the rests at the three turns; the way up takes one slot per rank. Short blocks hold little memory: V-Min, V-Half and
ZB-V are members. Source: arXiv 2405.15362, section 3; the enumeration is ours.

Blocks make the best orders where memory is tight, since a list scheduler loses a little in every period there.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.search.problem import KINDS, Problem

SLOTS = 6
Offsets = tuple[list[int], list[int], list[int], list[int], list[int], list[int]]  # F0 F1 B1 B0 W1 W0, by rank


def orders(problem: Problem) -> Iterator[tuple[str, list[int]]]:
    """Every building block of the problem's p as a rank-major order, for V placements of two chunks; else nothing."""
    p = problem.p
    down, up = list(range(p)), list(range(p - 1, -1, -1))
    if problem.v != 2 or problem.rank != down + up or p < 2:
        return
    rows = problem.rows()
    bases = [rows.bases(kind) for kind in KINDS]
    for name, offsets in blocks(p):
        yield name, _expand(bases, problem.m, offsets)


def blocks(p: int) -> Iterator[tuple[str, Offsets]]:
    """The blocks of p ranks; for many ranks only some of the places where the step changes."""
    places = range(1, p) if p <= 8 else (1, p // 2, p - 1)
    for ka in range(1, 6):
        for kb in range(1, ka + 1):
            for change in places if ka != kb else (p - 1,):
                steps = [0, *(ka if i < change else kb for i in range(p - 1))]
                yield from _turns(p, steps, f"{ka}.{kb}.{change}")


def _turns(p: int, steps: list[int], name: str) -> Iterator[tuple[str, Offsets]]:
    """The ways to turn at the last rank, at the first, and at the last again without two ops in one slot."""
    way = [sum(steps[: r + 1]) for r in range(p)]
    up = list(range(p - 1, -1, -1))
    for g1 in range(1, SLOTS + 1):
        f1 = [way[-1] + g1 + u for u in up]
        if _collide(way, f1):
            continue
        for g2 in range(1, SLOTS + 1):
            b1 = [f1[0] + g2 + w for w in way]
            if _collide(way, b1) or _collide(f1, b1):
                continue
            for g3 in range(1, SLOTS + 1):
                b0 = [b1[-1] + g3 + u for u in up]
                if _collide(way, b0) or _collide(f1, b0) or _collide(b1, b0):
                    continue
                w1, w0 = _weights(p, way, f1, b1, b0)
                yield f"block {name} {g1}{g2}{g3}", (way, f1, b1, b0, w1, w0)


def _collide(a: list[int], b: list[int]) -> bool:
    return any((x - y) % SLOTS == 0 for x, y in zip(a, b, strict=True))


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


def _expand(bases: list[list[int]], m: int, offsets: Offsets) -> list[int]:
    """All microbatches, SLOTS apart, merged into one order per rank. `bases`: the first F, B and W of each stage."""
    f, b, w = bases
    f0, f1, b1, b0, w1, w0 = offsets
    order: list[int] = []
    for down in range(len(f0)):
        up = -1 - down
        starts = (
            (f0[down], f[down]),
            (f1[down], f[up]),
            (b1[down], b[up]),
            (b0[down], b[down]),
            (w1[down], w[up]),
            (w0[down], w[down]),
        )
        timed = [(time + i * SLOTS, op + i) for time, op in starts for i in range(m)]
        timed.sort()
        order += [op for _, op in timed]
    return order
