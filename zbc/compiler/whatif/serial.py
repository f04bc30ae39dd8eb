"""Pipelines whose stages are no layers: `[pipeline]` of a file for `zbc report`, and nothing else.

    [pipeline]
    tokens = 20
    stages = [{ ms = 2.0, replicas = 3 }, { ms = 1.0 }]

Each token goes through all stages in order; token i runs on replica i mod r of a stage of r. A worker takes its tokens
in their order, and passes them on in no time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules.replicated import placement_of
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import Timeline
from zbc.errors import ZbcError, raise_all
from zbc.ir import Op, Program, forward
from zbc.job import toml
from zbc.job.section import OPS, Count, Ms, Section
from zbc.job.wording import convert, unknown


class Stage(Section):
    """One stage: ms per token, and its workers."""

    ms: Ms
    replicas: Count = 1


class Pipeline(Section):
    """`[pipeline]`."""

    stages: Annotated[list[Stage], Field(min_length=1)] = Field(description="a list of { ms = 2.0, replicas = 3 }")
    tokens: Count = Field(description="how many go through")


class Serial(NamedTuple):
    """A pipeline and the timeline of its tokens."""

    pipeline: Pipeline
    timeline: Timeline

    @property
    def period(self) -> float:
        """ms for each token once the pipeline is full."""
        return max(stage.ms / stage.replicas for stage in self.pipeline.stages)

    @property
    def slowest(self) -> int:
        """The stage that sets the period; of equals the first."""
        return next(s for s, stage in enumerate(self.pipeline.stages) if stage.ms / stage.replicas == self.period)


def read(path: Path) -> Serial | None:
    """The pipeline of a file, None if it has none. Raises E100 to E103, E105 and E114."""
    document = toml.load(path)
    if "pipeline" not in document.values:
        return None
    extra = [name for name in document.values if name not in ("pipeline", "zbc")]
    raise_all([unknown((name,), document, ["pipeline"]) for name in extra])
    try:
        pipeline = Pipeline.model_validate(document.values["pipeline"])
    except ValidationError as error:
        raise_all([convert("pipeline", Pipeline, problem, document)[0] for problem in error.errors()])
        raise
    if len(pipeline.stages) * pipeline.tokens > OPS:
        text = f"config: {pipeline.tokens} tokens through {len(pipeline.stages)} stages are more than {OPS} ops"
        raise ZbcError("E114", text, where=document.where(("pipeline", "tokens")), hint="use fewer tokens")
    return Serial(pipeline, _timeline(pipeline))


def _timeline(pipeline: Pipeline) -> Timeline:
    counts = [min(stage.replicas, pipeline.tokens) for stage in pipeline.stages]
    placement = placement_of(counts, pipeline.tokens)
    pipes, ranks = len(placement.pipes), list[tuple[Op, ...]]()
    for s, count in enumerate(counts):
        for replica in range(count):
            ranks.append(tuple(forward(s, i, i % pipes) for i in range(replica, pipeline.tokens, count)))
    costs = Costs.uniform(placement).with_ms(f=tuple(stage.ms for stage in pipeline.stages))
    return Context(Program(placement, pipeline.tokens, tuple(ranks), ("pipeline",)), costs).timeline
