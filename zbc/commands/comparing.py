"""`compare`: a job under several schedules, ranked, in every printed form; or two plans."""

from __future__ import annotations

import csv
import io
import json as jsonlib
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from zbc.commands.console import progress, refuse_unwritable, show, show_json, tell, write_text
from zbc.commands.opening import Changes, say_if_compiling
from zbc.commands.options import Budget, Out, ProfileFile, Settings, again, complete_schedule, share
from zbc.commands.shortlist import Shortlist, by_world, failures
from zbc.commands.summary import chosen_of
from zbc.text import GIB, aligned, percent, short, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.report.report import Facts, Report
    from zbc.compiler.whatif.compare import Candidate, ComparedPlan
    from zbc.compiler.whatif.crossings import Crossing

    Planned = tuple[ComparedPlan, Report]

_LINES, _WIDTH = 8, 80  # of partitions
_TRIALS = 50  # of a row under jitter
_SHOWN: dict[str, Callable[[list[float]], list[str]]] = {  # the numbers of a column as texts
    "ms": aligned,
    "GiB": lambda values: aligned(values, 3),
    "rate": lambda values: [percent(value) for value in values],
    "units": lambda values: [f"{value:.2f}" for value in values],
    "count": lambda values: [f"{value:g}" for value in values],
    "factor": lambda values: [f"{value:.2f}x" for value in values],
    "mark": lambda values: ["*" if value else "" for value in values],
}


class Column(NamedTuple):
    """One number of every row: its name in CSV and in the table, its getter, and its format."""

    key: str
    head: str
    value: Callable[[ComparedPlan, Report], float | None]
    kind: str  # of _SHOWN
    meaning: str

    def texts(self, planned: Sequence[Planned]) -> list[str]:
        """Its cells, with the same number of decimals, and a question mark if the number is not known."""
        values = [self.value(*entry) for entry in planned]
        texts = iter(_SHOWN[self.kind]([value for value in values if value is not None]))
        return ["?" if value is None else next(texts) for value in values]


def _gib(key: str, head: str, get: Callable[[Report], int], meaning: str) -> Column:
    return Column(key, head, lambda _, r: get(r) / GIB if r.bytes_known else None, "GiB", meaning)


def _even(row: ComparedPlan, report: Report) -> float:
    return report.peak_activation_units if row.exchanged is None else row.exchanged


