"""Sum the gradients of stages that several ranks hold a copy of."""

from __future__ import annotations

from zbc.ir import COMPUTE, Kind, Op, Program


def reduce_grads(program: Program) -> Program:
    """Put `REDUCE s` behind the last op of each replicated stage; stages with one holder need none.

    Where a rank finishes two replicated stages, its peers must meet it in the same order: all REDUCEs of a program
    follow one order, that of the stages' numbers, at the end of each rank's compute.

        BW s0 m3          BW s0 m3
        BW s1 m3    ->    BW s1 m3
                          REDUCE s0
                          REDUCE s1
    """
    placement = program.placement
    replicated = [s for s in range(placement.stages) if len(set(placement.holders(s))) > 1]
    if not replicated:
        return program
    ranks = []
    for rank, ops in enumerate(program.ranks):
        mine = [Op(Kind.REDUCE, s) for s in replicated if rank in placement.holders(s)]
        end = 1 + max((i for i, op in enumerate(ops) if op.kind in COMPUTE or op.kind.is_transfer), default=-1)
        ranks.append([*ops[:end], *mine, *ops[end:]])
    return program.with_ranks(ranks, by="reduce-grads")
