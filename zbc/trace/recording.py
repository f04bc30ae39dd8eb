"""A recorded run: the ops of each rank in some of its steps, with their times.

    runs/plan-1/trace/
      plan/              the plan as it ran
      rank-0000.jsonl    the recording of rank 0 of the run, one JSON object per line; complete at any moment
      rank-0001.jsonl    ...
      m4/                the same for the first steps of a training with a ramp; their plan is plan/m4

The lines of a rank's file, times in ns on its own clock:

    {"format": "zbc-trace", "version": 1, "plan": "..", "rank": 0, "device": "cpu", "process": "host:123", "ops": 4,
     "cores": 8}
    {"clock": {"at_ns": 0, "offset_ns": 0, "uncertainty_ns": 0}}
    {"step": 10, "begin_ns": 5, "took_ns": [3, 9, 1, 2], "lead_ns": [4], "waits": [1, 0, 3], "close_ns": 2}
    {"step": 11, .., "copies": [7, 2], "tokens": [64, 16]}
    {"clock": {"at_ns": 50, "offset_ns": 0, "uncertainty_ns": 0}}
    {"memory": {"step": 11, "categories": ["weights", ..], "bytes": [[8, ..], ..]}}

cores    usable by the process, on a CPU
clock    the lead of rank 0's clock over this one, at a time of this one; before and after the recorded steps
took     the duration of each op of the plan, in order: an op starts when the op before ended, the first one at `begin`,
         so that they and `close` (the work after the last op) fill the step without gaps
lead     for each compute op, the time from its start until it computes: before that it waits for messages or data
waits    three numbers for each wait: the op (the number of ops for the close), the `Cause`, the duration
copies   only if activations are offloaded: two numbers for each OFFLOAD and RELOAD, the start of its copy after
         `begin`, and its duration
tokens   only if they are unequal: those of the rows of each microbatch
memory   bytes per op and category, in a step of its own that is not timed, since sampling is slow

On a GPU times are those of the compute stream, not of the host program that launches kernels.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.host.linefile import LineFile
from zbc.ir import WHOLE, Op
from zbc.job.sections import Freeze
from zbc.ops import Lane
from zbc.plan import directory as plans

FORMAT, VERSION = "zbc-trace", 1
STEP = ("step", "begin_ns", "took_ns", "lead_ns", "waits", "close_ns")  # of a step: what it has, and what it may have
STEP_MAY = ("copies", "tokens")
RECORD = "record it again with `zbc run PLAN --trace STEPS`"
FOLDER, PLAN = "trace", "plan"
_RANKS = "rank-*.jsonl"


class Cause(IntEnum):
    """The cause of a wait inside an op."""

    MESSAGE = 0  # a tensor, or numbers, from a neighbour
    SUM = 1  # a sum of gradients over replicas that was started before
    ALL = 2  # a sum over all ranks
    DELIVERY = 3  # the completion of a send
    GATHER = 4  # weights that other ranks stepped
    COPY = 5  # activations on their way to the host or back


class Wait(NamedTuple):
    """A wait inside op number `op` of a step, in ns; the number of ops stands for the close of the step."""

    op: int
    cause: Cause
    ns: int


class ClockOffset(NamedTuple):
    """The clock of rank 0 is `offset_ns` ahead of this rank's at `at_ns`, give or take `uncertainty_ns`."""

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One step of one rank as it is written; see recording.py."""

    step: int  # from 1
    begin_ns: int
    took_ns: Sequence[int]
    lead_ns: Sequence[int]
    waits: Sequence[int]
    close_ns: int
    copies: Sequence[int] = ()
    tokens: Sequence[int] = ()  # of the rows of each microbatch; (): all are whole


@dataclass(frozen=True, slots=True)
class MemorySamples:
    """Memory of a rank at each op of a step, in bytes: rows are ops, columns categories."""

    step: int
    categories: tuple[str, ...]
    bytes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Head:
    """The plan, rank and process of a trace."""

    plan: str  # its id
    rank: int  # of the run
    device: str
    process: str  # host:pid
    ops: int
    cores: int | None = None  # usable by the process, if it computed on the CPU; None in older traces, too

    @property
    def host(self) -> str:
        return self.process.rpartition(":")[0]


# ---- writing -------------------------------------------------------------------------------------------------


def rank_file(rank: int) -> str:
    """The name of a rank's file in a trace."""
    return f"rank-{rank:04d}.jsonl"


