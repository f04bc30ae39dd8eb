"""Fuses B and W into one backward op if nothing is between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from zbc.compiler.sim.context import Context
from zbc.ir import Kind, Op, Program


@dataclass(frozen=True, slots=True)
class FuseBackward:
    """Replace each adjacent `B s m`, `W s m` by `BW s m`.

    A fused backward walks the autograd graph once, so it is cheaper whenever no op is scheduled between B and W.

        F s0 m0          F s0 m0
        B s0 m0    ->    BW s0 m0
        W s0 m0
    """

    name: ClassVar[str] = "fuse-backward"

    def run(self, program: Program, context: Context) -> Program:
        return program.with_ranks([_fuse(ops) for ops in program.ranks], by=self.name)


def _fuse(ops: Sequence[Op]) -> list[Op]:
    fused: list[Op] = []
    for op in ops:
        if op[0] is Kind.W and fused and fused[-1][0] is Kind.B and fused[-1][1:] == op[1:] and not _grouped(fused):
            fused[-1] = op._replace(kind=Kind.BW)
        else:
            fused.append(op)
    return fused


def _grouped(ops: Sequence[Op]) -> bool:
    """Whether the last op is in a group."""
    return any(op.kind is Kind.OVERLAP for op in ops[-3:-1])
