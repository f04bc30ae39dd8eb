"""Compiles a job description to a checked, simulated, complete plan."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from zbc.compiler import alternatives, ramps
from zbc.compiler.check import check_forward, check_graph
from zbc.compiler.check.asked import missing_problems
from zbc.compiler.check.memory import check_host, check_memory
from zbc.compiler.compiled import Compiled
from zbc.compiler.cost import estimate
from zbc.compiler.deciding import chunked, decided
from zbc.compiler.freezing import adapter_report, freeze_report, freezes
from zbc.compiler.numbering import numbered
from zbc.compiler.partition.limits import limits_of
from zbc.compiler.partition.setup import Ordered, as_ordered, over_of
from zbc.compiler.report import report
from zbc.compiler.steps import settled, with_barrier, without_barrier
from zbc.errors import ZbcError, raise_found
from zbc.exact.solve import proven
from zbc.host.until import Until
from zbc.ir import Program
from zbc.job.cuts import cuts_of
from zbc.job.spec import Job
from zbc.plan.lateness import lateness

ASKING = 10.0  # least CPU seconds for testing whether other schedules would fit


def compile_job(job: Job, *, suggest: bool = True, budget: float | None = None, exact: float | None = None) -> Compiled:
    """Plan a job: schedule, complete, prove, predict; and its ramp, on the same stages. `exact`: seconds for a proof
    that the order is optimal, or for a shorter one (`proven`); not for the ramp. Raises E1xx (the job cannot be
    planned), E2xx (the order is wrong; possible for plugins), E3xx (does not fit; with `suggest`, with the schedules
    that would)."""
    # Decide what is open, plan, and see whether it fits; else with chunks of the logits, or say what would.
    until, compiled = Until(budget if budget is None else max(budget, ASKING)), None
    asked, job = job, decided(job)
    try:
        compiled = planned(job, budget, exact)
        check_memory(job, compiled.memory, compiled.costs)
    except ZbcError as error:
        if (other := chunked(asked, [] if compiled is None else compiled.memory)) is not None:
            with suppress(ZbcError):
                return compile_job(other, suggest=False, budget=budget, exact=exact)
        if compiled is not None and suggest:
            raise alternatives.added(error, compiled, budget, until) from None
        raise
    # The same stages and schedule for other numbers of microbatches.
    check_host(job, compiled.program, compiled.costs)
    if job.balances:
        return ramps.with_counts(compiled, lambda other: planned(other, budget))
    starts = ramps.starts(compiled, lambda other: compile_job(other, suggest=False, budget=budget))
    return replace(compiled, ramp=tuple(starts))


def planned(job: Job, budget: float | None, exact: float | None = None) -> Compiled:
    """`compile_job` without its ramp, and without the check whether it fits."""
    began = time.perf_counter()
    # Order: choose, prove or shorten, freeze; lower it to a complete program.
    try:
        job, before, unequal = numbered(job, budget)
        proof = None
        if exact is not None and over_of(job, before) == 0:
            before, proof = proven(job, before, exact)
        found = freezes(job, before)
        found.compute.forget()
        program = found.complete.program
    except ZbcError as error:
        if job.flushless and error.where is None:  # from the pass, which has no job
            error.where = job.where("optimizer", "sync")
        raise
    # Prove: the program finishes, and is what the job asked for.
    check_graph(found.complete.graph)
    raise_found(missing_problems(job, program))
    if job.train.eval_every:
        check_forward(program)
    # Time and weigh; tell.
    timeline, memory = found.complete.timeline, found.memory
    table = estimate.layers(job)
    layers = tuple(tuple(table[i].name for i in part) for part in found.stages)
    barrier, ahead = with_barrier(found.complete), without_barrier(found.complete)
    summary = report.build(
        found.complete,
        memory,
        found.bounds,
        found.name,
        layers,
        as_ordered(job, found).memory,
        cuts_of(job),
        # The number of simulated partitions, and whether no other could be better for this schedule.
        report.told(tried=found.tried, all_tried=found.all_tried),
        barrier_ms=barrier,
        ahead_ms=None if job.freeze.share else ahead,  # frozen layers need the barrier
        limits=limits_of(job, found.name, found.costs),
        freezing=freeze_report(job, before, found),
        adapter=adapter_report(job, found),
        unequal=unequal,
        exact=proof,
        **(_steps(job, program, ahead, barrier) if program.flushless and ahead is not None else {}),
    )
    compiled = Compiled(job, found.name, found.program, program, found.costs, layers, found, timeline, memory, summary)
    took, rates = time.perf_counter() - began, compiled.rates(compiled.settled_ms)
    return replace(compiled, report=summary.having(compile_seconds=took, rates=rates))


def looked(job: Job) -> tuple[Ordered, float]:
    """The order that `planned` would choose at once, and ms of its step with the optimizer in steady state; neither
    proven nor reported."""
    job, before, _ = numbered(job, 0.0)
    return (found := freezes(job, before)), settled(found.complete)


def _steps(job: Job, program: Program, period: float, flush: float) -> report.Facts:
    """ms of steps without a flush and of those with one between any two; the staleness of each stage's gradients in
    steps of the stage, and whether each stage steps on its own, several times in a step of the training."""
    alone = job.optimizer.sync == "asynchronous"
    late = {stage: most for ops in program.ranks for stage, most in lateness(ops).items()}
    delay = tuple(late[stage] if alone else 1 for stage in range(program.placement.stages))
    steps = report.told(period_ms=period, flush_ms=flush, delay=delay, alone=alone)
    return report.told(steady_state_ms=period, flushless=steps)
