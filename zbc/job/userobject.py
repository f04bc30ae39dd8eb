"""Functions and factories that a job names as "package.module:name"."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from zbc.errors import ZbcError

_AREAS = {"E502": "run", "E121": "schedule"}
FAILURES = (Exception, SystemExit)  # failures of users' code: sys.exit() in it must not end zbc silently
IN_A_RANK = (*FAILURES, KeyboardInterrupt)  # ranks get Ctrl-C in another way, so this one is from users' code, too


def load(name: str, what: str, *, code: str = "E502", where: str | None = None) -> Callable[..., Any]:
    """Imports the callable `name`; `what` is the key of the job that named it, for messages.

    Searches the import path and the current directory. Raises `code` with the original error in its details; E602 for
    a module of zbc's own that needs transformers.
    """
    module, _, attribute = name.partition(":")
    here = look_here()
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except FAILURES as error:
        if isinstance(error, ImportError) and module.startswith("zbc."):  # made with another machine's transformers
            text = f"{_AREAS[code]}: {error.name} is missing, this transformers is too old or not there"
            raise ZbcError("E602", text, where=where, hint="pip install -U 'zbc[hf]'") from error
        place = here if code == "E502" else "the current directory"  # a run may be started anywhere
        hint = f"{what} is looked up on Python's import path and in {place}"
        text = f"{_AREAS[code]}: cannot import {what} = {name}"
        raise ZbcError(code, text, where=where, hint=hint, details=_trace(error)) from error
    if not callable(loaded):
        text = f"{_AREAS[code]}: {what} = {name} is {type(loaded).__name__}, not something to call"
        raise ZbcError(code, text, where=where, hint="name a function or a class")
    return loaded  # type: ignore[no-any-return]


def look_here() -> str:
    """Has imports search the current directory, too; returns it."""
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    return here


def call(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    name: str,
    what: str,
    *,
    code: str = "E502",
    where: str | None = None,
) -> Any:
    """Calls `function(**arguments)`. A ZbcError passes; any other error becomes `code` with the original as details."""
    try:
        return function(**arguments)
    except ZbcError:
        raise
    except FAILURES as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        failed = f"failed for ({shown})" if shown else "failed"
        hint = "the error is in that function, or in the arguments the job gives it"
        text = f"{_AREAS[code]}: {what} = {name} {failed}"
        raise ZbcError(code, text, where=where, hint=hint, details=_trace(error)) from error


def _trace(error: BaseException, frames: int = 3) -> list[str]:
    """The innermost frames and the error itself, as lines."""
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    shown = [line for line in lines if "importlib" not in line and __file__ not in line][-frames:]
    return [*shown, f"{type(error).__name__}: {error}"]
