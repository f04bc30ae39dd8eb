"""Predicted compared with measured: the numbers of `zbc report` for a recorded run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import compress
from typing import Any

from zbc.compiler import recall
from zbc.compiler.cost.cost import Costs
from zbc.compiler.recorded import blame, deviations
from zbc.compiler.recorded.derive import derive_from
from zbc.compiler.recorded.replan import replan
from zbc.compiler.recorded.times import times_of
from zbc.compiler.recorded.view import RecordedStep, typical
from zbc.compiler.report.report import Facts, told
from zbc.compiler.sim.beside import Copying, copied
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import Timeline
from zbc.compiler.steps import settled
from zbc.ir import Op
from zbc.job.throughput import NOTHING_KNOWN, Throughput, balance, idle_rate
from zbc.plan.directory import Manifest
from zbc.plan.headline import settled_ms, throughput_of
from zbc.text import percent, short
from zbc.trace.recording import Cause, Head, Trace

FORMAT, VERSION = "zbc-run-report", 1
_MS = 1e6
_CATEGORIES = {"weights": "weight", "gradients": "gradient", "masters": "master"}
_CATEGORIES |= {"optimizer": "optimizer", "activations": "activation", "buffers": "buffer"}


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number as predicted (None: not known) and as measured: the median of the steps, and their quartiles."""

    predicted: float | None
    measured: float
    low: float
    high: float

    @classmethod
    def of(cls, predicted: float | None, values: Sequence[float]) -> Quantity:
        low, middle, high = quartiles(values)
        return cls(predicted, middle, low, high)

    @property
    def change(self) -> float | None:
        """The excess of the measured over the predicted number, as a share of the prediction."""
        return None if not self.predicted else self.measured / self.predicted - 1


class RunReport(Facts):
    """Results of a recorded run compared with its prediction; times in ms. See `build`."""

    def __str__(self) -> str:
        """The main numbers, a line each; `zbc report RUN` prints all of them."""
        seen = f"{len(self.steps)} of steps {self.steps[0]} to {self.steps[-1]}"
        lines = [f"{self.schedule} on {len(self.ranks)} {self.device} ranks, {seen}"]
        for name, row in (("step", self.step), ("makespan", self.makespan), ("span", self.span)):
            meant = "not known" if row.predicted is None else f"{short(row.predicted)} ms"
            change = "" if row.change is None else f", {100 * row.change:+.1f}%"
            lines.append(f"{name}: predicted {meant}, measured {short(row.measured)} ms{change}")
        for name, row in (("makespan", self.bubble_makespan), ("span", self.bubble_span)):
            meant, found = percent(row.predicted or 0), percent(row.measured)
            lines.append(f"bubble of the {name}: predicted {meant}, measured {found}")
        lines += [f"rank {row.rank} takes {row.ratio:.2f} times what was predicted" for row in self.slow_ranks]
        if self.replan is not None and self.replan.planned_ms is not None:
            lines.append(f"planned with the measured times: {short(self.replan.planned_ms)} ms")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION, **_plain(self)}
        values |= {**dict.fromkeys(Throughput._fields), **values.pop("rates")}
        return values


def _plain(value: Any) -> Any:
    """The value as JSON: ops as text, floats without the noise of their last bits."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Op):
        return str(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def build(trace: Trace, *, again: bool = True) -> RunReport:
    """Compare a recorded run with its plan; `again`: plan it again with the measured times, too."""
    manifest, program = trace.plan.manifest, trace.plan.program
    costs = recall.costs_of(manifest)
    context = Context(program, costs)
    timeline = context.timeline
    steps = typical(trace)
    middle = _median(steps)
    times = times_of(steps, costs)
    wall = middle.wall_ns / _MS
    new = None
    if again:
        profile = derive_from(manifest, times, rounds=len(steps), device=trace.device).profile
        new = replan(manifest, program, profile, whole=trace.whole)
    ops = deviations.deviations(times, costs, len(steps), program)
    links = deviations.links(times, costs, program, len(steps))
    single, stalls = deviations.outliers(steps, times, wall)
    busy = [timeline.busy(rank) for rank in range(timeline.ranks)]
    bubbles = (timeline.bubble_rate_makespan, timeline.bubble_rate_span)
    facts = told(
        plan=manifest.id,
        schedule=manifest.schedule,
        device=trace.device,
        phase=trace.phase,  # in a ramp, the folder of these steps' plan; "" after the ramp
        microbatches=manifest.microbatches,
        steps=tuple(step.number for step in steps),  # the evaluated ones
        median_step=middle.number,  # the one split by cause
        clock_uncertainty_ms=trace.uncertainty_ns / _MS,
        crowded=_crowded(trace),
        # With the optimizer, in steady state.
        step=Quantity.of(settled(context), [step.wall_ns / _MS for step in steps]),
        makespan=Quantity.of(timeline.makespan, [step.makespan_ns / _MS for step in steps]),
        span=Quantity.of(timeline.span, [step.span_ns / _MS for step in steps]),
        bubble_makespan=Quantity.of(bubbles[0], [step.bubble(step.makespan_ns) for step in steps]),
        bubble_span=Quantity.of(bubbles[1], [step.bubble(step.span_ns) for step in steps]),
        idle_rate=Quantity.of(idle_rate(busy, timeline.makespan), [idle_rate(s.busy_ns, s.makespan_ns) for s in steps]),
        balance=Quantity.of(balance(busy), [balance(step.busy_ns) for step in steps]),
        rates=dict(_rates(manifest, [step.wall_ns / _MS for step in steps])),
        ranks=tuple(_shares(middle, timeline, costs)),
        slow_ranks=tuple(deviations.slow_ranks(ops)),
        slow_links=tuple(deviations.slow_links(links, wall)),
        outliers=tuple(single),
        stalls=tuple(stalls),
        ops=tuple(ops),
        links=tuple(links),
        memory=_memory(trace),
        replan=new,
        copies=tuple(_copies(middle, timeline)) or None,
        slices=tuple(deviations.compared_slices(steps, costs)) or None,
        slow=_slow(manifest, tuple(deviations.slow_ranks(ops))),
    )
    return RunReport(facts)


def _slow(manifest: Manifest, found: Sequence[Facts]) -> tuple[float, ...]:
    """For each rank of the pipeline, the slowest replica's ratio to the others; () if none is slow."""
    run = manifest.topology
    ratios = [1.0] * run.pp
    for slow in found:
        place = run.of(slow.rank).pp
        ratios[place] = max(ratios[place], round(slow.ratio / slow.others, 2))
    return tuple(ratios) if found else ()


