"""Ops of a step without a barrier (arXiv 2401.10241, section 4): tentative weights, a verdict that comes later.

    TENTATIVE  the weights that forward reads become what a step without clipping would make of them; nothing else does
    NORM       the numbers that make the gradient norm, the loss and the rest go from rank to rank, each adding its own;
               every entry comes from one rank, so the sum is exact in any order
    VERDICT    the sums of all come back from the last rank; with several replicas, their last ranks add up first
    REDO       if the step is to be clipped or skipped: step so, publish the weights, drop what the forwards since have
               made, wait for what is still on its way to them, and run them again, messages and all
    COMMIT     otherwise: the ordinary step, in place; the weights that forward reads have its bits already

Nothing is ever computed backwards: until COMMIT or REDO, master weights, optimizer state and gradients are those of the
step before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.plan.directory import judges
from zbc.runtime.answers import squares
from zbc.runtime.optimizer import Masters, set_rate
from zbc.runtime.pending import Ahead, TentativeStep
from zbc.runtime.progress import StepResult
from zbc.runtime.remembered import present, put_back
from zbc.runtime.sharded import Sharded
from zbc.runtime.state import Worker
from zbc.runtime.transport import Again, Signal
from zbc.runtime.validate import peak_bytes

NORM, VERDICT = Signal(Kind.NORM), Signal(Kind.VERDICT)

# ---- handlers ------------------------------------------------------------------------------------------------


def tentative(worker: Worker, op: Op) -> None:
    """TENTATIVE: write a stage's working weights as if its step stood, once its gradients are summed over replicas.

    The learning rate stays until the next one: COMMIT and REDO come before it and belong to this step.
    """
    worker.settle(op.stage)
    worker.before_update()
    masters = masters_of(worker, op)
    set_rate(masters, worker.rate(worker.phases, worker.step))
    masters.tentative()


def norm(worker: Worker, op: Op) -> None:
    """NORM: add this rank's sums of the last step to those of the ranks before, and pass them on."""
    pending = _ahead(worker, op).pending
    if pending is None:
        return
    losses = {} if worker.share else {worker.number(mb): loss for mb, loss in pending.losses.items()}
    losses |= pending.added
    own, peak, device = squares(worker), pending.peak, worker.device
    busy = pending.busy()  # a GPU's ops of the last step have long ended
    vector = worker.layout.vector(own, losses, rank=worker.rank, stop=worker.stop, busy=busy, peak=peak, device=device)
    before = _before(worker)
    if before is not None:
        vector += _signal(worker, NORM, before)
    after = _after(worker)
    if after is None:
        worker.all_reduce(vector, judges(worker.plan.manifest))
        pending.sums = vector
    else:
        worker.transport.send(NORM, vector, after)


def verdict(worker: Worker, op: Op) -> None:
    """VERDICT: take the sums of all ranks from the next one and pass them back."""
    pending = _ahead(worker, op).pending
    if pending is None:
        return
    sums, before = pending.sums, _before(worker)
    after = _after(worker)
    if sums is None and after is not None:
        sums = _signal(worker, VERDICT, after)
    if sums is None:
        raise ZbcError("E703", f"run: {op} comes before NORM", hint="plan again")
    if before is not None:
        worker.transport.send(VERDICT, sums, before)
    pending.verdict, pending.sums = worker.learn(sums), None


def redo(worker: Worker, op: Op) -> None:
    """REDO: where the last step does not stand as it was assumed, set it right and run the forwards since again."""
    ahead = _ahead(worker, op)
    pending = ahead.pending
    if pending is None or _settle(worker, pending):
        return
    for message in ahead.outstanding:
        worker.wait(message)
    worker.drop_repeated()
    worker.losses.clear()
    put_back(ahead.buffers, ahead.found)
    routes = [worker.routes[one] for _, one, _ in ahead.again]
    worker.renamed = {one: Again(one) for route in routes if (one := route.brought) is not None}
    progress, shown = worker.progress, (worker.progress.index, worker.progress.op)
    for handler, one, text in ahead.again:
        progress.op = f"{text} again"
        handler(worker, one)
    progress.index, progress.op = shown


