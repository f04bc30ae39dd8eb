"""The search for the shortest circle, on random waits between ranks and against a search without its shortcuts."""

from __future__ import annotations

import random

from zbc.compiler.check.circle import Roads, Wait

CASES = 4000  # the shortcuts matter in two of a thousand


def random_waits(seed: int) -> tuple[list[int], list[Wait]]:
    """(rank of each op, waits by place) of a few ranks."""
    rng = random.Random(seed)
    ranks, ops = rng.randint(2, 5), rng.choice([3, 5, 8])
    waits = []
    for _ in range(rng.choice([3, 8, 14, 20])):
        a, b = rng.randrange(ranks * ops), rng.randrange(ranks * ops)
        if b // ops != a // ops or b > a:
            waits.append(Wait(a, 2 * a + rng.randrange(2), b, 2 * b + rng.randrange(2)))
    return [i // ops for i in range(ranks * ops)], sorted(dict.fromkeys(waits), key=lambda wait: wait.place)


def leads_on(rank_of: list[int], wait: Wait, following: Wait) -> bool:
    """Whether one can go on by `following` from where `wait` leads."""
    return rank_of[wait.target] == rank_of[following.op] and following.place <= wait.there


def fewest(rank_of: list[int], waits: list[Wait]) -> int:
    """The length of a shortest circle, 0 if there is none: from each wait in turn, all waits level by level."""
    onward = {wait: [other for other in waits if leads_on(rank_of, wait, other)] for wait in waits}
    lengths = []
    for start in waits:
        level, seen, length = [start], set(), 0
        while level and start not in seen:
            level = [other for wait in level for other in onward[wait] if other not in seen]
            seen.update(level)
            length += 1
        if start in seen:
            lengths.append(length)
    return min(lengths, default=0)


def is_circle(rank_of: list[int], circle: list[Wait]) -> bool:
    return all(leads_on(rank_of, *pair) for pair in zip(circle, [*circle[1:], *circle[:1]], strict=True))


def test_the_circle_found_has_the_fewest_waits():
    for seed in range(CASES):
        rank_of, waits = random_waits(seed)
        circle = Roads(rank_of, waits).shortest()
        assert is_circle(rank_of, circle), (seed, circle)
        assert len(circle) == fewest(rank_of, waits), (seed, circle)


def test_a_search_that_is_cut_short_finds_a_circle_where_every_rank_stops_for_another():
    found = 0
    for seed in range(CASES):
        rank_of, waits = random_waits(seed)
        first: dict[int, Wait] = {}
        for wait in waits:
            first.setdefault(rank_of[wait.op], wait)
        roads = Roads(rank_of, waits)
        roads.effort = 10**9
        circle = roads.shortest()
        assert is_circle(rank_of, circle), (seed, circle)
        stops = [first.get(rank_of[wait.target]) for wait in waits]
        if waits and all(stop and leads_on(rank_of, wait, stop) for wait, stop in zip(waits, stops, strict=True)):
            assert circle, seed
            found += 1
    assert found > 20


def test_a_short_cut_to_the_beginning_of_a_rank_does_not_hide_the_way_to_its_end():
    """A ring of three ranks; from each rank another wait leads back to the beginning of the one before it."""
    rank_of = [i // 4 for i in range(12)]
    ring = [Wait(4 * r + 2, 8 * r + 4, (4 * r + 7) % 12, 2 * ((4 * r + 7) % 12)) for r in range(3)]
    back = [Wait(4 * r + 1, 8 * r + 2, (4 * r + 8) % 12, 2 * ((4 * r + 8) % 12)) for r in range(3)]
    circle = Roads(rank_of, sorted(ring + back, key=lambda wait: wait.place)).shortest()
    assert sorted(circle) == ring