_SEQUENCE = Column("ms_per_sequence", "ms/seq", lambda row, _: row.sequence_ms, "ms", "ms per sequence")
_STEADY, _UNITS = "ms of a step with its optimizer, in steady state", "activations at the fullest rank's peak"
_FASTER = "how many times as fast, per sequence"
_EVEN = "units if ranks shared out attention and slices were even (SlimPipe), which zbc does not run"
_MOVED = Column("moved", "moved", lambda _, r: r.moved, "rate", "share of activations that go to the host and back")
_GATHERED = "gathers of weights in a step, on a rank"
_EXPOSED = "ms by which gathers make a step longer"
_GATHERS = (
    Column("gathers", "gathers", lambda _, r: r.gathered.count if r.gathered else None, "count", _GATHERED),
    Column("gathers_exposed_ms", "exposed", lambda _, r: r.gathered.exposed_ms if r.gathered else None, "ms", _EXPOSED),
)
_HIDDEN = "of the sums inside ops of tensor-parallel ranks, the share that no rank waits for"
_SUMS = Column("sums_hidden", "hidden", lambda _, r: r.tp_sums.hidden if r.tp_sums else None, "rate", _HIDDEN)
_NOISY = Column("jitter", "jitter", lambda row, _: row.noisy, "rate", "longer on the mean, where op times vary")
# In the order in which they are printed.
COLUMNS = (
    Column("makespan_ms", "makespan", lambda _, r: r.makespan_ms, "ms", "ms of a step, first to last"),
    Column("bubble_rate_makespan", "bubble", lambda _, r: r.bubble_rate_makespan, "rate", "of the makespan"),
    Column("span_ms", "span", lambda _, r: r.span_ms, "ms", "ms of the rank that takes longest"),
    Column("bubble_rate_span", "of span", lambda _, r: r.bubble_rate_span, "rate", "the bubble of the span"),
    Column("settled_ms", "steady", lambda row, _: row.settled_ms, "ms", _STEADY),
    Column("peak_activation_units", "units", lambda _, r: r.peak_activation_units, "units", _UNITS),
    _gib("peak_gib", "GiB", lambda r: r.peak_bytes, "of the fullest rank"),
    _gib("parameter_gib", "params", lambda r: r.parameter_bytes, "GiB of weights, gradients, optimizer"),
    _gib("gradient_traffic_gib", "reduced", lambda r: r.summed_bytes, "GiB sent to all-reduce gradients"),
    Column("sends_per_rank", "sends", lambda row, _: row.transfers, "count", "messages per rank and step"),
    _gib("sent_gib", "sent", lambda r: r.sent_bytes, "GiB a rank sends to neighbours per step"),
    Column("gap_to_bound", "gap", lambda row, _: row.gap, "rate", "above the placement's lower bound"),
    Column("speedup_over_1f1b", "vs 1F1B", lambda row, _: row.speedup, "factor", _FASTER),
    Column("tokens_per_s_per_rank", "tokens/s", lambda _, r: r.rates.tokens_per_s_per_rank, "ms", "per rank"),
    Column("idle_rate", "idle", lambda _, r: r.idle_rate, "rate", "of the makespan, mean of the ranks"),
    Column("balance", "balance", lambda _, r: r.balance, "rate", "mean work of a rank over that of the busiest"),
    Column("exchanged_units", "if even", _even, "units", _EVEN),
    _MOVED,
    *_GATHERS,
    _SUMS,
    _NOISY,
    Column("pareto", "front", lambda row, _: row.front, "mark", "* nothing is both faster and smaller"),
)


class Format(StrEnum):
    CSV = "csv"
    MD = "md"
    TEX = "tex"
    JSON = "json"
    SVG = "svg"


