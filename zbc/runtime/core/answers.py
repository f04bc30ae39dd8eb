"""The parameters that a rank reports: in the norm of all gradients, and in saved weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from zbc.ops import EXPERTS, WORDS, home_of
from zbc.runtime.core.optimizer import StageOptimizer

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


def counted(worker: Worker) -> list[StageOptimizer]:
    """The optimizers of the stages whose gradients this rank reports in the norm of all.

    Of several replicas of a stage the one in pipe 0 of the first pipeline reports; if they shard its optimizer, each
    reports its shard, and if replicas do not sum gradients, each reports its own.
    """
    rank, placement = worker.plan.rank, worker.placement
    run, optimizers = worker.topology, list[StageOptimizer]()
    for owner, optimizer in worker.optimizers.items():
        alone = owner == WORDS or placement.rank_of(home_of(owner)) == rank
        first = run.first(worker.rank, worker.layout.apart) if owner <= EXPERTS else worker.within == 0
        if (optimizer.apart and not optimizer.mirrored) or (alone and (optimizer.apart or first)):
            optimizers.append(optimizer)
    return optimizers


def primary(worker: Worker) -> dict[str, nn.Parameter]:
    """The weights that this rank saves: each weight of the model is saved by one rank, in the first pipeline."""
    rank, placement = worker.plan.rank, worker.placement
    mine = [owner for owner in worker.optimizers if owner != WORDS and placement.rank_of(home_of(owner)) == rank]
    first = worker.topology.first(worker.rank)
    owners = [owner for owner in mine if (first if owner <= EXPERTS else worker.copy == 0)]
    parameters = {name: p for s in owners for name, p in worker.optimizers[s].parameters.items()}
    for feature in worker.features:
        parameters = feature.answers(worker, parameters)
    return parameters


def squares(worker: Worker) -> dict[str, Tensor]:
    """Sums of squares of the gradients this rank reports, by parameter name; see `StageOptimizer.squares`."""
    sums = {name: value for optimizer in counted(worker) for name, value in optimizer.squares().items()}
    for feature in worker.features:
        sums = feature.answers(worker, sums)
    return sums
