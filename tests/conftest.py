"""Golden files, and which tests run.

Golden files are texts a person has looked at. `pytest --update-golden` writes them anew; read the diff.
Tests marked `repeats` run with `--all`, or where the command line names a test (`pytest tests/x.py::test_y`).
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
WAITING = ("docs", "processes")  # mostly wait for processes they have started

settings.register_profile("zbc", settings.default, deadline=None)  # a busy machine may stop a test for a moment
settings.load_profile("zbc")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the code prints now")
    parser.addoption("--all", action="store_true", help="run tests that are marked `repeats`, too")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all") and not any("::" in name for name in config.args):
        repeats = [item for item in items if item.get_closest_marker("repeats")]
        config.hook.pytest_deselected(items=repeats)
        items[:] = [item for item in items if not item.get_closest_marker("repeats")]
    if config.pluginmanager.hasplugin("xdist"):
        items[:] = _in_groups(items)


def _in_groups(items):
    """Tests of a file stay on one worker unless they are marked `apart`; what waits takes turns with what computes.

    So one worker waits while the other computes, and neither is left with a long wait at the end.
    """
    groups = {}
    for item in items:
        name = item.nodeid if item.get_closest_marker("apart") else str(item.path.relative_to(TESTS))
        item.add_marker(pytest.mark.xdist_group(name))
        groups.setdefault(name, []).append(item)
    waiting = [group for group in groups.values() if group[0].path.parent.name in WAITING]
    others = [group for group in groups.values() if group[0].path.parent.name not in WAITING]
    return [item for pair in zip_longest(waiting, others, fillvalue=()) for group in pair for item in group]


@pytest.fixture
def golden(request):
    """`golden(name, text)` fails unless tests/golden/`name` holds `text`."""

    def compare(name, text):
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {name}; look at the text and run pytest --update-golden:\n{text}"
        assert text == path.read_text(encoding="utf-8")

    return compare
