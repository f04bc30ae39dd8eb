"""Functions and factories that a job names as "package.module:name"."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from zbc.errors import ZbcError


def load(name: str, what: str) -> Callable[..., Any]:
    """Import the callable `name`; `what` is the key of the job that named it, for messages.

    Looked up on the import path and in the current directory. Raises E502 with the original error in its details.
    """
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        hint = f"{what} is looked up on Python's import path and in {here}"
        raise ZbcError("E502", f"run: cannot import {what} = {name}", hint=hint, details=_trace(error)) from error
    if not callable(found):
        text = f"run: {what} = {name} is {type(found).__name__}, not something to call"
        raise ZbcError("E502", text, hint="name a function or a class")
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], name: str, what: str, **kwargs: Any) -> Any:
    """Call it. A ZbcError passes; any other error becomes E502 with the original in its details."""
    try:
        return function(**kwargs)
    except ZbcError:
        raise
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in kwargs.items())
        hint = "the error is in that function, or in the arguments the job gives it"
        details = _trace(error)
        raise ZbcError("E502", f"run: {what} = {name} failed for ({shown})", hint=hint, details=details) from error


def _trace(error: BaseException, frames: int = 3) -> list[str]:
    """The innermost frames and the error itself, as lines."""
    lines = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    shown = [line for line in lines if "importlib" not in line and __file__ not in line][-frames:]
    return [*shown, f"{type(error).__name__}: {error}"]