def _rates(manifest: Manifest, steps: Sequence[float]) -> Iterator[tuple[str, Quantity]]:
    """Yields known throughput (samples and tokens per second, MFU) by key, from the ms of steps."""
    meant = throughput_of(manifest, settled_ms(manifest)) if "barrier_ms" in manifest.predicted else NOTHING_KNOWN
    measured = [throughput_of(manifest, ms) for ms in steps]
    for key in Throughput._fields:
        values = [value for rates in measured if (value := getattr(rates, key)) is not None]
        if values:
            yield key, Quantity.of(getattr(meant, key), values)


def _crowded(trace: Trace) -> tuple[Facts, ...]:
    """The machines whose ranks take turns on its cores; none for ranks bound to cores of their own."""
    heads: dict[str, list[Head]] = {}
    for rank in trace.ranks:
        heads.setdefault(rank.head.host, []).append(rank.head)
    crowds = []
    for host, those in heads.items():
        cores = [head.cores for head in those if head.cores is not None]
        if len(cores) == len(those) > max(cores):
            crowds.append(told(host=host, ranks=len(those), cores=max(cores)))
    return tuple(crowds)


def _median(steps: Sequence[RecordedStep]) -> RecordedStep:
    """The step of median length; of an even number the shorter one."""
    return sorted(steps, key=lambda step: (step.wall_ns, step.number))[(len(steps) - 1) // 2]


def median_step(trace: Trace) -> int:
    """The number of the recorded step of median length."""
    return _median(typical(trace)).number


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _shares(step: RecordedStep, timeline: Timeline, costs: Costs) -> Iterator[Facts]:
    """Yields the time of each rank in a step by cause, as measured and as predicted; ms."""
    meant = blame.predicted(step.program, timeline, costs)
    for rank, shares in enumerate(blame.shares(step)):
        planned = meant[step.program.topology.of(rank).pp]
        yield told(rank=rank, predicted=planned, measured=shares.scaled(1 / _MS))


def _copies(step: RecordedStep, timeline: Timeline) -> Iterator[Facts]:
    """Yields the copies of activations of each rank in a step: ms, and the share that no rank waited for."""
    meant = copied(timeline)
    for rank, record in enumerate(step.ranks):
        planned = meant[step.program.topology.of(rank).pp]
        if record.copies:
            took = sum(copy.end - copy.start for copy in record.copies)
            measured = Copying(took / _MS, sum(record.waited(Cause.COPY).values()) / _MS)
            yield told(
                rank=rank,
                predicted_ms=planned.copying,
                predicted_hidden=planned.hidden,
                measured_ms=measured.copying,
                measured_hidden=measured.hidden,
            )


def _memory(trace: Trace) -> tuple[Facts, ...]:
    """Peak bytes of each rank by category, predicted (None: not known) and measured, and of all together at one moment;
    () if no step measured memory."""
    manifest = trace.plan.manifest
    meant = manifest.predicted.get("per_rank", [])
    bytes_known = bool(manifest.predicted.get("bytes_known"))
    rows = []
    for rank, record in enumerate(trace.ranks):
        if record.memory is None:
            return ()
        running = [not op.kind.is_transfer for op in record.ops]  # no time passes in transfers
        columns = dict(zip(record.memory.categories, zip(*record.memory.bytes, strict=True), strict=True))
        most = {name: max(compress(column, running), default=0) for name, column in columns.items()}
        row = meant[manifest.topology.of(rank).pp] if bytes_known and meant else None
        predicted = None if row is None else {name: row[f"{key}_bytes"] for name, key in _CATEGORIES.items()}
        if predicted is not None and "host" in most:
            predicted["host"] = manifest.host(manifest.topology.of(rank).pp).get("bytes", 0)
        most.pop("peak", 0)
        peak = max(columns.get("peak", (0,)))
        whole = None if row is None else int(row["peak_bytes"])
        rows.append(told(rank=rank, predicted=predicted, measured=most, peak=peak, predicted_peak=whole))
    return tuple(rows)
