"""Repeats ops on a stage's weights for the weights of its experts."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.ir import Kind, Op, Program
from zbc.ops import MAKER, experts_of


def with_experts(ops: Sequence[Op], program: Program, *kinds: Kind) -> list[Op]:
    """Puts in place of each of these ops of a stage: the op, and the same op of its experts, each if several replicas
    hold the same weights."""
    listed: list[Op] = []
    for op in ops:
        both = (op, op._replace(stage=experts_of(op.stage))) if op.kind in kinds and op.stage >= 0 else ()
        listed += [one for one in both if program.shared(Op(MAKER["weights"], one.stage))] if both else [op]
    return listed
