"""Random correct programs, and ways to break them."""

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from zbc.ir import Kind, Message, Op, Placement, Program
from zbc.ops import TIED

Ranks = list[list[Op]]


def placement(rng: random.Random) -> Placement:
    p = rng.choice([1, 2, 2, 3, 3, 4])
    return rng.choice(
        [*[Placement.linear(p)] * 2, Placement.looped(p, 2), Placement.vshape(p), Placement.bidirectional(range(p))]
    )


def correct(rng: random.Random) -> Program:
    """A program that runs: legal compute order, with or without transfers, with or without step-level ops.

    Delayed sends can still make it deadlock; the operational machine decides.
    """
    program = any_order(rng, placement(rng), rng.randint(1, 4), rng.choice([1, 1, 1, 2]))
    if rng.random() < 0.85:
        ranks = with_transfers(rng, program)
        if rng.random() < 0.6:
            copies, tied = rng.choice([1, 1, 2]), program.placement.stages > 1 and rng.random() < 0.3
            program = replace(program, dp=copies, tied=tied, sharded=rng.random() < 0.3)
            ranks = with_step_ops(rng, program, ranks)
        program = replace(program, ranks=tuple(map(tuple, ranks)))
    return program


def any_order(rng: random.Random, place: Placement, microbatches: int, slices: int) -> Program:
    """All compute ops in a random legal order, microbatches in random pipes.

    The kinds get random urgencies, so that anything between GPipe, 1F1B and zero-bubble orders comes out.
    """
    pipes = [rng.randrange(len(place.pipes)) for _ in range(microbatches)]
    after: dict[Op, list[Op]] = defaultdict(list)
    missing: dict[Op, int] = {}
    last = place.stages - 1

    def add(op: Op, *needs: Op) -> None:
        missing[op] = len(needs)
        for needed in needs:
            after[needed].append(op)

    split = rng.choice([0.0, 0.5, 1.0])
    for mb, pipe in enumerate(pipes):
        back = {(s, k): Kind.B if rng.random() < split else Kind.BW for s in range(last + 1) for k in range(slices)}
        for s in range(last + 1):
            for k in range(slices):
                forward = [Op(Kind.F, before, mb, pipe, k) for before in place.sources(s)]
                forward += [Op(Kind.F, s, mb, pipe, k - 1)] if k else []
                add(Op(Kind.F, s, mb, pipe, k), *forward)
                needs = [Op(Kind.F, s, mb, pipe, k)]
                needs += [Op(back[after, k], after, mb, pipe, k) for after in place.sinks(s)]
                needs += [Op(back[s, k + 1], s, mb, pipe, k + 1)] if k < slices - 1 else []
                add(Op(back[s, k], s, mb, pipe, k), *needs)
                if back[s, k] is Kind.B:
                    add(Op(Kind.W, s, mb, pipe, k), Op(Kind.B, s, mb, pipe, k))
    weight = {kind: rng.choice([1, 3, 20]) for kind in (Kind.F, Kind.B, Kind.BW, Kind.W)}
    in_order = rng.random() < 0.7
    ready = [op for op, count in missing.items() if not count]
    ranks: Ranks = [[] for _ in range(place.ranks)]
    while ready:
        chances = [weight[op.kind] * (8.0**-op.mb if in_order else 1.0) for op in ready]
        op = rng.choices(ready, chances)[0]
        ready.remove(op)
        ranks[place.rank_of(op.stage, op.pipe)].append(op)
        for other in after[op]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return Program(place, microbatches, tuple(map(tuple, ranks)), ("random",), slices)


def with_transfers(rng: random.Random, program: Program) -> Ranks:
    """Sends after their producers, some delayed; receives a random number of ops ahead, in channel order."""
    place, ranks = program.placement, program.ranks
    held_back = rng.choice([0.0, 0.0, 0.3])
    ahead = rng.choice([0, 1, 3, 100])
    use: dict[tuple[bool, tuple[int, ...]], int] = {}
    sends: dict[tuple[int, int], list[tuple[int, Message]]] = defaultdict(list)
    for rank, ops in enumerate(ranks):
        for at, op in enumerate(ops):
            if op.kind is Kind.W:
                continue
            forward = op.kind is Kind.F
            use[forward, op.key] = at
            for there in place.sinks(op.stage) if forward else place.sources(op.stage):
                if not place.crosses(op.stage, there, op.pipe):
                    continue
                late = rng.randint(1, 3) if rng.random() < held_back else 0
                peer = place.rank_of(there, op.pipe)
                sends[rank, peer].append((min(at + late, len(ops) - 1), Message(op.stage, there, *op.key[1:])))
    placed: list[list[tuple[int, int, int, Op]]] = [[(at, 1, 0, op) for at, op in enumerate(ops)] for ops in ranks]
    for (rank, peer), messages in sends.items():
        messages.sort(key=lambda sent: sent[0])
        limit = len(ranks[peer])
        for k, (at, message) in reversed(list(enumerate(messages))):
            placed[rank].append((at, 2, k, place.send(message)))
            limit = min(limit, max(0, use[message.forward, message[1:]] - rng.randint(0, ahead)))
            placed[peer].append((limit, 0, k, place.recv(message)))
    return [[op for *_, op in sorted(items, key=lambda item: item[:3])] for items in placed]


