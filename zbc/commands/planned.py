"""`zbc run JOB.toml`: the plan directory of a job, made just before it runs.

It is below `runs`, named after the job file and the plan id: `runs/plans/zbc-691945da`. Under torchrun the first rank
of each machine plans, and the others wait for a file next to the plans that names the directory. Each machine plans for
itself; the run checks that their plans are the same.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zbc.commands.opening import Changes, say_if_compiling
from zbc.errors import ZbcError
from zbc.host.folders import RUNS

if TYPE_CHECKING:
    from zbc.compiler.compiled import Compiled
    from zbc.job.spec import Job

_LOOK_S, _OLD_S = 0.1, 3600.0


@dataclass(frozen=True)
class Planned:
    """The directory of a job's plan; `compiled` on the rank that made it."""

    folder: Path
    compiled: Compiled | None = None


def planned(path: Path, changes: Changes) -> Planned:
    """The plan directory of the job at `path`. Raises E1xx, E3xx and E407."""
    env = os.environ
    waits = "RANK" in env and env.get("LOCAL_RANK", env["RANK"]) != "0"
    job = changes.job(path, sketch=waits)
    place = RUNS / "plans"
    if "RANK" not in env:
        return _made(path, job, changes, place)
    word = place / f".{path.stem}-{_launch()}"
    if waits:
        return Planned(_heard(word))
    made = _made(path, job, changes, place)
    _say(word, made.folder)
    return made


def _made(path: Path, job: Job, changes: Changes, place: Path) -> Planned:
    from zbc.compiler.compile import compile_job

    say_if_compiling(job, quiet=False)
    compiled = compile_job(job, budget=changes.budget)
    return Planned(keep(compiled, place, path.stem), compiled)


def keep(compiled: Compiled, place: Path, name: str) -> Path:
    """Writes a plan below `place`, named by `name` and its id, unless it exists already."""
    from zbc.plan import directory as plans

    manifest, files = compiled.assemble()
    folder = place / f"{name}-{manifest.id[:8]}"
    with suppress(ZbcError):
        if plans.is_plan(folder) and plans.read_manifest(folder).dumps() == manifest.dumps():
            return folder
    plans.write(folder, manifest, files)
    return folder


def _launch() -> str:
    """An id of this launch that the ranks of this machine share."""
    env = os.environ
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [socket.gethostname(), str(os.getppid()), *(env.get(name, "") for name in names)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _say(word: Path, folder: Path) -> None:
    """Tells the other ranks of this machine the plan's directory; removes the files of old launches."""
    for old in word.parent.glob(f"{word.name.rpartition('-')[0]}-*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_S:
                old.unlink()
    fresh = word.with_name(f"{word.name}.new")
    try:
        fresh.write_text(folder.name, encoding="utf-8")
        os.replace(fresh, word)
    except OSError as error:
        raise ZbcError("E407", f"plan: cannot write {word}: {error.strerror or error}") from None


def _heard(word: Path) -> Path:
    """Waits for the first rank of this machine, returns the plan's directory. Raises E604 if the launcher has gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        with suppress(FileNotFoundError):
            return word.parent / word.read_text(encoding="utf-8")
        time.sleep(_LOOK_S)
    raise ZbcError("E604", "run: the launcher of this rank is gone", hint="start the run again with torchrun")
