"""The Python side of the commands: `zbc.load`, `zbc.plan`, `zbc.compare`, `zbc.Plan`, `zbc.graph`.

    import zbc

    plan = zbc.plan(zbc.load("job.toml"))       # `zbc plan`; nothing is written until plan.write(folder)
    plan = zbc.load("plan")                     # a plan directory
    plan = zbc.load("order.csv")                # a torch pipelining CSV, at F = B = W = 1 per rank
    run = zbc.load("runs/plan-1")               # a run directory; run.report() compares it with its plan

    zbc.compare("job.toml", ["1f1b", "zb-v"])   # `zbc compare`: a row per schedule, the fastest first
    plan.check()                                # `zbc check`: raises a ZbcError that names the ops
    plan.simulate().makespan                    # ms; when each op runs
    zbc.graph(plan)                             # its ops and their dependencies as a networkx.DiGraph

Torch is never imported. Problems that a user can fix are raised as `zbc.ZbcError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zbc.compiler import recall
from zbc.compiler.check import check_all
from zbc.compiler.check.asked import check_asked
from zbc.compiler.check.deadlock import deadlock_problems
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.cost.cost import Costs, refuse_slices
from zbc.compiler.graph import build
from zbc.compiler.lowering import Lowering
from zbc.compiler.recorded.log import is_run
from zbc.compiler.recorded.log import read as read_log
from zbc.compiler.recorded.report import RunReport
from zbc.compiler.recorded.report import build as build_report
from zbc.compiler.report.difference import RankDifference, difference
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import Timeline, simulate
from zbc.compiler.whatif.compare import Asked, ComparedPlan, combinations
from zbc.compiler.whatif.compare import compare as rows_of
from zbc.compiler.whatif.noise import Noise, Spread, spread
from zbc.compiler.whatif.windows import Bubbles
from zbc.errors import ZbcError
from zbc.interop import as_json, megatron, torch_csv, torch_lowered, torchtitan
from zbc.interop.sheet_check import check_sheet
from zbc.ir import Program
from zbc.job.spec import Job
from zbc.plan import directory as plans
from zbc.plan.reading import job_of
from zbc.trace.recording import Trace, has_trace
from zbc.trace.recording import read as read_trace
from zbc.viz import html, perfetto, recorded, svg, terminal
from zbc.viz.strip import Drawn, Strip, repeated
from zbc.viz.words import groups, title

if TYPE_CHECKING:
    import networkx as nx

_NOTEBOOK = 32  # ranks a notebook shows


@dataclass(frozen=True)
class Plan:
    """An order of ops on ranks, with their costs: from a plan directory, a job, or another tool's file.

    `manifest` is set for a plan read from a directory, `compiled` for one just planned from a job, `sheet` for one
    read from a CSV file.
    """

    name: str
    program: Program
    manifest: plans.Manifest | None = None
    compiled: Compiled | None = None
    sheet: torch_csv.Sheet | None = None
    ramp: tuple[Plan, ...] = ()  # the plans of the first steps of a training, with fewer microbatches

    def __repr__(self) -> str:
        return f"<zbc.Plan {title(self.program)}>"

    @classmethod
    def read(cls, folder: str | Path) -> Plan:
        """A plan directory, verified. Raises E401 to E406."""
        read = plans.StoredPlan.read(Path(folder))
        ramp = tuple(cls.read(Path(folder, part.folder)) for part in read.manifest.ramp)
        return cls(str(folder), read.program, manifest=read.manifest, ramp=ramp)

    @classmethod
    def read_csv(cls, path: str | Path) -> Plan:
        """A torch pipelining CSV. Raises E411; `check` says whether its order works."""
        sheet = torch_csv.read(Path(path))
        return cls(str(path), sheet.program, sheet=sheet)

    @cached_property
    def costs(self) -> Costs:
        """Costs of the ops, from the job; without a job F = B = W = 1 per rank, and transfers are free.

        Raises E110 for an order of slices of microbatches without a job.
        """
        if self.compiled is not None:
            return self.compiled.costs
        if self.manifest is not None:
            return recall.costs_of(self.manifest)
        refuse_slices(f"plan: the order of {self.name}", self.program.slices)
        return Costs.uniform(self.program.placement)

    @cached_property
    def timeline(self) -> Timeline:
        if self.sheet is not None:
            check_sheet(self.sheet)
        return self.compiled.timeline if self.compiled is not None else simulate(self.program, self.costs)

    def check(self) -> None:
        """Prove the order complete, paired, ordered and free of deadlock, and a stored plan within its job's limits.

        Raises E2xx, naming ops or cells, and E3xx.
        """
        if self.sheet is not None:
            check_sheet(self.sheet)
        check_all(self.complete)
        if self.manifest is not None:
            check_asked(self.manifest, self.program)
        for start in self.ramp:
            start.check()

    @cached_property
    def complete(self) -> Program:
        """The program with its transfers and step-level ops; an order from a CSV file is lowered first."""
        return self.program if self.sheet is None else Lowering().lower(Context(self.program, self.costs)).program

    @property
    def barrier(self) -> bool:
        """Whether a step ends on all ranks before the next begins: `optimizer.sync` of the job is "before-step"."""
        job = self.compiled.job if self.compiled is not None else None
        if self.manifest is not None:
            return bool(self.manifest.planning.get("optimizer", {}).get("sync", "before-step") == "before-step")
        return job is None or job.optimizer.sync == "before-step"

    def strip(self, steps: int = 1, *, barrier: bool | None = None) -> Strip:
        """Timelines of `steps` consecutive steps; `barrier`: all ranks end a step first, by default as in the job."""
        waits = self.barrier if barrier is None else barrier
        return repeated(self.timeline, self.program, self.costs, steps, barrier=waits)

    def survives_blocking_sends(self) -> bool:
        """Whether the order is free of deadlock also if a send blocks until it is received."""
        return not any(deadlock_problems(build(self.complete), blocking_sends=True))

    def simulate(self) -> Timeline:
        """Start and end of each op, in ms, with `makespan`, `span`, both bubble rates and `idle(rank)`."""
        return self.timeline

    def bubbles(self) -> Bubbles:
        """Idle windows of each rank with their cause and the memory free in them, as `zbc report` lists them."""
        return Bubbles.of(self.name, self.timeline, self.program, self.costs, self._room)

    @property
    def _room(self) -> float | None:
        """Memory limit per rank in bytes; None if the job sets none."""
        if self.compiled is not None:
            return self.compiled.job.room
        return None if self.manifest is None else job_of(self.manifest).room

    def noisy(self, noise: Noise) -> Spread:
        """Steps with op times that jitter or a rank that is slow, as `zbc report` prints them. Raises E201, E411."""
        if self.sheet is not None:
            check_sheet(self.sheet)
        return spread(self.program, self.costs, noise, barrier=self.barrier)

    def drawn(self, steps: int = 1, *, barrier: bool | None = None) -> Drawn:
        """Data to draw this plan from, as `zbc.viz` takes it. Raises ValueError for `steps` below 1."""
        if steps < 1:
            raise ValueError(f"steps={steps}: a picture has one step at least")
        source = self.compiled if self.compiled is not None else self.manifest
        named = groups(self.program, () if source is None else source.layers)
        return Drawn(self.name, self.program, self.strip(steps, barrier=barrier), self.costs, groups=named)

    def svg(
        self,
        *,
        width: int = 1000,
        ranks: Sequence[int] | None = None,
        zoom: tuple[float, float] | None = None,
        steps: int = 1,
        title: str | None = None,
    ) -> str:
        """The timeline as an SVG document, `width` px wide; `zoom` is a window in ms, `ranks` leaves out all others.

        Raises ValueError for an empty window, or ranks that the plan does not have.
        """
        if zoom is not None and not 0 <= zoom[0] < zoom[1]:
            raise ValueError(f"zoom={zoom}: write (from, to) in ms")
        sheet = svg.SvgView(width, self._shown(ranks), zoom, title)
        return svg.draw([self.drawn(steps)], sheet)

    def html(self, *, ranks: Sequence[int] | None = None, steps: int = 1) -> str:
        """The timeline as one self-contained HTML file to zoom and search in."""
        return html.draw([self.drawn(steps)], self._shown(ranks))

    def _shown(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        """Ranks to draw. Raises ValueError for one that the plan does not have."""
        missing = [rank for rank in ranks or () if not 0 <= rank < self.timeline.ranks]
        if missing or (ranks is not None and not len(ranks)):
            raise ValueError(f"ranks={ranks!r}: the plan has ranks 0 to {self.timeline.ranks - 1}")
        return None if ranks is None else tuple(ranks)

    def perfetto(self, *, steps: int = 1) -> str:
        """The timeline as a Chrome trace for Perfetto, with messages as arrows and memory as counters."""
        return perfetto.draw([self.drawn(steps)])

    def text(self, *, width: int = 100, by: Literal["time", "slot"] = "time", steps: int = 1) -> str:
        """The timeline as text, without colours."""
        view = terminal.View(width=width, by=by)
        return terminal.draw([self.drawn(steps)], view).plain

    def _repr_html_(self) -> str:
        """The SVG picture for a notebook, of the first 32 ranks at most."""
        return self.svg(width=960, ranks=range(min(_NOTEBOOK, self.timeline.ranks)))

    def export(self, target: str, *, csv_name: str = "order.csv", dialect: str | None = None) -> dict[str, str]:
        """The plan in another tool's form, one of `EXPORTS`: file name suffix -> text, the main file first.

        `csv_name` is the path of the CSV file in torchtitan's settings. `dialect` is one of `DIALECTS[target]`, by
        default the first: for torch-csv "compute_comms" adds the transfers as torch reads them up to 2.14, and
        "compute_comms-2.15" as later versions do; for torchtitan it is the version. Raises E413 if the tool cannot
        express the plan.
        """
        if target not in EXPORTS:
            raise ZbcError("E413", f"export: no target {target!r}", hint=f"there are {', '.join(EXPORTS)}")
        forms = DIALECTS.get(target, ())
        if dialect is not None and dialect not in forms:
            text = f"export: {target} has no dialect {dialect!r}"
            hint = "; ".join(f"{name} has {', '.join(dialects)}" for name, dialects in DIALECTS.items())
            raise ZbcError("E413", text, hint=hint)
        return EXPORTS[target](self, dialect or next(iter(forms), ""), csv_name)

    def described(self, target: str) -> plans.Manifest:
        """The manifest, also of a plan that was not written. Raises E413 for an order without a model."""
        if self.manifest is not None:
            return self.manifest
        if self.compiled is not None:
            return self.compiled.assemble()[0]
        text = f"export: {target} needs the model and its layers, {self.name} is an order alone"
        hint = "plan a job whose schedule.kind it is, and export that"
        raise ZbcError("E413", text, hint=hint)

    def diff(self, other: Plan, *, compute_only: bool = True) -> list[RankDifference]:
        """Per rank, the ops that kept their order, those that moved, and those that only one of the plans has."""
        pair = (self.program, other.program) if compute_only else (self.complete, other.complete)
        return difference(*pair, compute_only=compute_only)

    def write(self, folder: str | Path) -> None:
        """Write the plan directory. Raises E407 for a plan without a job."""
        if self.compiled is None:
            text = f"plan: {self.name} was not made from a job here, so there is nothing to write"
            raise ZbcError("E407", text, hint='plan a job, with schedule.kind = "FILE.csv" for an order of your own')
        self.compiled.write(Path(folder))


@dataclass(frozen=True)
class Run:
    """A run directory, as `zbc run` writes it: its metrics per step and, if steps were recorded, their trace."""

    folder: Path
    trace: Trace | None

    def __repr__(self) -> str:
        return f"<zbc.Run {self.folder}, {'with' if self.trace else 'without'} a trace>"

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Reads a run directory. Raises E430 (it is none, or its trace is damaged), E4xx (the copy of its plan)."""
        folder = Path(folder)
        if has_trace(folder):
            return cls(folder, read_trace(folder))
        if not is_run(folder):
            text = f"run: {folder} is not a run directory"
            raise ZbcError("E430", text, hint="`zbc run` makes them below runs")
        return cls(folder, None)

    @property
    def recorded(self) -> Trace:
        """The trace. Raises E430 if no step was recorded."""
        return read_trace(self.folder) if self.trace is None else self.trace

    @property
    def plan(self) -> Plan:
        """The plan that ran. Raises E430 if no step was recorded."""
        trace = self.recorded
        return Plan(str(trace.folder), trace.plan.program, manifest=trace.plan.manifest)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The line of metrics.jsonl for each step: `loss`, `step_ms` and so on."""
        return list(read_log(self.folder).steps)

    def report(self) -> RunReport:
        """`zbc report`: predicted and measured times, and causes of the difference; its str() is the summary.

        Raises E430 if no step was recorded.
        """
        return build_report(self.recorded)

    def bubbles(self) -> Bubbles:
        """The same as `Plan.bubbles` of the median recorded step, as measured. Raises E430 if no step was recorded."""
        measured = self.drawn()[1]
        return Bubbles.of(measured.name, measured.strip.steps[0], measured.program, measured.costs, self.plan._room)

    def drawn(self, steps: int = 1, *, first: int | None = None) -> list[Drawn]:
        """Data to draw this run from: the prediction, and `steps` recorded steps from `first` on."""
        return recorded.drawn(self.recorded, steps, first=first)

    def svg(self, *, width: int = 1000, zoom: tuple[float, float] | None = None, steps: int = 1) -> str:
        """Predicted above measured on one time axis, as an SVG document."""
        return svg.draw(self.drawn(steps), svg.SvgView(width, zoom=zoom))

    def html(self, *, steps: int = 1) -> str:
        """The same as one HTML file to zoom and search in."""
        return html.draw(self.drawn(steps))

    def perfetto(self, *, steps: int = 1) -> str:
        """The same as a Chrome trace for Perfetto, with the causes of waits, and transfers."""
        return perfetto.draw(self.drawn(steps))

    def text(self, *, width: int = 100, steps: int = 1) -> str:
        """The same as text, without colours."""
        return terminal.draw(self.drawn(steps), terminal.View(width=width)).plain

    def _repr_html_(self) -> str:
        """The SVG picture for a notebook."""
        return self.svg(width=960)


def _torch_csv(plan: Plan, dialect: str, _: str) -> dict[str, str]:
    if dialect in torch_lowered.DIALECTS:
        return {".csv": torch_lowered.dumps(plan.complete, dialect)}
    return {".csv": torch_csv.dumps(plan.program)}


def _dot(plan: Plan, *_: str) -> dict[str, str]:
    from zbc.interop.digraph import dot  # loads networkx, which most commands do without

    return {".dot": dot(graph(plan))}


def _graphml(plan: Plan, *_: str) -> dict[str, str]:
    from zbc.interop.digraph import graphml  # loads networkx

    return {".graphml": graphml(graph(plan))}


# target -> its writer, which takes a plan, a dialect and a name for the CSV file and returns suffix -> text.
# The order is that of --help.
EXPORTS: dict[str, Callable[[Plan, str, str], dict[str, str]]] = {
    "torch-csv": _torch_csv,
    "torchtitan": lambda plan, dialect, csv: torchtitan.dumps(plan.program, plan.described("torchtitan"), csv, dialect),
    "megatron": lambda plan, *_: {".args": megatron.dumps(plan.program, plan.described("megatron"))},
    "json": lambda plan, *_: {".json": as_json.dumps(plan.program, plan.timeline)},
    "dot": _dot,
    "graphml": _graphml,
    "perfetto": lambda plan, *_: {".json": plan.perfetto()},
}

# The targets with several forms; the first is the default.
DIALECTS: dict[str, tuple[str, ...]] = {
    "torch-csv": ("compute_only", *torch_lowered.DIALECTS),
    "torchtitan": tuple(torchtitan.DIALECTS),
}


def load(path: str | Path, settings: Sequence[str] = (), schedule: str | None = None) -> Job | Plan | Run:
    """A job (`.toml`), a plan directory, a run directory, or a torch CSV (`.csv`).

    `settings` (`"schedule.microbatches=16"`) and `schedule` (a name or a CSV file) change a job as --set and --schedule
    do. Raises E1xx for a job, E4xx for the others.
    """
    path = Path(path)
    if path.suffix == ".toml":
        return load_job(path, settings, schedule)
    if path.suffix == ".csv":
        return Plan.read_csv(path)
    if is_run(path) or has_trace(path):
        return Run.read(path)
    return Plan.read(path.parent if path.name == plans.MANIFEST else path)


def plan(job: Job | str | Path, *, budget: float | None = None) -> Plan:
    """Plan a job, as `zbc plan` does, and prove it; nothing is written until `plan.write(folder)`.

        plan = zbc.plan("job.toml")
        plan = zbc.plan(zbc.load("job.toml", ["schedule.microbatches=16"], "zb-v"), budget=10)
        print(plan.text())

    `job`: a job file, a plan directory (its job is planned), or a Job from `zbc.load`. `budget`: seconds to search, by
    default the schedule's own. Raises `zbc.ZbcError`: E1xx (the job), E2xx (its order), E3xx (it does not fit).
    """
    if budget is not None and budget < 0:
        raise ValueError(f"budget={budget}: seconds to search, 0 or more")
    if not isinstance(job, Job):
        job = load_job(Path(job))
    compiled = compile_job(job, budget=budget)
    starts = (start.compiled for start in compiled.ramp)
    ramp = tuple(Plan(start.schedule, start.program, compiled=start) for start in starts)
    return Plan(compiled.schedule, compiled.program, compiled=compiled, ramp=ramp)


def compare(
    job: str | Path,
    schedules: Sequence[str] | None = None,
    *,
    sweep: Sequence[str] = (),
    settings: Sequence[str] = (),
    budget: float = 0.0,
) -> list[ComparedPlan]:
    """Plan a job file under several schedules (by default all), as `zbc compare` does: a row each, the fastest first.

        for row in zbc.compare("job.toml", ["1f1b", "zb-v"], sweep=["schedule.microbatches=8,16"]):
            print(row)                          # or row.report.makespan_ms, row.report.peak_bytes, row.settings ..

    Rows that cannot be planned come last, with `error` in place of `report`. Raises that error if all rows have it.
    """
    wanted = combinations(schedules or list(SCHEDULES), sweep)
    asked, _ = Asked(Path(job), tuple(settings), budget=budget).settled(wanted)
    return rows_of(asked, wanted)


def graph(plan: Plan) -> nx.DiGraph:
    """A step as a graph of dependencies: nodes are ops, messages and collectives, named by the texts of their ops.

    Nodes carry op, kind, rank, step, start and end (ms); edges kind ("order", "value", "message", "collective",
    "group") and value ("act", "grad" ..). See zbc/interop/digraph.py. Raises E201 if the order can never finish.
    """
    from zbc.interop.digraph import digraph  # loads networkx

    return digraph(plan.timeline)


def open_plan(path: str | Path) -> Plan:
    """Loads a path as a plan: a job is planned; a recorded run gives the plan that ran."""
    return as_plan(load(path))


def as_plan(found: Job | Plan | Run) -> Plan:
    """Turns a loaded object into a plan: a job is planned; a recorded run gives the plan that ran."""
    return plan(found) if isinstance(found, Job) else found.plan if isinstance(found, Run) else found
