"""Checks that plans for unequal numbers of microbatches start their collectives in one order.

Replicas of a step that run different plans meet in collectives on gradients and weights. Each rank starts its own one
after the other, so all plans must list those of a rank in one order. One-sided operations don't count: ranks do not
wait for each other there, in any order. If the ranks of a pipeline meet for each microbatch, plans have different
numbers of these: replicas then meet before the first of them or after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.errors import ZbcError
from zbc.ir import Op, Program


def order_problems(programs: Sequence[Program]) -> Iterator[ZbcError]:
    """Yields E209 for each rank whose collectives are in another order than in the first program."""
    first = programs[0]
    for program in programs:
        for rank, (left, right) in enumerate(zip(program.ranks, first.ranks, strict=True)):
            met, due = (_meetings(ops, one_sided=first.one_sided) for ops in (left, right))
            if [op for op in met if not op.kind.unit_wide] != [op for op in due if not op.kind.unit_wide] or _amid(met):
                counts = [f"{plan.microbatches} microbatches" for plan in (program, first)]
                text = f"program: rank {rank} meets its replicas in another order with {counts[0]} than {counts[1]}"
                details = [f"{counts[0]}: {_from(met, due)}", f"{counts[1]}: {_from(due, met)}"]
                hint = 'parallel.exchange = "one-sided", ' if first.resident else ""
                last = 'shard = "optimizer"' if first.scatters else "memory.resident for all stages of a rank"
                hint = f"use {hint}breadth-first, or {last}"
                yield ZbcError("E209", text, details=details, hint=hint)
                break


def _meetings(ops: Sequence[Op], *, one_sided: bool) -> list[Op]:
    met = [op for op in ops if op.kind.is_collective and not op.kind.is_barrier]
    return [op for op in met if not (one_sided and op.kind.stage_wide)]


def _amid(meetings: Sequence[Op]) -> bool:
    """Whether replicas meet in between the collectives within a pipeline."""
    inner = [k for k, op in enumerate(meetings) if op.kind.unit_wide]
    return bool(inner) and inner[-1] - inner[0] >= len(inner)


def _from(ops: Sequence[Op], others: Sequence[Op]) -> str:
    """The ops from the first difference on."""
    same = next((k for k, (a, b) in enumerate(zip(ops, others, strict=False)) if a != b), min(len(ops), len(others)))
    rest = [str(op) for op in ops[same : same + 6]]
    return ("... " if same else "") + (", ".join(rest) or "none left") + (", ..." if len(ops) > same + 6 else "")
