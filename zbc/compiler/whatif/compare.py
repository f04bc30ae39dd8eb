"""One job under several schedules and settings, ranked.

A swept key of the schedule, the ranks or the memory is a choice, and rows that differ in choices compete. A key of
[hardware], [costs] or [model] describes the world: rows are ranked and compared within one world only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.deciding import shareable
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.report.report import Report
from zbc.compiler.schedules import AUTO, LIMITS, find
from zbc.compiler.shapes import load_job
from zbc.compiler.whatif.noise import Noise, spread
from zbc.compiler.whatif.others import BASELINE
from zbc.compiler.whatif.why import bent_by_memory
from zbc.errors import MISTYPED, ZbcError
from zbc.job import gpu
from zbc.job.sections import is_name
from zbc.job.spec import Job
from zbc.job.world import Weighed
from zbc.text import percent, short, size

Setting = tuple[str, str]  # a key of the job file and the text of its value
Candidate = tuple[str, tuple[Setting, ...]]  # a schedule with settings
_VOCABULARY = "parallel.vocabulary"
WORLD = ("hardware.", "costs.", "model.")


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """One plan, or the reason why there is none: exactly one of `report` and `error` is set."""

    schedule: str
    settings: tuple[Setting, ...]
    report: Report | None = None
    transfers: float = 0.0  # messages a rank sends per step, on average
    step_ms: float = 0.0  # ms of a step by the job's objective
    settled_ms: float = 0.0  # ms of a step with its optimizer, in steady state
    bound_ms: float = 0.0  # lower bound for the same placement, by the same objective
    sequences: int = 1  # sequences per step
    bent: bool = False  # whether memory keeps it from the partition that is most even in time
    baseline_ms: float | None = None  # ms of 1F1B per sequence in the same settings, with its optimizer
    front: bool = False  # whether it is on the Pareto front of time and memory among the rows of its world
    shared: bool = False  # whether it uses vocabulary parallelism
    exchanged: float | None = None  # peak units if slices were even, unless they are
    noisy: float | None = None  # mean slowdown of a step under noise, as a share; if requested
    error: ZbcError | None = None

    @property
    def name(self) -> str:
        """Its schedule, with properties that no setting shows: its number of slices, and vocabulary parallelism:
        `zb-auto k=8 +vocabulary`."""
        slices, told = 0 if self.report is None else len(self.report.slices), dict(self.settings)
        parts = [self.schedule]
        parts += [f"k={slices}"] if slices > 1 and "schedule.slices" not in told else []
        parts += ["+vocabulary"] if self.shared and _VOCABULARY not in told else []
        return " ".join(parts)

    def __str__(self) -> str:
        name = " ".join([self.name, *(f"{key}={value}" for key, value in self.settings)])
        if self.report is None:
            return f"{name}: {self.error and self.error.message}"
        report = self.report
        held = size(report.peak_bytes) if report.bytes_known else f"{report.peak_activation_units:.2f} units"
        bubble = percent(report.bubble_rate_makespan)
        return f"{name}: makespan {short(report.makespan_ms)} ms, of which bubble {bubble}; at most {held} on a rank"

    @property
    def sequence_ms(self) -> float:
        """The time of a step per sequence: comparable if microbatches are swept."""
        return self.step_ms / self.sequences

    @property
    def speedup(self) -> float | None:
        """The speedup over 1F1B, per sequence; None if 1F1B cannot be planned."""
        ms = self.settled_ms / self.sequences
        return None if self.baseline_ms is None or not ms else self.baseline_ms / ms

    @property
    def world(self) -> tuple[Setting, ...]:
        """Its settings that are not the user's choice."""
        return tuple(setting for setting in self.settings if setting[0].startswith(WORLD))

    @property
    def choice(self) -> tuple[Setting, ...]:
        """Its other settings."""
        return tuple(setting for setting in self.settings if not setting[0].startswith(WORLD))

    @property
    def gap(self) -> float:
        """The excess of the step over its bound, as a share of the bound."""
        return max(0.0, self.step_ms / self.bound_ms - 1) if self.bound_ms > 0 else 0.0


Planner = Callable[[str, tuple[Setting, ...]], ComparedPlan]  # by schedule and settings


