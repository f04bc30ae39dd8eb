"""The forward-only program that evaluates a model where its stages are; made from the placement alone.

Runtime and compiler both make it from here: the runtime runs it, `zbc plan` and `zbc check` prove it.
"""

from __future__ import annotations

from zbc.ir import Kind, Message, Op, Placement, Program


def forward_only(placement: Placement, microbatches: int) -> Program:
    """Every microbatch once through all stages (of pipe 0), in waves: F of stage s, microbatch i in wave s + i.

    Within a wave later stages come first. All ranks follow this one order, and so do the messages of each direction.
    The buffer of a transfer is posted one F ahead.

        rank 1 of 2      RECV_F s1 m0, RECV_F s1 m1, F s1 m0, F s1 m1
    """
    pipe, last = placement.pipes[0], placement.stages - 1
    waves = sorted((stage + mb, -stage, mb) for stage in range(placement.stages) for mb in range(microbatches))
    ranks: list[list[Op]] = []
    for rank in range(placement.ranks):
        mine = [Op(Kind.F, -back, mb) for _, back, mb in waves if pipe[-back] == rank]
        posts = [[_arrival(op)] if op.stage > 0 and pipe[op.stage - 1] != rank else [] for op in mine]
        ops = list(posts[0]) if posts else []
        for op, ahead in zip(mine, [*posts[1:], []], strict=True):
            ops += [*ahead, op]
            if op.stage < last and pipe[op.stage + 1] != rank:
                ops.append(Message(True, op.stage + 1, op.mb, 0, 0).send)
        ranks.append(ops)
    return Program(placement, microbatches, tuple(map(tuple, ranks)), ("forward-only",))


def _arrival(op: Op) -> Op:
    return Message(True, op.stage, op.mb, 0, 0).recv
