"""The start of a run: at step 0, or after the steps of a checkpoint of this run or another one.

Rank 0 chooses and sends its choice to the others; does not need torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.host.folders import RUNS
from zbc.plan.directory import Manifest
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.together import owned, together
from zbc.training.launch import rundir
from zbc.training.launch.board import Board
from zbc.training.launch.launch import RunOptions
from zbc.training.launch.rounds import same_launch


@dataclass(frozen=True)
class Start:
    """`checkpoint`: the one to load, None to begin at step 0. `run`: the run directory to resume, None: a new one."""

    checkpoint: Path | None = None
    run: Path | None = None


@contextmanager
def begun(board: Board, options: RunOptions, manifest: Manifest, who: str) -> Iterator[Start]:
    """The start of this run, on every rank; inside of the block its folder of checkpoints is locked for other runs.

    Chosen again once the folder is locked: its previous owner may have written one more checkpoint as it ended. `who`
    is shown to runs that are refused. Raises as `choose`, and E614 if another run writes there now.
    """

    def place(start: Start) -> Path | None:
        """The folder of its checkpoints; None if it writes none, or into a directory that does not exist yet."""
        return _place(manifest, start.run or options.out) if _options(manifest).get("every") else None

    def choice() -> dict[str, Any]:
        chosen = choose(options, manifest) if board.rank == 0 else Start()
        return {name: None if path is None else str(path) for name, path in asdict(chosen).items()}

    def agree(name: str) -> Start:
        told = together(board, name, choice)
        return Start(**{name: None if path is None else Path(path) for name, path in told.items()})

    start = agree("where to begin")
    with owned(board, place(start), who, options.launch):
        again = agree("where to begin, once nobody else writes")
        chosen = again if place(again) == place(start) else start
        if board.rank == 0 and chosen.checkpoint is not None and _within(chosen.checkpoint, place(chosen)):
            disk.set_aside(chosen.checkpoint)
        yield chosen


def choose(options: RunOptions, manifest: Manifest) -> Start:
    """The start by `--resume`.

        none   begin at step 0
        auto   the newest complete checkpoint: of checkpoint.dir, of -o, or of this plan's runs in runs; without
               one begin at step 0
        PATH   that checkpoint, or the newest of that run directory or folder of checkpoints

    Without --resume a run begins at step 0, except that a restart resumes the run that it restarts. So does a restart
    of a run that was given a PATH, once it has a checkpoint of its own.

    Raises E612 if PATH has no complete checkpoint, E614 if this run's folder has checkpoints of another run.
    """
    asked = options.resume
    own = _restart(options, manifest) if options.restarted and asked != "none" else Start()
    if own.checkpoint is not None or (own.run is not None and asked in (None, "auto")):
        return own
    if asked == "auto":
        return _newest(options, manifest)
    if asked in (None, "none"):
        _refuse(_place(manifest, options.out), 0)
        return Start()
    named = _complete_in(Path(asked))
    if own.run is not None:
        return Start(named, own.run)
    place = _place(manifest, options.out)
    goes_on = _within(named, place)  # back in its own run, whose later checkpoints are set aside
    if not goes_on:
        _refuse(place, disk.step_of(named) or 0)
    return Start(named, options.out if goes_on else None)


def save_folder(manifest: Manifest, run: Path) -> Path:
    return Path(_options(manifest).get("dir") or run / disk.FOLDER)


def _place(manifest: Manifest, run: Path | None) -> Path | None:
    """The folder of a run's checkpoints; None if it is in a run directory that does not exist yet."""
    return None if run is None and not _options(manifest).get("dir") else save_folder(manifest, run or Path())


def _options(manifest: Manifest) -> Mapping[str, Any]:
    options: Mapping[str, Any] = manifest.training.get("checkpoint", {})
    return options


def _runs(manifest: Manifest, plan: Path) -> list[Path]:
    """The run directories of a plan, the newest first."""
    name = re.compile(re.escape(plan.resolve().name) + r"-(\d+)")
    entries = RUNS.iterdir() if os.path.isdir(RUNS) else ()
    runs = {int(match[1]): entry for entry in entries if (match := name.fullmatch(entry.name))}
    return [runs[number] for number in sorted(runs, reverse=True)]


def _newest(options: RunOptions, manifest: Manifest) -> Start:
    folder = _place(manifest, options.out)
    if folder is not None:
        path = disk.newest(folder)
        named = None if path is None or options.out else disk.read_index(path).run
        own = Path(named) if named and os.path.isfile(Path(named) / rundir.RUN) else None  # if it still exists
        return Start(path, options.out or own)
    for run in _runs(manifest, options.plan):
        path = disk.newest(run / disk.FOLDER)
        if path is not None:
            return Start(path, run)
    return Start()


def _restart(options: RunOptions, manifest: Manifest) -> Start:
    """The run of this launch before its restart, which may have written nothing yet."""
    runs = [options.out] if options.out is not None else _runs(manifest, options.plan)
    run = next((place for place in runs if same_launch(rundir.told(place).get("launch"), options.launch)), None)
    return Start() if run is None else Start(disk.newest(save_folder(manifest, run)), run)


def _within(checkpoint: Path, folder: Path | None) -> bool:
    """Whether a checkpoint lies in this folder of checkpoints."""
    return folder is not None and folder.resolve() == checkpoint.parent.resolve()


def _complete_in(path: Path) -> Path:
    """The checkpoint that a path names, or the newest in it. Raises E612 if there is none."""
    folder = path if disk.is_complete(path) else disk.newest(path) or disk.newest(path / disk.FOLDER)
    if folder is None:
        if disk.step_of(path) is not None and os.path.isdir(path):
            disk.read_index(path)  # raises that it is not complete
        text = f"run: there is no complete checkpoint in {path}"
        raise ZbcError("E612", text, hint="name a checkpoint, a run directory with checkpoints, auto or none")
    return folder


def _refuse(folder: Path | None, step: int) -> None:
    """Raises E614 if a run that begins after `step` would write among later checkpoints of another one."""
    later = [] if folder is None else [path for number, path in disk.complete(folder).items() if number > step]
    if later:
        text = f"run: {folder} holds checkpoints of another run, up to {later[-1].name}"
        hint = "go on from there with --resume auto, or give this run another -o or checkpoint.dir, or remove them"
        raise ZbcError("E614", text, hint=hint)