def compare(
    target: Annotated[
        Path, typer.Argument(metavar="JOB.toml", help="A job file, or a plan directory for the job it was made from.")
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="Compare these two plans, jobs, CSV files or runs.", show_default=False),
    ] = None,
    schedules: Annotated[
        str,
        typer.Option(
            "--schedule",
            metavar="all|A,B,C",
            help="Schedules, CSV files or plugins to compare.",
            autocompletion=complete_schedule,
        ),
    ] = "all",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2", help="Try each value; several sweeps try every combination."),
    ] = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    jitter: Annotated[
        float | None,
        typer.Option(metavar="10%", parser=share, help="Say how much longer steps get if op times vary by this."),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Print this; svg draws steps against the numbers of a swept key.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write a file too, in the format of its name's ending."),
    ] = None,
    *,
    out: Out,
) -> None:
    """Rank a job's schedules, or compare two plans.

    The fastest comes first. Rows that do not fit or cannot be planned stay in the table with the reason. If you sweep a
    number of [hardware], [costs] or [model], each value gets its own ranking, and the table shows where the fastest
    schedule changes; with -v and --json also where any two change places.

    Of two plans: their numbers and, rank by rank, how the order of ops differs.
    """
    out = out._replace(json=out.json or form is Format.JSON)
    if other is not None:
        from zbc.commands.differing import differ

        given = {"--sweep": sweep, "--jitter": jitter, "--output": output, "--format": None if out.json else form}
        for name in (name for name, value in given.items() if value is not None):
            raise typer.BadParameter(f"works with one job, not with {target} and {other}", param_hint=name)
        asked_for = Changes(None if schedules == "all" else schedules, settings, profile, budget)
        return differ(target, other, asked_for, out)
    from zbc.commands import frontier
    from zbc.compiler.schedules import SCHEDULES
    from zbc.compiler.whatif.compare import Asked, beside_baseline, combinations
    from zbc.compiler.whatif.compare import compare as rows_of
    from zbc.compiler.whatif.crossings import changed, crossings
    from zbc.compiler.whatif.noise import Noise

    printed = None if output is not None or out.json else form
    written = None if output is None else form or _form_of(output)
    if output is not None:
        refuse_unwritable(output)
    named = [name.strip() for name in schedules.split(",") if name.strip()]
    if not named:
        raise typer.BadParameter("--schedule names none; write them as zb-h1,zb-v, or all")
    names = [schedule for name in named for schedule in (SCHEDULES if name == "all" else [name])]
    noise = Noise(jitter, trials=_TRIALS) if jitter else None
    asked = Asked(target, tuple(settings or ()), profile, 0.0 if budget is None else budget, noise)
    wanted = asked.both_ways(combinations(names, sweep or ()))
    asked, weighed = asked.settled(wanted)
    say_if_compiling(None, quiet=out.silent or printed is not None)
    with progress("planning", len(wanted), quiet=out.quiet) as done:
        rows = [*beside_baseline(rows_of(asked, wanted, done), asked)]
    named_all = all(name != "all" for name in named)
    changes_of = partial(crossings, asked, rows)

    def text_of(form: Format) -> str:
        if form is Format.CSV:
            return as_csv(rows)
        if form is Format.SVG:
            return frontier.svg(rows, _without)
        if form is Format.JSON:
            return jsonlib.dumps(document(), indent=1, ensure_ascii=False)
        return (as_markdown if form is Format.MD else as_tex)(rows, verbose=out.verbose, everything=named_all)

    def document() -> dict[str, Any]:
        world = {"world": [row.as_json() for row in weighed]} if weighed else {}
        return as_json(rows, changes_of(every=True)) | world

    if output is not None and written is not None:
        write_text(output, text_of(written) + "\n")
    if printed is not None:
        show(text_of(printed))
    elif out.json:
        show_json(document())
    else:
        with progress("where the fastest changes", None, quiet=out.quiet):
            changes = changes_of(every=out.verbose)
        pairs = set() if out.verbose else changed(rows) - {change.pair for change in changes if change.leading}
        if out.verbose:
            show(*as_table(rows, changes))
        else:
            show(*as_shortlist(rows, changes, more=len(pairs), everything=named_all))
        show(*frontier.drawn(rows, _without))
        if (remark := asked.remark()) is not None and not out.quiet:
            show("", remark)
        if weighed and not out.quiet:
            show("", f"all at {chosen_of(weighed)}; --sweep parallel.pp=1,2,4 plans others")
        if rows[0].report is not None and not out.quiet:
            first = rows[0]
            chosen = [*(settings or ()), *(f"{key}={value}" for key, value in first.settings)]
            show("", f"next: {again('plan', target, first.schedule, chosen, profile)}")
    if output is not None and not out.silent:
        tell(f"wrote {output}")
    if all(row.error is not None for row in rows):
        raise typer.Exit(min(row.error.exit_code for row in rows if row.error is not None))


def _form_of(output: Path) -> Format:
    ending = output.suffix.lower()[1:]
    if ending not in [*Format]:
        raise typer.BadParameter(f"{output} ends in none of {', '.join(Format)}; add --format", param_hint="-o")
    return Format(ending)


def as_shortlist(
    rows: Sequence[ComparedPlan], crossings: Sequence[Crossing] = (), *, more: int = 0, everything: bool
) -> Iterator[RenderableType]:
    """The best rows in the columns that matter most, then their meaning and a summary of the other rows. `more`: number
    of pairs that change places besides the fastest; `everything`: all rows, as their schedules were named."""
    planned = _planned(rows)
    shortlist = Shortlist.of(planned, _names(rows), _name, everything=everything)
    if planned:
        yield shortlist.table()
        yield ""
    if planned and not everything:
        yield from failures(rows, lambda row: _candidate((row.schedule, row.settings)))
    else:
        yield from (f"{_candidate((row.schedule, row.settings))}: {_reason(row)}" for row in rows if row.error)
    yield from _changes(crossings, more)
    yield from _without_effect(rows)
    if planned:
        yield from shortlist.legend()
        left = f"{shortlist.left_out} more rows, " if shortlist.left_out else ""
        yield f"-v: {left}other columns; --budget 10s: a longer search, as in zbc plan"


