"""The ranked table of `compare`, in every form it is printed in."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zbc.cli.console import table
from zbc.text import GIB, aligned, percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.compare import Row
    from zbc.compiler.report import Report


def as_table(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Ranked rows, then the reasons of those that could not be planned."""
    planned = [(row, row.report) for row in rows if row.report is not None]
    if planned:
        made = table(*_heads(rows, short=True), left=1 + len(_swept(rows)))
        for cells in _cells(planned, varied=_varied(rows)):
            made.add_row(*cells)
        yield made
    failed = [row for row in rows if row.error is not None]
    if planned and failed:
        yield ""
    for row in failed:
        yield f"{_name(row)}: {_reason(row)}"
    if planned:
        yield ""
        yield from _key(rows)


def _key(rows: Sequence[Row]) -> Iterator[str]:
    yield "makespan, span in ms, each with the bubble's share of it; units: activations at the fullest rank's peak"
    yield "settled: ms of a step with its optimizer once steps follow one another, with or without its barrier"
    yield "GiB: at most on a rank; params: of it weights, gradients, optimizer; sums: sent to add up gradients"
    yield "sends: per rank and step; gap: how far a step is above the lower bound of its placement"


def _name(row: Row) -> str:
    return " ".join([row.schedule, *(f"{key.rpartition('.')[2]}={value}" for key, value in row.settings)])


def _reason(row: Row) -> str:
    if row.error is None:
        return ""
    more = len(row.error.errors) - 1
    text = f"[{row.error.code}] {row.error.message}"
    return text if not more else f"{text} (and {more} more)"


def _swept(rows: Sequence[Row]) -> list[str]:
    return [key for key, _ in rows[0].settings]


def _heads(rows: Sequence[Row], *, short: bool = False) -> list[str]:
    keys = [key.rpartition(".")[2] if short else key for key in _swept(rows)]
    if short:
        names = ["makespan", "bubble", "span", "bubble ", "settled", "units", "GiB", "params", "sums", "sends", "gap"]
        sequence = "ms/seq"
    else:
        names = ["makespan_ms", "bubble_rate_makespan", "span_ms", "bubble_rate_span", "settled_ms"]
        names += ["peak_activation_units", "peak_gib", "parameter_gib", "gradient_traffic_gib"]
        names += ["sends_per_rank", "gap_to_bound"]
        sequence = "ms_per_sequence"
    return ["schedule", *keys, *([sequence] if _varied(rows) else []), *names]


def _varied(rows: Sequence[Row]) -> bool:
    """Whether a step is not the same work in all rows."""
    return len({row.sequences for row in rows if row.error is None}) > 1


def _cells(planned: Sequence[tuple[Row, Report]], *, varied: bool) -> list[list[str]]:
    """The cells of all rows that have a report, the numbers of a column with equally many decimals."""
    reports = [report for _, report in planned]
    columns = [
        [row.schedule for row, _ in planned],
        *([value for _, value in column] for column in zip(*(row.settings for row, _ in planned), strict=True)),
        *([aligned([row.sequence_ms for row, _ in planned])] if varied else []),
        aligned([report.makespan_ms for report in reports]),
        [percent(report.bubble_rate_makespan) for report in reports],
        aligned([report.span_ms for report in reports]),
        [percent(report.bubble_rate_span) for report in reports],
        aligned([row.settled_ms for row, _ in planned]),
        [f"{report.peak_activation_units:.2f}" for report in reports],
        *(aligned([size / GIB for size in sizes], 3) for sizes in _sizes(reports)),
        [f"{row.transfers:g}" for row, _ in planned],
        [percent(row.gap) for row, _ in planned],
    ]
    if not all(report.bytes_known for report in reports):
        columns[-5:-2] = [["?"] * len(planned)] * 3
    return [list(cells) for cells in zip(*columns, strict=True)]


def _sizes(reports: Sequence[Report]) -> list[list[int]]:
    """Bytes: peak, parameters and what stays with them, sent for sums."""
    each = [(report.peak_bytes, report.parameter_bytes, report.summed_bytes) for report in reports]
    return [list(column) for column in zip(*each, strict=True)]


def as_markdown(rows: Sequence[Row]) -> str:
    heads = _heads(rows, short=True)
    heads = [head.replace("bubble ", "of span").replace("bubble", "of makespan") for head in heads]
    left = 1 + len(_swept(rows))
    lines = [heads, ["---"] * left + ["---:"] * (len(heads) - left)]
    lines += _cells([(row, row.report) for row in rows if row.report is not None], varied=_varied(rows))
    for row in rows:
        if row.error is not None:
            lines.append([row.schedule, *(value for _, value in row.settings), _reason(row).replace("|", "\\|")])
    return "\n".join("| " + " | ".join(cells + [""] * (len(heads) - len(cells))) + " |" for cells in lines)


def as_csv(rows: Sequence[Row]) -> str:
    """Plain numbers, rates as shares of one, and a last column with the reason where there are none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = [*_heads(rows), "error"]
    writer.writerow(heads)
    for row in rows:
        first: list[Any] = [row.schedule, *(value for _, value in row.settings)]
        writer.writerow([*first, *_numbers(row, rows, len(heads) - len(first) - 1), _reason(row)])
    return out.getvalue().rstrip("\n")


def _numbers(row: Row, rows: Sequence[Row], count: int) -> list[Any]:
    report = row.report
    if report is None:
        return [""] * count
    numbers = [row.sequence_ms] if _varied(rows) else []
    numbers += [report.makespan_ms, report.bubble_rate_makespan, report.span_ms, report.bubble_rate_span]
    numbers += [row.settled_ms, report.peak_activation_units]
    numbers += [*(size / GIB for (size,) in _sizes([report])), row.transfers, row.gap]
    rounded = [round(number, 9) for number in numbers]
    return rounded if report.bytes_known else [*rounded[:-5], "", "", "", *rounded[-2:]]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """`schedules` holds one report each in ranked order; where there is none, `error` takes its place."""
    from zbc.compiler.report import FORMAT, VERSION

    entries = []
    for row in rows:
        entry: dict[str, Any] = {"schedule": row.schedule, "settings": dict(row.settings)}
        if row.report is not None:
            extra = {"sends_per_rank": round(row.transfers, 9), "gap_to_bound": round(row.gap, 9)}
            entry = {**row.report.as_json(), "settings": dict(row.settings), **extra}
        elif row.error is not None:
            entry["error"] = [error.as_json() for error in row.error.errors]
        entries.append(entry)
    return {"format": FORMAT, "version": VERSION, "schedules": entries}
