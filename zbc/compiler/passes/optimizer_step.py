"""Close the step: agree on it, then update the weights."""

from __future__ import annotations

from zbc.ir import Kind, Op, Program


def optimizer_step(program: Program) -> Program:
    """Put `VALIDATE` behind all gradients, and a `STEP` for each stage of the rank behind it.

    VALIDATE is where ranks agree on the loss, on the norm of all gradients and on whether to step: a barrier.

        BW s0 m3          BW s0 m3
                    ->    VALIDATE
                          STEP s0
    """
    placement = program.placement
    ranks = [
        [*ops, Op(Kind.VALIDATE, 0), *(Op(Kind.STEP, s) for s in placement.stages_of(rank))]
        for rank, ops in enumerate(program.ranks)
    ]
    return program.with_ranks(ranks, by="optimizer-step")
