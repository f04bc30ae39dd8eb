"""The ranked table of `compare`, in every form it is printed in."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from zbc.commands import cuts
from zbc.commands.console import table
from zbc.text import GIB, aligned, percent, short, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.report.report import Report
    from zbc.compiler.whatif.compare import ComparedPlan
    from zbc.compiler.whatif.crossings import Candidate, Crossing

Numbers = Sequence[float | None]


def _rates(values: Numbers) -> list[str]:
    return ["?" if value is None else percent(value) for value in values]


def _times(values: Numbers) -> list[str]:
    return _known(values, aligned)


def _gib(values: Numbers) -> list[str]:
    return _known(values, lambda known: aligned(known, 3))


def _units(values: Numbers) -> list[str]:
    return _known(values, lambda known: [f"{value:.2f}" for value in known])


def _plain(values: Numbers) -> list[str]:
    return _known(values, lambda known: [f"{value:g}" for value in known])


def _marks(values: Numbers) -> list[str]:
    return ["*" if value else "" for value in values]


def _known(values: Numbers, shown: Callable[[list[float]], list[str]]) -> list[str]:
    """The numbers there are, with equally many decimals, and a question mark for each that is not known."""
    texts = iter(shown([value for value in values if value is not None]))
    return ["?" if value is None else next(texts) for value in values]


class Column(NamedTuple):
    """One number of every row: its name in CSV, in the table and in Markdown, where to get it and how to print it.

    `keep`: the columns with the smallest numbers stay where a terminal has no room for all.
    """

    key: str
    head: str
    title: str
    value: Callable[[ComparedPlan, Report], float | None]
    shown: Callable[[Numbers], list[str]]
    keep: int
    meaning: str


def _bytes(get: Callable[[Report], int]) -> Callable[[ComparedPlan, Report], float | None]:
    return lambda row, report: get(report) / GIB if report.bytes_known else None


_SEQUENCE = Column("ms_per_sequence", "ms/seq", "ms/seq", lambda row, _: row.sequence_ms, _times, 0, "ms per sequence")
# In the order in which they are printed.
COLUMNS = (
    Column("makespan_ms", "makespan", "makespan", lambda _, r: r.makespan_ms, _times, 1, "ms of a step, first to last"),
    Column(
        "bubble_rate_makespan",
        "bubble",
        "of makespan",
        lambda _, r: r.bubble_rate_makespan,
        _rates,
        2,
        "of the makespan",
    ),
    Column("span_ms", "span", "span", lambda _, r: r.span_ms, _times, 6, "ms of the rank that takes longest"),
    Column(
        "bubble_rate_span", "of span", "of span", lambda _, r: r.bubble_rate_span, _rates, 9, "the bubble of the span"
    ),
    Column(
        "settled_ms",
        "steady",
        "steady",
        lambda row, _: row.settled_ms,
        _times,
        8,
        "ms of a step with its optimizer, in steady state",
    ),
    Column(
        "peak_activation_units",
        "units",
        "units",
        lambda _, r: r.peak_activation_units,
        _units,
        5,
        "activations at the fullest rank's peak",
    ),
    Column("peak_gib", "GiB", "GiB", _bytes(lambda r: r.peak_bytes), _gib, 3, "at most on a rank"),
    Column(
        "parameter_gib",
        "params",
        "params",
        _bytes(lambda r: r.parameter_bytes),
        _gib,
        11,
        "GiB of weights, gradients, optimizer",
    ),
    Column(
        "gradient_traffic_gib",
        "reduced",
        "reduced",
        _bytes(lambda r: r.summed_bytes),
        _gib,
        4,
        "GiB sent to all-reduce gradients",
    ),
    Column("sends_per_rank", "sends", "sends", lambda row, _: row.transfers, _plain, 12, "messages per rank and step"),
    Column(
        "sent_gib", "sent", "sent", _bytes(lambda r: r.sent_bytes), _gib, 4, "GiB a rank sends to neighbours per step"
    ),
    Column("gap_to_bound", "gap", "gap", lambda row, _: row.gap, _rates, 7, "above the placement's lower bound"),
    Column("pareto", "front", "front", lambda row, _: row.front, _marks, 0, "* nothing is both faster and smaller"),
)


def as_table(
    rows: Sequence[ComparedPlan], crossings: Sequence[Crossing] = (), *, more: int = 0, verbose: bool = False
) -> Iterator[RenderableType]:
    """Ranked rows, then the reasons of those that could not be planned, then where the fastest changes.

    `more`: how many pairs change places besides the fastest.
    """
    planned = [(row, row.report) for row in rows if row.report is not None]
    failed = [row for row in rows if row.error is not None]
    columns = _fitting(planned, rows, None if verbose else shutil.get_terminal_size((80, 24)).columns)
    if planned:
        yield _filled(planned, rows, columns)
    if planned and failed:
        yield ""
    for row in failed:
        yield f"{_name(row)}: {_reason(row)}"
    yield from _changes(crossings, more)
    yield from _without_effect(rows)
    if planned:
        yield ""
        left = [column.head for column in _columns(rows) if column not in columns]
        meanings = [f"{column.head}: {column.meaning}" for column in columns]
        yield from wrap([*meanings, *([f"-v: also {', '.join(left)}"] if left else [])], 78, between="; ")
        yield from cuts.notes(rows)


def _filled(
    planned: Sequence[tuple[ComparedPlan, Report]], rows: Sequence[ComparedPlan], columns: Sequence[Column]
) -> RenderableType:
    swept = [key.rpartition(".")[2] for key in _swept(rows)]
    made = table("schedule", *swept, *(column.head for column in columns), left=1 + len(swept))
    cells = iter(_cells(planned, columns))
    for number, (_, group) in enumerate(groupby(planned, key=lambda entry: entry[0].world)):
        if number:
            made.add_row()
        for _ in group:
            made.add_row(*next(cells))
    return made


def _fitting(
    planned: Sequence[tuple[ComparedPlan, Report]], rows: Sequence[ComparedPlan], width: int | None
) -> list[Column]:
    """The columns for which there is room, and of which something is known."""
    columns = _columns(rows)
    if width is None or not planned:
        return columns
    telling = [c for c in columns if any(c.value(*entry) is not None for entry in planned)]
    nothing = [c for c in telling if not any(c.value(*entry) for entry in planned)]  # all zero: not worth a column
    kept: list[Column] = []
    for column in sorted(telling, key=lambda column: (column in nothing, column.keep)):
        candidate = [c for c in columns if c in kept or c is column]
        if _width(planned, rows, candidate) <= width:
            kept = candidate
    return kept


def _width(
    planned: Sequence[tuple[ComparedPlan, Report]], rows: Sequence[ComparedPlan], columns: Sequence[Column]
) -> int:
    heads = ["schedule", *(key.rpartition(".")[2] for key in _swept(rows)), *(column.head for column in columns)]
    lines = [heads, *_cells(planned, columns)]
    return sum(max(map(len, cells)) + 2 for cells in zip(*lines, strict=True)) - 2


def _changes(crossings: Sequence[Crossing], more: int) -> Iterator[str]:
    """Where the fastest changes, key by key; then, where they were asked for, all other changes."""
    leading = [one for one in crossings if one.leading]
    for (key, world), group in groupby(leading, key=lambda one: (one.key, one.world)):
        found = list(group)
        yield ""
        yield f"as {key} grows{_where(world)}, the fastest is"
        yield f"  {_candidate(found[0].before)} up to {short(found[0].at)}"
        for one, after in zip(found, [*found[1:], None], strict=True):
            until = f" to {short(after.at)}" if after else ""
            yield f"  {_candidate(one.after)} from {short(one.at)}{until}   ({short(one.ms)} ms per sequence there)"
    others = [one for one in crossings if not one.leading]
    if others:
        yield ""
        yield "and after it"
    for one in others:
        place = f"{one.key} = {short(one.at)}{_where(one.world)}"
        yield f"  {_candidate(one.after)} passes {_candidate(one.before)} at {place}"
    if more:
        yield ""
        yield f"{more} {'pair changes' if more == 1 else 'pairs change'} places after the fastest: -v says where"


def _without_effect(rows: Sequence[ComparedPlan]) -> Iterator[str]:
    """Keys of the world that were swept and change neither time nor memory of anything."""
    for key in {key: None for row in rows for key, _ in row.world}:
        found: dict[tuple[object, ...], set[tuple[float, int]]] = {}
        for row in rows:
            if row.report is not None:
                rest = tuple(setting for setting in row.settings if setting[0] != key)
                found.setdefault((row.schedule, rest), set()).add((row.sequence_ms, row.report.peak_bytes))
        if len({dict(row.settings)[key] for row in rows}) > 1 and all(len(seen) == 1 for seen in found.values()):
            given = any(row.report is not None and row.report.costs != "estimated" for row in rows)
            yield ""
            yield f"{key} changes nothing here{': the times of this job are not estimated' if given else ''}"


def _where(world: Sequence[tuple[str, str]]) -> str:
    return f" ({', '.join(f'{key} = {value}' for key, value in world)})" if world else ""


def _candidate(candidate: Candidate) -> str:
    schedule, choice = candidate
    return " ".join([schedule, *(f"{key.rpartition('.')[2]}={_plainly(value)}" for key, value in choice)])


def _plainly(value: str) -> str:
    """The text of a swept value without quotes around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def _name(row: ComparedPlan) -> str:
    return _candidate((row.schedule, row.settings))