def as_table(rows: Sequence[ComparedPlan], crossings: Sequence[Crossing] = ()) -> Iterator[RenderableType]:
    """Ranked rows, then the reasons why others could not be planned, then the values at which the fastest changes."""
    planned, columns = _planned(rows), _columns(rows)
    if planned:
        yield by_world(planned, _cells(planned, columns), _names(rows), [column.head for column in columns])
    failed = [row for row in rows if row.error is not None]
    if planned and failed:
        yield ""
    for row in failed:
        yield f"{_candidate((row.schedule, row.settings))}: {_reason(row)}"
    yield from _changes(crossings, 0)
    yield from _without_effect(rows)
    if planned:
        yield ""
        yield from wrap([f"{column.head}: {column.meaning}" for column in columns], 78, between="; ")
        yield from _cuts(rows)


def _planned(rows: Sequence[ComparedPlan]) -> list[Planned]:
    return [(row, row.report) for row in rows if row.report is not None]


def _columns(rows: Sequence[ComparedPlan]) -> list[Column]:
    """The informative columns: the time per sequence if rows differ in their work per step, offloaded bytes if there
    are any, and so on."""
    varied = len({row.sequences for row in rows if row.error is None}) > 1
    reports = [report for _, report in _planned(rows)]
    known = dict.fromkeys((column.key for column in _GATHERS), any(report.gathered is not None for report in reports))
    known["exchanged_units"] = any(row.exchanged is not None for row in rows)
    known[_NOISY.key] = any(row.noisy is not None for row in rows)
    known[_MOVED.key] = any(report.copied is not None for report in reports)
    known[_SUMS.key] = any(report.tp_sums is not None for report in reports)
    return [*([_SEQUENCE] if varied else []), *(column for column in COLUMNS if known.get(column.key, True))]


def _names(rows: Sequence[ComparedPlan]) -> list[str]:
    """The heads of the columns that tell rows apart."""
    return ["schedule", *(key.rpartition(".")[2] for key, _ in rows[0].settings)]


def _name(row: ComparedPlan) -> list[str]:
    return [row.name, *(_plainly(value) for _, value in row.settings)]


def _cells(planned: Sequence[Planned], columns: Sequence[Column]) -> list[list[str]]:
    """The cells of each row that has a report."""
    texts = (column.texts(planned) for column in columns)
    return [[*_name(row), *cells] for (row, _), *cells in zip(planned, *texts, strict=True)]


def _changes(crossings: Sequence[Crossing], more: int) -> Iterator[str]:
    """The values at which the fastest changes, key by key; then all other changes, if given."""
    leading = [row for row in crossings if row.leading]
    for (key, world), group in groupby(leading, key=lambda row: (row.key, row.world)):
        changes = list(group)
        yield ""
        yield f"as {key} grows{_where(world)}, the fastest is"
        yield f"  {_candidate(changes[0].before)} up to {short(changes[0].at)}"
        for row, after in zip(changes, [*changes[1:], None], strict=True):
            until = f" to {short(after.at)}" if after else ""
            yield f"  {_candidate(row.after)} from {short(row.at)}{until}   ({short(row.ms)} ms per sequence there)"
    rest = [row for row in crossings if not row.leading]
    if rest:
        yield ""
        yield "and after it"
    for row in rest:
        place = f"{row.key} = {short(row.at)}{_where(row.world)}"
        yield f"  {_candidate(row.after)} passes {_candidate(row.before)} at {place}"
    if more:
        yield ""
        yield f"{more} {'pair changes' if more == 1 else 'pairs change'} places after the fastest: -v says where"


