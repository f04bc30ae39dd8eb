"""What `plan` says of why a step is not shorter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zbc.commands.console import labelled
from zbc.text import aligned, percent, short

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.compile import Compiled
    from zbc.compiler.whatif.why import Path, WhatIf


def of_step(compiled: Compiled, *, verbose: bool) -> Iterator[RenderableType]:
    """What binds and the critical path; with `verbose` what small changes would give."""
    from zbc.compiler.whatif.why import binds, critical_path, what_ifs

    more = [] if verbose else ["-v: the effect of more microbatches, more memory or another partition"]
    yield labelled("why", binds(compiled), *_path(critical_path(compiled)), *more)
    if verbose:
        found = list(what_ifs(compiled))
        if found:
            yield labelled("what if", "per sequence, by the fast search", *_what_ifs(found))


def _path(path: Path) -> Iterator[str]:
    kinds = ", ".join(f"{kind} {short(path.by_kind[kind], 3)}" for kind in sorted(path.by_kind))
    rank, most = max(path.by_rank.items(), key=lambda item: item[1])
    yield f"critical path: {kinds} ms"
    share = percent(most / path.total if path.total else 0.0)
    yield f"and {path.changes} transfers, {short(path.transfers, 3)} ms; {share} of it on rank {rank}"


def _what_ifs(found: list[WhatIf]) -> Iterator[str]:
    changes = aligned([100 * (entry.factor - 1) for entry in found], 2)
    for entry, change in zip(found, changes, strict=True):
        yield f"{entry.change}: {'' if change.startswith('-') else '+'}{change}%"
