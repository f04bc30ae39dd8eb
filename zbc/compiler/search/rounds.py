"""The V placement of two chunks filled round by round at the real op times, if memory allows 1F1B's peak.

Warm-up: each rank starts as many F of its first chunk as fit before its second chunk's first input arrives, leaving
room for that chunk's needs; then ranks further down catch up with those above. After that, rounds: every rank runs one
B, then one F, of the chunk whose input has arrived. A W fills a gap it fits in, frees memory when a B or F needs it, or
runs when waiting would make its rank the idlest of all. An open filling keeps the last kind of W out of gaps before F
and before B of the way down. As ranks look no further than one round, warm-up and drain have one shape for any number
of ranks.

Source: the heuristic for ZB-V of arXiv 2401.10241, section 6.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from zbc.compiler.search.listing import ROOM
from zbc.compiler.search.problem import KINDS, Problem

F, B, W = range(3)
DOWN, UP = range(2)  # chunks, by the way of F
NEVER = float("inf")


class Filling(NamedTuple):
    """Whether W may run in a gap too small for it; a recipe to make such an order again for other microbatches."""

    fill: bool


def filled(problem: Problem, recipe: Filling) -> list[int] | None:
    """A rank-major order for a V placement of two chunks with room for it; None otherwise, and for slices."""
    p = problem.p
    if problem.slices > 1 or problem.v != 2 or problem.rank != [*range(p), *range(p - 1, -1, -1)]:
        return None
    ranks = _Rounds(problem, recipe.fill)
    return [op for ops in ranks.order for op in ops] if ranks.warm_up() and ranks.steady() else None


class _Rounds:
    """Ranks as they are filled. `step` runs an op; the other methods choose it."""

    def __init__(self, problem: Problem, fill: bool) -> None:
        p, n = problem.p, problem.n_stages
        self.problem, self.p, self.m, self.fill = problem, p, problem.m, fill
        self.stage = [(r, n - 1 - r) for r in range(p)]
        rows = problem.rows()
        self.base = [rows.bases(kind) for kind in KINDS]
        self.length = (problem.f, problem.b, problem.w)
        growth = [w - b for b, w in zip(problem.keep_b, problem.keep_w, strict=True)]
        self.change = (problem.keep_b, growth, [-w for w in problem.keep_w])
        self.ends: list[list[list[float]]] = [[[] for _ in range(n)] for _ in range(3)]  # kind, stage, microbatch
        self.clock, self.held, self.idle = [0.0] * p, [0.0] * p, [0.0] * p
        self.pending: list[deque[int]] = [deque() for _ in range(p)]  # chunks whose W is due
        self.order: list[list[int]] = [[] for _ in range(p)]

    def count(self, kind: int, r: int, chunk: int) -> int:
        return len(self.ends[kind][self.stage[r][chunk]])

    def arrival(self, kind: int, r: int, chunk: int) -> float:
        """ms when the input of rank r's next such op arrives; NEVER if it is not made yet."""
        s = self.stage[r][chunk]
        i = len(self.ends[kind][s])
        before, lag = (s - 1, s) if kind == F else (s + 1, s + 1)
        if before < 0:
            return 0.0
        if before == self.problem.n_stages:
            kind, before, lag = F, s, 0
        ends = self.ends[kind][before]
        return ends[i] + self.problem.lag[lag] if i < len(ends) else NEVER

    def fits(self, kind: int, r: int, chunk: int, times: int = 1) -> bool:
        return self.held[r] + times * self.change[kind][self.stage[r][chunk]] <= self.problem.limit[r] + ROOM

    def step(self, kind: int, r: int, chunk: int) -> bool:
        """Runs the next such op; False if its input or its memory is missing."""
        s = self.stage[r][chunk]
        ends = self.ends[kind][s]
        arrived = 0.0 if kind == W else self.arrival(kind, r, chunk)
        if len(ends) == self.m or arrived == NEVER or not self.fits(kind, r, chunk):
            return False
        begin = max(self.clock[r], arrived)
        if self.order[r]:
            self.idle[r] += begin - self.clock[r]
        self.order[r].append(self.base[kind][s] + len(ends))
        self.clock[r] = begin + self.length[kind][s]
        ends.append(self.clock[r])
        self.held[r] += self.change[kind][s]
        if kind == B:
            self.pending[r].append(chunk)
        return True

    def weigh(self, r: int) -> None:
        self.step(W, r, self.pending[r].popleft())

    def warm_up(self) -> bool:
        """Forwards only, until every rank can begin its rounds; False if memory does not suffice."""
        p, m = self.p, self.m
        done = all(self.step(F, r, DOWN) for r in range(p))
        for r in reversed(range(p)):
            arrived = self.arrival(F, r, UP)
            while (
                done
                and self.count(F, r, DOWN) < m
                and self.fits(F, r, DOWN, 2 * r + 2)
                and self.clock[r] + self.length[F][r] <= arrived
            ):
                done = all(self.step(F, q, DOWN) for q in range(r + 1))
            done = done and self.step(F, r, UP)
        chunk = DOWN
        for r in range(1, p):
            while done and self.behind(r):
                running = [q for q in reversed(range(r, p)) if self.count(F, q, chunk) < m]
                done = all(self.step(F, q, chunk) for q in running)
                chunk = UP - chunk
        return done

    def behind(self, r: int) -> bool:
        """Whether rank r has run fewer F than the one above it."""
        own, above = ((self.count(F, q, DOWN), self.count(F, q, UP)) for q in (r, r - 1))
        return sum(own) < sum(above) or own[UP] <= above[UP] < self.m

    def steady(self) -> bool:
        """Rounds of one B and one F on every rank; False if some op never ran."""
        for _ in range(2 * self.m):
            chunks = [self.backward(r) for r in range(self.p)]
            turn = [r for r in reversed(range(self.p)) if chunks[r] == DOWN]
            for r in turn + [r for r in range(self.p) if chunks[r] == UP]:
                self.settle(B, r, chunks[r], self.fill or chunks[r] == DOWN)
            for r in range(self.p):
                self.settle(F, r, self.forward(r), self.fill)
        for r in range(self.p):
            while self.pending[r]:
                self.weigh(r)
        return sum(map(len, self.order)) == self.problem.size

    def backward(self, r: int) -> int:
        """The chunk of the next B."""
        if self.count(B, r, DOWN) >= self.count(B, r, UP):
            return UP
        down = r == self.p - 1 or self.count(B, r, UP) == self.m or self.arrival(B, r, DOWN) < NEVER
        return DOWN if down else UP

    def forward(self, r: int) -> int:
        """The chunk of the next F."""
        ready = self.count(F, r, UP) < self.count(F, r, DOWN) and self.arrival(F, r, UP) < NEVER
        return UP if ready else DOWN

    def settle(self, kind: int, r: int, chunk: int, fill: bool) -> None:
        """Runs one op of this round, after any W that fit before it, that memory demands, or that idleness demands."""
        arrived = self.arrival(kind, r, chunk)
        if arrived == NEVER or self.count(kind, r, chunk) == self.m:
            return
        pending = self.pending[r]
        while pending and not self.fits(kind, r, chunk):
            self.weigh(r)
        while pending and arrived >= self.clock[r] + self.length[W][self.stage[r][pending[0]]]:
            self.weigh(r)
        if fill and pending and arrived - self.clock[r] > max(self.idle) - self.idle[r]:
            self.weigh(r)
        self.step(kind, r, chunk)