def _reason(row: ComparedPlan) -> str:
    if row.error is None:
        return ""
    more = len(row.error.errors) - 1
    text = f"[{row.error.code}] {row.error.message}"
    return text if not more else f"{text} (and {more} more)"


def _swept(rows: Sequence[ComparedPlan]) -> list[str]:
    return [key for key, _ in rows[0].settings]


def _columns(rows: Sequence[ComparedPlan]) -> list[Column]:
    """All columns; the time per sequence where a step is not the same work in all rows."""
    varied = len({row.sequences for row in rows if row.error is None}) > 1
    return [*([_SEQUENCE] if varied else []), *COLUMNS]


def _cells(planned: Sequence[tuple[ComparedPlan, Report]], columns: Sequence[Column]) -> list[list[str]]:
    """The cells of all rows that have a report, the numbers of a column with equally many decimals."""
    texts = [
        [row.schedule for row, _ in planned],
        *(
            [_plainly(value) for _, value in column]
            for column in zip(*(row.settings for row, _ in planned), strict=True)
        ),
        *(column.shown([column.value(*entry) for entry in planned]) for column in columns),
    ]
    return [list(cells) for cells in zip(*texts, strict=True)]


def as_markdown(rows: Sequence[ComparedPlan]) -> str:
    columns = _columns(rows)
    left = 1 + len(_swept(rows))
    heads = ["schedule", *(key.rpartition(".")[2] for key in _swept(rows)), *(column.title for column in columns)]
    lines = [heads, ["---"] * left + ["---:"] * len(columns)]
    lines += _cells([(row, row.report) for row in rows if row.report is not None], columns)
    for row in rows:
        if row.error is not None:
            lines.append(
                [row.schedule, *(_plainly(value) for _, value in row.settings), _reason(row).replace("|", "\\|")]
            )
    return "\n".join("| " + " | ".join(cells + [""] * (len(heads) - len(cells))) + " |" for cells in lines)


