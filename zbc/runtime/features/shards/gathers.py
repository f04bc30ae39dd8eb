"""Sharded weights and gradients: GATHER, FREE, SCATTER, and the waits of ops that need them (sharded.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from zbc.ir import Kind, Op
from zbc.ops import WORDS, At, owners_among, rows_with
from zbc.runtime.core.feature import Context, Feature, Pause
from zbc.runtime.core.optimizer import inside
from zbc.runtime.core.route import Edges, Route
from zbc.runtime.core.state import Handler, PhaseRun, Worker
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.features.shards.windows import WindowCopier


class Gathers(Feature):
    """`stages` (or other owners) with sharded weights; `gathered`: those that a step gathers before ops use them, so
    that between steps they are freed, or lack the last update; `freed`: those that are freed within a step."""

    def __init__(self, stages: dict[int, Sharded], *, gathers: bool, frees: bool) -> None:
        self.stages = stages
        self.gathered = [shard for _, shard in sorted(stages.items())] if gathers else []
        self.freed = [shard for owner, shard in sorted(stages.items()) if owner != WORDS] if gathers and frees else []
        self.coming: list[Sharded] = []
        self.leaving: list[Sharded] = []  # with reductions of gradients in flight
        self._opened = False  # the windows of a one-sided exchange

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        manifest = run.plan.manifest
        if run.trains and manifest.sharded and not manifest.flushless:
            rows = rows_with(("weights for W",) if manifest.with_w else ())
            run.wrap([kind for kind, row in rows.items() if row.with_weights], _with_weights)

    def routes(self, worker: Worker, run: PhaseRun, op: Op, route: Route) -> Route:
        """A layer may return a weight, which is freed before the next stage reads it."""
        gives = route.gives
        if not (run.plan.manifest.with_w and op.kind.gives is At.SINKS and isinstance(gives, Edges)):
            return route

        def each(y: Tensor) -> list[Tensor]:
            freed = any(self.stages[owner].weights.holds(y) for owner in owners_among(op.stage, self.stages))
            return [y.clone() if freed else y] * len(gives.edges)

        return route._replace(gives=gives._replace(each=each))

    def opens(self, worker: Worker) -> None:
        if worker.plan.manifest.one_sided and not self._opened:  # all ranks together, with the initial weights
            copier, self._opened = WindowCopier(worker.device), True
            for sharded in self.freed:
                sharded.open_window(worker.transport, copier)
        self.free()

    def resumes(self, worker: Worker) -> None:
        self.free()

    def reduces(self, worker: Worker, op: Op) -> None:
        sharded = self.stages.get(op.stage)
        if sharded is not None and sharded.scatters:
            self.leaving.append(sharded)

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        self.leaving.clear()  # VALIDATE has waited for them

    def closes(self, worker: Worker) -> None:
        self.finish(worker)

    def start(self, worker: Worker, one: Sharded, *, whole: bool = False) -> None:
        one.start_gather(worker.transport, whole=whole)
        self.coming.append(one)

    def finish(self, worker: Worker, *some: Sharded) -> None:
        """Blocks until gathered weights have arrived: of `some` stages, or of all."""
        worker.progress.waiting = True
        for sharded in some or tuple(self.coming):
            if sharded in self.coming:
                self.coming.remove(sharded)
                sharded.finish_gather()
        worker.progress.waiting = False

    def ready(self, worker: Worker, owners: Iterable[int]) -> None:
        """Blocks until the weights of these owners are resident."""
        for owner in self.stages.keys() & owners if self.coming else ():
            self.finish(worker, self.stages[owner])

    def arrived(self, op: Op) -> bool:
        """Whether gathers of an op's weights are in flight and have completed."""
        coming = [one for owner in owners_among(op.owner, self.stages) if (one := self.stages[owner]) in self.coming]
        return bool(coming) and all(one.arrived for one in coming)

    def pauses(self, worker: Worker, pause: Pause) -> None:
        for sharded in self.gathered if pause.whole else ():
            self.start(worker, sharded, whole=True)
            self.finish(worker)

    def free(self) -> None:
        """Frees all weights that a step will gather."""
        for sharded in self.freed:
            sharded.weights.free()


def gather(worker: Worker, op: Op) -> None:
    """GATHER: starts the all-gather of a stage's weights from the ranks that each updated a shard."""
    gathers = worker.features.of(Gathers)
    gathers.start(worker, gathers.stages[op.stage])


def free(worker: Worker, op: Op) -> None:
    """FREE: reshards a stage, freeing the bytes of its weights."""
    worker.features.of(Gathers).stages[op.stage].weights.free()


def scatter(worker: Worker, op: Op) -> None:
    """SCATTER: starts the reduce-scatter of a stage's gradients so far; later ones are added to its result."""
    for feature in worker.features:
        feature.reduces(worker, op)
    worker.features.of(Gathers).stages[op.stage].scatter(worker.transport)


def _with_weights(handler: Handler, worker: Worker, op: Op) -> None:
    """Runs an op that reads sharded weights."""
    gathers = worker.features.of(Gathers)
    gathers.ready(worker, owners_among(op.owner, gathers.stages))
    if gathers.leaving:
        gathers.leaving = [sharded for sharded in gathers.leaving if not sharded.poll()]
    handler(worker, op)


GATHERS: dict[Kind, Handler] = {Kind.GATHER: gather, Kind.FREE: free, Kind.SCATTER: scatter}


def build(context: Context) -> Gathers:
    dealt = {owner: inside(optimizer, Sharded) for owner, optimizer in context.optimizers.items()}
    sharded = {owner: inner for owner, inner in dealt.items() if inner is not None}
    later = not context.manifest.ahead and not context.manifest.flushless
    return Gathers(sharded, gathers=later, frees=bool(context.manifest.resident))
