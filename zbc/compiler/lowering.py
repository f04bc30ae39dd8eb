"""Lowers a compute-only schedule to a complete plan: the passes, in the order they run.

The order matters:
0. weave, for vocabulary parallelism, moves backwards, and so runs before all passes that place ops by them.
1. insert-comm first: it sends a B's gradient before the W after it.
2. fuse-backward second: with the SEND in between, only those B W pairs fuse that keep no other rank waiting. Run before
   insert-comm, it makes a split 1F1B of makespan 30 take 33.
3. offload needs the times that both leave, and a fused backward frees at once the inputs that a split one keeps for W.
4. gather-weights, if weights or the optimizer are sharded, needs every op that reads weights; reductions go after its
   gathers, for which ops wait.
5. reduce-grads needs all compute and transfers in place.
6. optimizer-step or, for an optimizer without a barrier, post-validate closes the list.
   For steps without a flush one pass, flushless, does all of this at once: the places of ops depend on the steps
   before and after.
7. the passes of the job (`schedule.passes`) change a program that is complete.
8. freeze, on request, leaves the list as it is and shortens some of its ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from zbc.compiler.passes.flushless import Flushless, Several, never
from zbc.compiler.passes.freeze import Freeze
from zbc.compiler.passes.fuse_backward import FuseBackward
from zbc.compiler.passes.gather_weights import GatherWeights, RenewWeights
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.passes.offload import Offload
from zbc.compiler.passes.optimizer_step import OptimizerStep
from zbc.compiler.passes.post_validate import PostValidate
from zbc.compiler.passes.reduce_grads import ReduceGrads
from zbc.compiler.passes.weave import Weave
from zbc.compiler.sim.context import Context
from zbc.excludes import FLUSHLESS
from zbc.ir import Program
from zbc.job.spec import Job


class Pass(Protocol):
    """A frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str: ...

    def run(self, program: Program, context: Context) -> Program:
        """Returns the changed program; `context` is of the given one."""


# These do not depend on costs, except for the posting of receives (`Costs.rendezvous`).
_FIRST: tuple[Pass, ...] = (
    InsertComm(),
    FuseBackward(),
)


@dataclass(frozen=True, slots=True)
class Lowering:
    """The options of a job that decide how its program is lowered."""

    sync: str = "before-step"  # `optimizer.sync`: whether a barrier closes a step, or the next step does
    gather: GatherWeights | None = None  # of weights that are gathered and freed within a step
    offload: Offload | None = None  # keeps activations within a limit by offloading them
    weave: Weave | None = None  # vocabulary parallelism
    every: int = 0  # microbatches from one step of a stage to its next, if each steps on its own
    several: Several = never  # without a flush: makes several steps of the schedule
    group: int | None = None  # of the schedule
    own: tuple[Pass, ...] = ()  # of the job, on the complete program
    freeze: Freeze | None = None  # of skipped weight gradients; set once an order is found

    @classmethod
    def of(cls, job: Job, several: Several) -> Lowering:
        resident = None if isinstance(job.memory.resident, str) else job.memory.resident
        return cls(
            job.optimizer.sync,
            gather=GatherWeights(resident, with_w=not job.model.builtin, room=job.room) if job.parallel.frees else None,
            weave=Weave(job.vocabulary) if job.vocabulary else None,
            every=job.optimizer.every if job.optimizer.sync == "asynchronous" else 0,
            several=several,
            group=job.schedule.group,
        )

    def lower(self, context: Context) -> Context:
        """Run every pass in order: a complete plan from a compute-only schedule."""
        return self.finish(self.begin(context))

    def begin(self, context: Context) -> Context:
        """Runs the first passes, whose result is the same for any costs if no message waits for its buffer, and no
        vocabulary is shared."""
        return _through(self.first, context)

    def finish(self, context: Context) -> Context:
        """The passes after `begin`."""
        return _through(self._last(sharded=context.program.sharded), context)

    def states(self, context: Context) -> Iterator[tuple[str, Program]]:
        """Yields the schedule's program and each pass's result, with the name of its maker."""
        yield context.program.history[0], context.program
        for one in (*self.first, *self._last(sharded=context.program.sharded)):
            context = _through([one], context)
            yield one.name, context.program

    @property
    def moves(self) -> bool:
        """Whether a pass moves F and B, or lets steps overlap: only the complete program tells time and memory then."""
        return self.sync != "before-step" or self.offload is not None or self.weave is not None or bool(self.own)

    @property
    def first(self) -> list[Pass]:
        """The passes of `begin`."""
        if self.sync in FLUSHLESS:
            return [Flushless(self.every, self.several, self.group)]
        return [*_some(self.weave), *_FIRST]

    def _last(self, *, sharded: bool) -> list[Pass]:
        if self.sync in FLUSHLESS:
            return [*self.own]
        ahead = self.sync == "post-validate"  # which gathers the results of its tentative steps
        gather = self.gather or (RenewWeights() if sharded and not ahead else None)
        close = PostValidate() if ahead else OptimizerStep()
        return [*_some(self.offload, gather), ReduceGrads(), close, *self.own, *_some(self.freeze)]


def _some(*passes: Pass | None) -> list[Pass]:
    """The passes that a job asks for."""
    return [one for one in passes if one is not None]


def _through(some: Sequence[Pass], context: Context) -> Context:
    for one in some:
        context = context.then(one.run(context.program, context))
    return context
