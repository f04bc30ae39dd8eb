"""Ops of a step without a barrier (arXiv 2401.10241, section 4): tentative weights, a verdict that arrives later.

    TENTATIVE  updates only the weights that forward reads, as a step without clipping would
    NORM       the vector of gradient norm, loss and the rest goes from rank to rank, each adding its own entries;
               every entry comes from one rank, so the sum is exact in any order
    VERDICT    the sum comes back from the last rank; with several replicas, their last ranks all-reduce it first
    REDO       if the step is to be clipped or skipped: steps accordingly, publishes the weights, drops the outputs of
               the forwards since, waits for messages still in flight to them, and runs them again with their messages
    COMMIT     otherwise: the ordinary step, in place; the weights that forward reads already have its values

No update is ever reversed: until COMMIT or REDO, master weights, optimizer state and gradients are those before the
step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from zbc.ir import Kind, Message, Op
from zbc.ops import UNIT_SCOPES
from zbc.plan.directory import judges
from zbc.runtime.core.ending import Ending, close
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.optimizer import Masters, inside, set_rate, squares
from zbc.runtime.core.progress import Busy, StepResult
from zbc.runtime.core.remembered import Kept, Place, present, put_back
from zbc.runtime.core.state import Handler, PhaseRun, Script, Worker
from zbc.runtime.core.validate import peak_bytes
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.transports.transport import Again, Signal

NORM, VERDICT = Signal(Kind.NORM), Signal(Kind.VERDICT)


@dataclass
class TentativeStep:
    """A step whose verdict may be unknown; its gradients stay in `.grad` until it is committed or redone."""

    step: int
    losses: dict[int, Tensor | float]
    busy: Busy
    peak: int
    seconds: float
    sums: Tensor = field(init=False)  # over all ranks, on the last one, from NORM on
    verdict: StepResult = field(init=False)  # from VERDICT on
    redone: bool = False
    added: Mapping[int, Tensor | float] = field(default_factory=dict)  # auxiliary losses, as in `Worker.entries`

    def result(self) -> StepResult:
        return self.verdict.of(self.step, self.seconds, redone=self.redone)


class Ahead(Ending):
    """The verdict of a step arrives during the next one, or at the end of the run. `again` are the ops that REDO runs:
    those before it that make or send tensors. `buffers` are the buffers that forwards change, `found` their values when
    the step began."""

    def __init__(self, again: Script, buffers: tuple[Place, ...]) -> None:
        self.again, self.buffers = again, buffers
        self.pending: TentativeStep | None = None
        self.found: list[Kept] = []

    def outstanding(self, worker: Worker) -> list[Message]:
        """The messages that ops before REDO receive and do not use."""
        messages = [(op.kind, worker.routes[op].brought) for _, op, _ in self.again]
        used = {message for kind, message in messages if kind.computes}
        return [message for kind, message in messages if kind.is_recv and message and message not in used]

    def opens(self, worker: Worker, step: int) -> None:
        if self.pending is not None:
            self.found = present(self.buffers)  # forwards change copies of these

    def closes(self, worker: Worker, began: float) -> StepResult | None:
        """Keeps the step as pending until its verdict arrives; returns the result of the previous step."""
        before = self.pending
        losses, added = dict(worker.losses), worker.entries()
        worker.losses.clear()
        worker.renamed.clear()
        busy, peak = worker.clock.read(), peak_bytes(worker.device)
        self.pending = pending = TentativeStep(worker.step, losses, busy, peak, seconds=0.0, added=added)
        result = None if before is None else before.result()
        close(worker, drain=False)
        pending.seconds = time.monotonic() - began
        return result

    def finish(self, worker: Worker) -> StepResult | None:
        worker.progress.index, worker.progress.op = 0, "the end of the last step"
        pending, result = self.pending, None
        if pending is not None:
            self.opens(worker, worker.step)
            norm(worker, Op(Kind.NORM, 0))
            verdict(worker, Op(Kind.VERDICT, 0))
            if _settle(worker, pending):
                for owner in worker.optimizers:
                    commit(worker, Op(Kind.COMMIT, owner))
            self.pending, result = None, pending.result()
        close(worker, drain=True)
        return result


def tentative(worker: Worker, op: Op) -> None:
    """TENTATIVE: writes a stage's working weights as if its step were final, once its gradients are all-reduced. The
    learning rate stays set until the next one: COMMIT and REDO come before it and belong to this step."""
    worker.settle(op.stage)
    worker.before_update()
    masters = _masters_of(worker, op.stage)
    set_rate(masters, worker.rate(worker.phases, worker.step))
    masters.tentative()


def norm(worker: Worker, op: Op) -> None:
    """NORM: adds this rank's entries of the last step to the vector of the previous ranks, and passes it on."""
    pending = _ahead(worker).pending
    if pending is None:
        return
    losses = {} if worker.share else {worker.number(mb): loss for mb, loss in pending.losses.items()}
    losses |= pending.added
    own = squares(worker)
    vector = worker.vector(own, losses, pending.busy(), pending.peak)  # a GPU's ops of the last step have long ended
    if (before := _next_to(worker, -1)) is not None:
        vector += _signal(worker, NORM, before)
    if (after := _next_to(worker, 1)) is None:
        worker.all_reduce(vector, judges(worker.plan.manifest))
        pending.sums = vector
    else:
        worker.transport.send(NORM, vector, after)


