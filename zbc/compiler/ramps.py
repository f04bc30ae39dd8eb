"""Plans of the same schedule and stages for other numbers of microbatches: a ramp, and unequal replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from zbc.compiler.check import check_graph
from zbc.compiler.check.memory import check_memory
from zbc.compiler.check.orders import order_problems
from zbc.compiler.compiled import Compiled, RampStart
from zbc.compiler.graph import build
from zbc.compiler.partition.setup import as_ordered
from zbc.compiler.passes.reduce_grads import reduced_as
from zbc.errors import ZbcError, raise_found
from zbc.job.rules import asked_again
from zbc.job.spec import Job


def with_counts(compiled: Compiled, plan: Callable[[Job], Compiled]) -> Compiled:
    """Adds plans for all other numbers of microbatches that a replica may get in a step, with gradient reductions in
    the order of the largest. Raises E209 if weight gathers still have different orders."""
    own, most = compiled.program.microbatches, compiled.job.most_microbatches
    found = {own: compiled}
    for count in range(most, 0, -1):
        if count != own:
            found[count] = plan(_with_count(compiled, count))
            _same_stages(found[count], compiled, count, ("data", "balance"))
            check_memory(compiled.job, found[count].memory, found[count].costs)
    if not compiled.program.one_sided:
        for count, one in found.items():
            program = reduced_as(one.program, found[most].program)
            if program is not one.program:
                check_graph(build(program))
                found[count] = replace(one, program=program)
    plans = dict(sorted(found.items()))
    raise_found(order_problems([one.program for one in plans.values()]))
    return replace(plans.pop(own), ramp=tuple(RampStart(one, 0) for one in plans.values()))


def starts(compiled: Compiled, plan: Callable[[Job], Compiled]) -> Iterator[RampStart]:
    """Yields the plans of `schedule.ramp`: the same schedule and the same stages, for other numbers of microbatches."""
    job, where = compiled.job, ("schedule", "ramp")
    for number, phase in enumerate(job.schedule.ramp):
        try:
            found = plan(_with_count(compiled, phase.microbatches))
        except ZbcError as error:
            if error.hint is not None and "schedule.microbatches" in error.hint:  # an entry has its own number of these
                named = f"microbatches of entry {number} of schedule.ramp"
                error.hint = error.hint.replace("schedule.microbatches", named)
                error.where = job.where(*where, number, "microbatches")
            raise
        _same_stages(found, compiled, phase.microbatches, where)
        yield RampStart(found, phase.length(job.schedule.microbatch_size * job.parallel.dp))


def _with_count(compiled: Compiled, count: int) -> Job:
    """The job of a plan with its schedule and its stages, for another number of microbatches."""
    job = compiled.job
    chosen: dict[str, object] = {"ramp": [], "chunks": compiled.program.placement.chunks, "microbatches": count}
    if job.schedule.plugin is None:
        chosen["kind"] = compiled.schedule
    if job.balances:
        chosen["max_microbatches"] = job.most_microbatches
    blocks = [sum(name not in ("embed", "head") for name in names) for names in compiled.layers]
    made = replace(
        job,
        schedule=job.schedule.model_copy(update=chosen),
        partition=job.partition.model_copy(update={"layers_per_stage": blocks}),
        node=compiled.costs.node,
        memory=as_ordered(job, compiled.found).memory,
    )
    return asked_again(made)


def _same_stages(found: Compiled, whole: Compiled, count: int, where: tuple[str, str]) -> None:
    if found.program.placement != whole.program.placement or found.layers != whole.layers:
        text = f"schedule: with {count} microbatches stages are on other ranks or have other layers"
        hint = f"{'.'.join(where)} needs a schedule whose stages do not depend on the number of microbatches"
        raise ZbcError("E110", text, where=whole.job.where(*where), hint=hint)
