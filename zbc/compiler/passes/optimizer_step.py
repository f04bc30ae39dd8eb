"""Closes the step: agree on it, then update the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Program


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Put `VALIDATE` after all gradients, and a `STEP` for each owner of weights of the rank after it.

    In VALIDATE ranks agree on the loss, on the norm of all gradients and on whether to step: a barrier. If the replicas
    of a stage share out its step, the next step gathers its weights; if replicas average weights, a step begins with an
    AVERAGE of each stage's last weights.

        BW s0 m3          BW s0 m3
                    ->    VALIDATE
                          STEP s0
    """

    name: ClassVar[str] = "optimizer-step"

    def run(self, program: Program, context: Context) -> Program:
        ranks = [
            [
                *(Op(Kind.AVERAGE, owner) for owner in program.averaged(rank)),
                *ops,
                Op(Kind.VALIDATE, 0),
                *(Op(Kind.STEP, owner) for owner in program.owners(rank)),
            ]
            for rank, ops in enumerate(program.ranks)
        ]
        return program.with_ranks(ranks, by=self.name)
