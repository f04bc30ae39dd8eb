"""Close the step: agree on it, then update the weights."""

from __future__ import annotations

from zbc.ir import Kind, Op, Program


def optimizer_step(program: Program) -> Program:
    """Put `VALIDATE` behind all gradients, and a `STEP` for each stage of the rank behind it.

    VALIDATE is where ranks agree on the loss, on the norm of all gradients and on whether to step: a barrier.
    Where the copies of a stage share out its step, `GATHER` collects the weights behind it.

        BW s0 m3          BW s0 m3
                    ->    VALIDATE
                          STEP s0
    """
    ranks = [
        [*ops, Op(Kind.VALIDATE, 0), *(op for s in program.placement.stages_of(rank) for op in _step(program, s))]
        for rank, ops in enumerate(program.ranks)
    ]
    return program.with_ranks(ranks, by="optimizer-step")


def _step(program: Program, stage: int) -> list[Op]:
    gather = Op(Kind.GATHER, stage)
    return [Op(Kind.STEP, stage), *([gather] if program.sharded and program.shared(gather) else [])]
