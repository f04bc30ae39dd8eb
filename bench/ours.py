"""Our runtime as one of the contestants of fidelity.py: the worker, transport and loop of every training run."""

from __future__ import annotations

from datetime import timedelta

import torch

from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import finish, run_step
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.network import Network
from zbc.training.worker import build_worker


class Ours:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def step(self, step: int) -> StepResult | None:
        return run_step(self.worker, step)

    def finish(self) -> None:
        """Behind the last of several steps without a barrier."""
        finish(self.worker)

    def clear(self) -> None:
        """Nothing is left behind."""


def build(plan: StoredPlan, rank: int, limit: timedelta) -> Ours:
    cpu = torch.device("cpu")
    network = Network(plan.manifest, cpu, limit)
    return Ours(build_worker(RankPlan(rank, plan.program.ranks[rank], plan.manifest), network, cpu))
