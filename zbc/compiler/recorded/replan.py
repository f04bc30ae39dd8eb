"""The job of a plan with measured times in the place of its costs, to plan it anew.

Times are measured per stage. Those of a layer are what the cost model says of it, scaled so that the layers of each
stage add up to what the stage took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbc.compiler import estimate, recall
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import Costs
from zbc.compiler.estimate import Layer
from zbc.compiler.steps import settled
from zbc.errors import ZbcError
from zbc.ir import Kind, Program
from zbc.plan import Manifest
from zbc.spec import GivenCosts, Job, LayerCost


@dataclass(frozen=True, slots=True)
class Replan:
    """A settled step under measured times, in ms: in the present order, and as planned with these times.

    `why_not` says why there is no new plan.
    """

    present_ms: float
    planned_ms: float | None
    schedule: str
    cut: tuple[tuple[str, ...], ...]
    changed: bool  # whether the cut or the order is another
    why_not: str | None = None

    @property
    def gain(self) -> float | None:
        """The share of the present step that the new plan saves."""
        return None if self.planned_ms is None else 1 - self.planned_ms / self.present_ms


def replan(manifest: Manifest, program: Program, measured: Costs, *, budget: float | None = None) -> Replan:
    """Plan the job of a plan again with measured costs, and compare both under them."""
    job = with_times(manifest, measured)
    again = recall.costs_for(job, manifest)
    agree = measured.agree if any(op.kind is Kind.VALIDATE for op in program.ranks[0]) else 0.0  # a job cannot give it
    present = settled(program, again) + agree
    cut = tuple(map(tuple, manifest.layers))
    try:
        compiled = compile_job(job, suggest=False, budget=budget)
    except ZbcError as error:
        return Replan(present, None, manifest.schedule, cut, False, error.message)
    changed = compiled.layers != cut or compiled.program.ranks != program.ranks
    return Replan(present, compiled.settled_ms + agree, compiled.schedule, compiled.layers, changed)


def with_times(manifest: Manifest, measured: Costs) -> Job:
    """The job of a plan whose layers cost what was measured, ms per microbatch."""
    job = recall.job_of(manifest)
    table = estimate.layers(job)
    index = {layer.name: i for i, layer in enumerate(table)}
    times = {name: [0.0] * len(table) for name in ("f", "b", "w", "step")}
    for s, names in enumerate(manifest.layers):
        part = [index[name] for name in names]
        again = measured.f[s] if job.memory.of(s) == "recompute" else 0.0  # planning adds it
        _share(times["f"], table, part, measured.f[s], "f")
        _share(times["b"], table, part, max(0.0, measured.b[s] - again), "b")
        _share(times["w"], table, part, measured.w[s], "w")
        blocks = [i for i in part if table[i].name not in ("embed", "head")]
        _share(times["step"], table, blocks, measured.step[s] if measured.step else 0.0, "params")
    return replace(job, costs=_given(job, table, times, measured), profile=None)


def _share(times: list[float], table: Sequence[Layer], part: Sequence[int], ms: float, key: str) -> None:
    """Deal `ms` to the layers of a stage, in the proportion the cost model has them in."""
    weights = [float(getattr(table[i], key)) for i in part]
    whole = sum(weights)
    for i, weight in zip(part, weights, strict=True):
        times[i] = ms * (weight / whole if whole > 0 else 1 / len(part))


def _given(job: Job, table: Sequence[Layer], times: dict[str, list[float]], measured: Costs) -> GivenCosts:
    inner = [i for i, layer in enumerate(table) if layer.name not in ("embed", "head")]
    ends = {
        layer.name: LayerCost(f=times["f"][i], b=times["b"][i], w=times["w"][i])
        for i, layer in enumerate(table)
        if layer.name in ("embed", "head")
    }
    links = [ms for pipe in measured.comm for ms in pipe if ms > 0.0]
    values = {
        "per": "layer",
        **{key: [times[key][i] for i in inner] for key in ("f", "b", "w")},
        "optimizer": [times["step"][i] for i in inner],
        "comm": sum(links) / len(links) if links else 0.0,
        "reduce": max(measured.reduce, default=0.0) if any(measured.reduce) else None,
        "overlap": job.costs.overlap,
    }
    return GivenCosts.model_validate(values | ends)
