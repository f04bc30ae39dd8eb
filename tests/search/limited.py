"""Random jobs whose units of activations are not proportional to bytes, under limits in units and in bytes."""

from dataclasses import replace
from random import Random

from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.job.spec import Job

OWN = {"zb-v": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}


def limited_job(seed: int) -> Job:
    """A job with given op times; activations given or counted; a schedule with its own limit or the job's."""
    rng = Random(seed)
    kind = rng.choice((*OWN, "v-auto", "zb-auto", "1f1b-v"))
    p, m = rng.randint(2, 5), rng.randint(2, 12)
    costs = {"f": rng.uniform(1, 3), "b": rng.uniform(1, 3), "w": rng.uniform(0.5, 2), "comm": rng.choice((0.0, 0.2))}
    if rng.random() < 0.6:
        costs |= {"act_b": 1.0, "act_w": rng.choice((0.4, 0.9, 1.0))}
    schedule = {"objective": rng.choice(("makespan", "span"))}
    if kind not in OWN or rng.random() < 0.3:
        schedule["memory_limit"] = f"{rng.uniform(1.0, 2.0):.3f}x"
    model = {"vocab": rng.choice((256, 5000)), "seq_len": 32}
    return job(kind=kind, pp=p, m=m, layers=2 * p * rng.randint(1, 3), model=model, costs=costs, schedule=schedule)


def wrong_limits(seed: int) -> str | None:
    """A problem of the plans of such a job with devices of any size, compared with the plan without; None: none."""
    made, rng = limited_job(seed), Random(-seed)
    free = compile_job(made, suggest=False, budget=0.0)
    most = max(rank.bytes for rank in free.memory)
    own, asked, p = OWN.get(made.schedule.kind or ""), made.schedule.memory_limit, made.parallel.pp
    units = min(own(p) if own else 1e9, float(asked[:-1]) * p if asked else 1e9)
    for share in (1000.0, 1.0 + 1e-9, rng.uniform(0.6, 1.0)):
        device = made.memory_for(most * share)
        small = replace(made, hardware=made.hardware.model_copy(update={"memory_gib": device}))
        try:
            plan = compile_job(small, suggest=False, budget=0.0)
        except ZbcError as error:
            if share >= 1:
                return f"refused with {share:g} of what it needs: {error}"
            continue
        if max(rank.units for rank in plan.memory) > units + 1e-6:
            return f"above {units:g} units with {share:g} of the bytes"
        if max(rank.bytes for rank in plan.memory) > (small.room or 0):
            return f"above the bytes with {share:g} of them"
        if share >= 1 and plan.step_ms > free.step_ms * (1 + 1e-9):  # other partitions are tried, too
            return f"a longer step with {share:g} of the bytes"
        limits = plan.report.limits
        if (
            abs((limits.activation_units or 0.0) - units) > 1e-9
            or abs((limits.device_bytes or 0) - (small.room or 0)) > 1
        ):
            return f"reported limits are {limits}"
    return None