def with_step_ops(rng: random.Random, program: Program, ranks: Ranks) -> Ranks:
    """Sums at random places after their last backwards, mostly in one order on all ranks; GATHER, VALIDATE, STEP."""
    place, spread = program.placement, rng.choice([0, 2, 100])
    sums = [Op(Kind.REDUCE, stage) for stage in range(place.stages)] + [Op(Kind.REDUCE, TIED)] * program.tied
    sums = rng.sample([op for op in sums if program.shared(op)], sum(map(program.shared, sums)))
    disorder = rng.random() < 0.2
    closed = []
    for rank, ops in enumerate(ranks):
        listed, floor = list(ops), 0
        mine = [op for op in sums if rank in program.members(op)]
        for op in rng.sample(mine, len(mine)) if disorder else mine:
            stages = (0, place.stages - 1) if op.stage == TIED else (op.stage,)
            ends = [i + 1 for i, other in enumerate(listed) if other.kind.computes and other.stage in stages]
            floor = max(floor, max(ends, default=len(listed)))
            floor += rng.randint(0, min(spread, len(listed) - floor))
            listed.insert(floor, op)
            floor += 1
        mine = list(place.stages_of(rank))
        steps = [Op(Kind.STEP, stage) for stage in rng.sample(mine, len(mine))]
        gathers = [op for stage in mine if program.sharded and program.shared(op := Op(Kind.GATHER, stage))]
        gathers = rng.sample(gathers, len(gathers)) if disorder else gathers
        closed.append([*gathers, *listed, Op(Kind.VALIDATE, 0), *steps])
    return closed


# ---- breaking ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    program: Program
    how: str
    touched: frozenset[Op]  # the ops that were moved, dropped or changed, and the other ends of transfers among them


def broken(rng: random.Random, program: Program, how: str) -> Broken:
    """The program after one break; unchanged if it has nothing to break that way."""
    ranks = [list(ops) for ops in program.ranks]
    touched: list[Op] = []
    with suppress(IndexError, ValueError):  # no choice among none
        touched = BREAKS[how](rng, ranks, program.placement)
    ends = {end for op in touched if op.kind.is_transfer for end in _ends(program.placement, op)}
    return Broken(replace(program, ranks=tuple(map(tuple, ranks))), how, frozenset({*touched, *ends}))


def _ends(place: Placement, op: Op) -> tuple[Op, ...]:
    message = place.message(op)
    return (op,) if message is None else (place.send(message), place.recv(message))


def _pick(rng: random.Random, ranks: Ranks, wanted: Callable[[Op], bool] = lambda op: True) -> tuple[int, int]:
    return rng.choice([(r, i) for r, ops in enumerate(ranks) for i, op in enumerate(ops) if wanted(op)])


def _swap(ops: list[Op], i: int, j: int) -> list[Op]:
    ops[i], ops[j] = ops[j], ops[i]
    return [ops[i], ops[j]]


