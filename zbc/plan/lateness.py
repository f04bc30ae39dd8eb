"""The staleness of gradients for steps without a flush, counted from a rank's ops; used by compiler and runtime."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.ir import NEXT, Op

_STEPS = 3  # from the second step on, all forwards have run in the cycle


def lateness(ops: Sequence[Op]) -> dict[int, int]:
    """Stage of a rank -> the most optimizer steps between a microbatch's forward and its backward."""
    late, made, read = dict[int, int](), dict[int, int](), dict[tuple[int, int], int]()
    for step in range(-1, _STEPS):
        for op in ops:
            batch = step + (op.mb >= NEXT)
            if op.kind.steps:
                made[op.stage] = made.get(op.stage, 0) + (step >= 0)
            elif op.kind.is_forward and batch >= 0:
                read[op.stage, batch * NEXT + op.mb % NEXT] = made.get(op.stage, 0)
            elif op.kind.makes_part and batch >= 0:
                since = made.get(op.stage, 0) - read[op.stage, batch * NEXT + op.mb % NEXT]
                late[op.stage] = max(late.get(op.stage, 0), since)
    return late
