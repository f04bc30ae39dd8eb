"""Fuses B and W into one backward op if nothing is between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from zbc.compiler.sim.context import Context
from zbc.ir import Op, Program
from zbc.ops import round_trip


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
        return program.with_ranks([fuse(ops) for ops in program.ranks], by=self.name)


def fuse(ops: Sequence[Op]) -> list[Op]:
    """`ops` with each B directly followed by its W as one BW, except in groups."""
    fused, rest, whole = list[Op](), round_trip(split=True)[-1], round_trip(split=False)[-1]
    for op in ops:
        joins = op[0] is rest and fused and fused[-1][0].splits and fused[-1][1:] == op[1:]
        if joins and not any(one.kind.is_mark for one in fused[-3:-1]):  # of a group
            fused[-1] = op._replace(kind=whole)
        else:
            fused.append(op)
    return fused
