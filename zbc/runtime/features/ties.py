"""Tied weights: each stage that shares one has a gradient of its own, and one rank reports it."""

from __future__ import annotations

from collections.abc import Mapping

from zbc.runtime.core.feature import Answer, Context, Feature
from zbc.runtime.core.state import Worker


class Ties(Feature):
    """`homes`: the stages of each shared weight, its owner's first."""

    def __init__(self, homes: Mapping[str, tuple[int, ...]]) -> None:
        self.homes = homes

    def answers(self, worker: Worker, found: dict[str, Answer]) -> dict[str, Answer]:
        own = {s for s in worker.stages if worker.within == 0 and worker.placement.rank_of(s) == worker.plan.rank}
        return {name: answer for name, answer in found.items() if name not in self.homes or self.homes[name][0] in own}

    def ranks(self, worker: Worker, name: str) -> tuple[int, ...]:
        """The ranks of the run that hold a shared weight."""
        ranks = {rank for stage in self.homes[name] for rank in worker.placement.holders(stage)}
        return worker.topology.ranks(sorted(ranks), worker.at)


def build(context: Context) -> Ties:
    return Ties(context.tied)
