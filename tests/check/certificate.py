"""Verifies a deadlock error as a proof: every named wait is real, and the waits form a cycle.

Uses the meaning of ops, independent of the check that found the cycle.
"""

import re

import networkx as nx

from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Program, parse_line
from zbc.ops import TIED

KEYED = r"(?:SEND_[FB]|RECV_[FB]|BW|F|B|W) s\d+ m\d+(?:\.\d+)?"
OP = re.compile(rf"(?:{KEYED}|(?:REDUCE|STEP|GATHER) (?:s\d+|t)|VALIDATE|OVERLAP)(?: up| pipe\d+)?\b")
PLACE = re.compile(r"rank (\d+) step (\d+): (" + OP.pattern + r"(?: [<>]r\d+)?)")
LINE = re.compile(rf"{PLACE.pattern}  waits for  {PLACE.pattern}(?:, after step (\d+))?")
FORWARD, BACKWARD = {Kind.F}, {Kind.B, Kind.BW}


def named_ops(error: ZbcError) -> set[Op]:
    """All ops that an error names, whether or not the program has them."""
    return {Op.parse(text) for text in OP.findall(error.render())}


def check_places(error: ZbcError, program: Program) -> None:
    """Asserts that the ops in an error are at the places it names."""
    for rank, step, text in PLACE.findall(error.render()):
        assert program.text(int(rank), int(step)) == f"rank {rank} step {step}: {text}"


def circles(error: ZbcError) -> list[list[re.Match[str]]]:
    """The lines of each cycle among an error's problems."""
    found = [[match for line in problem.details if (match := LINE.fullmatch(line))] for problem in error.errors]
    return [lines for lines in found if lines]


def check_circle(lines: list[re.Match[str]], program: Program, *, blocking: bool = False) -> None:
    """Asserts that each line is a real wait and that the lines form a cycle."""
    for line, following in zip(lines, [*lines[1:], lines[0]], strict=True):
        _, _, text, other_rank, other_step, other_text, behind = line.groups()
        assert waits_for(parse_line(text)[0], parse_line(other_text)[0], blocking), line[0]
        assert following.group(1, 2) == (other_rank, behind or other_step)
        assert behind is None or int(behind) < int(other_step)
        after, goal = parse_line(following.group(3))[0], parse_line(other_text)[0]
        only_started = after.kind.is_collective and after.kind is not Kind.VALIDATE
        if behind is not None and only_started and parse_line(following.group(6))[0] == after:
            between = program.ranks[int(other_rank)][int(behind) : int(other_step)]
            assert goal.kind.is_collective or any(op.kind is Kind.VALIDATE for op in between), "it has been started"


def reads(op: Op) -> tuple[bool, int, int, int, int]:
    """Of a transfer: whether it is an output, and its reader (stage, microbatch, pipe, slice)."""
    further = {Kind.SEND_F: 1, Kind.SEND_B: -1}.get(op.kind, 0)
    return op.kind in (Kind.SEND_F, Kind.RECV_F), op.stage + further, *op.key[1:]


def waits_for(op: Op, other: Op, blocking: bool) -> bool:
    """Whether `op` cannot end before `other` was reached (before it ended, for compute)."""
    if op.kind.is_collective and op == other:
        return True  # a rendezvous
    if op.kind.is_transfer and other.kind.is_transfer:
        return blocking and op.kind.is_send and other.kind.is_recv and reads(op) == reads(other)
    if other.kind is Kind.GATHER:
        return op.kind in FORWARD | BACKWARD | {Kind.STEP} and op.stage == other.stage
    same = op[2:] == other[2:]
    if other.kind.is_transfer:
        forward, *unit = reads(other)
        return op.kind in (FORWARD if forward else BACKWARD) and tuple(unit) == op.key
    if op.kind in FORWARD:
        return other.kind in FORWARD and (
            (same and other.stage == op.stage - 1)
            or (op.stage, op.mb, op.pipe, op.slice - 1) == (other.stage, other.mb, other.pipe, other.slice)
        )
    if op.kind in BACKWARD:
        if other.kind in FORWARD:
            return op[1:] == other[1:]
        return other.kind in BACKWARD and (
            (same and other.stage == op.stage + 1)
            or (op.stage, op.mb, op.pipe, op.slice + 1) == (other.stage, other.mb, other.pipe, other.slice)
        )
    if op.kind is Kind.W:
        return other.kind is Kind.B and op[1:] == other[1:]
    if op.kind.is_send:
        made = FORWARD if op.kind is Kind.SEND_F else BACKWARD
        return other.kind in made and op[1:] == other[1:]
    if op.kind is Kind.REDUCE:
        return other.kind.computes and op.stage in (TIED, other.stage)
    if op.kind is Kind.VALIDATE:
        return other.kind.computes or other.kind.sums
    if op.kind is Kind.GATHER:
        return other.kind in (Kind.STEP, Kind.TENTATIVE) and op.stage == other.stage
    return op.kind is Kind.STEP and other.kind is Kind.VALIDATE


def fewest_waits(program: Program, *, blocking: bool = False) -> int | None:
    """The number of waits of a shortest cycle, by brute force over every pair of ops and every start; None if there is
    no cycle."""
    graph = nx.DiGraph()
    ops = [(r, k, op) for r, k, op in program]
    for r, k, op in ops:
        graph.add_edge(("end", r, k), ("start", r, k), weight=0)
        if k:
            graph.add_edge(("start", r, k), ("end", r, k - 1), weight=0)
        for r2, k2, other in ops:
            if r == r2 and k2 <= k:
                continue  # the order on a rank is no wait
            if op.kind.is_collective or other.kind.is_collective or not waits_for(op, other, blocking):
                continue
            own = op.kind.is_send and other.kind.is_recv
            here, there = ("end" if own else "start", r, k), ("start" if other.kind.is_transfer else "end", r2, k2)
            graph.add_edge(here, there, weight=1)
    _add_collectives(graph, ops)
    best = None
    for component in nx.strongly_connected_components(graph):
        inside = graph.subgraph(component)
        for here, there, weight in inside.edges(data="weight"):
            if weight:
                length = 1 + nx.dijkstra_path_length(inside, there, here)
                best = length if best is None else min(best, length)
    return best


def _add_collectives(graph: nx.DiGraph, ops: list[tuple[int, int, Op]]) -> None:
    """Each rank has a queue of collectives next to its ops; the nodes "next" and "over" are states of an entry.

    A collective is over when it is next in the queues of all members, and all have started it. Only VALIDATE blocks its
    rank. For programs with each collective once and no op late.
    """
    collectives = [entry for entry in ops if entry[2].kind.is_collective]
    for r, k, op in collectives:
        before = [k2 for r2, k2, _ in collectives if r2 == r and k2 < k]
        graph.add_edge(("over", r, k), ("next", r, k), weight=0)
        if before:
            graph.add_edge(("next", r, k), ("over", r, max(before)), weight=0)
        waiting = [("over", r, k)] + [("end", r, k)] * (op.kind is Kind.VALIDATE)
        for here in waiting:
            for r2, k2, other in collectives:
                if other == op and here != ("over", r2, k2):
                    graph.add_edge(here, ("next", r2, k2), weight=1)
                    if r2 != r:
                        graph.add_edge(here, ("start", r2, k2), weight=1)