def start(run: Path, plan: Path) -> None:
    """Prepares the folder of a trace in a run directory, with a copy of the plan; removes traces of another plan.
    Raises E608 if the copy cannot be written, and leaves nothing of it."""
    copy = run / FOLDER / PLAN
    if plans.is_plan(copy) and plans.read_manifest(copy).sha256 == plans.read_manifest(plan).sha256:
        return
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    try:
        for folder in ("", *(part.folder for part in plans.read_manifest(plan).ramp)):
            (copy / folder).mkdir(parents=True, exist_ok=True)
            for name in (plans.MANIFEST, *plans.read_manifest(plan / folder).files):
                shutil.copyfile(plan / folder / name, copy / folder / name)
    except OSError as error:
        shutil.rmtree(run / FOLDER, ignore_errors=True)
        raise _unwritable(copy, error) from None


class Writer:
    """Writes the file of one rank during a run; every line is complete as soon as it is written."""

    def __init__(self, run: Path, head: Head, behind: int = 0, phase: str = "") -> None:
        """`behind`: the training resumes after this step (from 1), and its recordings until then are kept. `phase`: the
        folder of a plan of a ramp. Raises E608 if the file cannot be written."""
        path = run / FOLDER / phase / rank_file(head.rank)
        about = {name: value for name, value in asdict(head).items() if value is not None}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = _kept(path, behind) if behind and path.is_file() else []
            self._path, self._file = path, LineFile(path, "w")
        except OSError as error:
            raise _unwritable(path, error) from None
        for values in kept or [{"format": FORMAT, "version": VERSION, **about}]:
            self._line(values)

    def clock(self, clock: ClockOffset) -> None:
        self._line({"clock": clock._asdict()})

    def step(self, timing: Timing) -> None:
        values = {name: getattr(timing, name) for name in STEP}
        values |= {name: column for name in STEP_MAY if (column := getattr(timing, name))}
        self._line({name: value if isinstance(value, int) else list(value) for name, value in values.items()})

    def memory(self, memory: MemorySamples) -> None:
        rows = [list(row) for row in memory.bytes]
        self._line({"memory": {"step": memory.step, "categories": list(memory.categories), "bytes": rows}})

    def close(self) -> None:
        self._file.close()

    def _line(self, values: Mapping[str, Any]) -> None:
        """Appends a line. Raises E608 if it cannot be written; earlier lines stay complete."""
        try:
            self._file.add(json.dumps(values, separators=(",", ":")) + "\n")
        except OSError as error:
            raise _unwritable(self._path, error) from None


def _unwritable(path: Path, error: OSError) -> ZbcError:
    text = f"run: cannot write the trace {path}: {error.strerror or error}"
    return ZbcError("E608", text, hint="make room there, or choose another run directory with -o DIR")


def _kept(path: Path, behind: int) -> list[dict[str, Any]]:
    """The lines of a file that remain valid if the training resumes after step `behind`; [] if it is damaged."""
    try:
        entries = [values for _, values in lines(path)]
    except ZbcError:
        return []
    return [values for values in entries if not ("step" in values and values["step"] > behind)]


# ---- reading lines -------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers; a truncated last line is left out."""
    try:
        raw = contents(path)
    except OSError as error:
        raise ZbcError("E430", f"trace: cannot read {path}: {error.strerror}", hint=RECORD) from None
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        yield number, object_of(line, f"{path}:{number}", "trace", RECORD)


