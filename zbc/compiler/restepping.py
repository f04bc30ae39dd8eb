"""`schedule.renumber = "steps"`: for each step of a run the numbers of its microbatches in which it is shortest.

    python -m zbc.compiler.restepping PLAN

reads a line per step, the tokens of its microbatches as the plan numbers them, and answers with a line of numbers. The
order of ops stays the plan's, which has been proven, and no rank exceeds a limit that it keeps with the plan's numbers.
The answer depends on the plan and the tokens alone, so runs that resume get the same ones. The tries are limited such
that it takes less than a step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zbc.compiler import recall
from zbc.compiler.check.memory import excess
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.numbering import Numbers, shortest, tries_of
from zbc.compiler.sim.context import Context
from zbc.plan.directory import StoredPlan

_OPS_PER_MS, _LEAST = 100.0, 10  # simulated per ms of a step, and tries at least
_NICE = 10


class Restepper:
    """Numbers the microbatches of the steps of a plan. Raises E404 for a plan without a job."""

    def __init__(self, plan: StoredPlan) -> None:
        manifest = plan.manifest
        self._job, self._placement = recall.job_of(manifest), manifest.to_placement()
        table = estimate.layers(self._job)
        self._stages = recall.stages_of(manifest, table)
        self._planned = Context(plan.program, pricing.build(self._job, self._placement, self._stages, table))
        step_ms = self._planned.step_ms(self._job.objective)
        self._tries = tries_of(step_ms * _OPS_PER_MS, plan.program, _LEAST)
        self._known = dict[tuple[int, ...], tuple[Numbers, float, float]]()

    def of(self, tokens: Sequence[int]) -> tuple[Numbers, float, float]:
        """Which microbatch, as the plan numbers them, comes in each place; ms of the step with these numbers, and with
        the plan's. `tokens`: of the rows of each microbatch."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self._shortest(key)
        return self._known[key]

    def _shortest(self, tokens: tuple[int, ...]) -> tuple[Numbers, float, float]:
        job = self._job.with_tokens(tokens)
        costs = pricing.build(job, self._placement, self._stages, estimate.layers(job))
        given = self._planned.priced(costs)
        most = max(0.0, self._excess(given))

        def ms_of(numbers: Numbers, least: float) -> float | None:
            other = self._planned.priced(costs.renumbered(numbers))
            ms = other.step_ms(job.objective)
            return ms if ms < least and self._excess(other) <= most else None

        ms = given.step_ms(job.objective)
        return (*shortest(tokens, ms, self._tries, ms_of), ms)

    def _excess(self, context: Context) -> float:
        memory = peaks(context.program, context.costs, context.timeline)
        return excess(self._job, memory, context.costs)


def main() -> None:
    os.nice(_NICE)
    restepper = Restepper(StoredPlan.read(Path(sys.argv[1])))
    with suppress(BrokenPipeError):  # the run has ended; a buffer would complain once more
        for line in sys.stdin:
            numbers, _, _ = restepper.of(json.loads(line))
            os.write(sys.stdout.fileno(), f"{json.dumps(numbers)}\n".encode())


if __name__ == "__main__":
    main()
