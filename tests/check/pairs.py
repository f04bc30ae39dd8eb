"""Random pairs of a bidirectional or wave schedule and a size, whole and damaged; verdicts of checks and machine."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.check import operational
from tests.check.each import verdict
from tests.lowered import lower
from zbc.compiler.check import check_all
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.ir import Kind, Op, Program

NAMES = ("chimera", "bitpipe", "dualpipe", "dualpipe-v", "hanayo", "chimera-zb", "bitpipe-zb")


@dataclass(frozen=True)
class Made:
    """A request and its complete program."""

    name: str
    request: Request
    program: Program

    def __str__(self) -> str:
        r, one = self.request, self.program
        more = f"group={r.group} early={r.early} overlap={r.overlap} dp={one.dp} sums={one.vocabulary}"
        return f"{self.name} p={r.p} m={r.m} k={r.slices} v={r.v} {more}"


def draw(seed: int, *, ranks: int, microbatches: int) -> Made:
    """Pair number `seed`: the options of the schedule are drawn too."""
    rng = random.Random(seed)
    name = rng.choice(NAMES if rng.random() < 0.5 else NAMES[:5])  # those that are searched take longer to make
    card = SCHEDULES[name]
    p = card.ranks_in * rng.randint(1, ranks // card.ranks_in)
    v = rng.choice([v for v in (1, 2, 3, 4) if card.allows(v)])
    units = "group" in card.options
    request = Request(
        p,
        rng.randint(1, microbatches),
        v,
        group=2 * rng.randint(1, p) if units and rng.random() < 0.4 else None,
        early=rng.choice((None, 0, 1, 2)) if units else None,
        overlap="overlap" in card.options and rng.random() < 0.5,
    )
    return Made(name, request, lower(replace(card.make(request), dp=rng.choice((1, 1, 1, 2)))))


def damaged(program: Program, rng: random.Random) -> Program:
    """The program with two ops of a rank swapped, one moved, one dropped or one repeated."""
    ranks: list[list[Op]] = [list(ops) for ops in program.ranks]
    ops = rng.choice(ranks)
    i, j = rng.randrange(len(ops)), rng.randrange(len(ops))
    draw = rng.random()
    if draw < 0.35:
        ops[i], ops[j] = ops[j], ops[i]
    elif draw < 0.7:
        ops.insert(j, ops.pop(i))
    elif draw < 0.85:
        del ops[i]
    else:
        ops.insert(j, ops[i])
    return replace(program, ranks=tuple(map(tuple, ranks)))


def displaced(*kinds: Kind) -> Callable[[Program, random.Random], Program]:
    """Damage of one op of these kinds: moved by a few places, dropped, repeated or renamed."""

    def displace(program: Program, rng: random.Random) -> Program:
        ranks = [list(ops) for ops in program.ranks]
        places = [(r, i) for r, ops in enumerate(ranks) for i, op in enumerate(ops) if op.kind in kinds]
        if not places:
            return damaged(program, rng)
        r, i = rng.choice(places)
        ops, draw = ranks[r], rng.random()
        op, j = ops[i], min(len(ops) - 1, max(0, i + rng.choice((-3, -2, -1, -1, 1, 1, 2, 3))))
        if draw < 0.6:
            ops.insert(j, ops.pop(i))
        elif draw < 0.7:
            del ops[i]
        elif draw < 0.85 or op.kind.is_mark:
            numbered = op.kind in (Kind.GATHER, Kind.FREE, Kind.SCATTER) and rng.random() < 0.7
            ops.insert(j, op._replace(mb=op.mb + numbered))
        else:
            ops[i] = op._replace(stage=rng.randrange(program.placement.stages))
        return replace(program, ranks=tuple(map(tuple, ranks)))

    return displace


def verdicts(program: Program, seed: int) -> tuple[bool, bool]:
    """Whether the checks let a program pass, and whether it runs to its end, also where that begins again."""
    ways = {False, any(op.kind is Kind.REDO for _, _, op in program)}
    runs = all(operational.run(program, seed=seed, redo=redo).ok for redo in ways)
    return verdict(check_all, program) is None, runs
