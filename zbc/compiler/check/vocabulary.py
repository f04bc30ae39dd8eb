"""Checks that every rank runs the ops of its vocabulary shard once for each slice of each microbatch."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.graph import Graph
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.ops import Kind


def kinds_of(program: Program) -> list[Kind]:
    """Kinds of ops that each rank runs for each unit, in the order of their dependencies."""
    features = program.features
    return [kind for kind in Kind if kind.unit_wide and kind.row.feature in features]


def vocabulary_problems(g: Graph) -> Iterator[ZbcError]:
    """Yields E202 for missing or repeated ops of units that all ranks run."""
    program = g.program
    if not program.vocabulary or _whole(g):
        return
    for rank in range(program.placement.ranks):
        first = dict[Op, int]()
        for i in g.mine(rank):
            op = g.ops[i]
            if not op.kind.unit_wide:
                continue
            if op in first:
                text = f"program: {op} runs a second time on rank {rank}"
                details = [f"first at {g.text(first[op])}"]
                yield ZbcError("E202", text, where=g.where(i), hint="drop one", details=details)
            first.setdefault(op, i)
        for kind in kinds_of(program):
            for mb in range(program.microbatches):
                for part in range(program.slices):
                    op = Op(kind, 0, mb, 0, part)
                    if op not in first:
                        text = f"program: rank {rank} never runs {op}"
                        yield ZbcError("E202", text, hint="every rank has a share of each microbatch's words: add it")


def _whole(g: Graph) -> bool:
    """Whether there are no problems, by numbers alone."""
    program = g.program
    wanted = len(kinds_of(program)) * program.microbatches * program.slices
    for rank in range(program.placement.ranks):
        ops = [g.ops[i] for i in g.mine(rank) if g.ops[i].kind.unit_wide]
        if len(ops) != wanted or len(set(ops)) != wanted:
            return False
    return not any(g.ops[i].kind.unit_wide for i, _ in g.lost)
