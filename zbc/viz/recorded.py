"""Data for pictures of a recorded run: the prediction, and the measured steps below it, on one time axis."""

from __future__ import annotations

from zbc.compiler import recall
from zbc.compiler.recorded.report import median_step
from zbc.compiler.recorded.timeline import Recording
from zbc.compiler.recorded.times import times_of, with_messages
from zbc.compiler.recorded.view import step_of
from zbc.compiler.sim.simulate import simulate
from zbc.errors import ZbcError
from zbc.trace.recording import Trace
from zbc.viz.strip import Drawn, Strip, repeated
from zbc.viz.words import groups


def drawn(trace: Trace, steps: int = 1, *, first: int | None = None) -> list[Drawn]:
    """The prediction of `steps` consecutive steps, then for each replica as many recorded ones from `first` on. Without
    `first` it is the median of the recorded steps, or the earliest `steps` consecutive ones. Raises E430 if these steps
    were not recorded."""
    numbers = _numbers(trace, steps, first)
    measured_steps = [step_of(trace, number) for number in numbers]
    program, costs = trace.plan.program, recall.costs_of(trace.plan.manifest)
    predicted = repeated(simulate(program, costs), program, costs, steps, barrier=measured_steps[0].barrier)
    real = with_messages(costs, times_of(measured_steps, costs))
    named = groups(program, trace.plan.manifest.layers)
    pictures = [Drawn("predicted", program, predicted, costs, groups=named)]
    memory, ahead = tuple(rank.memory for rank in trace.ranks), steps > 1 and not measured_steps[0].barrier
    which = f"step {numbers[0]}" if steps == 1 else f"steps {numbers[0]}-{numbers[-1]}"
    for replica in range(program.dp):
        record = Recording(tuple(measured_steps), replica, ahead, memory)
        name = f"measured, {which}" + (f", replica {replica}" if program.dp > 1 else "")
        pictures.append(Drawn(name, program, Strip(record.timelines()), real, record, named))
    return pictures


def _numbers(trace: Trace, steps: int, first: int | None) -> range:
    recorded = {*trace.steps}
    if first is None and steps == 1:
        first = median_step(trace)
    if first is None:
        rows = (number for number in trace.steps if recorded.issuperset(range(number, number + steps)))
        first = next(rows, trace.steps[0])
    wanted = range(first, first + steps)
    missing = [number for number in wanted if number not in recorded]
    if missing:
        text = f"trace: step {missing[0]} was not recorded"
        shown = ", ".join(map(str, trace.steps[:12])) + (" .." if len(trace.steps) > 12 else "")
        raise ZbcError("E430", text, hint=f"recorded are {shown}")
    return wanted
