"""Host memory of activation offload: slabs, each the size of one stage's offload of one microbatch, or of the largest
microbatch or slice that it offloads.

An OFFLOAD takes a slab, and the backward that used the reloaded values frees it, so the number of slabs at a time
follows from the order alone. A run allocates a stage's slabs for its first parcel; on a GPU that is before the first
step.
"""

from __future__ import annotations

from typing import Any

from zbc.compiler.cost.cost import Costs
from zbc.ir import COPY, Key, Program
from zbc.ops import ROWS, Lane


def slabs(program: Program, rank: int) -> dict[int, int]:
    """The number of slabs a rank needs, by stage."""
    taken, most = dict[int, int](), dict[int, int]()
    away = set[Key]()
    for op in program.ranks[rank]:
        if op.kind.row.lane is Lane.OUT:
            away.add(op.key)
            taken[op.stage] = taken.get(op.stage, 0) + 1
            most[op.stage] = max(most.get(op.stage, 0), taken[op.stage])
        elif ROWS[op.kind].family == "input" and op.key in away:
            away.discard(op.key)
            taken[op.stage] -= 1
    return most


def host_bytes(program: Program, rank: int, costs: Costs) -> float:
    """Bytes of a rank's slabs; 0 if sizes are not known."""
    largest = dict[int, float]()
    for op in program.ranks[rank]:
        if op.kind.row.lane is Lane.BACK:
            largest[op.stage] = max(largest.get(op.stage, 0.0), costs.held_bytes(op))
    return sum(count * largest.get(stage, 0.0) for stage, count in slabs(program, rank).items())


def predicted(program: Program, costs: Costs) -> dict[str, Any]:
    """Slabs of the ranks that copy, for the manifest: `{"rank 0": {"bytes": 4096, "slabs": {"s0": 5}}}`."""
    found = dict[str, Any]()
    for rank, ops in enumerate(program.ranks):
        if any(op.kind in COPY for op in ops):
            counts = {f"s{stage}": count for stage, count in sorted(slabs(program, rank).items())}
            found[f"rank {rank}"] = {"bytes": round(host_bytes(program, rank, costs)), "slabs": counts}
    return found