def object_of(line: str | bytes, place: str, of: str, hint: str | None = None) -> dict[str, Any]:
    """The JSON object in a line. Raises E430."""
    try:
        values = json.loads(line)
        problem = None if isinstance(values, dict) else "not an object"
    except (ValueError, RecursionError) as error:
        problem = f"not JSON: {error}"
    if problem is not None:
        raise ZbcError("E430", f"{of}: damaged: {problem}", where=place, hint=hint)
    return values  # type: ignore[no-any-return]


def head_of(values: dict[str, Any], place: str, rank: int, plan: str, ops: int) -> Head:
    """The first line of a rank's trace. Raises E430 if its plan (an id), rank or number of ops differs."""
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        version = f"format {values.get('format')!r}, version {values.get('version')!r}"
        raise damaged(place, f"{version}; this zbc reads {FORMAT!r}, version {VERSION}")
    for key, wanted in (("plan", plan), ("rank", rank), ("ops", ops)):
        if values.get(key) != wanted:
            raise damaged(place, f"{key} is {values.get(key)!r}, the plan beside it says {wanted!r}")
    device, process = values.get("device"), values.get("process")
    if not isinstance(device, str) or not isinstance(process, str):
        raise damaged(place, "device and process have to be texts")
    cores = values.get("cores")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or cores < 1):
        raise damaged(place, f"cores is {cores!r}, it has to be a whole number from 1 on")
    return Head(plan, rank, device, process, ops, cores)


def timing_of(values: dict[str, Any], ops: Sequence[Op], place: str) -> Timing:
    """The times of one recorded step; `ops`: the ops of the plan. Raises E430."""
    if values.keys() - STEP_MAY != {*STEP}:
        raise damaged(place, f"a step has {', '.join(STEP)}; found {', '.join(values)}")
    compute = sum(op.kind.computes for op in ops)
    took, lead, waits = (_column(values[name], name, place) for name in ("took_ns", "lead_ns", "waits"))
    for name, column, count in (("took_ns", took, len(ops)), ("lead_ns", lead, compute)):
        if len(column) != count:
            raise damaged(place, f"{name} has {len(column)} numbers, the plan has {count} such ops")
    if len(waits) % 3 or any(not 0 <= op <= len(ops) for op in waits[::3]):
        raise damaged(place, "waits has to be three numbers each: op, cause, ns")
    if any(cause not in _CAUSES for cause in waits[1::3]):
        raise damaged(place, f"waits has a cause beyond {max(_CAUSES)}")
    copies = _column(values.get("copies", []), "copies", place)
    if copies and len(copies) != 2 * sum(map(copying, ops)):
        raise damaged(place, "copies has to be two numbers for each: when it begins, how long it takes")
    tokens = _column(values.get("tokens", []), "tokens", place)
    step, begin, close = (_whole(values[name], name, place) for name in ("step", "begin_ns", "close_ns"))
    return Timing(step, begin, took, lead, waits, close, copies, tokens)


def copying(op: Op) -> bool:
    """Whether an op starts a copy of activations."""
    return op.kind.row.lane in (Lane.OUT, Lane.BACK)


_CAUSES = {cause.value: cause for cause in Cause}


def memory_of(values: Any, ops: int, place: str) -> MemorySamples:
    """Memory samples of a rank, a row for each of `ops` ops. Raises E430."""
    fields = ("step", "categories", "bytes")
    if not isinstance(values, dict) or values.keys() != {*fields}:
        raise damaged(place, f"memory has {', '.join(fields)}")
    categories = values["categories"]
    if not isinstance(categories, list) or not all(isinstance(name, str) for name in categories):
        raise damaged(place, "categories has to be a list of names")
    rows = values["bytes"]
    if not isinstance(rows, list) or len(rows) != ops:
        raise damaged(place, f"bytes needs a row for each of {ops} ops")
    table = [_column(row, "bytes", place) for row in rows]
    if any(len(row) != len(categories) for row in table):
        raise damaged(place, f"every row of bytes needs {len(categories)} numbers")
    return MemorySamples(_whole(values["step"], "step", place), tuple(categories), table)


