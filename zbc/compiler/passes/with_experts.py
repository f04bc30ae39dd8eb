"""What goes for a stage's weights goes for those of its experts."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.ir import Kind, Op, Program
from zbc.ops import experts_of


def with_experts(ops: Sequence[Op], program: Program, *kinds: Kind) -> list[Op]:
    """Behind each op of these kinds of a stage that of its experts, where several replicas have the same."""
    if not program.ep:
        return [*ops]
    listed: list[Op] = []
    for op in ops:
        own = op._replace(stage=experts_of(op.stage))
        deals = op.kind in kinds and op.stage >= 0 and program.shared(Op(Kind.GATHER, own.stage))
        listed += [op, own] if deals else [op]
    return listed