def _without_effect(rows: Sequence[ComparedPlan]) -> Iterator[str]:
    """Swept keys of the world that change neither time nor memory of any row."""
    for key in {key: None for row in rows for key, _ in row.world}:
        outcomes: dict[tuple[object, ...], set[tuple[float, int]]] = {}
        for row in rows:
            if row.report is not None:
                rest = tuple(setting for setting in row.settings if setting[0] != key)
                outcomes.setdefault((row.schedule, rest), set()).add((row.sequence_ms, row.report.peak_bytes))
        if len({dict(row.settings)[key] for row in rows}) > 1 and all(len(seen) == 1 for seen in outcomes.values()):
            given = any(row.report is not None and row.report.costs != "estimated" for row in rows)
            yield ""
            yield f"{key} changes nothing here{': the times of this job are not estimated' if given else ''}"


def _where(world: Sequence[tuple[str, str]]) -> str:
    return f" ({', '.join(f'{key} = {value}' for key, value in world)})" if world else ""


def _without(row: ComparedPlan, key: str) -> str:
    """The name of a curve against a key."""
    return _candidate((row.name, tuple(setting for setting in row.choice if setting[0] != key)))


def _candidate(candidate: Candidate) -> str:
    schedule, choice = candidate
    return " ".join([schedule, *(f"{key.rpartition('.')[2]}={_plainly(value)}" for key, value in choice)])


def _plainly(value: str) -> str:
    """The text of a swept value without its quotes."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _reason(row: ComparedPlan) -> str:
    if row.error is None:
        return ""
    rest = len(row.error.errors) - 1
    text = f"[{row.error.code}] {row.error.message}"
    return text if not rest else f"{text} (and {rest} more)"


class _Cells(NamedTuple):
    """A table as text: the heads of names and of numbers, the rows, and the failed rows."""

    names: list[str]
    heads: list[str]
    rows: list[list[str]]
    failed: list[list[str]]

    @classmethod
    def of(cls, rows: Sequence[ComparedPlan], *, verbose: bool, everything: bool) -> _Cells:
        """The table of the console; with `verbose` all rows and columns, and the reasons of failed rows."""
        if not verbose:
            shortlist = Shortlist.of(_planned(rows), _names(rows), _name, everything=everything)
            return cls([*shortlist.heads], [column.head for column in shortlist.columns], [*shortlist.cells], [])
        columns = _columns(rows)
        heads = ["of makespan" if column.head == "bubble" else column.head for column in columns]
        failed = [[*_name(row), _reason(row)] for row in rows if row.error is not None]
        return cls(_names(rows), heads, _cells(_planned(rows), columns), failed)


def as_markdown(rows: Sequence[ComparedPlan], *, verbose: bool, everything: bool) -> str:
    names, heads, cells, failed = _Cells.of(rows, verbose=verbose, everything=everything)
    marks = ["---"] * len(names) + ["---:"] * len(heads)
    width = len(names) + len(heads)
    lines = [[*names, *heads], marks, *cells, *([cell.replace("|", "\\|") for cell in row] for row in failed)]
    return "\n".join("| " + " | ".join(line + [""] * (width - len(line))) + " |" for line in lines)


_TEX = str.maketrans(
    {**{sign: f"\\{sign}" for sign in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}"}
)


def as_tex(rows: Sequence[ComparedPlan], *, verbose: bool, everything: bool) -> str:
    """The table in LaTeX, for the package booktabs; failed rows are in comments below."""
    names, heads, cells, failed = _Cells.of(rows, verbose=verbose, everything=everything)

    def line(texts: Sequence[str]) -> str:
        return " & ".join("--" if text == "?" else text.translate(_TEX) for text in texts) + r" \\"

    begin = rf"\begin{{tabular}}{{{'l' * len(names)}{'r' * len(heads)}}}"
    top, bottom = [begin, r"\toprule", line([*names, *heads]), r"\midrule"], [r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*top, *map(line, cells), *bottom, *(f"% {': '.join(row)}" for row in failed)])


def as_csv(rows: Sequence[ComparedPlan]) -> str:
    """Plain numbers, rates as shares of one, and a last column with the reason of rows without numbers."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = _columns(rows)
    keys = (key for key, _ in rows[0].settings)
    writer.writerow(["schedule", *keys, *(column.key for column in columns), "error"])
    for row in rows:
        writer.writerow([*_name(row), *_numbers(row, columns), _reason(row)])
    return out.getvalue().rstrip("\n")