def as_csv(rows: Sequence[ComparedPlan]) -> str:
    """Plain numbers, rates as shares of one, and a last column with the reason where there are none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = _columns(rows)
    writer.writerow(["schedule", *_swept(rows), *(column.key for column in columns), "error"])
    for row in rows:
        first: list[Any] = [row.schedule, *(_plainly(value) for _, value in row.settings)]
        writer.writerow([*first, *_numbers(row, columns), _reason(row)])
    return out.getvalue().rstrip("\n")


def _numbers(row: ComparedPlan, columns: Sequence[Column]) -> list[Any]:
    report = row.report
    if report is None:
        return [""] * len(columns)
    values = [column.value(row, report) for column in columns]
    return ["" if value is None else int(value) if isinstance(value, bool) else round(value, 9) for value in values]


def as_json(rows: Sequence[ComparedPlan], crossings: Sequence[Crossing] = ()) -> dict[str, Any]:
    """`schedules` holds one report each in ranked order; where there is none, `error` takes its place."""
    from zbc.compiler.report.report import FORMAT, VERSION

    entries = []
    for row in rows:
        entry: dict[str, Any] = {"schedule": row.schedule, "settings": dict(row.settings)}
        if row.report is not None:
            extra: dict[str, Any] = {"sends_per_rank": round(row.transfers, 9), "gap_to_bound": round(row.gap, 9)}
            extra["pareto_front"] = row.front
            entry = {**row.report.as_json(), "settings": dict(row.settings), **extra}
        elif row.error is not None:
            entry["error"] = [error.as_json() for error in row.error.errors]
        entries.append(entry)
    changes = [_crossing(one) for one in crossings]
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
