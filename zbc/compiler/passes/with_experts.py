"""Repeats ops on a stage's weights for the weights of its experts."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.ir import Kind, Op, Program
from zbc.ops import MAKER, experts_of


def with_experts(ops: Sequence[Op], program: Program, *kinds: Kind) -> list[Op]:
    """Adds after each of these ops of a stage the same op of its experts, if several replicas hold the same."""
    if not program.ep:
        return [*ops]
    listed: list[Op] = []
    for op in ops:
        own = op._replace(stage=experts_of(op.stage))
        deals = op.kind in kinds and op.stage >= 0 and program.shared(Op(MAKER["weights"], own.stage))
        listed += [op, own] if deals else [op]
    return listed
