"""The proof that a program can run: complete, paired, free of deadlock.

The order of the checks is the order in which their answers are meaningful: 1. complete: the ops, their ranks, and their
order on each rank. Everything else is about these ops. 2. pairing: the messages between them. Sends match receives only
among complete ops. 3. deadlock: whether all of these ops happen. The first check that fails reports all its problems
and the later ones do not run: a missing op or a message without an end would come up there once more, as ops that never
run.
"""

from __future__ import annotations

from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.check.device import Survival, survival
from zbc.compiler.check.faults import message_faults, op_faults
from zbc.compiler.check.versions import check_steps
from zbc.compiler.graph import Graph, build
from zbc.errors import raise_found
from zbc.ir import Program
from zbc.plan.forward import forward_of

__all__ = ["Survival", "check_all", "check_forward", "check_graph", "survival"]


def check_all(program: Program) -> None:
    """Raise all problems of the first failing check: E202, E205, E206, then E203, E204, then E201. Returns for exactly
    the programs that run to their end under every timing of ranks and messages."""
    check_graph(build(program))


def check_graph(graph: Graph) -> None:
    """`check_all` for a given graph. For steps without a flush also E210, and all of it for any number of steps."""
    if graph.cyclic is not None:
        check_steps(graph.cyclic)
        return
    for problems in (op_faults, message_faults, deadlock_problems):
        raise_found(problems(graph))


def check_forward(program: Program) -> None:
    """Raise E203, E204 (transfers) or E201 for the evaluation on the ranks of a program: the forward-only program of
    its placement, whose ops are complete as they are made."""
    graph = build(forward_of(program))
    for problems in (message_faults, deadlock_problems):
        raise_found(problems(graph))
