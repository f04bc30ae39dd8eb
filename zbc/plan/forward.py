"""The forward-only program that evaluates a model where its stages are; made from the placement alone.

Runtime and compiler both make it from here: the runtime runs it, `zbc plan` and `zbc check` prove it.
"""

from __future__ import annotations

from zbc.ir import Kind, Message, Op, Placement, Program, nth


def forward_only(placement: Placement, microbatches: int, slices: int = 1) -> Program:
    """Every microbatch, slice by slice, once through all stages (of pipe 0), in waves: F of stage s, unit i in wave
    s + i.

    Within a wave later stages come first. All ranks follow this one order, and so do the messages of each direction.
    The buffer of a transfer is posted one F ahead.

        rank 1 of 2      RECV_F s1 m0, RECV_F s1 m1, F s1 m0, F s1 m1
    """
    stages = range(placement.stages)
    into = [[(a, s) for a in placement.sources(s) if placement.crosses(a, s)] for s in stages]
    out = [[(s, b) for b in placement.sinks(s) if placement.crosses(s, b)] for s in stages]
    waves = sorted((stage + unit, -stage, unit) for stage in stages for unit in range(microbatches * slices))
    ranks: list[list[Op]] = []
    for rank in range(placement.ranks):
        mine = [nth(Kind.F, -back, unit, slices) for _, back, unit in waves if placement.rank_of(-back) == rank]
        posts = [[Message(*edge, op.mb, 0, op.slice).recv for edge in into[op.stage]] for op in mine]
        now, *later = *posts, list[Op]()
        ops = list(now)
        for op, ahead in zip(mine, later, strict=True):
            ops += [*ahead, op, *(Message(*edge, op.mb, 0, op.slice).send for edge in out[op.stage])]
        ranks.append(ops)
    return Program(placement, microbatches, tuple(map(tuple, ranks)), ("forward-only",), slices)
