"""How many layers the stages of ranked plans hold, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbc.compiler.report.report import CutReport
    from zbc.compiler.whatif.compare import ComparedPlan

_LINES, _WIDTH = 8, 80


def notes(rows: Sequence[ComparedPlan]) -> Iterator[str]:
    """The partitions with unequal numbers of blocks, each with its plans; nothing if there are none."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.report is not None and uneven(row.report.cut):
            name = " ".join([row.schedule, *(value for _, value in row.settings)])
            found.setdefault(counts(row.report.cut), []).append(name)
    if found:
        yield "layers per stage (embedding and head too), where they differ; r: recomputed"
    for number, (cut, names) in enumerate(found.items()):
        if number == _LINES:
            yield f"  ... {len(found) - _LINES} more: --json"
            return
        line = f"  {cut}: {', '.join(names)}"
        yield line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def uneven(cut: CutReport) -> bool:
    """Whether a stage recomputes, or the numbers of blocks per stage differ by more than what division leaves over."""
    blocks = [sum(name not in ("embed", "head") for name in stage.layers) for stage in cut.stages]
    return max(blocks) - min(blocks) > 1 or any(stage.recompute for stage in cut.stages)


def counts(cut: CutReport) -> str:
    """`10 8x2 2`: layers of each stage, equal ones in a row together."""
    each = [f"{len(stage.layers)}{'r' if stage.recompute else ''}" for stage in cut.stages]
    runs = [(text, len(list(run))) for text, run in groupby(each)]
    return " ".join(text if length == 1 else f"{text}x{length}" for text, length in runs)
