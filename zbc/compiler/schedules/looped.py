"""Interleaved 1F1B and breadth-first: v stages per rank, dealt round and round (stage s on rank s mod p).

Both walk the rank's stages in rounds of microbatches: a round of g microbatches visits chunk 0 g times, then chunk 1 g
times, and so on; backward the chunks come in reverse. Breadth-first makes one round of all m. Interleaved makes rounds
of p and alternates F and BW after a warm-up:

    schedule           round   warm-up forwards on rank r      activations held      source
    interleaved-1f1b   p       2(p-1-r) + (v-1)p               p + (p-1)/v           arXiv 2104.04473
    breadth-first      m       all                             m                     arXiv 2211.05953

Interleaved rounds may be longer or shorter, g = `group` microbatches instead of p. They are as even as they can be when
the group does not divide m: floor(m/g) rounds of at least g microbatches each, and the warm-up counts the longest.

A round of g < p does not cover the pipeline: rank 0 has to wait for its own output of chunk 0 before chunk 1 begins, so
the bubble grows, and memory shrinks with g. Warm-ups w(r) = (v-1)g + d(r) are free of deadlock as long as d falls along
the ranks and d(0) - d(p-1) <= 2g: BW k of the last rank needs, through rank 0, forward w(0) + k - 2g of the last rank,
which has to be among its first w(p-1) + k. So d(r) = min(2(p-1-r), 2g-1): at 2g itself ranks would wait more.

    g < p: warm-up (v-1)g + min(2(p-1-r), 2g-1)      activations held g (v+1)/v, from 2(p-1) >= 2g-1 on

With `early` microbatches more in the warm-up (Kimi K2, arXiv 2507.20534) a backward never waits for the forward before
it: the two can be an overlap group, whose ops hide each other's exchanges (`overlap`). That holds early / v more.

The generalized interleaved schedule (`gis`, arXiv 2503.01328) splits the backward, W right after its B, and so needs
half the distance in the warm-up:

    gis                g       (v-1)g + p-r                        (p + (v-1)g)/v, g from p/2 to p

Its rounds are of g, and of the rest at the end; a short round has the order of a full one.

With k slices of each microbatch a round is of ceil(p/k) microbatches, so of k ceil(p/k) >= p slices, and k - 1 more of
them warm up. Rounds of p slices, as in the public code of arXiv 2406.03488, block if one splits a microbatch.
"""

from __future__ import annotations

from zbc.compiler.schedules.request import Request
from zbc.ir import Kind, Op, Placement, Program, nth


def breadth_first(request: Request) -> Program:
    """All microbatches through one chunk before the next chunk."""
    p, m, v, k = request.p, request.m, request.v, request.slices
    ranks = tuple(tuple(op for kind in (Kind.F, Kind.BW) for op in _walk(kind, r, p, v, [m * k], k)) for r in range(p))
    return Program(Placement.looped(p, v), m, ranks, history=("breadth-first",), slices=k)


def interleaved_1f1b(request: Request) -> Program:
    """1F1B over v chunks per rank: the bubble shrinks by v, the number of transfers grows by v."""
    p, m, v, k = request.p, request.m, request.v, request.slices
    group = request.group or -(-p // k)
    sizes = [k * size for size in round_sizes(group, m)]
    reach = 2 * (p - 1) if k * group >= p else 2 * min(sizes) - 1
    ranks, early = [], request.early or 0
    hides = request.overlap and early > 0 and k * group >= p  # in shorter rounds a backward feeds its paired forward
    mark = [Op(Kind.OVERLAP, 0)] if hides else []
    for r in range(p):
        forwards, backwards = _walk(Kind.F, r, p, v, sizes, k), _walk(Kind.BW, r, p, v, sizes, k)
        warmup = min(min(2 * (p - 1 - r), reach) + (v - 1) * max(sizes) + k - 1 + early, len(forwards))
        ops = forwards[:warmup]
        for step, forward in enumerate(forwards[warmup:]):
            ops += [*mark, forward, backwards[step]]
        ops += backwards[len(forwards) - warmup :]
        ranks.append(tuple(ops))
    return Program(Placement.looped(p, v), m, tuple(ranks), history=("interleaved-1f1b",), slices=k)


def gis(request: Request) -> Program:
    """Interleaved 1F1B with W after each B: shorter warm-ups, and less memory with rounds of fewer than p."""
    p, m, v, k = request.p, request.m, request.v, request.slices
    group = request.group or -(-p // k)
    sizes = [k * group] * -(-m // group)
    ranks = []
    for r in range(p):
        forwards, backwards = _walk(Kind.F, r, p, v, sizes, k), _walk(Kind.B, r, p, v, sizes, k)
        warmup = min((v - 1) * k * group + p - r + k - 1, len(forwards))
        ops = forwards[:warmup]
        for step, backward in enumerate(backwards):
            ops += [backward, backward._replace(kind=Kind.W), *forwards[warmup + step : warmup + step + 1]]
        ranks.append(tuple(op for op in ops if op.mb < m))
    return Program(Placement.looped(p, v), m, tuple(ranks), history=("gis",), slices=k)


def round_sizes(group: int, m: int) -> list[int]:
    """m microbatches as floor(m/group) (at least one) rounds whose sizes differ by at most one, larger rounds first."""
    rounds = max(1, m // group)
    return [m // rounds + (k < m % rounds) for k in range(rounds)]


def _walk(kind: Kind, r: int, p: int, v: int, sizes: list[int], slices: int) -> list[Op]:
    """The rank's ops of one direction, round by round; backward visits the chunks in reverse. Sizes are in units."""
    chunks = range(v) if kind is Kind.F else range(v - 1, -1, -1)
    ops, start = [], 0
    for size in sizes:
        ops += [nth(kind, chunk * p + r, i, slices) for chunk in chunks for i in range(start, start + size)]
        start += size
    return ops
