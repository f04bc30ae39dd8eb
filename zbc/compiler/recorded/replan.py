"""Plans the job of a plan again, with the profile derived from its recorded run (derive.py).

The result is the plan that `zbc profile RUN` and `zbc plan --profile` make of a run.
"""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.report.report import Facts, told
from zbc.compiler.sim.context import Context
from zbc.compiler.steps import settled
from zbc.errors import ZbcError
from zbc.ir import Op, Program
from zbc.job.profile import Profile, misfits
from zbc.job.spec import GivenCosts, Job
from zbc.plan.directory import Manifest
from zbc.plan.reading import job_of
from zbc.topology import inner_of


def replan(manifest: Manifest, program: Program, profile: Profile, *, whole: Manifest | None = None) -> Facts:
    """Plan the job of a plan again with a profile, and compare both: ms of a step in steady state, in the present
    order, and as planned; whether the partition or the order is `changed`, and the share of the present step that this
    saves; `why_not` if there is no new plan. For a phase of a ramp the `whole` plan is planned again, and that phase of
    it compared."""
    job = with_profile(manifest if whole is None else whole, profile)
    again = recall.costs_for(job, manifest)
    present = settled(Context(program, again))
    cut = tuple(map(tuple, manifest.layers))
    found = told(present_ms=present, planned_ms=None, schedule=manifest.schedule, cut=cut, changed=False)
    try:
        compiled = compile_job(job, suggest=False)
    except ZbcError as error:
        return told(**found, why_not=error.message, gain=None)
    if whole is not None:
        starts = (start.compiled for start in compiled.ramp)
        compiled = next(plan for plan in starts if plan.program.microbatches == program.microbatches)
    changed = compiled.layers != cut or _work(compiled.program) != _work(program)
    found |= told(planned_ms=compiled.settled_ms, schedule=compiled.schedule, cut=compiled.layers, changed=changed)
    return told(**found, why_not=None, gain=1 - compiled.settled_ms / present)


def same_work(one: Compiled, other: Compiled) -> bool:
    """Whether two plans have the same stages, and the same compute in the same order on every rank."""
    alike = one.program.placement == other.program.placement and one.layers == other.layers
    again = [(compiled.found.recompute, compiled.found.activations) for compiled in (one, other)]
    return alike and again[0] == again[1] and _work(one.program) == _work(other.program)


def _work(program: Program) -> list[list[Op]]:
    """Compute ops of each rank, in order; the posting of receives may differ."""
    return [[op for op in ops if op.kind.computes] for ops in program.ranks]


def with_profile(manifest: Manifest, profile: Profile) -> Job:
    """The job of a plan with the costs of a profile."""
    job = job_of(manifest)
    given = job.costs.model_dump()
    kept = {key: value for key, value in given.items() if key not in GivenCosts.replaced(given)}
    return replace(job, costs=GivenCosts.model_validate(kept), profile=profile)


def refuse_misfit(manifest: Manifest, profile: Profile, name: str) -> None:
    """Raise E142 for a profile of something other than the plan's job."""
    job = job_of(manifest)
    size, inner = manifest.microbatch_size, inner_of(job.parallel)
    wrong = misfits(profile, job.model, job.adapter, device=job.hardware.device, microbatch_size=size, inner=inner)
    if wrong:
        text = f"profile: {name} was made for something else than the run"
        raise ZbcError("E142", text, hint="leave --profile out, or name a profile of this job", details=wrong)
