"""A program with its costs, and results derived from both, computed on first use and once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zbc.compiler.cost.cost import Costs
from zbc.compiler.graph import Graph, build
from zbc.compiler.sim.simulate import Timeline, run, steady_state
from zbc.ir import Program


@dataclass(frozen=True)
class Context:
    """A program and its costs, as passes and predictions read them."""

    program: Program
    costs: Costs
    twin: Context | None = None  # the same program at other costs, which holds results that need no costs

    @classmethod
    def of(cls, program: Program, costs: Costs | None = None) -> Context:
        """By default all ops take equally long."""
        return cls(program, costs or Costs.uniform(program.placement))

    def then(self, program: Program) -> Context:
        """The context of another program, made from this one by a pass, at the same costs."""
        return self if program is self.program else Context(program, self.costs)

    def priced(self, costs: Costs) -> Context:
        """The same program at other costs."""
        return Context(self.program, costs, twin=self.twin or self)

    @cached_property
    def graph(self) -> Graph:
        """The dependencies of the ops."""
        return build(self.program) if self.twin is None else self.twin.graph

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline. Raises E201 or E202 if the order can never finish."""
        return run(self.graph, self.costs)

    def forget(self) -> None:
        """Drops the graph and the timeline, which are large; they are made again on the next use."""
        for name in ("graph", "timeline"):
            self.__dict__.pop(name, None)

    def step_ms(self, objective: str) -> float:
        """ms of a step, by an objective: "makespan", "span", or "period" (see `steady_state`)."""
        if objective == "period":
            return steady_state(self.timeline, self.costs)
        return self.timeline.makespan if objective == "makespan" else self.timeline.span