def verdict(worker: Worker, op: Op) -> None:
    """VERDICT: receives the vector of all ranks from the next one and passes it back."""
    pending = _ahead(worker).pending
    if pending is None:
        return
    after = _next_to(worker, 1)
    sums = pending.sums if after is None else _signal(worker, VERDICT, after)
    if (before := _next_to(worker, -1)) is not None:
        worker.transport.send(VERDICT, sums, before)
    pending.verdict = worker.learn(sums)


def redo(worker: Worker, op: Op) -> None:
    """REDO: if the last step is to be clipped or skipped, corrects it and runs the forwards since again."""
    ahead = _ahead(worker)
    pending = ahead.pending
    if pending is None or _settle(worker, pending):
        return
    for message in ahead.outstanding(worker):
        worker.wait(message)
    worker.drop_repeated()
    worker.losses.clear()
    put_back(ahead.buffers, ahead.found)
    routes = [worker.routes[entry[1]] for entry in ahead.again]
    worker.renamed = {brought: Again(brought) for route in routes if (brought := route.brought) is not None}
    progress, shown = worker.progress, (worker.progress.index, worker.progress.op)
    for handler, again, text in ahead.again:
        progress.op = f"{text} again"
        handler(worker, again)
    progress.index, progress.op = shown


def _settle(worker: Worker, pending: TentativeStep) -> bool:
    """Whether the last step is final as assumed; if not, steps by the verdict and writes the working weights again."""
    verdict = pending.verdict
    scale = verdict.clip(worker.clip)
    if not verdict.skipped and scale is None:
        return True
    for stage, optimizer in sorted(worker.optimizers.items()):
        if not verdict.skipped:
            optimizer.commit(scale)
        _masters_of(worker, stage).publish()
        optimizer.drop()
        if (sharded := inside(optimizer, Sharded)) is not None:  # all its replicas do this, in the same order
            worker.features.of(Gathers).start(worker, sharded)
    worker.features.of(Gathers).finish(worker)
    pending.redone = True
    return False


def commit(worker: Worker, op: Op) -> None:
    """COMMIT: makes the ordinary step of a stage, unless REDO has made it."""
    pending, optimizer = _ahead(worker).pending, worker.optimizers[op.stage]
    if pending is not None and not pending.redone:
        optimizer.commit(None)
        optimizer.drop()


def _signal(worker: Worker, signal: Signal, peer: int) -> Tensor:
    """Receives a signal from `peer`, posted right before the wait: on a GPU a posted receive occupies thread blocks
    until its message arrives, and the first launch of a kernel may wait for that."""
    buffer = torch.empty(worker.layout.size, dtype=torch.float64, device=worker.device)
    worker.transport.post(signal, buffer, peer)
    return worker.wait(signal)


def _ahead(worker: Worker) -> Ahead:
    return cast(Ahead, worker.phase_run.ending)


def _masters_of(worker: Worker, owner: int) -> Masters:
    """The optimizer of a stage's masters, or of this rank's pieces of them."""
    return cast(Masters, inside(worker.optimizers[owner], Masters))


def _next_to(worker: Worker, way: int) -> int | None:
    """The rank that sends NORM to this one (-1), or VERDICT (1); None at the end of the pipeline."""
    part = worker.plan.rank + way
    return worker.seat(part) if 0 <= part < worker.topology.pp else None


AHEAD: dict[Kind, Handler] = {
    Kind.TENTATIVE: tentative,
    Kind.NORM: norm,
    Kind.VERDICT: verdict,
    Kind.REDO: redo,
    Kind.COMMIT: commit,
}


class Tentatively(Feature):
    """Steps of plans with REDO end before their verdict is known."""

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        if any(op.kind.row.closes == "ahead" for op in run.plan.ops):
            until = [op.kind for op in run.plan.ops].index(Kind.REDO)
            again = [entry for entry in run.script[:until] if entry[1].kind.row.scope in UNIT_SCOPES]
            run.ending = Ahead(again, tuple(place for stage in worker.stages.values() for place in stage.buffers))


def build(context: Context) -> Tentatively:
    return Tentatively()
