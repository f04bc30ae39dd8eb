"""A scheduling request as numbers: what the kernels read, and orders back as programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zbc.compiler.cost import Costs
from zbc.ir import Kind, Op, Placement, Program

UNLIMITED = 1e15
KINDS = (Kind.F, Kind.B, Kind.W)


@dataclass(frozen=True, slots=True)
class Problem:
    """p ranks with v stages each, m microbatches; times in ms, memory in activation units.

    `lag[s]` is the transfer between stages s-1 and s, `limit[r]` what rank r may hold. Ops are numbered
    `kind * S*m + stage * m + microbatch`, kinds F, B, W.
    """

    placement: Placement
    p: int
    m: int
    v: int
    rank: list[int]
    stages: list[int]  # rank-major: the v stages of each rank in path order
    f: list[float]
    b: list[float]
    w: list[float]
    lag: list[float]
    keep_b: list[float]
    keep_w: list[float]
    limit: list[float]

    @classmethod
    def make(cls, placement: Placement, costs: Costs, m: int, limit: float | Sequence[float] | None) -> Problem:
        """`limit` in activation units, one for all ranks or one each; None for none."""
        p, v = placement.ranks, placement.stages // placement.ranks
        each = limit if isinstance(limit, Sequence) else [UNLIMITED if limit is None else limit] * p
        return cls(
            placement=placement,
            p=p,
            m=m,
            v=v,
            rank=list(placement.pipes[0]),
            stages=[s for r in range(p) for s in placement.stages_of(r)],
            f=list(map(float, costs.column("f"))),  # compiled kernels tell them from whole numbers
            b=list(map(float, costs.column("b"))),
            w=list(map(float, costs.column("w"))),
            lag=[0.0, *map(float, costs.links[0].values())],
            keep_b=list(map(float, costs.units("kept"))),
            keep_w=list(map(float, costs.units("left"))),
            limit=list(map(float, each)),
        )

    @property
    def n_stages(self) -> int:
        return self.p * self.v

    @property
    def size(self) -> int:
        """Number of ops."""
        return 3 * self.n_stages * self.m

    def earliest(self) -> tuple[list[float], list[float]]:
        """Earliest start of the first F and of the first B of each stage."""
        f_start = [0.0]
        for s in range(1, self.n_stages):
            f_start.append(f_start[-1] + self.f[s - 1] + self.lag[s])
        b_start = [0.0] * self.n_stages
        b_start[-1] = f_start[-1] + self.f[-1]
        for s in range(self.n_stages - 2, -1, -1):
            b_start[s] = b_start[s + 1] + self.b[s + 1] + self.lag[s + 1]
        return f_start, b_start

    def first_b(self) -> list[float]:
        """Earliest start of any B, per rank."""
        _, b_start = self.earliest()
        return [min(b_start[s] for s in self._of(r)) for r in range(self.p)]

    def reserves(self) -> list[float]:
        """Per rank and chunk, how many microbatches of the chunk an unhindered warm-up would start."""
        f_start, b_start = self.earliest()
        result = []
        for r in range(self.p):
            stages = self._of(r)
            first = min(b_start[s] for s in stages)
            period = sum(self.f[s] for s in stages) or 1.0
            for s in stages:
                count = (first - f_start[s]) / period // 1.0 + 1.0
                room = self.limit[r] / (self.keep_b[s] or 1.0) / self.v
                result.append(min(max(1.0, count), float(self.m), max(1.0, room)))
        return result

    def _of(self, rank: int) -> list[int]:
        return self.stages[rank * self.v : (rank + 1) * self.v]

    def program(self, order: Sequence[int], name: str) -> Program:
        """The program of a rank-major order of op numbers."""
        per_kind, per_rank = self.n_stages * self.m, 3 * self.v * self.m
        bounds = [0, *accumulate([per_rank] * self.p)]
        ranks = tuple(
            tuple(
                Op(KINDS[number // per_kind], number % per_kind // self.m, number % self.m)
                for number in order[bounds[r] : bounds[r + 1]]
            )
            for r in range(self.p)
        )
        return Program(self.placement, self.m, ranks, history=(name,))
