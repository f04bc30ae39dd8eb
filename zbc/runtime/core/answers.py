"""Which rank answers for what: in the norm of all gradients, and in what is written down of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from zbc.ops import EXPERTS, WORDS, experts_of
from zbc.runtime.core.optimizer import StageOptimizer

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


def counted(worker: Worker) -> list[StageOptimizer]:
    """The stages whose gradients this rank answers for in the norm of all.

    Of several copies of a stage the one in pipe 0 of the first pipeline counts; where they share out its optimizer,
    each counts its part, and where replicas do not sum gradients each counts its own.
    """
    rank, placement = worker.plan.rank, worker.placement
    ep, found = worker.plan.manifest.ep, list[StageOptimizer]()  # so many replicas have all experts together
    for owner, optimizer in worker.optimizers.items():
        stage, first = (experts_of(owner), ep) if owner <= EXPERTS else (owner, 1)
        alone = owner == WORDS or placement.rank_of(stage) == rank
        if (optimizer.apart and not optimizer.mirrored) or (alone and (optimizer.apart or worker.within < first)):
            found.append(optimizer)
    return found


def primary(worker: Worker) -> dict[str, nn.Parameter]:
    """The weights that are written down from this rank: each of the model's on one rank, in the first pipeline."""
    rank, placement = worker.plan.rank, worker.placement
    mine = [s for s in worker.stages if worker.copy == 0 and placement.rank_of(s) == rank]
    ep = worker.plan.manifest.ep  # so many replicas have all experts together
    mine += [experts_of(s) for s in worker.stages if worker.copy < ep and placement.rank_of(s) == rank]
    found = {name: p for s in mine for name, p in worker.optimizers[s].parameters.items()}
    for feature in worker.features:
        found = feature.answers(worker, found)
    return found


def squares(worker: Worker) -> dict[str, Tensor]:
    """Sums of squares of the gradients this rank answers for, by parameter name; see `StageOptimizer.squares`."""
    found = {name: value for optimizer in counted(worker) for name, value in optimizer.squares().items()}
    for feature in worker.features:
        found = feature.answers(worker, found)
    return found
