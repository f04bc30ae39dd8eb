"""Orders for placements that no schedule of zbc has, and plugins that return them.

Ranks hold different numbers of stages, or a pipe leaves a rank out.
"""

from collections.abc import Callable

from zbc.compiler.schedules import Request
from zbc.ir import Kind, Op, Placement, Program

FORK = ((0, 2, 3), (1, 2, 3))  # each pipe leaves one rank without a stage
FOLD = ((0, 1, 1, 2),)  # rank 1 holds two stages, the others one
THREE = ((0, 1), (1, 0), (0, 1))
URGENT = {Kind.B: 0, Kind.BW: 0, Kind.F: 1, Kind.W: 2}


def order_of(pipes: tuple[tuple[int, ...], ...], *, split: bool = False) -> Callable[[Request], Program]:
    return lambda request: eager(Placement(pipes), request.m, split=split)


fork, fold, three, idle = order_of(FORK), order_of(FOLD, split=True), order_of(THREE), order_of(((0, 2),))


def unequal(request: Request) -> Program:
    return Program(Placement(((0, 1), (0,))), request.m, ((Op(Kind.F, 0),),) * 2)


def joined(request: Request) -> Program:
    return Program(Placement(((0, 1, 2),), ((0, 2), (1, 2))), request.m, ((Op(Kind.F, 0),),) * 3)


def eager(placement: Placement, m: int, *, split: bool = False, deal: Callable[[int], int] | None = None) -> Program:
    """Every rank runs any op that is ready, backward first, as if all ops were equally long.

    `deal`: the pipe of a microbatch, by default in turn.
    """
    pipe_of = deal or (lambda mb: mb % len(placement.pipes))
    kinds = (Kind.F, Kind.B, Kind.W) if split else (Kind.F, Kind.BW)
    left = {Op(kind, stage, mb, pipe_of(mb)) for kind in kinds for stage in range(placement.stages) for mb in range(m)}
    done: set[Op] = set()
    ranks: list[list[Op]] = [[] for _ in range(placement.ranks)]
    while left:
        ready = [op for op in left if _needs(placement, op, kinds[1]) <= done]
        now = set[Op]()
        for rank, ops in enumerate(ranks):
            mine = [op for op in ready if placement.rank_of(op.stage, op.pipe) == rank]
            if mine:
                ops.append(min(mine, key=lambda op: (URGENT[op.kind], op.mb, op.stage)))
                now.add(ops[-1])
        done |= now
        left -= now
    return Program(placement, m, tuple(map(tuple, ranks)), ("eager",))


def _needs(placement: Placement, op: Op, backward: Kind) -> set[Op]:
    if op.kind is Kind.F:
        return {op._replace(stage=stage) for stage in placement.sources(op.stage)}
    if op.kind is Kind.W:
        return {op._replace(kind=Kind.B)}
    later = {op._replace(kind=backward, stage=stage) for stage in placement.sinks(op.stage)}
    return {op._replace(kind=Kind.F), *later}