def _settle(worker: Worker, pending: TentativeStep) -> bool:
    """Whether the last step stands; if not, step as the verdict says and write the working weights again."""
    verdict = pending.verdict
    if verdict is None:
        raise ZbcError("E703", "run: the verdict of the last step is not known", hint="plan again")
    scale = verdict.clip(worker.clip)
    if not verdict.skipped and scale is None:
        return True
    for stage, optimizer in sorted(worker.optimizers.items()):
        masters = masters_of(worker, Op(Kind.COMMIT, stage))
        if not verdict.skipped:
            masters.commit(scale)
        masters.publish()
        optimizer.drop()
        if isinstance(optimizer, Sharded):  # all its copies are here, in this order, as they all know the verdict
            worker.gathers.start(worker, optimizer)
    worker.gathers.finish(worker)
    pending.final = pending.redone = True
    return False


def commit(worker: Worker, op: Op) -> None:
    """COMMIT: the ordinary step of a stage, unless REDO has made it."""
    pending, masters = _ahead(worker, op).pending, masters_of(worker, op)
    if pending is not None and not pending.final:
        masters.commit(None)
        worker.optimizers[op.stage].drop()


def _signal(worker: Worker, signal: Signal, peer: int) -> Tensor:
    """Numbers of `peer`, posted for right before they are waited for: on a GPU what is posted takes part of it until
    it comes, and kernels that run for the first time may wait for that."""
    buffer = torch.empty(worker.layout.size, dtype=torch.float64, device=worker.device)
    worker.transport.post(signal, buffer, peer)
    return worker.wait(signal)


# ---- steps ---------------------------------------------------------------------------------------------------


def open_step(worker: Worker, ahead: Ahead) -> None:
    """Remember what the forwards of the step may change."""
    if ahead.pending is not None:
        ahead.found = present(ahead.buffers)  # forwards change copies of these


def close_step(worker: Worker, ahead: Ahead) -> tuple[StepResult | None, TentativeStep]:
    """Put the step away until its verdict comes; returns the one before, which is final now, and the one put away."""
    before = ahead.pending
    losses, added = dict(worker.losses), worker.added.told(worker.layout.microbatches)
    worker.losses.clear()
    worker.renamed.clear()
    pending = TentativeStep(
        worker.step, losses, worker.clock.read(), peak_bytes(worker.device), seconds=0.0, added=added
    )
    ahead.pending = pending
    return None if before is None else before.result(), pending


def flush(worker: Worker, ahead: Ahead) -> StepResult | None:
    """Make the last step final, with no step after it."""
    pending = ahead.pending
    if pending is None:
        return None
    open_step(worker, ahead)
    norm(worker, Op(Kind.NORM, 0))
    verdict(worker, Op(Kind.VERDICT, 0))
    if _settle(worker, pending):
        for stage in worker.stages:
            commit(worker, Op(Kind.COMMIT, stage))
    ahead.pending = None
    return pending.result()


def _ahead(worker: Worker, op: Op) -> Ahead:
    if worker.ahead is None:
        raise _not_ahead(str(op))
    return worker.ahead


def masters_of(worker: Worker, op: Op) -> Masters:
    """The optimizer of a stage's masters, or of the pieces of them that are this rank's."""
    optimizer = worker.optimizers[op.stage]
    masters = optimizer.masters if isinstance(optimizer, Sharded) else optimizer
    if not isinstance(masters, Masters):
        raise _not_ahead(str(op))
    return masters


def _not_ahead(what: str) -> ZbcError:
    text = f'run: {what} is for optimizer.sync = "post-validate", which this plan was not made for'
    return ZbcError("E703", text, hint="plan again")


def _before(worker: Worker) -> int | None:
    """The rank that NORM comes from."""
    part = worker.plan.rank
    return worker.seat(part - 1) if part > 0 else None


def _after(worker: Worker) -> int | None:
    """The rank that VERDICT comes from."""
    part = worker.plan.rank
    return worker.seat(part + 1) if part + 1 < worker.topology.pp else None
