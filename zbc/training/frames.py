"""Stack traces for users: without the frames of zbc and of torch."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

import torch

import zbc
from zbc.errors import ZbcError

_ZBC, _TORCH = Path(zbc.__file__).parent, str(Path(torch.__file__).parent)
_OURS = (str(_ZBC / "runtime"), str(_ZBC / "training"))
_MOST = 8  # frames of a stack


def of_error(error: BaseException) -> list[str]:
    return _lines(traceback.extract_tb(error.__traceback__))


def failure(error: BaseException, text: str) -> ZbcError:
    """E703 for an error raised by a layer, the loss or the data of a job, with the place in their code."""
    first, *more = f"{type(error).__name__}: {error}".splitlines()
    details = [*more, *reversed(getattr(error, "__notes__", [])), *of_error(error)]
    return ZbcError("E703", f"{text}: {first}", details=details)


def raised(error: BaseException) -> list[str]:
    """The message of an error, and its traceback if it comes from code of users."""
    return [f"{type(error).__name__}: {error}", *(of_error(error) if of_users(error) else ())]


def of_users(error: BaseException) -> bool:
    """Whether an error comes through code that is neither zbc's, nor torch's, nor Python's own."""
    known = (str(_ZBC), _TORCH, sysconfig.get_path("stdlib"))
    frames = traceback.extract_tb(error.__traceback__)
    return any(not frame.filename.startswith((*known, "<frozen")) for frame in frames)


def of_thread(ident: int) -> list[str]:
    """The stack of a thread of this process, as lines, from the first frame of zbc's runtime on."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return []
    frames = traceback.extract_stack(frame)
    return _lines(list(dropwhile(lambda one: not one.filename.startswith(_OURS), frames)) or frames)


def _lines(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """The frames outside of zbc's runtime and torch, and always the innermost one, as lines."""
    chosen = [frame for frame in frames[:-1] if not frame.filename.startswith((*_OURS, _TORCH))] + list(frames[-1:])
    return [line for text in traceback.format_list(chosen[-_MOST:]) for line in text.rstrip("\n").split("\n")]
