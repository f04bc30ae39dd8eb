"""The run directory: a new one for a new run, or that of the run that is resumed.

    runs/plan-1/
      run.json         the run: plan, schedule, ranks, settings, prediction
      metrics.jsonl    one line per step

The run that creates `metrics.jsonl` owns the directory: of two runs with the same one at once the second is refused,
and does not touch the files of the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.host.folders import folders_for
from zbc.host.linefile import LineFile, replace_text

METRICS, RUN = "metrics.jsonl", "run.json"


@contextmanager
def begun(parent: Path, name: str, out: Path | None, about: Mapping[str, Any]) -> Iterator[tuple[Path, LineFile]]:
    """A new run directory with the run.json `about`, and its `metrics.jsonl`: `out`, or the next free one.

    Free ones are called `<parent>/<name>-<n>`. If the block raises, the files made here are removed. Raises OSError,
    and E614 if `out` holds a run already.
    """
    with folders_for(parent / name if out is None else out / METRICS):
        folder = _numbered(parent, name) if out is None else out
        try:
            try:
                file = LineFile(folder / METRICS, "x")
            except FileExistsError:
                text = f"run: {folder} holds the metrics of another run"
                hint = "go on with it by --resume auto, choose another directory with -o, or remove this one"
                raise ZbcError("E614", text, hint=hint) from None
            try:
                replace_text(folder / RUN, _text(about))
                yield folder, file
            except BaseException:
                file.close()
                (folder / METRICS).unlink()
                (folder / RUN).unlink(missing_ok=True)
                raise
        except BaseException:
            if out is None:
                with suppress(OSError):
                    folder.rmdir()
            raise


def gone_on(folder: Path, first: int, about: Mapping[str, Any]) -> LineFile:
    """The `metrics.jsonl` of a run resumed after `first` steps, without lines of later ones. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, kept = folder / METRICS, list[str]()
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # an incomplete line
            if json.loads(line)["step"] <= first:
                kept.append(line + "\n")
    if metrics.exists():
        replace_text(metrics, "".join(kept))
    replace_text(folder / RUN, _text(about))
    return LineFile(metrics, "a")


def told(run: Path) -> dict[str, Any]:
    """The `run.json` of a run; empty if it is missing or damaged."""
    try:
        about = json.loads((run / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def before(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The earlier parts of a resumed run, from its `run.json`: plan, first step, start time of each."""
    if not told:
        return []
    return [*told.get("before", []), {key: told.get(key) for key in ("plan", "schedule", "first_step", "started")}]


def _numbered(parent: Path, name: str) -> Path:
    n = 1
    while True:
        folder = parent / f"{name}-{n}"
        try:
            folder.mkdir()  # fails if it exists, so two runs that start together get two directories
        except FileExistsError:
            n += 1
        else:
            return folder


def _text(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=1) + "\n"
