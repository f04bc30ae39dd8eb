"""Chimera, BitPipe and Hanayo: stages that run down and up the ranks, and microbatches that come in units.

A pipe has v legs of p stages each, down the ranks and up again. With two pipes the second is the mirror image of the
first and holds a replica of every stage. A unit is as many microbatches as there are ranks, dealt to the pipes in turn;
search/pipes.py places its ops. At T_F = T_B = T_W = 1 and m = p:

    schedule   pipes   v         makespan         activations, fewest and most       source
    chimera    2       1         3m + 2(p-2)      p/2 + 1 to p                       arXiv 2107.06925
    bitpipe    2       2, ..     3m + 2(p-2)/v    p - (p/2-1)/v to p                 arXiv 2410.19367
    hanayo     1       2W        3m + 4(p-1)/v    p - (p-1)/v to p                   arXiv 2308.15762

Between units, `early` forwards of the next one run in the gap before the remaining backwards of the last one: 1 follows
from the slots (Chimera's direct concatenation, and BitPipe's public code), 2 is in BitPipe's figure, 0 keeps units
apart. A unit can be made longer (`group`): less waiting for more memory.

Odd p with two pipes, whose slots collide, and units that are not full are packed instead: a list scheduler takes such
orders of slots as its priority, and the best result within the memory of the schedule counts.

With B and W apart, orders of two pipes are found by search for the job's costs and limit:

    name         pipes   legs   makespan at T_F = T_B = T_W = 1    limit on activations, unless the job gives one
    chimera-zb   2       1      3m + (p-1)//2                      that of Chimera: p units
    bitpipe-zb   2       v      3m + ((p-1)//2)/v                  that of BitPipe: p units

None is faster: the ranks in the middle cannot start before (p-1)//2 forwards. For some p and m the search stays one or
two ops behind; m >= p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules.request import Request
from zbc.compiler.schedules.searched import found
from zbc.compiler.search.pipes import by_slots, in_units, paced, with_sums
from zbc.ir import Op, Placement, Program


def chimera(request: Request) -> Program:
    """Two pipes of one leg each, in opposite directions."""
    return _waves("chimera", request, two_pipes(request.p, request.v), early=1)


def bitpipe(request: Request) -> Program:
    """Two pipes that run down and up, in opposite directions."""
    return _waves("bitpipe", request, two_pipes(request.p, request.v), early=2)


def hanayo(request: Request) -> Program:
    """One pipe of W waves, 2W legs; W = 1 is one half of Chimera on 2p ranks."""
    return _waves("hanayo", request, Placement.vshape(request.p, request.v), early=1)


def split_pipes(name: str, place: Callable[[int, int], Placement], request: Request) -> Program:
    """The fastest order found with B and W apart, within p units unless the request has a limit."""
    placement, limits = place(request.p, request.v), request.limits() or [float(request.p)] * request.p
    costs = request.costs or Costs.uniform(placement)
    orders = paced(placement, request.m, costs, limits, split=True)
    return found(name, place, replace(request, memory_limit=tuple(limits)), orders=orders)


def two_pipes(p: int, v: int) -> Placement:
    """`v` legs down and up the ranks, and their mirror image."""
    return Placement.bidirectional(Placement.vshape(p, v).pipes[0])


def _waves(name: str, request: Request, placement: Placement, early: int) -> Program:
    p, m = request.p, request.m
    pipes = min(p, len(placement.pipes))  # a single rank gains nothing from a second pipe
    unit = max(1, (request.group or p) // pipes) * pipes
    early = early if request.early is None else request.early
    plain = by_slots(placement, in_units(placement, m, unit), name)
    joined = plain.ranks if early == 1 else tuple(tuple(_join(ops, unit, early)) for ops in plain.ranks)
    program = Program(placement, m, joined, (name,))
    if m % unit == 0 and (p % 2 == 0 or pipes == 1):
        return program
    costs = request.costs or Costs.uniform(placement)
    limits = [max(float(p), rank.units) for rank in peaks(plain, costs)]
    orders = [program] if p % 2 == 0 or pipes == 1 else [plain]
    tried = [*paced(placement, m, costs, limits, split=False, orders=orders)]
    best = min(tried, key=lambda order: with_sums(order, costs, request.objective))
    return replace(best, history=(name,))


def _join(ops: Sequence[Op], unit: int, early: int) -> list[Op]:
    """Runs `early` forwards of each unit before the remaining backwards of the previous one, the rest in turn.

    With early = 2 (b belongs to the previous unit, F to the next):

        b b F b F b F F    ->    b b F F b F b F
    """
    joined = list(ops)
    for number in range(1, 1 + max((op.mb for op in joined), default=0) // unit):
        first = next(k for k, op in enumerate(joined) if op.mb // unit == number)
        if all(op.mb // unit >= number for op in joined[first:]):
            continue  # no op is left of the previous unit
        old = [op for op in joined[first:] if op.mb // unit < number]
        new = [op for op in joined[first:] if op.mb // unit >= number]
        tail, rest = new[:early], iter(new[early:])
        for op in old:
            tail.append(op)
            if early and (following := next(rest, None)):
                tail.append(following)
        joined[first:] = [*tail, *rest]
    return joined
