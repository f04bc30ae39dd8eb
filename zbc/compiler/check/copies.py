"""Checks that offload copies are complete and in order.

For the activations of an F there is none of the three ops or each of them once, on the F's rank: F, OFFLOAD, RELEASE,
RELOAD and then its B or BW. The cells of the graph would refuse all else too, but not say which of the three is wrong.
A second round is legal by its cells and refused here: a plan has one slab on the host for each activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from zbc.compiler.graph import Graph
from zbc.errors import ZbcError
from zbc.ir import COPY, Key
from zbc.ops import Kind, round_trip

FORWARD, BACKWARD = round_trip(split=False)
ORDER = (FORWARD, *(kind for kind in Kind if kind in COPY), BACKWARD)


def copy_problems(g: Graph) -> Iterator[ZbcError]:
    """Yields E206 for copies that are repeated, lack one of the others, or come too early."""
    if not COPY & g.layout.kinds:
        return
    lost = {i for i, _ in g.lost}
    for rank in range(len(g.first) - 1):
        places: dict[Key, dict[Kind, int]] = {}
        copied: dict[Key, None] = {}
        for i in g.mine(rank):
            op = g.ops[i]
            kind = BACKWARD if op.kind.is_backward else op.kind
            if kind not in ORDER or i in lost:
                continue
            first = places.setdefault(op.key, {}).setdefault(kind, i)
            if kind in COPY:
                copied[op.key] = None
                if first != i:
                    text = f"program: {op} runs a second time"
                    yield ZbcError(
                        "E206", text, where=g.where(i), hint="drop one", details=[f"first at {g.text(first)}"]
                    )
        for key in copied:
            yield from _of_one(g, places[key])


def _of_one(g: Graph, at: dict[Kind, int]) -> Iterator[ZbcError]:
    """Yields the problems with the copies of one activation."""
    there = next(kind for kind in ORDER if kind in COPY and kind in at)
    for kind in ORDER:
        if kind in COPY and kind not in at:
            missing = g.ops[at[there]]._replace(kind=kind)
            text = f"program: {g.ops[at[there]]} has no {missing}"
            hint = "what F keeps is copied out, let go of and copied back (OFFLOAD, RELEASE, RELOAD), or none of it"
            yield ZbcError("E206", text, where=g.where(at[there]), hint=hint)
            return
    steps = [at[kind] for kind in ORDER if kind in at]
    for earlier, later in pairwise(steps):
        if later < earlier:
            text = f"program: {g.ops[later]} comes before {g.ops[earlier]}, which it needs"
            hint = f"move step {g.place(earlier)[1]} before step {g.place(later)[1]}"
            yield ZbcError("E206", text, details=[g.text(later), g.text(earlier)], hint=hint)
            return
