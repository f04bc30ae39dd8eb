"""Orders of ops for a graph of stages, one stage on each rank.

    1f1b        before its first backward a rank runs as many forwards as edges are on its longest path to the loss
    eager-1f1b  twice as many
    gpipe       all
    zb-h1       as 1f1b, with W delayed by as many microbatches as edges are on its longest path from the data, or by
                as many as leave it no more activations than the deepest rank has; both are tried
    zb-h2       twice as many of both

In a chain they equal the schedules of these names. The order of a chain of the same stages, in their order, is an order
of the graph as well, with more waits than the graph has. It is tried too, so that a graph is never slower than its
chain. A list scheduler then follows each of them at the costs of the job, in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.lagged import eager_1f1b, gpipe, lagged, one_f_one_b, zb_h1, zb_h2
from zbc.compiler.schedules.request import Request
from zbc.compiler.search.follow import Manner, fits, follow
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.ways import longest
from zbc.ir import Placement, Program

_FAR = 16  # ops to look ahead while the next one's input has not arrived


def branched(kind: str, placement: Placement, request: Request) -> Program:
    """The order with the shortest step that keeps to the memory of the schedule, or to the limit for `auto`."""
    costs = request.costs or Costs.uniform(placement)
    plain = [replace(order, placement=placement) for order in _by_hand(kind, placement, request)]
    most = ([max(accumulate(map(costs.held, ops), initial=0.0)) for ops in order.ranks] for order in plain)
    limits = [max(column) for column in zip(*most, strict=True)]
    if request.memory_limit is not None:
        limits = list(map(min, limits, request.limits() or limits))
        plain = [order for order in plain if fits(order, costs, limits)] or plain[:1]
    tried = [*plain, *(follow(order, costs, limits, Manner(_FAR)) for order in plain if fits(order, costs, limits))]
    best = min(tried, key=lambda order: Context(order, costs).step_ms(request.objective))
    return replace(best, history=("zb-auto" if kind == "auto" else kind,))


def _by_hand(kind: str, placement: Placement, request: Request) -> Iterator[Program]:
    """Yields orders without costs; those of one schedule hold no more than it does in a chain."""
    edges = dict.fromkeys(placement.edges, 1.0)
    none = [0.0] * placement.stages
    ahead, behind = (
        [round(ms) for ms in longest(placement, none, edges, reads)] for reads in (placement.sinks, placement.sources)
    )
    deepest = max(ahead)
    fused = {"1f1b": (ahead, one_f_one_b), "eager-1f1b": ([2 * far for far in ahead], eager_1f1b)}
    fused["gpipe"] = [request.units] * placement.stages, gpipe
    if kind in fused:
        warmup, chain = fused[kind]
        yield lagged(kind, request, warmup=warmup.__getitem__)
        yield chain(request)
        return
    rules: tuple[Sequence[int], ...] = (behind, [deepest - far for far in ahead])
    first = deepest if kind == "zb-h2" else 1
    if kind != "zb-h2":
        for lags in rules:
            yield lagged(kind, request, warmup=ahead.__getitem__, lag=lags.__getitem__)
        yield zb_h1(request)
    if kind == "zb-h1":
        return
    for extra in range(first, deepest + 1):
        for lags in rules:
            yield lagged(kind, request, warmup=_more(ahead, extra), lag=_more(lags, extra))
    yield zb_h2(request)


def _more(counts: Sequence[int], extra: int) -> Callable[[int], int]:
    return lambda rank: counts[rank] + min(extra, counts[rank])
