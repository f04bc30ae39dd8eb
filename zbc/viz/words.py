"""What every picture says of a plan."""

from __future__ import annotations

from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Program
from zbc.text import percent, short


def title(program: Program) -> str:
    """`zb-v: 4 ranks, 8 stages, 8 microbatches`."""
    placement = program.placement
    counts = [(placement.ranks, "rank"), (placement.stages, "stage"), (program.microbatches, "microbatch")]
    if len(placement.pipes) > 1:
        counts.insert(2, (len(placement.pipes), "pipe"))
    name = program.history[0] if program.history else "program"
    replicas = f", {program.dp} replicas" if program.dp > 1 else ""
    return f"{name}: " + ", ".join(_count(number, noun) for number, noun in counts) + replicas


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('h') else 's'}"


def step_costs(timeline: Timeline) -> dict[str, float]:
    """Both costs of a step with their bubble rates, for JSON."""
    names = {"makespan_ms": "makespan", "span_ms": "span"}
    names |= {name: name for name in ("bubble_rate_makespan", "bubble_rate_span")}
    return {key: round(getattr(timeline, name), 9) for key, name in names.items()}


def verdict(timeline: Timeline) -> str:
    """Both costs of a step, each with its bubble rate."""
    return (
        f"makespan {short(timeline.makespan)} ms, of which bubble {percent(timeline.bubble_rate_makespan)}; "
        f"span {short(timeline.span)} ms, of which bubble {percent(timeline.bubble_rate_span)}"
    )