def combinations(schedules: Sequence[str], sweeps: Sequence[str]) -> list[Candidate]:
    """Every schedule with every combination of swept values. Raises E104 (schedule) or E109 (sweep)."""
    kept = {AUTO, *LIMITS}  # names that are not aliases of a schedule, or say more
    names = list(dict.fromkeys(_named(n, kept) for n in schedules))
    axes = [_axis(sweep) for sweep in sweeps]
    return [(name, settings) for settings in itertools.product(*axes) for name in names]


def _named(schedule: str, kept: Collection[str]) -> str:
    """The name of a row: a schedule's own, or an order from a file or a plugin as it was given."""
    if not is_name(schedule):
        return schedule
    return schedule.lower() if schedule.lower() in kept else find(schedule).name


def _axis(sweep: str) -> list[Setting]:
    """`key=v1,v2` as its settings; commas inside brackets and quotes belong to a value."""
    key, equals, text = sweep.partition("=")
    values = [value.strip() for value in _split(text)]
    if not equals or "." not in key or not all(values):
        hint = "write --sweep schedule.microbatches=8,16,32"
        raise ZbcError("E109", f"config: cannot read --sweep {sweep!r}", hint=hint)
    return [(key.strip(), value) for value in values]


def _split(text: str) -> list[str]:
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def compare(plan: Planner, wanted: Iterable[Candidate], done: Callable[[], None] = lambda: None) -> list[ComparedPlan]:
    """A row for each combination: world by world, the least time per sequence first, unplanned ones last. Calls `done`
    after each row. If all rows fail with one and the same problem, raises it."""
    rows = []
    for schedule, settings in wanted:
        rows.append(plan(schedule, settings))
        done()
    reasons = {row.error and tuple((error.code, error.message) for error in row.error.errors) for row in rows}
    if len(reasons) == 1 and rows[0].error is not None:
        raise rows[0].error
    _refuse_mistyped(rows)
    worlds = {world: place for place, world in enumerate(dict.fromkeys(row.world for row in rows))}
    ranked = sorted(rows, key=lambda row: (row.error is not None, worlds[row.world], row.sequence_ms, _held(row, rows)))
    return [replace(row, front=_undominated(row, rows)) for row in ranked]


def _refuse_mistyped(rows: Sequence[ComparedPlan]) -> None:
    """Raise the error of a swept value that is refused as such under all schedules: it was mistyped."""
    for row in rows:
        if row.error is not None and {problem.code for problem in row.error.errors} <= MISTYPED:
            alike = [twin.error for twin in rows if twin.settings == row.settings]
            if all(error is not None and error.render() == row.error.render() for error in alike):
                raise row.error


def beside_baseline(rows: Sequence[ComparedPlan], plan: Planner) -> Iterator[ComparedPlan]:
    """The same rows with the time of 1F1B in their settings, which is planned if it was not requested."""
    bases = {row.settings: row for row in rows if row.schedule == BASELINE}
    for row in rows:
        if row.report is None:
            yield row
            continue
        if row.settings not in bases:
            bases[row.settings] = plan(BASELINE, row.settings)
        base = bases[row.settings]
        ms = None if base.report is None else base.settled_ms / base.sequences
        made = replace(row, baseline_ms=ms)
        yield replace(made, report=row.report.having(speedup_over_1f1b=made.speedup))


def _held(one: ComparedPlan, rows: Sequence[ComparedPlan]) -> float:
    """Peak of the fullest rank: bytes, or activation units if bytes are not known for all rows."""
    if one.report is None:
        return 0.0
    sized = all(row.report is None or row.report.bytes_known for row in rows)
    return float(one.report.peak_bytes if sized else one.report.peak_activation_units)


