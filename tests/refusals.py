"""What is refused, by its code and by words of what is said."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zbc.errors import ZbcError


@contextmanager
def refused(
    code: str, *said: str, match: str | None = None, hint: str = ""
) -> Iterator[pytest.ExceptionInfo[ZbcError]]:
    """The block raises an error of this code with these words in its message, and those in its hint."""
    with pytest.raises(ZbcError, match=match) as caught:
        yield caught
    assert caught.value.code == code
    for words in said:
        assert words in caught.value.message
    assert hint in (caught.value.hint or "")
