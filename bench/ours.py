"""Our runtime as a contestant: the worker, transport and loop of every training run."""

from __future__ import annotations

import torch
from ranks import PATIENCE

from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.network import Network
from zbc.training.worker import build_worker


class Ours:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def step(self, step: int) -> StepResult | None:
        return run_step(self.worker, step)


def build(plan: StoredPlan, rank: int) -> Ours:
    cpu, seat = torch.device("cpu"), plan.manifest.topology.of(rank).pp
    network = Network(plan.manifest, cpu, PATIENCE)
    ramp = [RankPlan(seat, one.program.ranks[seat], one.manifest) for one in plan.ramp]
    return Ours(build_worker(RankPlan(seat, plan.program.ranks[seat], plan.manifest), network, cpu, ramp))
