"""The run directory: a new one for a single run, or that of the run which goes on.

    runs/plan-1/
      run.json         what ran: plan, schedule, ranks, settings, prediction
      metrics.jsonl    one line per step

Whoever makes `metrics.jsonl` has the directory: of two runs that are given the same one at once the second is refused,
and leaves what the first has written.
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
    """A new run directory, which says what it is `about`, and its `metrics.jsonl`: `out`, or the next free one.

    Those are called `<parent>/<name>-<n>`. If the block raises, what was made here is gone again. Raises OSError, and
    E607 if `out` holds a run already.
    """
    with folders_for(parent / name if out is None else out / METRICS):
        folder = _numbered(parent, name) if out is None else out
        try:
            file = _claimed(folder)
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
    """The `metrics.jsonl` of a run that goes on after `first` steps: lines of later ones are gone. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    _drop_after(folder / METRICS, first)
    replace_text(folder / RUN, _text(about))
    return LineFile(folder / METRICS, "a")


def told(run: Path) -> dict[str, Any]:
    """What `run.json` of a run that goes on says; nothing if it is not there, or damaged."""
    try:
        about = json.loads((run / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def before(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The earlier parts of a run that goes on, by its `run.json`: plan, first step, when they started."""
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


def _claimed(folder: Path) -> LineFile:
    try:
        return LineFile(folder / METRICS, "x")
    except FileExistsError:
        text = f"run: {folder} holds the metrics of another run"
        hint = "go on with it by --resume auto, choose another directory with --out, or remove this one"
        raise ZbcError("E607", text, hint=hint) from None


def _drop_after(metrics: Path, step: int) -> None:
    """Keep the lines of the first `step` steps; one that was cut off in the middle goes too."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    replace_text(metrics, "".join(kept))


def _text(about: Mapping[str, Any]) -> str:
    return json.dumps(about, indent=1) + "\n"