def swap_adjacent(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    rank, i = _pick(rng, [ops[:-1] for ops in ranks])
    return _swap(ranks[rank], i, i + 1)


def swap_any(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    ops = rng.choice(ranks)
    return _swap(ops, *rng.sample(range(len(ops)), 2))


def move_any(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    ops = rng.choice(ranks)
    op = ops.pop(rng.randrange(len(ops)))
    ops.insert(rng.randint(0, len(ops)), op)
    return [op]


def drop(wanted: Callable[[Op], bool], rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    rank, i = _pick(rng, ranks, wanted)
    return [ranks[rank].pop(i)]


def repeat(wanted: Callable[[Op], bool], rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    rank, i = _pick(rng, ranks, wanted)
    op = ranks[rank][i]
    ranks[rank].insert(rng.randint(0, len(ranks[rank])), op)
    return [op]


def repeat_message(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    """Repeats both ends of a message, right after the first."""
    rank, i = _pick(rng, ranks, lambda op: op.kind.is_send)
    ends = _ends(place, ranks[rank][i])
    for ops in ranks:
        for op in ends:
            if op in ops:
                ops.insert(ops.index(op), op)
    return list(ends)


def reorder_receives(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    """Exchanges two receives of one channel."""
    channels: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for rank, ops in enumerate(ranks):
        for i, op in enumerate(ops):
            if op.kind.is_recv:
                channels[rank, place.peer(op)].append(i)
    key = rng.choice(sorted(key for key, places in channels.items() if len(places) > 1))
    return _swap(ranks[key[0]], *rng.sample(channels[key], 2))


def legal_moves(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    """Moves some ops by a random number of steps, as far as dependencies on their own rank allow."""
    touched = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        rank, i = _pick(rng, ranks)
        ops = ranks[rank]
        direction = rng.choice([-1, 1])
        for _ in range(rng.choice([1, 3, 100])):
            j = i + direction
            if not 0 <= j < len(ops) or _bound(place, ops[min(i, j)], ops[max(i, j)]):
                break
            ops[i], ops[j] = ops[j], ops[i]
            i = j
        touched.append(ops[i])
    return touched


def _bound(place: Placement, first: Op, second: Op) -> bool:
    """Whether `second` has to stay after `first` on their rank, independent of other ranks."""
    for op, other in ((first, second), (second, first)):
        if op.kind in (Kind.VALIDATE, Kind.STEP, Kind.GATHER):
            return True
        if op.kind.sums and other.kind.computes and op.stage in (TIED, other.stage):
            return True
    if first.kind.is_transfer and first.kind.is_send is second.kind.is_send and second.kind.is_transfer:
        return place.peer(first) == place.peer(second)
    same = (first.mb, first.pipe) == (second.mb, second.pipe)
    return same and second.stage in {first.stage, *place.sources(first.stage), *place.sinks(first.stage)}


def receive_later(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    """Posts a receive later, still before the next receive of its channel if there is room."""
    rank, i = _pick(rng, ranks, lambda op: op.kind.is_recv)
    op = ranks[rank].pop(i)
    peers = [j for j, o in enumerate(ranks[rank]) if o.kind.is_recv and place.peer(o) == place.peer(op) and j >= i]
    end = min(peers, default=len(ranks[rank])) if rng.random() < 0.7 else len(ranks[rank])
    ranks[rank].insert(rng.randint(i, max(i, end)), op)
    return [op]


def other_rank(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    rank, i = _pick(rng, ranks)
    target = rng.choice([r for r in range(len(ranks)) if r != rank])
    op = ranks[rank].pop(i)
    ranks[target].insert(rng.randint(0, len(ranks[target])), op)
    return [op]


def other_op(rng: random.Random, ranks: Ranks, place: Placement) -> list[Op]:
    """Changes one field of an op, perhaps to a value that does not exist."""
    rank, i = _pick(rng, ranks, lambda op: not op.kind.rank_wide)
    old = ranks[rank][i]
    keyed = old.kind.computes or old.kind.is_transfer
    field = rng.choice(["kind", "stage", "mb", "pipe", "slice"]) if keyed else "stage"
    kinds = [kind for kind in Kind if kind.computes] if old.kind.computes else [k for k in Kind if k.is_transfer]
    new = rng.choice(kinds) if field == "kind" else max(0, getattr(old, field) + rng.choice([-1, 1]))
    ranks[rank][i] = op = old._replace(**{field: new})
    return [old, op]


OF: dict[str, Callable[[Op], bool]] = {
    "compute": lambda op: op.kind.computes,
    "transfer": lambda op: op.kind.is_transfer,
    "step op": lambda op: not op.kind.computes and not op.kind.is_transfer,
}
BREAKS: dict[str, Callable[[random.Random, Ranks, Placement], list[Op]]] = {
    "nothing": lambda rng, ranks, place: [],
    "swap adjacent": swap_adjacent,
    "swap any": swap_any,
    "move any": move_any,
    **{f"drop {name}": partial(drop, wanted) for name, wanted in OF.items()},
    **{f"repeat {name}": partial(repeat, wanted) for name, wanted in OF.items()},
    "repeat message": repeat_message,
    "reorder receives": reorder_receives,
    "legal moves": legal_moves,
    "more legal moves": legal_moves,
    "yet more legal moves": legal_moves,
    "receive later": receive_later,
    "other rank": other_rank,
    "other op": other_op,
}
