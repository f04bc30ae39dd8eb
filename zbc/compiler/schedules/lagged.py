"""GPipe, 1F1B, ZB-H1 and ZB-H2: one family with two knobs per rank.

`warmup(r)` forwards run before the first backward. Without `lag`, backward is one op, BW; with it, the weight gradient
W runs `lag(r)` microbatches after its input gradient B. For p ranks and m microbatches:

    schedule   warmup(r)     lag(r)   activations held on rank r   source
    gpipe      m             -        m                            arXiv 1811.06965
    1f1b       p-1-r         -        p-r                          arXiv 2104.04473
    eager-1f1b 2(p-1-r)      -        2(p-r)-1                     arXiv 2211.05322, section 4.2
    zb-h1      p-1-r         r        p                            arXiv 2401.10241, section 2.2
    zb-h2      2(p-1-r)      2r       2p-1                         arXiv 2401.10241, section 2.2

With fewer than 2p-1 microbatches the pipeline empties before every rank has a full set of delayed W: ZB-H2 then lags by
r + (m-p) at most, and by r for m <= p, so that no rank ends with more W than the others have work.

With k slices of each microbatch units are slices, and k - 1 more of them warm up (Seq1F1B, arXiv 2406.03488): F runs
slices 0 to k-1, backwards k-1 to 0, so the first backward comes after the last F. The bubble equals that of k times as
many microbatches of a k-th each, and rank r holds (warmup(r) + lag(r) + k) / k microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zbc.compiler.schedules.request import Request
from zbc.ir import Kind, Op, Placement, Program, nth

PerRank = Callable[[int], int]


def gpipe(request: Request) -> Program:
    """All forwards, then all backwards."""
    return lagged("gpipe", request, warmup=lambda r: request.units)


def one_f_one_b(request: Request) -> Program:
    """One forward, one backward: as few microbatches in flight as keep the pipeline full."""
    return lagged("1f1b", request, warmup=lambda r: request.p - 1 - r)


def eager_1f1b(request: Request) -> Program:
    """1F1B that runs twice as far ahead, so that transfers have time."""
    return lagged("eager-1f1b", request, warmup=lambda r: 2 * (request.p - 1 - r))


def zb_h1(request: Request) -> Program:
    """1F1B with W delayed into the bubble; memory of 1F1B."""
    return lagged("zb-h1", request, warmup=lambda r: request.p - 1 - r, lag=lambda r: r)


def zb_h2(request: Request) -> Program:
    """Enough forwards up front to hide the way to the last stage and back; no bubble inside a rank's span."""
    spare = max(0, request.units - request.p - request.slices + 1)
    return lagged("zb-h2", request, warmup=lambda r: 2 * (request.p - 1 - r), lag=lambda r: min(2 * r, r + spare))


def between_h1_and_h2(request: Request) -> Iterator[Program]:
    """ZB-H1, ZB-H2 and some orders between: up to `extra` forwards more than 1F1B in flight, memory p + extra."""
    p = request.p
    for extra in range(0, p, 1 + p // 10):
        yield lagged(
            f"zb-h1+{extra}",
            request,
            warmup=lambda r, extra=extra: p - 1 - r + min(extra, p - 1 - r),  # type: ignore[misc]
            lag=lambda r, extra=extra: r + min(extra, r),  # type: ignore[misc]
        )
    yield zb_h2(request)


def lagged(name: str, request: Request, *, warmup: PerRank, lag: PerRank | None = None) -> Program:
    """One program of the family. With slices the first backward follows the last F: `slices` - 1 more warm up."""
    p, m, k = request.p, request.m, request.slices
    ranks = []
    for r in range(p):
        ahead = min(warmup(r) + k - 1, request.units)
        ranks.append(tuple(in_turn(r, request.units, k, ahead, None if lag is None else min(lag(r), request.units))))
    return Program(Placement.linear(p), m, tuple(ranks), history=(name,), slices=k)


def in_turn(r: int, units: int, slices: int, warmup: int, lag: int | None = None) -> Iterator[Op]:
    """Yields the ops of a stage: `warmup` forwards, then one forward and one backward in turn."""
    yield from (nth(Kind.F, r, i, slices) for i in range(warmup))
    for i in range(units):
        if warmup + i < units:
            yield nth(Kind.F, r, warmup + i, slices)
        yield nth(Kind.BW if lag is None else Kind.B, r, i, slices)
        if lag is not None and i >= lag:
            yield nth(Kind.W, r, i - lag, slices)
    if lag is not None:
        yield from (nth(Kind.W, r, i, slices) for i in range(units - lag, units))
