"""Passes from a compute-only schedule to a complete plan, in the order they run.

The order matters:
1. insert-comm first: it sends a B's gradient before the W behind it.
2. fuse-backward second: with the SEND in between, only those B W pairs fuse that keep no other rank waiting. Run before
   insert-comm, it makes a split 1F1B of makespan 30 take 33.
3. reduce-grads needs all compute and transfers in place.
4. optimizer-step or, for an optimizer without a barrier, post-validate closes the list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zbc.compiler.cost import Costs
from zbc.compiler.passes.fuse_backward import fuse_backward
from zbc.compiler.passes.insert_comm import insert_comm
from zbc.compiler.passes.optimizer_step import optimizer_step
from zbc.compiler.passes.post_validate import post_validate
from zbc.compiler.passes.reduce_grads import reduce_grads
from zbc.ir import Program

Pass = Callable[[Program], Program]


# What does not depend on what ops cost.
_FIRST: dict[str, Pass] = {
    "insert-comm": insert_comm,
    "fuse-backward": fuse_backward,
}


def passes(sync: str = "before-step", costs: Costs | None = None) -> dict[str, Pass]:
    """Every pass by name, in order. `sync` is that of the optimizer; `costs` decide where ops stand that take turns."""
    return {**_FIRST, **_last(sync, costs)}


def lower(program: Program, sync: str = "before-step", costs: Costs | None = None) -> Program:
    """Run every pass in order: a complete plan from a compute-only schedule."""
    return closed(with_transfers(program), sync, costs)


def with_transfers(program: Program) -> Program:
    """The passes whose result is the same whatever ops cost."""
    return _all(_FIRST, program)


def closed(program: Program, sync: str = "before-step", costs: Costs | None = None) -> Program:
    """The passes behind `with_transfers`."""
    return _all(_last(sync, costs), program)


def _last(sync: str, costs: Costs | None) -> dict[str, Pass]:
    close: dict[str, Pass] = {"optimizer-step": optimizer_step}
    if sync == "post-validate":
        close = {"post-validate": partial(post_validate, costs=costs)}
    return {"reduce-grads": partial(reduce_grads, costs=costs), **close}


def _all(some: dict[str, Pass], program: Program) -> Program:
    for run in some.values():
        program = run(program)
    return program
