"""Random graphs of stages with random programs on them."""

import random
from dataclasses import replace

from tests.check.programs import any_order, with_step_ops, with_transfers
from tests.lowered import lower
from zbc.ir import Edge, Op, Placement, Program


def edges(rng: random.Random, stages: int) -> tuple[Edge, ...]:
    """Edges: each stage but the last is read by one to three later ones."""
    found = set[Edge]()
    for stage in range(stages - 1):
        later = range(stage + 1, stages)
        near = [*later[:1]] if rng.random() < 0.5 else []
        found |= {(stage, other) for other in (near or rng.sample(later, min(len(later), rng.choice((1, 1, 2, 3)))))}
    return tuple(sorted(found))


def placement(rng: random.Random, *, most: int) -> Placement:
    """2 to `most` stages, one per rank, or dealt to fewer ranks at random."""
    stages = rng.randint(2, most)
    homes = list(range(stages))
    if rng.random() < 0.3:
        ranks = rng.randint(1, stages)
        homes = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
        rng.shuffle(homes)
    return Placement((tuple(homes),), edges(rng, stages))


def draw(seed: int, *, stages: int = 7, microbatches: int = 6) -> Program:
    """Program number `seed`: its transfers are placed by the compiler, or at random."""
    rng = random.Random(seed)
    place, count = placement(rng, most=stages), rng.randint(1, microbatches)
    slices, copies = rng.choice([1, 1, 1, 2]), rng.choice([1, 1, 2])
    program = replace(any_order(rng, place, count, slices), dp=copies)
    if rng.random() < 0.5:
        return lower(program)
    complete = with_step_ops(rng, program, with_transfers(rng, program))
    return replace(program, ranks=tuple(map(tuple, complete)))


def confused(program: Program, rng: random.Random) -> Program:
    """The program with one transfer, of a stage with several, changed to name another stage, or none."""
    spots = [(r, i) for r, ops in enumerate(program.ranks) for i, op in enumerate(ops) if op.other >= 0]
    if not spots:
        return program
    ranks: list[list[Op]] = [list(ops) for ops in program.ranks]
    rank, step = rng.choice(spots)
    op = ranks[rank][step]
    others = [s for s in (-1, *range(program.placement.stages)) if s != op.other]
    ranks[rank][step] = op._replace(other=rng.choice(others))
    return replace(program, ranks=tuple(map(tuple, ranks)))
