"""Checks that gathered weights are resident whenever they are needed, and never more of them than there is room for."""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.graph import Graph
from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.ops import COUNTED, TIED, WORDS, Scope, experts_of, owner_text

# Names kinds: the proof has a rule for each kind that brings weights, frees them, or ends their use.


def resident_problems(g: Graph) -> list[ZbcError]:
    """E208 for each op that finds the weights of its stage missing, gathers or frees them in vain, or gathers more than
    `resident` stages; [] if weights stay."""
    return list(_resident(g)) if g.program.resident else []


def _resident(g: Graph) -> Iterator[ZbcError]:
    program = g.program
    needs = {kind for kind, row in g.layout.rows.items() if any(ref.what == "weights" for ref in row.reads)}
    lost = {i for i, _ in g.lost}
    for rank in range(len(program.ranks)):
        there: dict[int, bool] = {}  # resident stages and experts, and whether an op has used their weights
        for i in g.mine(rank):
            op = g.ops[i]
            if i in lost or op.kind.row.scope not in (Scope.UNIT, Scope.STAGE):
                continue
            for owner in (op.stage, experts_of(op.stage)) if op.kind.row.scope is Scope.UNIT else (op.stage,):
                if owner == WORDS and op.kind is Kind.GATHER and op.mb:  # words stay for the whole step
                    yield ZbcError(
                        "E208", f"program: {op} gathers weights that are there", where=g.where(i), hint="drop it"
                    )
                if owner in (WORDS, TIED) or not g.layout.deals.get(owner):
                    continue
                wrong = _wrong(op, owner, there, needs, program.resident)
                if wrong is not None:
                    text, hint = wrong
                    yield ZbcError("E208", f"program: {text}", where=g.where(i), hint=hint)
                if op.kind is Kind.GATHER:
                    there[owner] = False
                elif op.kind is Kind.FREE:
                    there.pop(owner, None)
                elif op.kind in needs and owner in there:
                    there[owner] = True


def number_problems(g: Graph) -> Iterator[ZbcError]:
    """Yields E202 for each op that may come several times in a step and is not numbered in order."""
    count: dict[tuple[int, Kind, int], int] = {}
    lost = {i for i, _ in g.lost}
    for i, op in enumerate(g.ops) if COUNTED & g.layout.kinds else ():
        if op.kind in COUNTED and i not in lost:
            key = g.rank(i), op.kind, op.stage
            number = count.get(key, 0)
            if op.mb != number:
                text = f"program: {op} is number {number} of its kind and stage on its rank, counted from 0"
                yield ZbcError("E202", text, where=g.where(i), hint=f"write {op._replace(mb=number)}")
            count[key] = max(number, op.mb) + 1


def scatter_problems(g: Graph) -> Iterator[ZbcError]:
    """Yields E206 for each SCATTER after the REDUCE that completes the gradients of its stage."""
    for rank in range(len(g.program.ranks)) if Kind.SCATTER in g.layout.kinds else ():
        reduced = dict[int, int]()
        for i in g.mine(rank):
            op = g.ops[i]
            if op.kind is Kind.REDUCE:
                reduced[op.stage] = i
            elif op.kind is Kind.SCATTER and op.stage in reduced:
                text = f"program: {op} comes after {g.ops[reduced[op.stage]]}, which completes its stage's gradients"
                yield ZbcError("E206", text, where=g.where(i), hint="put it before, or drop it")


def _wrong(op: Op, owner: int, there: dict[int, bool], needs: set[Kind], room: int) -> tuple[str, str] | None:
    """The error of an op of an owner, given the resident owners, and its fix; None if it is right."""
    stage, here, full = owner_text(owner), owner in there, [place for place in there if place >= 0]
    if op.kind is Kind.GATHER and here:
        return f"{op} gathers weights that are there", "drop it, or free them before"
    if op.kind is Kind.GATHER and owner >= 0 and len(full) >= room:
        stages = ", ".join(f"s{s}" for s in sorted(full))
        return f"{op} finds no room: {stages} fill the {room} that memory.resident allows", "put a FREE before it"
    if op.kind is Kind.FREE and here and not there[owner]:
        return f"{op} frees weights that nothing has used", "drop it and its GATHER"
    if op.kind is Kind.STEP and here:
        return f"{op} leaves gathered weights of before the step behind", f"put FREE {stage} before it"
    if op.kind in needs and not here:
        whose = f"stage {owner}" if owner >= 0 else f"the experts of stage {experts_of(owner)}"
        return f"{op} needs the weights of {whose}, which are not there", f"put a GATHER {stage} before it"
    return None
