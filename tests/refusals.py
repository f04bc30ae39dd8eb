"""Checks of errors, by code and by words of the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from zbc.errors import ZbcError


@contextmanager
def refused(
    code: str, *said: str, match: str | None = None, hint: str = ""
) -> Iterator[pytest.ExceptionInfo[ZbcError]]:
    """Asserts that the block raises an error of this code, with words in its message and in its hint."""
    with pytest.raises(ZbcError, match=match) as caught:
        yield caught
    assert caught.value.code == code
    for words in said:
        assert words in caught.value.message
    assert hint in (caught.value.hint or "")


def only(errors: Sequence[ZbcError]) -> ZbcError:
    assert len(errors) == 1, errors
    return errors[0]


def facts(error: ZbcError) -> tuple[str, ...]:
    """Code and message without its subject, then what else it tells: place, hint and details, as far as it does."""
    text = f"{error.code} {error.message.partition(': ')[2]}"
    return text, *(part for part in (error.where, error.hint, *error.details) if part is not None)


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> ZbcError:
    with pytest.raises(ZbcError) as caught:
        call(*args, **kwargs)
    return caught.value.with_traceback(None)