def clock_of(values: Any, place: str) -> ClockOffset:
    """The offset of the rank's clock to the clock of rank 0. Raises E430."""
    names = ClockOffset._fields
    if not isinstance(values, dict) or values.keys() != {*names}:
        raise damaged(place, f"a clock has {', '.join(names)}")
    return ClockOffset(**{name: _whole(values[name], name, place) for name in names})


def _whole(value: Any, name: str, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise damaged(place, f"{name} has to be a whole number, not {value!r}")
    return value


def _column(values: Any, name: str, place: str) -> array[int]:
    """The values as whole numbers from 0 to 2^50: 13 days in ns, a pebibyte. Raises E430."""
    try:
        column = array("q", values if isinstance(values, list) else [None])
    except (TypeError, OverflowError):
        raise damaged(place, f"{name} has to be a list of whole numbers") from None
    if column and min(column) < 0:
        raise damaged(place, f"{name} has a negative number")
    if column and max(column) > 2**50:
        raise damaged(place, f"{name} has {max(column)}, more than 2^50")
    return column


def damaged(place: str, found: str) -> ZbcError:
    """E430 for the line at `place`; `found`: the problem."""
    return ZbcError("E430", f"trace: damaged: {found}", where=place, hint=RECORD)


# ---- reading a run -------------------------------------------------------------------------------------------


class Copied(NamedTuple):
    """The copy started by op number `op` of a step: start and end, in ns."""

    op: int
    start: int
    end: int


@dataclass(frozen=True)
class Recorded:
    """One step of one rank, in ns on the clock of rank 0; lists have an entry per op of the plan. Op i starts at
    `start[i]`, the end of the op before; it works from `work[i]` to `end[i]`. The time before `work` is waits and, for
    compute ops, reading data and overhead of the runtime. `ends` is the end of the step."""

    ops: tuple[Op, ...]
    start: list[int]
    work: list[int]
    end: list[int]
    waits: tuple[Wait, ...]
    begins: int
    ends: int
    copies: tuple[Copied, ...] = ()

    def waited(self, cause: Cause) -> dict[int, int]:
        """Op -> ns of its waits with this cause; the number of ops stands for the close of the step."""
        ns: dict[int, int] = {}
        for wait in self.waits:
            if wait.cause is cause:
                ns[wait.op] = ns.get(wait.op, 0) + wait.ns
        return ns


@dataclass(frozen=True)
class RankTrace:
    """The recording of one rank."""

    head: Head
    ops: tuple[Op, ...]
    clocks: tuple[ClockOffset, ...]
    timings: dict[int, Timing]  # by step, from 1
    memory: MemorySamples | None

    def aligned(self, ns: int) -> int:
        """A time of this rank's clock on the clock of rank 0, interpolated between the first and last comparison."""
        if not self.clocks:
            return ns
        first, last = self.clocks[0], self.clocks[-1]
        passed = last.at_ns - first.at_ns
        drift = (last.offset_ns - first.offset_ns) / passed if passed else 0.0
        share = min(max(ns - first.at_ns, 0), passed)
        return ns + first.offset_ns + round(drift * share)

    def recorded(self, step: int) -> Recorded:
        """One step. KeyError if it was not recorded."""
        timing = self.timings[step]
        begins, own = self.aligned(timing.begin_ns), timing.begin_ns
        aligned = self.aligned if any(clock.offset_ns for clock in self.clocks) else int
        leads = iter(timing.lead_ns)
        triples = zip(timing.waits[::3], timing.waits[1::3], timing.waits[2::3], strict=True)
        waits = tuple(Wait(op, _CAUSES[cause], ns) for op, cause, ns in triples)
        ahead = [0] * (len(self.ops) + 1)
        for wait in waits:
            if wait.cause is not Cause.ALL:
                ahead[wait.op] += wait.ns
        start, work, end = list[int](), list[int](), list[int]()
        at = begins
        for index, (op, took) in enumerate(zip(self.ops, timing.took_ns, strict=True)):
            start.append(at)
            lead = next(leads) if op.kind.computes else min(ahead[index], took)
            own += took
            close = aligned(own)
            work.append(min(at + lead, close))
            end.append(close)
            at = close
        started = (index for index, op in enumerate(self.ops) if copying(op))
        spans = zip(started, timing.copies[::2], timing.copies[1::2], strict=False)
        copies = tuple(
            Copied(index, aligned(timing.begin_ns + at), aligned(timing.begin_ns + at + ns)) for index, at, ns in spans
        )
        return Recorded(self.ops, start, work, end, waits, begins, self.aligned(own + timing.close_ns), copies)


@dataclass(frozen=True)
class Trace:
    """A recorded run, or a phase of it: the plan, and the recording of each rank of the run."""

    folder: Path  # the run directory
    plan: plans.StoredPlan
    ranks: tuple[RankTrace, ...]
    phase: str = ""  # the folder of its plan, if that is a plan of a ramp
    whole: plans.Manifest | None = None  # the plan that contains this folder, if so

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps that all ranks have recorded completely, counted from 1 as on the console."""
        common = set(self.ranks[0].timings)
        for rank in self.ranks[1:]:
            common &= rank.timings.keys()
        return tuple(sorted(common))

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Of each microbatch the tokens of its rows, of the longest replica: the median of all steps; () if no rank
        recorded any."""
        every = [[rank.timings[step].tokens for rank in self.ranks] for step in self.steps]
        longest = [[max(column) for column in zip(*lengths, strict=True)] for lengths in every if all(lengths)]
        return tuple(map(median_low, zip(*longest, strict=True)))

    @property
    def uncertainty_ns(self) -> int:
        """The largest error of a rank's clock offset."""
        return max((clock.uncertainty_ns for rank in self.ranks for clock in rank.clocks), default=0)

    @property
    def device(self) -> str:
        return self.ranks[0].head.device

    def recorded(self, rank: int, step: int) -> Recorded:
        return self.ranks[rank].recorded(step)


def has_trace(run: Path, phase: str | None = None) -> bool:
    """Whether a run directory holds a trace, of this phase or of any."""
    patterns = [_RANKS, f"*/{_RANKS}"] if phase is None else [f"{phase}/{_RANKS}" if phase else _RANKS]
    try:
        return any(True for pattern in patterns for _ in (run / FOLDER).glob(pattern))
    except OSError:  # the folder is locked, or the name too long
        return False


def located(path: Path) -> tuple[Path, str | None]:
    """The run directory and the phase of its ramp that a path names: `RUN/trace/m4`; of other paths itself and None."""
    return (path.parent.parent, path.name) if path.parent.name == FOLDER else (path, None)


def phases(run: Path) -> list[str]:
    """The recorded phases of a training, in order; the last phase, after the ramp, is named ""."""
    names = [*(part.folder for part in plans.read_manifest(run / FOLDER / PLAN).ramp), ""]
    return [name for name in names if has_trace(run, name)]


def read(run: Path, phase: str | None = None) -> Trace:
    """Reads the trace of a run directory, as far as it was written; `phase`: by default the last one recorded. Raises
    E430 (no trace, or of some ranks only, no complete step, or a damaged file: file and line), E4xx (the copy of the
    plan)."""
    if not has_trace(run):
        raise ZbcError("E430", f"trace: there is no trace in {run}", hint=RECORD)
    if not plans.is_plan(run / FOLDER / PLAN):
        text = f"trace: {run / FOLDER} has lost {PLAN}, its copy of the plan that ran"
        raise ZbcError("E430", text, hint=f"copy the plan directory to {run / FOLDER / PLAN}")
    recorded = phases(run)
    if phase is None:
        phase = recorded[-1] if recorded else ""
    if phase not in recorded:
        raise _unrecorded(run, phase, recorded)
    folder = run / FOLDER / phase
    plan = plans.StoredPlan.read(run / FOLDER / PLAN / phase)
    topology = plan.manifest.topology
    world = topology.world
    missing = [rank for rank in range(world) if not (folder / rank_file(rank)).is_file()]
    if missing:
        text = f"trace: {folder} has no file of {', '.join(topology.name(rank) for rank in missing)}"
        hint = "ranks of other machines wrote theirs there: copy them here"
        raise ZbcError("E430", text, hint=hint)
    ranks = plan.program.ranks
    parts = [topology.of(r).pp for r in range(world)]
    traces = tuple(_read_rank(folder / rank_file(r), r, plan.manifest.id, ranks[parts[r]]) for r in range(world))
    trace = Trace(run, plan, traces, phase, plans.read_manifest(run / FOLDER / PLAN) if phase else None)
    freeze = Freeze.model_validate(plan.manifest.planning.get("freeze", {}), strict=False)
    if plan.program.freezes and trace.steps and trace.steps[-1] <= freeze.after:
        trace = _unfrozen(trace)
    if not trace.steps:
        raise ZbcError("E430", f"trace: {folder} holds no step that all ranks have completed", hint=RECORD)
    if not trace.tokens:
        return trace
    # The plan for microbatches as long as those that ran.
    manifest = trace.plan.manifest
    schedule = {**manifest.planning["schedule"], "tokens": list(trace.tokens)}
    ran = manifest.model_copy(update={"planning": {**manifest.planning, "schedule": schedule}})
    return replace(trace, plan=replace(trace.plan, manifest=ran))


def _unfrozen(trace: Trace) -> Trace:
    """The trace with unfrozen ops, for a recording that ended before its training began to freeze layers."""

    def whole(ops: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(op._replace(share=WHOLE) for op in ops)

    program = trace.plan.program
    plan = replace(trace.plan, program=replace(program, ranks=tuple(map(whole, program.ranks))))
    return replace(trace, plan=plan, ranks=tuple(replace(rank, ops=whole(rank.ops)) for rank in trace.ranks))


def _unrecorded(run: Path, phase: str, recorded: Sequence[str]) -> ZbcError:
    """E430 for a phase that was not recorded: the run had no ramp, or other phases of it were recorded."""
    ramps = [part.folder for part in plans.read_manifest(run / FOLDER / PLAN).ramp]
    if not ramps:
        return ZbcError("E430", f"trace: {run} had no ramp, and so no phase {phase}", hint=f"of all of it: {run}")
    what = f"the phase {phase}" if phase else "the steps after the ramp"
    text = f"trace: {run} has no trace of {what}" + (f", its ramp has {', '.join(ramps)}" * (phase not in ["", *ramps]))
    names = [name for name in recorded if name]
    hint = f"recorded phases: {', '.join(names) or 'none'}"
    return ZbcError("E430", text, hint=hint + f"; and the steps after the ramp: {run}" * ("" in recorded))


def _read_rank(path: Path, rank: int, plan: str, ops: tuple[Op, ...]) -> RankTrace:
    head: Head | None = None
    clocks, timings, memory = list[ClockOffset](), dict[int, Timing](), None
    for number, values in lines(path):
        place = f"{path}:{number}"
        if head is None:
            head = head_of(values, place, rank, plan, len(ops))
        elif "clock" in values:
            clocks.append(clock_of(values["clock"], place))
        elif "step" in values:
            timing = timing_of(values, ops, place)
            if timing.step in timings:
                raise damaged(place, f"step {timing.step} is there twice")
            timings[timing.step] = timing
        elif "memory" in values:
            memory = memory_of(values["memory"], len(ops), place)
        else:
            raise damaged(place, f"neither clock, step nor memory: {', '.join(sorted(values)) or 'nothing'}")
    if head is None:
        raise damaged(f"{path}:1", "the file is empty")
    return RankTrace(head, ops, tuple(clocks), timings, memory)