def _undominated(one: ComparedPlan, rows: Sequence[ComparedPlan]) -> bool:
    if one.report is None:
        return False
    own = one.sequence_ms, _held(one, rows)
    rivals = [(row.sequence_ms, _held(row, rows)) for row in rows if row.report is not None and row.world == one.world]
    near = 1 + 1e-9  # times that differ in their last bits are equal
    return not any(
        ms <= own[0] * near and held <= own[1] * near and (ms * near < own[0] or held * near < own[1])
        for ms, held in rivals
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """The source of all rows of a comparison: a job file or plan directory with `overrides`. `profile` is the file of
    measured costs to plan with, instead of the job's; searched orders take about `budget` seconds (None: the schedule's
    default)."""

    path: Path
    overrides: tuple[str, ...] = ()
    profile: Path | None = None
    budget: float | None = None
    noise: Noise | None = None

    def settled(self, wanted: Iterable[Candidate]) -> tuple[Asked, tuple[Weighed, ...]]:
        """The same with pp and dp chosen once for all rows, and the weighed shapes; unchanged if they are swept."""
        swept = {key for _, settings in wanted for key, _ in settings}
        if swept & {f"parallel.{key}" for key in ("world", "pp", "dp")}:
            return self, ()
        with suppress(ZbcError):  # the rows will say what is wrong
            job = load_job(self.path, self.overrides, None, self.profile)
            if job.weighed:
                axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if axis in job.document.values["parallel"]]
                shape = [f"parallel.{axis}={getattr(job.parallel, axis)}" for axis in axes]
                return replace(self, overrides=(*self.overrides, *shape)), job.weighed
        return self, ()

    def both_ways(self, wanted: Sequence[Candidate]) -> list[Candidate]:
        """The same rows, each with its vocabulary at the ends and vocabulary parallel, if the job leaves that open."""
        with suppress(ZbcError):  # the rows will say what is wrong
            job = load_job(self.path, self.overrides, None, self.profile, sketch=True)
            if job.parallel.vocabulary == "auto" and all(_VOCABULARY not in dict(settings) for _, settings in wanted):
                return [
                    (name, (*settings, (_VOCABULARY, f'"{where}"')))
                    for where in ("ends", "shared")
                    for name, settings in wanted
                    if where == "ends" or not is_name(name) or shareable(job.under(name))
                ]
        return list(wanted)

    def remark(self) -> str | None:
        """A remark on all rows: that a device was forgotten."""
        with suppress(ZbcError):
            return gpu.forgotten(load_job(self.path, self.overrides, None, self.profile, sketch=True).hardware)
        return None

    def __call__(self, schedule: str, settings: tuple[Setting, ...]) -> ComparedPlan:
        """One planned job, or its error."""
        try:
            asked = self._job(schedule, settings)
            # The configuration of most steps, or the mean one.
            data = asked.data.model_copy(update={"balance": "none"})
            alone = replace(asked, schedule=asked.schedule.model_copy(update={"ramp": []}), data=data)
            compiled = compile_job(alone, suggest=False, budget=self.budget)
        except ZbcError as error:
            return ComparedPlan(schedule, settings, error=_swept(error, settings))
        report, job = compiled.report, compiled.job
        sends = sum(op.kind.is_send for ops in compiled.program.ranks for op in ops)
        barrier, noise = job.optimizer.sync == "before-step", self.noise
        trials = None if noise is None else spread(compiled.program, compiled.costs, noise, barrier=barrier)
        return ComparedPlan(
            schedule,
            settings,
            report,
            transfers=sends / report.ranks,
            step_ms=compiled.step_ms,
            settled_ms=compiled.settled_ms,
            bound_ms=report.lower_bound_ms(job.objective),
            sequences=compiled.sequences,
            bent=bent_by_memory(compiled),
            shared=bool(job.vocabulary),
            exchanged=_exchanged(compiled),
            noisy=None if trials is None else trials.slower(trials.mean),
        )

    def _job(self, schedule: str, settings: tuple[Setting, ...]) -> Job:
        """The job under `schedule`; `chunks` of the file is for schedules that leave it open, a swept one for all."""
        overrides = [*self.overrides, *(f"{key}={value}" for key, value in settings)]
        try:
            return load_job(self.path, overrides, schedule, self.profile)
        except ZbcError as error:
            if (
                error.code != "E110"
                or len(error.errors) > 1
                or "schedule.chunks" in dict(settings)
                or not is_name(schedule)
            ):
                raise
        chunks = f"schedule.chunks={find(schedule).default_chunks}"
        return load_job(self.path, [*overrides, chunks], schedule, self.profile)


def _swept(error: ZbcError, settings: Sequence[Setting]) -> ZbcError:
    """The error with the locations of swept values as they were given."""
    given = {f"--set {key}={value}": f"--sweep {key}={value}" for key, value in settings}
    for item in error.errors:
        item.where = given.get(item.where or "", item.where)
    return error


def _exchanged(compiled: Compiled) -> float | None:
    """Peak units of the fullest rank if its slices had equally many tokens and ranks shared out their attention, which
    would take as long; None if slices have equally many, or there are none."""
    if len({row.tokens for row in compiled.report.slices}) < 2:
        return None
    return max(row.units for row in peaks(compiled.program, compiled.costs.evened()))
