"""Skips weight gradients of frozen layers if that makes the step shorter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from zbc.compiler.cost import estimate
from zbc.compiler.passes.freeze_shares import frozen_shares
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import lengths, replay
from zbc.ir import WHOLE, Op, Program

_ROUND = 1e-6  # of a layer: the error of the linear program
# For even and for odd stages: the fraction of a layer that may be frozen before the linear program asks for all of it.
# Neighbours' simultaneous backwards are of adjacent microbatches, so with the last pair they round the same way.
_BIASES = ((0.0, 0.0), (0.5, 0.5), (0.0, 0.5))


@dataclass(frozen=True, slots=True)
class Freeze:
    """Freeze layers in W and BW: at most the share `most` of a stage, on average over its ops of a step.

    `layers` has the number of layers of each stage: an op freezes whole layers, so the shares of the linear program are
    rounded, and the rest that an op did not get goes to the next ones of its stage. Without `layers` a share is a whole
    percentage.

        BW s0 m0         BW s0 m0
        BW s0 m1   ->    BW s0 m1 50%
        BW s0 m2         BW s0 m2 75%
    """

    name: ClassVar[str] = "freeze"
    most: float
    layers: tuple[int, ...] = ()

    def run(self, program: Program, context: Context) -> Program:
        solved = frozen_shares(program, context.graph, context.costs, self.most)
        ways = [solved.of]
        if solved.ms is None:  # in part, which may be worse than equal shares
            ways.append({op: self.most for _, _, op in program if op.kind.makes_part})
        programs = [self._rounded(program, shares, bias) for shares in ways for bias in _BIASES]
        fits = [trial for trial in programs if all(within(share, self.most) for share in frozen_by_stage(trial))]
        plain = context.timeline.makespan

        def rank(one: Program) -> tuple[float, float]:
            ms = _makespan(context, one)
            return round(ms / plain, 9) if plain else 0.0, frozen(one)

        best = min(fits, key=rank, default=program)
        return best if best is not program else program.with_ranks(program.ranks, by=self.name)

    def _rounded(self, program: Program, shares: Mapping[Op, float], bias: tuple[float, float]) -> Program:
        """The program with whole layers frozen."""
        due = [bias[stage % 2] for stage in range(program.placement.stages)]

        def rounded(op: Op) -> Op:
            if not op.kind.makes_part:
                return op
            count = self.layers[op.stage] if self.layers else WHOLE
            asked = due[op.stage] + shares.get(op, 0.0) * count
            layers = min(count, math.floor(asked + _ROUND))
            due[op.stage] = asked - layers
            return op._replace(share=round(WHOLE * (count - layers) / count))

        return program.with_ranks([[rounded(op) for op in ops] for ops in program.ranks], by=self.name)


def within(share: float, most: float) -> bool:
    """Whether a stage is frozen by at most `most`; ops have shares in whole percent."""
    return share <= most + 1 / (2 * WHOLE)


def trained(table: Sequence[estimate.Layer], part: Sequence[int]) -> int:
    """The number of layers of a stage with weight gradients, at least 1."""
    return max(1, sum(table[i].w > 0 for i in part))


def frozen_by_stage(program: Program) -> list[float]:
    """The mean share of each stage that is frozen, 0 to 1."""
    stages = program.placement.stages
    shares, counts = [0.0] * stages, [0] * stages
    for _, _, op in program:
        if op.kind.makes_part:
            shares[op.stage] += (WHOLE - op.share) / WHOLE
            counts[op.stage] += 1
    return [share / count if count else 0.0 for share, count in zip(shares, counts, strict=True)]


def frozen(program: Program) -> float:
    """The mean frozen share of all its ops that have weight gradients."""
    shares = [(WHOLE - op.share) / WHOLE for _, _, op in program if op.kind.makes_part]
    return sum(shares) / len(shares) if shares else 0.0


def alike(context: Context, most: float) -> float:
    """ms of a step with all ops frozen by the same share, rounded to a percentage."""
    program, share = context.program, round(WHOLE * (1 - most))
    ranks = [[op._replace(share=share) if op.kind.makes_part else op for op in ops] for ops in program.ranks]
    return _makespan(context, program.with_ranks(ranks, by=Freeze.name))


def _makespan(context: Context, program: Program) -> float:
    """ms of the step of a context, of which `program` freezes some layers; dependencies are the same."""
    length = lengths(context.graph, context.costs)
    for i, (_, _, op) in enumerate(program):
        if op.share != WHOLE:
            length[i] -= context.costs.frozen(op)
    return replay(context.graph, context.costs, length).makespan
