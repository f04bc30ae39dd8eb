"""The identity that all ranks must share: plan, versions, and the code itself.

A machine that was not updated runs other code under the same version, and a run with two kinds of code may go on
without an error and learn nothing. So the sources are compared: zbc's, and every module imported by the job's own
modules (except installed packages: only torch's version is compared).
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

import zbc
from zbc.job import userobject
from zbc.plan.directory import Manifest

_DIGITS = 12
# The first is compared as a whole, the second by its version: code compiled by torch is in a cache of its own.
_NOT_MODULES = ("zbc", "torch", "__main__", "__mp_main__")
_PACKAGES = {"site-packages", "dist-packages"}


def identity(manifest: Manifest, steps: int, trace: frozenset[int] = frozenset()) -> dict[str, str]:
    """The identity of this rank's run, by names for messages. Raises E502 if the job's code cannot be imported."""
    return {
        "plan id": manifest.id,
        "plan.json (sha256)": manifest.sha256,
        "steps": str(steps),
        "steps to record": f"{len(trace)} of {min(trace) + 1}-{max(trace) + 1}" if trace else "none",
        "zbc version": zbc.__version__,
        "torch version": torch.__version__,
        "Python version": platform.python_version(),
        "the code of zbc (sha256)": _digest(sorted(Path(zbc.__file__).parent.rglob("*.py"))),
        **{f"the code of {name} (sha256)": _digest([file]) for name, file in _modules(_named(manifest))},
    }


def _named(manifest: Manifest) -> set[str]:
    """The top-level packages of the callables in the job, which are imported here."""
    model, data = manifest.planning["model"], manifest.training["data"]
    keys = {"model.family": model.get("family"), "model.loss": model.get("loss"), "data.kind": data.get("kind")}
    keys["train.hook"] = manifest.training["train"].get("hook")
    keys["checkpoint.keep_best"] = manifest.training.get("checkpoint", {}).get("keep_best")
    keys["filler.task"] = manifest.training.get("filler", {}).get("task")
    names = {what: str(name) for what, name in keys.items() if ":" in str(name)}
    for what, name in names.items():
        userobject.load(name, what)
    return {name.partition(":")[0].partition(".")[0] for name in names.values()}


def _modules(packages: set[str]) -> list[tuple[str, Path]]:
    """The loaded modules of users, and their files: those of `packages`, and others that are not installed."""
    modules, standard = [], sysconfig.get_paths()["stdlib"] + os.sep
    for name, module in sorted(sys.modules.items()):
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if not isinstance(file, str) or not os.path.isabs(file) or not file.endswith(".py"):
            continue  # not Python, or synthetic: torch has some
        installed = file.startswith(standard) or not _PACKAGES.isdisjoint(Path(file).parts)
        if top not in _NOT_MODULES and (top in packages or not installed):
            modules.append((name, Path(file)))
    return modules


def _digest(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents; a file that cannot be read counts as empty."""
    seen = hashlib.sha256()
    for file in files:
        seen.update(file.name.encode() + b"\0")
        try:
            seen.update(hashlib.sha256(file.read_bytes()).digest())
        except OSError:
            seen.update(b"\0")
    return seen.hexdigest()[:_DIGITS]
