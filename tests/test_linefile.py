"""Lines and files are written completely or not at all, also if the disk is full."""

import errno
import resource
from contextlib import contextmanager

import pytest

from zbc.host.linefile import LineFile, replace_text


@contextmanager
def no_file_beyond(size):
    """Writes beyond a number of bytes of a file fail, as on a full disk: bytes that fit are written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_is_not_begun_and_the_next_one_may_fit_again(tmp_path):
    path = tmp_path / "lines"
    path.write_text("from before\n")
    file = LineFile(path, "a")
    file.add("gr\u00fcn\n")
    with no_file_beyond(30), pytest.raises(OSError) as raised:
        file.add("twenty characters more\n")
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text(encoding="utf-8") == "from before\ngr\u00fcn\n"
    file.add("room again\n")
    file.close()
    assert path.read_text(encoding="utf-8") == "from before\ngr\u00fcn\nroom again\n"


def test_a_file_that_does_not_fit_stays_as_it_was(tmp_path):
    path = tmp_path / "run.json"
    replace_text(path, "{}")
    with no_file_beyond(10), pytest.raises(OSError) as raised:
        replace_text(path, '{"more": "than fits"}')
    assert raised.value.filename == str(path)
    assert path.read_text() == "{}" and list(tmp_path.iterdir()) == [path]
