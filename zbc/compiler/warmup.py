"""The forwards a step begins with: what ranks can do before they know whether the step before stands.

A *reach* is, per rank, a number of its first compute ops. It is closed if everything these ops need is among them.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.dag import Dag
from zbc.ir import Kind


def forwards(dag: Dag) -> list[int]:
    """The largest closed reach of forwards alone: no backward precedes them, on any rank, directly or not."""
    ranks = len(dag.first) - 1
    reach = []
    for r in range(ranks):
        mine = range(dag.first[r], dag.first[r + 1])
        reach.append(next((k for k, i in enumerate(mine) if not lone_forward(dag, i)), len(mine)))
    shrinking = True
    while shrinking:
        shrinking = False
        for r in range(ranks):
            for k in range(reach[r]):
                if not _within(dag, dag.source[dag.first[r] + k], reach):
                    reach[r], shrinking = k, True
                    break
    return reach


def lone_forward(dag: Dag, op: int) -> bool:
    """Whether an op is a forward, and not one that overlaps a backward."""
    return dag.ops[op].kind is Kind.F and not (dag.paired and dag.paired[op])


def closed(dag: Dag, reach: Sequence[int]) -> list[int]:
    """The smallest closed reach that covers `reach`."""
    found = list(reach)
    pending = list(range(len(found)))
    seen = [0] * len(found)  # per rank, how many ops have been looked at
    while pending:
        r = pending.pop()
        for k in range(seen[r], found[r]):
            j = dag.source[dag.first[r] + k]
            if not _within(dag, j, found):
                other = dag.rank[j]
                found[other] = j - dag.first[other] + 1
                pending.append(other)
        seen[r] = found[r]
    return found


def _within(dag: Dag, op: int, reach: Sequence[int]) -> bool:
    return op < 0 or op - dag.first[dag.rank[op]] < reach[dag.rank[op]]
