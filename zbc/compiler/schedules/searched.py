"""Schedules found by search, for real op times and any memory limit.

    name       placement   backward   limit on activations, unless the job gives one
    zb-auto    linear      B, W       none ("1.0x" is ZB-1p, "2.0x" is ZB-2p of arXiv 2401.10241)
    v-auto     V           B, W       none
    zb-v       V           B, W       that of 1F1B: p units           arXiv 2401.10241
    v-half     V           B, W       half of 1F1B: (p+2)//2 units    arXiv 2405.15362
    v-min      V           B, W       a third of 1F1B: (p+4)//3 units arXiv 2405.15362
    1f1b-v     V           one op     none
    looped-zb  looped      B, W       none; with "1.0x" the generalized interleaved schedule of arXiv 2503.01328

Hand-made orders for the same placement (ZB-H1, ZB-H2, ZB-V, ...) are among the candidates, so the result is never worse
than any of them that fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.lagged import between_h1_and_h2
from zbc.compiler.schedules.looped import gis, interleaved_1f1b
from zbc.compiler.schedules.request import Request
from zbc.compiler.schedules.vshape import zb_v as zb_v_by_hand
from zbc.compiler.search.cyclic import FEW_OPS
from zbc.compiler.search.engine import Engine, available, compiles_first
from zbc.compiler.search.feasible import check_feasible, least_of, one_by_one
from zbc.compiler.search.pipes import with_sums
from zbc.compiler.search.portfolio import search, visits_of
from zbc.compiler.search.problem import Problem
from zbc.compiler.sim.bounds import bounds
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program
from zbc.text import at_least, short

_OWN_LIMIT: dict[str, Callable[[int], int]] = {  # activation units of p ranks
    "zb-v": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
}


def own_limit(name: str, p: int, costs: Costs | None = None) -> float | None:
    """The limit implied by the name of a schedule, if any, in activation units of p ranks. With slices it is as many
    slices as it is microbatches without, and one more for each slice that has to come before the first can return. They
    are the rest of a returning microbatch, whole ones, and the beginning of the last: of both ends the first slices,
    which balanced cuts make the longest. The buffers that slices share are added."""
    if name not in _OWN_LIMIT:
        return None
    if costs is None or costs.slices == 1:
        return _OWN_LIMIT[name](p)
    k, stages = costs.slices, range(costs.stages)
    sizes = [sum(costs.held(Op(Kind.F, s, 0, 0, j)) for s in stages) for j in range(k)]
    buffers = sum(costs.units("kv")) if "kv" in costs.amounts else 0.0
    units, begun = _OWN_LIMIT[name](p) + k - 1, [0.0, *accumulate(sizes)]
    most = max(
        (units - a - b) // k * begun[k] + begun[a] + begun[b]
        for a in range(k + 1)
        for b in range(k + 1)
        if a + b <= units and (units - a - b) % k == 0
    )
    return (most + buffers) / (begun[k] or 1.0)


def even_slices(placement: Placement, slices: int) -> Costs:
    """The papers' unit costs, for microbatches in slices of equal time."""
    costs = Costs.uniform(placement)
    return costs if slices == 1 else costs.cut([1 / slices] * slices)


def zb_v(request: Request) -> Program:
    """The V placement at the activations of 1F1B; without costs, the order of the paper."""
    if request.costs is None and request.slices == 1:
        return zb_v_by_hand(request)
    return found("zb-v", lambda p, _: Placement.vshape(p), request)


def _at_most(name: str, request: Request) -> Request:
    """The request with the schedule's own limit per rank, or its tighter one. Raises E303 if it is too small."""
    costs = request.costs or even_slices(Placement.vshape(request.p), request.slices)
    given, units = request.limits(), own_limit(name, request.p, costs) or 0.0
    if request.costs is not None:
        needs = least_of(Placement.vshape(request.p), request.costs)
        rank = max(range(request.p), key=lambda r: needs[r])
        if needs[rank] > units + 1e-6:
            text = f"does not fit: {name} is for {short(units)} activation units per rank"
            text += f", rank {rank} holds {needs[rank]:.6g} for one microbatch alone"
            share = at_least(needs[rank] / request.p, 6)
            raise ZbcError("E303", text, hint=f'use v-auto, with memory_limit = "{share}x"')
    return replace(request, memory_limit=tuple(min(units, limit) for limit in given) if given else float(units))


# CPU seconds of searches by plain Python in this process, and those that loading compiled kernels takes at most.
_PLAIN, LOADING = [0.0], 1.5


def found(
    name: str,
    place: Callable[[int, int], Placement],
    request: Request,
    *,
    split: bool = True,
    orders: Iterable[Program] = (),
) -> Program:
    """The schedule of that name: the fastest order found; `place`: of p ranks with v stages each, `orders`: further
    ones to begin with. Raises E303."""
    placement, request = place(request.p, request.v), _at_most(name, request) if name in _OWN_LIMIT else request
    costs = request.costs or even_slices(placement, request.slices)
    costs = costs if split else costs.joined()
    problem = Problem.make(placement, costs, request.m, request.limits())
    check_feasible(name, placement, costs, request.limits())
    loads = request.budget > 0 or request.compiled or problem.size > FEW_OPS
    engine = Engine(available() and (loads or (_PLAIN[0] > LOADING and not compiles_first())))
    judge = None
    if problem.pipes > 1 and any(costs.column("reduce")):  # an order that leaves time for sums is better

        def judge(order: Sequence[int]) -> float:
            return with_sums(problem.program(order, name), costs, request.objective)

    @cache
    def made(order: Sequence[int]) -> Program:
        program = problem.program(order, name)
        return program if split else fused(program)

    began, fits = time.process_time(), request.fits
    best = search(
        problem,
        request.objective,
        visits_of(request.budget, engine),
        engine,
        orders=_by_hand(problem, placement, request, orders),
        target=bounds(placement, costs, request.m, problem.limit).of(request.objective),
        judge=judge,
        fits=fits and (lambda order: fits(made(order))),
    )
    _PLAIN[0] += 0.0 if engine.compiled else time.process_time() - began
    if best is None:  # one_by_one always fits
        raise ZbcError("E303", f"schedule: {name} found no order")
    return made(best.order)


def fused(program: Program) -> Program:
    """The program with each B as BW, and without W."""
    ranks = [
        tuple(op._replace(kind=Kind.BW) if op.kind is Kind.B else op for op in ops if op.kind is not Kind.W)
        for ops in program.ranks
    ]
    return replace(program, ranks=tuple(ranks))


def _by_hand(
    problem: Problem, placement: Placement, request: Request, orders: Iterable[Program]
) -> Iterator[tuple[str, Sequence[int]]]:
    """Orders for this placement that need no search."""
    plain = Request(request.p, problem.m // problem.slices, problem.v, slices=problem.slices)
    programs = orders
    if placement == Placement.linear(request.p):
        programs = between_h1_and_h2(plain)
    elif placement == Placement.vshape(request.p):
        programs = (zb_v_by_hand(plain),) if plain.slices == 1 else ()
    elif placement == Placement.looped(request.p, plain.v):
        programs = (interleaved_1f1b(plain), *((gis(plain),) if plain.slices > 1 else ()))
    for program in programs:
        yield program.history[0], problem.numbers(program)
    yield "one by one", one_by_one(problem)
