"""`report`: the numbers of a plan, or of a run beside its prediction."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands import predicting
from zbc.commands.console import indented, labelled, table
from zbc.commands.opening import Changes, is_planned
from zbc.commands.options import Out, share
from zbc.commands.summary import layer_ranges, ranges
from zbc.errors import ZbcError
from zbc.text import MIB, aligned, fixed, percent, short, size, unit_of, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.recorded.blame import Shares
    from zbc.compiler.recorded.deviations import Outlier
    from zbc.compiler.recorded.log import Loads, RunLog
    from zbc.compiler.recorded.report import Quantity, RunReport
    from zbc.compiler.report.report import Facts

_OPS, _OUTLIERS = 8, 5  # rows without -v
WORTH = 0.005  # share of a step that a new plan has to save
_SHORT = {"gradients": "grads", "optimizer": "state", "activations": "kept"}  # names in `zbc plan -v`
_CAUSES = ("compute", "warm_up", "message", "copies", "drain", "sums", "optimizer", "host")
_HEADS = {"sums": "sync"}
QUANTITY = ("", "predicted", "measured", "", "")  # heads after the name of a row
_ROWS = {
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_rank": "tokens/s per rank",
    "mfu": "MFU",
}


def report(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN|JOB.toml|FILE.csv|RUN",
            help="A plan, a job, a torch CSV, or a run directory (RUN/trace/m4: a phase).",
        ),
    ],
    jitter: Annotated[
        float | None,
        typer.Option(
            metavar="5%", parser=share, help="Vary the time of each op and transfer by this standard deviation."
        ),
    ] = None,
    straggler: Annotated[
        float | None,
        typer.Option(metavar="10%", parser=share, help="Make one rank slower by this much, each rank in turn."),
    ] = None,
    *,
    changes: Changes,
    out: Out,
) -> None:
    """Report the numbers of a plan, or of a run beside its prediction.

    Of a plan or job: the time of a step, how noise spreads it, and when ranks idle, why, and how much memory is free
    then. Of a run: step times, idle time by cause, ops and memory as measured, and the gain of a plan from the measured
    times (record some steps first: `zbc run PLAN --trace 10-19`).
    """
    if is_planned(target):
        return predicting.report(target, changes, jitter, straggler, out)
    for option, given in (("--jitter", jitter), ("--straggler", straggler)):
        if given is not None:
            raise typer.BadParameter(f"works with a plan, a job or a CSV; {target} is none", param_hint=option)
    changes.refuse(target)
    if isfile(target):  # not target.is_file(), which raises for what cannot be looked at
        hint = "compare step times of other tools by hand: `zbc report PLAN` has what is predicted"
        raise ZbcError("E430", f"report: {target} is a file; zbc reads its own runs, which are directories", hint=hint)
    _of_run(target, out)


def _of_run(target: Path, out: Out) -> None:
    """Prints the report of a run directory, or of a phase in it. Raises E430 if it is none, or a file is damaged."""
    from zbc.api import Run
    from zbc.compiler.recorded import log
    from zbc.compiler.recorded.report import FORMAT, VERSION, build
    from zbc.trace import recording as trace

    run, phase = trace.located(target)
    if not trace.has_trace(run):
        run_log = log.read(run)
        return out.answer(
            lambda: {"format": FORMAT, "version": VERSION, **run_log.as_json()},
            lambda: _unrecorded(run_log, verbose=out.verbose),
        )
    recorded = trace.read(run, phase)
    made = build(recorded)
    command = replan_command(run, made.phase, lengths=bool(recorded.tokens))
    hidden, loads = log.beside(run)

    def document() -> dict[str, Any]:
        experts = {} if loads is None else loads.as_json()
        idle = {"bubbles": predicting.idle_json(Run(run, recorded).bubbles())}
        return {**made.as_json(), **log.as_numbers(hidden), **experts, **idle, "replan_command": command}

    def parts() -> Iterator[RenderableType]:
        yield from _summary(run, made, trace.phases(run), hidden, verbose=out.verbose)
        yield from _experts(loads, verbose=out.verbose)
        yield from ("", *_causes(made, verbose=out.verbose))
        yield from ("", *_findings(made, verbose=out.verbose))
        yield from _slices(made)
        yield from _memory(made)
        if out.verbose:
            idle_time = Run(run, recorded).bubbles()
            yield from ("", labelled("idle", idle_time.name), *predicting.idle_parts(idle_time, verbose=True))
        yield from ("", labelled("new plan", *_again(made, command)))

    out.answer(document, parts)


def replan_command(run: Path, phase: str = "", *, lengths: bool = False) -> str:
    """The command that plans the job of a recorded run with the measured times of these steps; `lengths`: and with the
    lengths of its microbatches."""
    steps = run / "trace" / phase if phase else run
    folder, plan = (shlex.quote(str(path)) for path in (steps, run / "trace" / "plan"))
    return (
        f"zbc profile {folder} -o profile.json && "
        f"zbc plan {plan} --profile profile.json{' --set schedule.tokens=recorded' * lengths} -o plan-measured"
    )


# ---- a run without a trace -----------------------------------------------------------------------------------


def _unrecorded(run: RunLog, *, verbose: bool) -> Iterator[RenderableType]:
    yield labelled("run", f"{run.folder}: {run.about.get('schedule')}, plan {run.about.get('plan')}, not recorded")
    yield labelled("steps", f"{len(run.counted)} of {len(run.steps)} count; medians, with quartiles")
    yield ""
    yield table(
        QUANTITY,
        [
            ("step", *times(run.step())),
            ("idle", *rates(run.idle())),
            ("balance", *rates(run.balance())),
            *_hidden(run.hidden()),
            *throughput(run.rates()),
            *([("bubble of the step", *rates(run.bubble()))] if verbose else []),
        ],
    )
    yield from _experts(run.loads(), verbose=verbose)
    yield ""
    rows = [
        (str(rank), "-" if meant is None else fixed(meant), fixed(ms), size(peak))
        for rank, ((meant, ms), peak) in enumerate(zip(run.busy(), run.peak(), strict=True))
    ]
    yield table(("rank", "compute ms predicted", "measured", run.held), rows)
    yield ""
    ranks = int(run.about.get("ranks", 1)) * int(run.about.get("copies", 1))
    local = f" --local {ranks}" if run.about.get("device") == "cpu" else ""
    yield labelled(
        "more",
        "where the time went, what deviates and memory by category need a trace:",
        f"zbc run {shlex.quote(run.plan_folder)}{local} --trace {_some(int(run.about.get('steps', 20)))}   "
        "(under torchrun if the run was)",
    )


def _some(steps: int) -> str:
    """Steps to record in a run of `steps` steps, as --trace takes them: neither the first nor the last."""
    if steps >= 20:
        return "10-19"
    return f"2-{steps - 1}" if steps > 3 else str(max(1, steps - 1))


# ---- a recorded run ------------------------------------------------------------------------------------------


def _summary(
    run: Path, made: RunReport, phases: Sequence[str], hidden: Mapping[str, Quantity], *, verbose: bool
) -> Iterator[RenderableType]:
    count = len(made.steps)
    ranks_ = f"{len(made.ranks)} {made.device} rank{'s' if len(made.ranks) > 1 else ''}"
    yield labelled("run", f"{run}: {made.schedule} on {ranks_}, plan {made.plan}")
    yield labelled(
        "steps",
        f"{ranges(made.steps)} recorded" + ("; medians, with quartiles" if count > 1 else ""),
        *(["the first of the run, in which things are set up: record others"] if made.steps == (1,) else []),
        f"clocks of the ranks agree within {short(made.clock_uncertainty_ms, 2)} ms"
        if made.clock_uncertainty_ms
        else "all ranks read the same clock",
    )
    if made.crowded:
        yield labelled(
            "cores",
            *(
                f"{box.ranks} ranks share the {'one core' if box.cores == 1 else f'{box.cores} cores'} of {box.host}"
                for box in made.crowded
            ),
            "those that compute at once take turns, of which estimates",
            "know nothing: zbc profile measures with as many at work",
        )
    rest = [str(run / "trace" / name) if name else "the steps after the ramp" for name in phases if name != made.phase]
    if made.phase or rest:
        where = f"the steps of {made.phase} of a ramp" if made.phase else "the steps after a ramp"
        yield labelled(
            "phase",
            f"{where}, {made.microbatches} microbatches each",
            *([f"also recorded: {', '.join(rest)}"] if rest else []),
        )
    yield ""
    rows = [
        ("step, with its optimizer", *times(made.step)),
        ("makespan", *times(made.makespan)),
        ("  idle", *rates(made.idle_rate)),
        ("  balance", *rates(made.balance)),
        *_hidden(hidden),
        *throughput(made.rates),
    ]
    if verbose:
        rows += [
            ("span", *times(made.span)),
            ("bubble of makespan", *rates(made.bubble_makespan)),
            ("bubble of span", *rates(made.bubble_span)),
        ]
    yield table(QUANTITY, rows)


def _hidden(found: Mapping[str, Quantity]) -> list[tuple[str, ...]]:
    return [("collectives inside of ops hidden", *rates(quantity)) for quantity in found.values()]


def _experts(loads: Loads | None, *, verbose: bool) -> Iterator[RenderableType]:
    """Loads of experts, and of ranks that share them out, over the mean of their block."""
    if loads is None:
        return
    yield ""
    yield labelled("experts", f"rows over the mean of their block, of {loads.steps} steps in metrics.jsonl")
    rows = [("busiest expert of a block", "-", f"{loads.busiest:.2f}")]
    if len(loads.ranks) > 1:
        rows.append(("busiest rank of a block", f"{loads.planned:.2f}", f"{loads.imbalance:.2f}"))
        rows += [(f"ep {place}, of all blocks", "-", f"{load:.2f}") for place, load in enumerate(loads.ranks)]
    yield table(("", "model.imbalance", "measured"), rows)
    if verbose:
        ends = [
            (block, sorted(range(len(expert_rows)), key=expert_rows.__getitem__), expert_rows)
            for block, expert_rows in loads.blocks.items()
        ]
        cells = [[str(b), *(f"{expert_rows[i]:.2f} by e{i}" for i in (by[-1], by[0]))] for b, by, expert_rows in ends]
        yield table(("block", "most", "least"), cells)


def _causes(made: RunReport, *, verbose: bool) -> Iterator[RenderableType]:
    """Two rows per rank: its predicted and its measured time by cause."""
    which = f"step {made.median_step}" + (", the median one" if len(made.steps) > 1 else "")
    yield labelled("time", f"ms of each rank in {which}, by cause")
    decimals = len(fixed(max(max(rank.predicted.total, rank.measured.total) for rank in made.ranks)).partition(".")[2])

    causes = [name for name in _CAUSES if name != "copies" or made.copies]

    def cells(shares: Shares) -> list[str]:
        return [f"{getattr(shares, name):.{decimals}f}" for name in ("total", *causes)]

    rows = list[Sequence[str]]()
    for rank in made.ranks:
        rows += [(str(rank.rank), "predicted", *cells(rank.predicted)), ("", "measured", *cells(rank.measured))]
    heads = ("rank", "", "step", *(_HEADS.get(name, name.replace("_", "-")) for name in causes))
    yield indented(table(heads, rows, left=2), 1)
    waits = [
        f"rank {rank.rank}: "
        + ", ".join(f"{short(ms, 3)} ms for rank {peer}" for peer, ms in _largest(rank.measured.senders, verbose))
        for rank in made.ranks
        if rank.measured.senders
    ]
    if waits:
        yield labelled("waits", "for messages:", *waits)
    if made.copies:
        lines = (
            f"rank {copy.rank}: {short(copy.measured_ms, 3)} ms, {percent(copy.measured_hidden)} hidden "
            f"({short(copy.predicted_ms, 3)} ms, {percent(copy.predicted_hidden)} predicted)"
            for copy in made.copies
        )
        yield labelled("offload", "of activations to the host and back:", *lines)


def _largest(senders: dict[int, float], verbose: bool) -> list[tuple[int, float]]:
    return sorted(senders.items(), key=lambda pair: -pair[1])[: None if verbose else 3]


def _findings(made: RunReport, *, verbose: bool) -> Iterator[RenderableType]:
    lines = [
        f"rank {slow.rank}: its ops take {slow.ratio:.2f} times what was predicted, the others' {slow.others:.2f}"
        for slow in made.slow_ranks
    ]
    if made.slow and not made.crowded:  # ranks that take turns on cores are slow in turn
        lines.append(f"a plan around it: --set 'hardware.slow=[{', '.join(map(short, made.slow))}]'")
    lines += [
        f"rank {way.sender} to rank {way.receiver}: {short(way.ms, 3)} ms a transfer, usually {short(way.others, 3)}"
        for way in made.slow_links
    ]
    if lines:
        yield labelled("slow", *lines)
    lines = [*map(_stall, made.stalls), *map(_outlier, made.outliers)]
    if lines:
        shown = lines if verbose else lines[:_OUTLIERS]
        rest = [f"and {len(lines) - len(shown)} more: -v"] if len(lines) > len(shown) else []
        yield labelled("outliers", *shown, *rest)
    yield labelled("ops", "that deviate most, ms each, and what that makes in a step")
    yield indented(_ops(made, verbose=verbose))
    if verbose and made.links:
        yield labelled("links", "ms of a transfer, where the receiver waited for it")
        yield indented(_links(made))


def _stall(one: Facts) -> str:
    return f"step {one.step}: ranks {ranges(one.ranks)} stood still together, {short(one.ms, 3)} ms: a busy machine"


def _outlier(one: Outlier) -> str:
    what = f"{one.op} took" if one.sender is None else f"the message of rank {one.sender} for {one.op} took"
    return f"step {one.step}, rank {one.rank}: {what} {short(one.measured, 3)} ms, usually {short(one.usual, 3)} ms"


def _ops(made: RunReport, *, verbose: bool) -> RenderableType:
    from zbc.ops import Kind

    shown = made.ops if verbose else made.ops[:_OPS]
    rows = list[Sequence[str]]()
    meant, measured = aligned([op.predicted for op in shown], 4), aligned([op.measured for op in shown], 4)
    excess = aligned([op.excess for op in shown], 3)
    for op, a, b, c in zip(shown, meant, measured, excess, strict=True):
        change = f"{100 * (op.ratio - 1):+.1f}%" if op.predicted > 0 else ""
        sign = "" if c.startswith("-") else "+"
        name = op.kind if Kind(op.kind).unit_wide else f"{op.kind} s{op.stage}"
        rows.append((name, str(op.rank), f"{op.ops} ops", a, b, change, f"{sign}{c} ms"))
    return table(("op", "rank", "a step", "predicted", "measured", "change", "in a step"), rows, left=2)


def _links(made: RunReport) -> RenderableType:
    rows = [
        (str(link.sender), str(link.receiver), str(link.awaited), short(link.predicted, 3), short(link.measured, 3))
        for link in made.links
    ]
    return table(("from", "to", "a step", "predicted", "measured"), rows, left=2)


def _slices(made: RunReport) -> Iterator[RenderableType]:
    if not made.slices:
        return
    yield labelled("slices", "of a microbatch, ms through all stages; backward: B and W")
    rows = []
    for part in made.slices:
        cells = (f"{value:.2f}" for value in part[1:])
        rows.append((str(part.number), *cells))
    yield indented(table(("slice", "F predicted", "measured", "backward predicted", "measured"), rows, left=1), 1)


def _memory(made: RunReport) -> Iterator[RenderableType]:
    if not made.memory:
        missing = ("not looked at: that takes one step more than those recorded,", "and not the first one")
        yield labelled("memory", *missing)
        return
    most = max(rank.peak for rank in made.memory)
    unit, scale = unit_of(most) if most >= MIB else ("KiB", 1024.0)
    sized = made.memory[0].predicted is not None
    notes = [] if sized else ["sizes are not known before the model is built, so there is no prediction"]
    yield labelled("memory", f"peaks of live tensors: of all at one moment, of a category at its own, {unit}", *notes)
    everything = [held for rank in made.memory for held in (rank.measured, rank.predicted or {})]
    names = [name for name in made.memory[0].measured if any(held.get(name) for held in everything)]

    def cells(whole: float, held: Mapping[str, float]) -> list[str]:
        return [f"{value / scale:.2f}" for value in (whole, *(held.get(name, 0) for name in names))]

    rows = list[Sequence[str]]()
    for rank in made.memory:
        if rank.predicted is not None:
            rows.append((str(rank.rank), "predicted", *cells(rank.predicted_peak or 0, rank.predicted)))
        rows.append(("" if sized else str(rank.rank), "measured", *cells(rank.peak, rank.measured)))
    yield indented(table(("rank", "", "all", *(_SHORT.get(name, name) for name in names)), rows, left=2))


def _again(made: RunReport, command: str) -> Iterator[str]:
    """The predicted gain of a new plan, and the command that makes it."""
    again = made.replan
    if again is None:
        return
    yield f"with measured times a step is {short(again.present_ms)} ms in the present order"
    if again.planned_ms is None or again.gain is None:
        yield f"there is no plan with them: {again.why_not}"
        return
    if not again.changed:
        yield "planning with them gives the same plan"
        return
    change = f"{-100 * again.gain:+.1f}%"
    yield f"and {short(again.planned_ms)} ms planned with them: {change}"
    cut = " | ".join(layer_ranges(names) for names in again.cut)
    yield from wrap([f"{again.schedule},", *cut.split(" ")] if len(cut) < 90 else [again.schedule], 69, between=" ")
    if again.gain < WORTH:
        yield "which is not worth it; the command would be"
    yield command


# ---- rows of measured beside predicted numbers --------------------------------------------------------------------


def times(one: Quantity, unit: str = " ms") -> list[str]:
    middle, low, high = aligned([one.measured, one.low, one.high])
    predicted = "-" if one.predicted is None else f"{fixed(one.predicted)}{unit}"
    change = "" if one.change is None else f"{100 * one.change:+.1f}%"
    return [predicted, f"{middle}{unit}", "" if one.low == one.high else f"{low}-{high}", change]


def rates(one: Quantity) -> list[str]:
    predicted = "-" if one.predicted is None else percent(one.predicted)
    change = "" if one.predicted is None else f"{100 * (one.measured - one.predicted):+.1f} points"
    spread = "" if one.low == one.high else f"{100 * one.low:.1f}-{percent(one.high)}"
    return [predicted, percent(one.measured), spread, change]


def throughput(known: Mapping[str, Quantity]) -> Iterator[Sequence[str]]:
    """A row for each known rate; samples only if tokens are not known."""
    for key, name in _ROWS.items():
        rate = known.get(key)
        if rate is None or (key == "samples_per_s" and "tokens_per_s" in known):
            continue
        yield name, *(rates(rate) if key == "mfu" else times(rate, unit=""))