def _numbers(row: ComparedPlan, columns: Sequence[Column]) -> list[Any]:
    report = row.report
    if report is None:
        return [""] * len(columns)
    values = [column.value(row, report) for column in columns]
    return ["" if value is None else int(value) if isinstance(value, bool) else round(value, 9) for value in values]


def as_json(rows: Sequence[ComparedPlan], crossings: Sequence[Crossing] = ()) -> dict[str, Any]:
    """`schedules` holds a report for each row in ranked order, or an `error` in its place."""
    from zbc.compiler.report.report import FORMAT, VERSION

    entries = []
    for row in rows:
        entry: dict[str, Any] = {"schedule": row.schedule, "settings": dict(row.settings)}
        if row.report is not None:
            extra: dict[str, Any] = {"sends_per_rank": round(row.transfers, 9), "gap_to_bound": round(row.gap, 9)}
            extra["pareto_front"] = row.front
            extra |= {} if row.exchanged is None else {"exchanged_units": round(row.exchanged, 9)}
            extra |= {} if row.noisy is None else {"jitter": round(row.noisy, 9)}
            entry = {**row.report.as_json(), "settings": dict(row.settings), **extra}
        elif row.error is not None:
            entry["error"] = [error.as_json() for error in row.error.errors]
        entries.append(entry)
    changes = [_crossing(crossing) for crossing in crossings]
    return {"format": FORMAT, "version": VERSION, "schedules": entries, "crossings": changes}


def _crossing(one: Crossing) -> dict[str, Any]:
    (before, chosen), (after, instead) = one.before, one.after
    return {
        "key": one.key,
        "at": round(one.at, 9),
        "before": {"schedule": before, "settings": dict(chosen)},
        "after": {"schedule": after, "settings": dict(instead)},
        "ms_per_sequence": round(one.ms, 9),
        "settings": dict(one.world),
        "fastest": one.leading,
    }


# ---- layers per stage ------------------------------------------------------------------------------------


def _cuts(rows: Sequence[ComparedPlan]) -> Iterator[str]:
    """The partitions with unequal numbers of blocks, each with its plans."""
    plans: dict[str, list[str]] = {}
    for row in rows:
        if row.report is not None and _uneven(row.report.cut):
            name = " ".join([row.schedule, *(value for _, value in row.settings)])
            plans.setdefault(_counts(row.report.cut), []).append(name)
    if plans:
        yield "layers per stage (embedding and head too), where they differ; r: recomputed, s: selectively"
    for number, (cut, names) in enumerate(plans.items()):
        if number == _LINES:
            yield f"  ... {len(plans) - _LINES} more: --json"
            return
        line = f"  {cut}: {', '.join(names)}"
        yield line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _uneven(cut: Facts) -> bool:
    """Whether a stage recomputes, or the numbers of blocks per stage differ by more than one."""
    blocks = [sum(name not in ("embed", "head") for name in stage.layers) for stage in cut.stages]
    return max(blocks) - min(blocks) > 1 or any(stage.recompute or stage.selective for stage in cut.stages)


def _counts(cut: Facts) -> str:
    """`10 8x2 2`: layers of each stage, runs of equal numbers joined."""
    counts = [
        f"{len(stage.layers)}{'r' if stage.recompute else 's' if stage.selective else ''}" for stage in cut.stages
    ]
    runs = [(text, len(list(run))) for text, run in groupby(counts)]
    return " ".join(text if length == 1 else f"{text}x{length}" for text, length in runs)
