"""Titles and captions of plans, the same for every picture."""

from __future__ import annotations

from collections.abc import Sequence

from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Program, chain
from zbc.text import counted, percent, short
from zbc.topology import INNER


def title(program: Program) -> str:
    """`zb-v: 4 ranks, 8 stages, 8 microbatches`."""
    placement = program.placement
    counts = [counted(placement.ranks, "rank"), counted(placement.stages, "stage")]
    counts += [counted(len(placement.pipes), "pipe")] if len(placement.pipes) > 1 else []
    counts.append(counted(program.microbatches, "microbatch", "microbatches"))
    name = program.history[0] if program.history else "program"
    slices = f" in {program.slices} slices" if program.slices > 1 else ""
    replicas = f", {program.dp} replicas" if program.dp > 1 else ""
    inner = zip(INNER, program.topology.inner, strict=True)
    shares = "".join(f", {axis.name} {count}" for axis, count in inner if count > 1)
    return f"{name}: " + ", ".join(counts) + slices + replicas + shares


def groups(program: Program, layers: Sequence[Sequence[str]]) -> str:
    """The stages of each group of layers of a graph, `vision 0-1, text 2, decoder 3`; "" for a chain."""
    if program.placement.edges == chain(program.placement.stages):
        return ""
    stages_of: dict[str, list[int]] = {}
    for stage, names in enumerate(layers):
        for group in dict.fromkeys(name.partition(".")[0] for name in names):
            stages_of.setdefault(group, []).append(stage)
    return ", ".join(f"{group} {span(stages)}" for group, stages in stages_of.items())


def span(stages: Sequence[int]) -> str:
    """`3`, `0-1`; the stages of a group are consecutive."""
    return f"{stages[0]}" if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def step_costs(timeline: Timeline) -> dict[str, float]:
    """Makespan and span of a step, with idle and bubble rates, for JSON."""
    names = {"makespan_ms": "makespan", "span_ms": "span"}
    names |= {name: name for name in ("idle_rate", "balance", "bubble_rate_makespan", "bubble_rate_span")}
    return {key: round(getattr(timeline, name), 9) for key, name in names.items()}


def verdict(timeline: Timeline, *, bubbles: bool = False) -> str:
    """Makespan, idle rate, balance and span of a step; with `bubbles` the papers' rates of makespan and span, too."""
    text = (
        f"makespan {short(timeline.makespan)} ms, idle {percent(timeline.idle_rate)}, "
        f"balance {percent(timeline.balance)}; span {short(timeline.span)} ms"
    )
    if not bubbles:
        return text
    rates = percent(timeline.bubble_rate_makespan), percent(timeline.bubble_rate_span)
    return f"{text}; bubble {rates[0]} of the makespan, {rates[1]} of the span"
