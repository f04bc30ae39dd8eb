"""Pipelines whose stages have different numbers of ranks: a replica of a stage is a rank that runs some microbatches.

Microbatch i runs on replica i mod r of a stage of r replicas. So the stages of one microbatch form a pipe, and there
are as many pipes as the least common multiple of all r (no more than microbatches). With 1F1B on each rank, a replica
of stage s warms up with ceil(ranks of later stages / r) forwards: then every forward that a backward waits for comes
before it. The slices of a microbatch all run on one replica, and as many whole microbatches warm up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import lcm

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.lagged import in_turn
from zbc.compiler.schedules.request import Request, ScheduleCard, texts_of
from zbc.compiler.search.follow import Manner, follow
from zbc.compiler.sim.context import Context
from zbc.ir import Op, Placement, Program

NAME = "replicated-1f1b"
_FAR = 16  # ops to look ahead while the next one's input has not arrived


def placement_of(replicas: Sequence[int], microbatches: int) -> Placement:
    """Stage s on `replicas[s]` ranks, stage after stage; replicas beyond the microbatches are left out."""
    firsts = [0, *accumulate(replicas)]
    pipes = min(lcm(*replicas), microbatches)
    return Placement(tuple(tuple(a + k % r for a, r in zip(firsts, replicas, strict=False)) for k in range(pipes)))


def replicated(replicas: Sequence[int], microbatches: int) -> ScheduleCard:
    """The card of these replicas."""
    placement = placement_of(replicas, microbatches)

    def make(request: Request) -> Program:
        return _ordered(placement, replicas, request)

    return ScheduleCard(NAME, make, lambda p, v: placement, "replicas", (1, 1), 1, False, **texts_of(NAME))


REPLICATED = replicated((1,), 1)  # the card for any replicas


def _ordered(placement: Placement, replicas: Sequence[int], request: Request) -> Program:
    """1F1B, or of whole microbatches a list scheduler's version of it, in the same memory; the shorter one."""
    plain = _plain(placement, replicas, request)
    if request.slices > 1:
        return plain
    costs = request.costs or Costs.uniform(placement)
    limits = [max(accumulate(map(costs.held, ops), initial=0.0)) for ops in plain.ranks]
    packed = follow(plain, costs, limits, Manner(_FAR))
    return min((plain, packed), key=lambda program: Context(program, costs).step_ms(request.objective))


def _plain(placement: Placement, replicas: Sequence[int], request: Request) -> Program:
    ranks, pipes, m, k = list[tuple[Op, ...]](), len(placement.pipes), request.m, request.slices
    for s, count in enumerate(replicas):
        warmup = -(-sum(replicas[s + 1 :]) // count) * k + k - 1
        for replica in range(count):
            batches = range(replica, m, count)
            ops = in_turn(s, len(batches) * k, k, min(warmup, len(batches) * k))
            ranks.append(tuple(op._replace(mb=batches[op.mb], pipe=batches[op.mb] % pipes) for op in ops))
    return Program(placement, m, tuple(ranks), (NAME,), k)
