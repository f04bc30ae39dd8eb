"""Steps that follow one another without a flush.

The plan has the body of a cycle, which includes ops of the next step. A run of steps begins with these ops alone (the
prologue), and ends with the body without them (the epilogue); both are derived here from the body. Microbatches of even
and odd steps have separate keys, [0, m) and [m, 2m), so that those of two steps can be in the stores and in flight.

No rank waits for the others at the end of a step. The vector of a step (loss, norm, whether to stop) is all-reduced
while the next step runs, and read at its end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from zbc.ir import NEXT, Kind, Op
from zbc.job.sections import Optimizer
from zbc.ops import home_of, owners_among
from zbc.runtime.core.ending import Ending, close, refuse_left
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.optimizer import counted, set_rate
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.state import Handler, PhaseRun, Script, Worker
from zbc.runtime.core.validate import peak_bytes
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.features.unflushed.versions import Unflushed
from zbc.runtime.transports.transport import Pending


@dataclass
class Told:
    step: int
    seconds: float
    vector: Tensor
    pending: Pending


@dataclass
class Cycle(Ending):
    """The `Ending` of a plan without a flush; `limit` is the largest norm of a stage's gradients."""

    ops: tuple[Op, ...]
    texts: tuple[str, ...]
    microbatches: int
    handlers: dict[Kind, Handler]
    limit: float | None
    every: int = 0  # microbatches from one step of a stage to its next, if a stage steps several times per step
    running: bool = False  # whether forwards of the next step have run
    told: Told | None = None
    squares: dict[str, Tensor] = field(default_factory=dict)  # of the current step
    norms: dict[int, float] = field(default_factory=dict)  # of the gradients of stages at their last STEP
    _scripts: dict[tuple[bool, bool, bool], Script] = field(default_factory=dict)

    def _key(self, op: Op, *, odd: bool) -> Op:
        """An op with its microbatch renumbered, in the body of an even or an odd step."""
        if op.kind.stage_wide:
            return op
        ahead = op.mb >= NEXT
        return op._replace(mb=(op.mb - NEXT if ahead else op.mb) + self.microbatches * (odd != ahead))

    def keyed(self, ops: Iterable[Op]) -> Iterator[Op]:
        return (self._key(op, odd=odd) for odd in (False, True) for op in ops)

    def script(self, step: int, *, ends: bool) -> Script:
        """The script of a step; `ends`: no step follows it directly."""
        key = (step % 2 == 1, not self.running, ends)
        if key not in self._scripts:
            before = self._part(odd=not key[0], own=False) if key[1] else []
            self._scripts[key] = [*before, *self._part(odd=key[0], own=True if ends else None)]
        return self._scripts[key]

    def _part(self, *, odd: bool, own: bool | None) -> Script:
        """The body's ops: of its `own` step, of the next step, run as this step's (False), or of both (None)."""
        script: Script = []
        for op, text in zip(self.ops, self.texts, strict=True):
            ahead = op.mb >= NEXT
            if own is None or own != ahead:
                handler = self.handlers[op.kind]
                if op.kind.computes:
                    handler = partial(_of_next if ahead and own is None else _of_this, handler)
                shown = text if own is None else text.replace(" next", "")
                script.append((handler, self._key(op, odd=odd), shown))
        return script

    def opens(self, worker: Worker, step: int) -> None:
        worker.phase_run.script = self.script(step, ends=worker.ends)
        if not self.running:
            for owner in worker.optimizers:
                versions_of(worker, owner).begin(step, worker.transport)

    def closes(self, worker: Worker, began: float) -> StepResult | None:
        """Starts the all-reduce of the step's vector; returns the result of the previous step."""
        first, step, m = worker.phase_run.first, worker.step, self.microbatches
        own = {first + mb % m: worker.losses.pop(mb) for mb in [*worker.losses] if mb // m == step % 2}
        losses = {} if worker.share else own
        losses |= worker.entries(lambda key: key.mb // m == step % 2)
        peak, busy = peak_bytes(worker.device), worker.clock.read()()
        vector = worker.vector(self.squares, losses, busy, peak)
        self.squares = {}
        pending = worker.transport.start_sum(vector, worker.everyone)
        before = self.finish(worker)
        self.told = Told(step, time.monotonic() - began, vector, pending)
        self.running = not worker.ends
        if self.running:
            refuse_left(worker)
        else:
            for owner in worker.optimizers:
                versions_of(worker, owner).newest()
            close(worker, drain=True)
        return before

    def finish(self, worker: Worker) -> StepResult | None:
        """Waits for the all-reduced vector of the last step; returns its result, None if there is none."""
        told, self.told = self.told, None
        if told is None:
            return None
        worker.wait_for("the sums of the step before", told.pending)
        return worker.learn(told.vector).of(told.step, told.seconds)

    def due(self, worker: Worker, mb: int) -> bool:
        """Whether a microbatch is one of this step, not of the next, whose forwards may have run."""
        return worker.ends or mb // self.microbatches == worker.step % 2

    def follows(self, worker: Worker) -> bool:
        return not worker.ends


def versions_of(worker: Worker, owner: int) -> Unflushed:
    return cast(Unflushed, worker.optimizers[owner])


def _of_this(handler: Handler, worker: Worker, op: Op) -> None:
    versions = [versions_of(worker, owner) for owner in owners_among(op.stage, worker.optimizers)]
    gathers = worker.features.of(Gathers)
    if gathers.coming and gathers.arrived(op):  # usually long before the newest weights are read
        for weights in versions:
            weights.newest()
        gathers.ready(worker, owners_among(op.owner, gathers.stages))
    for weights in versions:
        weights.before(op, worker.step)
    if versions[0].newer:
        gathers.ready(worker, owners_among(op.owner, gathers.stages))
    handler(worker, op)
    for weights in versions:
        weights.after(op)


def _of_next(handler: Handler, worker: Worker, op: Op) -> None:
    worker.step += 1
    try:
        _of_this(handler, worker, op)
    finally:
        worker.step -= 1


def stage_step(worker: Worker, op: Op) -> None:
    """STEP: clips by the norm of the stage and its experts, updates an owner's weights unless a gradient is not finite,
    drops the gradients."""
    cycle = cast(Cycle, worker.phase_run.ending)
    weights = versions_of(worker, op.stage)
    if op.stage >= 0:
        squares = [_squares(worker, cycle, owner) for owner in owners_among(op.stage, worker.optimizers)]
        cycle.norms[op.stage] = math.sqrt(math.fsum(squares))
    norm = cycle.norms[home_of(op.stage)]
    if math.isfinite(norm):
        set_rate(weights, worker.rate(worker.phases, worker.step))
        scale = None if cycle.limit is None else cycle.limit / (norm + 1e-6)
        weights.step(scale if scale is not None and scale < 1.0 else None)
    else:
        weights.skip()
    weights.drop()


def _squares(worker: Worker, cycle: Cycle, owner: int) -> float:
    """The sum of squares of an owner's gradients over all ranks that have a part of them; blocks."""
    weights = versions_of(worker, owner)
    worker.settle(owner)
    weights.newest()  # the last GATHER writes into the newest version
    worker.features.of(Gathers).ready(worker, [owner])
    worker.before_update()
    squares = weights.squares()
    for feature in worker.features:
        squares = feature.answers(worker, squares)
    if weights in counted(worker):  # if a stage steps several times, the last is reported, or one that is not finite
        bad = {name: old for name, old in cycle.squares.items() if not torch.isfinite(old).all()}
        cycle.squares |= squares | bad
    own, run, seat = math.fsum(n for values in squares.values() for n in values.tolist()), worker.topology, worker.rank
    ranks = run.whole(seat) if owner < 0 else run.beside("tp", seat)
    ranks = run.held(run.of(seat).pp) if weights.apart else ranks
    total = torch.tensor([own], dtype=torch.float64, device=worker.device if len(ranks) > 1 else "cpu")
    if len(ranks) > 1:
        worker.all_reduce(total, ranks)
    return total.item()


class Flushless(Feature):
    """Steps of plans without a flush follow one another."""

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        if not run.trains:
            return
        plan, options = run.plan, Optimizer.model_validate(run.plan.manifest.training["optimizer"], strict=False)
        every = options.every if options.sync == "asynchronous" else 0
        run.wrap([kind for kind in Kind if kind.steps], lambda _, *given: stage_step(*given))
        handlers = {op.kind: handler for handler, op, _ in run.script}
        texts = tuple(text for *_, text in run.script)
        run.ending = Cycle(plan.ops, texts, plan.manifest.microbatches, handlers, options.clip_grad_norm, every)


def build(context: Context) -> Flushless | None:
    return Flushless() if context.manifest.flushless else None
