"""Golden files, and which tests run.

Golden files are texts a person has looked at. `pytest --update-golden` writes them anew; read the diff.
Tests marked `repeats` add names, sizes, seeds and whole runs to what others show (tests/tiers.py). They run with
`--all`, or where the command line names a test (`pytest tests/x.py::test_y`).
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"
WAITING = ("tests/docs/", "tests/processes/")  # mostly wait for processes they have started

settings.register_profile("zbc", settings.default, deadline=None)  # a busy machine may stop a test for a moment
settings.load_profile("zbc")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the code prints now")
    parser.addoption("--all", action="store_true", help="run tests that are marked `repeats`, too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all") and not any("::" in name for name in config.args):
        repeats = [item for item in items if item.get_closest_marker("repeats")]
        config.hook.pytest_deselected(items=repeats)
        items[:] = [item for item in items if not item.get_closest_marker("repeats")]
    if hasattr(config, "workerinput"):
        items[:] = _in_turns(items)


def _in_turns(items):
    """Groups that wait take turns with those that compute.

    So one worker waits while the other computes, and neither is left with a long wait at the end.
    """
    groups = {}
    for item in items:
        groups.setdefault(_group(item.nodeid), []).append(item)
    waiting = [group for name, group in groups.items() if name.startswith(WAITING)]
    others = [group for name, group in groups.items() if not name.startswith(WAITING)]
    return [item for pair in zip_longest(waiting, others, fillvalue=()) for group in pair for item in group]


def _group(nodeid):
    """What stays on one worker, in its order: a file, but of the documentation each case by itself."""
    return nodeid if nodeid.startswith("tests/docs/") and "[" in nodeid else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The groups in the order of collection. (`--dist loadgroup` of pytest-xdist 3.8 does nothing with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


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
