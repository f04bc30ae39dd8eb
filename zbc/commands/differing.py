"""`compare A B`: two plans, in numbers and op by op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zbc.commands.console import labelled, table
from zbc.commands.opening import Changes, opened_both
from zbc.commands.options import Out
from zbc.text import aligned, change, few, percent, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.api import Plan
    from zbc.compiler.report.difference import DiffLine, RankDifference

_AROUND = 1  # lines around a change that are shown
_SHOWN = 24  # lines of a rank without -v
_RANKS = 4  # ranks whose lines are shown without -v


class Metric(NamedTuple):
    """A number of both plans; `kind`: its format."""

    name: str
    left: float
    right: float
    kind: str  # count | ms | rate | units | bytes


def differ(left: Path, right: Path, changes: Changes, out: Out) -> None:
    """Prints the numbers of two plans, jobs, CSV files or runs and, rank by rank, how the order of ops differs."""
    from zbc.api import as_plan

    first, second = map(as_plan, opened_both((left, right), changes))
    ranks = first.diff(second)
    numbers = list(metrics(first, second))

    def parts() -> Iterator[RenderableType]:
        shown = [number for number in numbers if out.verbose or not number.name.startswith("bubble")]
        yield from (*_numbers(first, second, shown), "")
        yield from (*_placements(first, second), *_orders(ranks, verbose=out.verbose))

    out.answer(lambda: _document(first, second, numbers, ranks), parts)


def metrics(left: Plan, right: Plan) -> Iterator[Metric]:
    """The comparable numbers of both plans; bytes only if both know them."""
    from zbc.compiler.memory.per_rank import peaks

    for name, path in (("ranks", "placement.ranks"), ("stages", "placement.stages"), ("microbatches", "microbatches")):
        count = attrgetter(path)
        yield Metric(name, count(left.program), count(right.program), "count")
    times = left.timeline, right.timeline
    yield Metric("makespan", times[0].makespan, times[1].makespan, "ms")
    yield Metric("idle", times[0].idle_rate, times[1].idle_rate, "rate")
    yield Metric("balance", times[0].balance, times[1].balance, "rate")
    yield Metric("bubble of makespan", times[0].bubble_rate_makespan, times[1].bubble_rate_makespan, "rate")
    yield Metric("span", times[0].span, times[1].span, "ms")
    yield Metric("bubble of span", times[0].bubble_rate_span, times[1].bubble_rate_span, "rate")
    held = [peaks(plan.complete, plan.costs) for plan in (left, right)]
    units = [max(rank.units for rank in ranks) for ranks in held]
    yield Metric("peak activations", units[0], units[1], "units")
    if left.costs.bytes is not None and right.costs.bytes is not None:
        sizes = [max(rank.bytes for rank in ranks) for ranks in held]
        yield Metric("peak memory", sizes[0], sizes[1], "bytes")


def _numbers(left: Plan, right: Plan, numbers: Sequence[Metric]) -> Iterator[RenderableType]:
    schedules = (plan.program.history[0] if plan.program.history else "-" for plan in (left, right))
    rows = [("schedule", *schedules, ""), *((metric.name, *_pair(metric), _change(metric)) for metric in numbers)]
    yield labelled("first", left.name)
    yield labelled("second", right.name)
    yield ""
    yield table(("", "first", "second", "change"), rows)


def _pair(metric: Metric) -> list[str]:
    if metric.kind == "rate":
        return [percent(metric.left), percent(metric.right)]
    if metric.kind == "count":
        return [f"{metric.left:g}", f"{metric.right:g}"]
    if metric.kind == "bytes":
        return [size(metric.left), size(metric.right)]
    return [f"{text} {metric.kind}" for text in aligned([metric.left, metric.right])]


def _change(metric: Metric) -> str:
    if metric.left == metric.right:
        return "="
    if metric.kind == "rate":
        return f"{100 * (metric.right - metric.left):+.1f} points"
    if metric.kind == "count" or not metric.left:
        return f"{metric.right - metric.left:+g}"
    return change(metric.right, metric.left)


def _placements(left: Plan, right: Plan) -> Iterator[RenderableType]:
    """Stages that are on other ranks."""
    first, second = left.program.placement, right.program.placement
    if first == second:
        return
    common = range(min(first.stages, second.stages))
    moved = (s for s in common if first.holders(s) != second.holders(s))
    lines = [f"stage {s}: rank {_ranks(first.holders(s))} -> {_ranks(second.holders(s))}" for s in moved]
    if first.stages != second.stages:
        lines.append(f"{first.stages} stages -> {second.stages}")
    yield labelled("placement", *few(lines, 8))


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(map(str, ranks))


def _orders(ranks: Sequence[RankDifference], *, verbose: bool) -> Iterator[RenderableType]:
    changed = [rank for rank in ranks if not rank.same]
    if not changed:
        yield labelled("order", "the same ops in the same order on every rank")
        return
    moved, left, right = (sum(getattr(rank, name) for rank in changed) for name in ("moved", "only_left", "only_right"))
    words = [f"{moved} op{'' if moved == 1 else 's'} moved"] if moved else []
    words += [f"{left} only in the first"] if left else []
    words += [f"{right} only in the second"] if right else []
    yield labelled("order", f"{len(changed)} of {len(ranks)} ranks differ: {', '.join(words)}")
    for rank in changed if verbose else changed[:_RANKS]:
        yield ""
        yield f"rank {rank.rank}"
        yield from (f"  {line}" for line in _listing(rank, verbose=verbose))
    if not verbose and len(changed) > _RANKS:
        yield ""
        yield f"and {len(changed) - _RANKS} more ranks: -v shows all"


def _listing(rank: RankDifference, *, verbose: bool) -> Iterator[str]:
    """Changed lines with lines around them: step and op of both sides, and a mark between them."""
    lines = rank.lines
    near = {k + d for k, line in enumerate(lines) if _mark(line) != " " for d in range(-_AROUND, _AROUND + 1)}
    shown = [k for k in sorted(near) if 0 <= k < len(lines)]
    width = max(len(str(lines[k].op)) for k in shown)
    digits = len(str(max(max(line.left or 0, line.right or 0) for line in lines)))
    for count, k in enumerate(shown):
        if not verbose and count == _SHOWN:
            yield f"... {len(shown) - _SHOWN} more lines: -v"
            return
        if count and shown[count - 1] != k - 1:
            yield "..."
        line = lines[k]
        sides = [_side(line.op, step, digits, width) for step in (line.left, line.right)]
        yield f"{sides[0]} {_mark(line)} {sides[1]}".rstrip()


def _mark(line: DiffLine) -> str:
    """`<`: only on the left, `>`: only on the right; a moved op has one of each."""
    return " " if line.left is not None and line.right is not None else "<" if line.right is None else ">"


def _side(op: Any, step: int | None, digits: int, width: int) -> str:
    return " " * (digits + 1 + width) if step is None else f"{step:>{digits}} {op!s:<{width}}"


def _document(left: Plan, right: Plan, numbers: Sequence[Metric], ranks: Sequence[RankDifference]) -> dict[str, Any]:
    return {
        "format": "zbc-diff",
        "version": 1,
        "first": left.name,
        "second": right.name,
        "same_order": all(rank.same for rank in ranks),
        "same_placement": left.program.placement == right.program.placement,
        "metrics": {
            _key(metric): {"first": round(metric.left, 9), "second": round(metric.right, 9)} for metric in numbers
        },
        "ranks": [
            {
                "rank": rank.rank,
                "moved": rank.moved,
                "only_first": rank.only_left,
                "only_second": rank.only_right,
                "changes": [
                    {"op": str(line.op), "first_step": line.left, "second_step": line.right}
                    for line in rank.lines
                    if _mark(line) != " "
                ],
            }
            for rank in ranks
        ],
    }


def _key(metric: Metric) -> str:
    unit = f"_{metric.kind}" if metric.kind in ("ms", "units", "bytes") else ""
    return metric.name.replace(" ", "_") + unit
