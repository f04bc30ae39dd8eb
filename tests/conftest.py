"""Golden files, the selection of tests, and their time limits.

Golden files are texts that a person has reviewed. `pytest --update-golden` rewrites them; read the diff.

Tests marked `repeats` (tests/tiers.py) or `long` run with `--all`, with `--eighth N` an eighth of the former and a
sixteenth of the latter, or if the command line names one (`pytest tests/x.py::test_y`). `long` take more than `QUICK`
CPU seconds, with the cards that no other test reads; `pytest --all --measure` says which should be marked, or need not.
Tests marked `always` run all the same: they catch planted bugs that no other test catches as fast (bench/planted.py),
or judge many features at once. Both marks name cases, or mean all. Tests without one fail beyond `MOST`, or what a
slow machine takes for as many additions.
Schedules are searched for `BUDGET` seconds by default, except in tests of searches and of their results.
"""

import os
import time
import zlib
from collections import Counter
from importlib import import_module
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiers import slowness
from zbc.compiler.cost import cards, machine, profiled
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.search.engine import compiles_first

os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "cache")  # of cards: all workers share it
GOLDEN = Path(__file__).parent / "golden"
QUICK, MOST = 0.5, 3.0  # CPU seconds, of all processes of a test
COLD = 25.0 if compiles_first() else 0.0  # additional seconds for a fresh clone, whose first searches compile
WHOLE = ("tests/search/", "tests/docs/")  # with the default budgets of users
BUDGETS = {name: card.budget for name, card in SCHEDULES.items()}
BUDGET = 0.1
WAITING = ("tests/docs/", "tests/processes/")  # mostly wait for processes they have started

settings.register_profile("zbc", settings.default, deadline=None)  # a busy machine may stop a test for a moment
settings.load_profile("zbc")


MADE = {}  # card -> CPU seconds to make it; most are of several tests, so they count for none
READ = set()  # cards of the current test


def _timed(file, *args, made=cards._made):
    import_module(cards.MAKER.partition(":")[0])  # of torch, which counts for none
    before = time.process_time()
    try:
        return made(file, *args)
    finally:
        MADE[file and file.stem] = time.process_time() - before


def _noted(*args, digest=cards._digest):
    READ.add(name := digest(*args))
    return name


cards._made, cards._digest = _timed, _noted


@pytest.fixture
def everything_moves(monkeypatch):
    """Plans offload all activations: a toy model stands for a large one, whose tensors are not too small to move."""
    monkeypatch.setattr(profiled, "SMALL", 1)


@pytest.fixture
def no_launches(monkeypatch):
    """Kernels take no time to start: estimates are of arithmetic and memory traffic alone."""
    defaults = {device: (a, b, 0.0, *links) for device, (a, b, _, *links) in machine._DEFAULTS.items()}
    monkeypatch.setattr(machine, "_DEFAULTS", defaults)


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the code prints now")
    parser.addoption("--all", action="store_true", help="run the tests that `make test` leaves out, too")
    parser.addoption("--measure", action="store_true", help="say whose marks do not agree with what they take")
    parser.addoption("--eighth", type=int, metavar="N", help="run an eighth of those, another for N + 1")


def pytest_collection_modifyitems(config, items):
    named = Counter()
    for item in items:
        named.update({f"{item.nodeid.partition('[')[0]} {word}": there for word, there in _named(item)})
    if (stale := [one for one, count in named.items() if not count]) and not any("::" in name for name in config.args):
        raise pytest.UsageError(f"marks name cases that are not there: {stale}")
    if not config.getoption("--all") and not any("::" in name for name in config.args):
        eighth = config.getoption("--eighth")
        left = [item for item in items if _left(item) and not _in(eighth, item)]
        config.hook.pytest_deselected(items=left)
        left = set(left)
        items[:] = [item for item in items if item not in left]
    if hasattr(config, "workerinput"):
        items[:] = _in_turns(items)


def _left(item):
    return not _is(item, "always") and (_is(item, "long") or _is(item, "repeats"))


def _is(item, name):
    """Whether a test has a mark, which may name cases by some of their parameters."""
    return any(there for _, there in _named(item, name)) or any(not mark.args for mark in item.iter_markers(name))


def _named(item, *marks):
    """The cases that marks of a test name, and whether it is one of them."""
    case = f"-{item.callspec.id}-" if hasattr(item, "callspec") else ""
    words = (word for name in marks or ("long", "always") for mark in item.iter_markers(name) for word in mark.args)
    return [(word, f"-{word}-" in case) for word in words]


def _in(eighth, item):
    return eighth is not None and (zlib.crc32(item.nodeid.encode()) + eighth) % (16 if _is(item, "long") else 8) == 0


def pytest_runtest_setup(item):
    whole = item.nodeid.startswith(WHOLE)
    for name, card in SCHEDULES.items():
        if name in BUDGETS:  # tests add some of their own
            object.__setattr__(card, "budget", BUDGETS[name] if whole else min(BUDGETS[name], BUDGET))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    READ.clear()
    MADE.clear()
    before, measures = _cpu(), item.config.getoption("--measure")
    found = yield
    slow = slowness() if measures else 1.0
    took = (_cpu() - sum(MADE.values()) - before) / slow
    made = {name: MADE.get(name, 0.0) / slow for name in READ}
    item.user_properties += [("cpu", took), ("cards", made if measures else {}), ("long", _is(item, "long"))]
    if took > MOST + COLD and not measures and not any(_is(item, name) for name in ("long", "repeats", "always")):
        most = MOST * slowness()
        if took > most + COLD:
            pytest.fail(f"took {took:.1f} CPU seconds of {most:.1f}: make it smaller, or mark it `long`")
    return found


def _cpu():
    """CPU seconds of this process, and of the processes that it started and waited for."""
    return sum(os.times()[:4])


TOOK, CARDS, LONG = {}, {}, set()  # CPU seconds of each test; its cards, with those for what it made; those marked


def pytest_runtest_logreport(report):
    if report.when == "call":
        told = dict(report.user_properties)
        TOOK[report.nodeid], CARDS[report.nodeid] = told.get("cpu", 0.0), told.get("cards", {})
        LONG.update([report.nodeid] * told.get("long", False))


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--measure"):
        readers = Counter(card for some in CARDS.values() for card in some)
        for name, some in CARDS.items():
            TOOK[name] += sum(cpu for card, cpu in some.items() if readers[card] == 1)
        for name, took in sorted(TOOK.items()):
            if (took > QUICK) if name not in LONG else (took < QUICK / 2):
                terminalreporter.write_line(f"{took:7.1f} {'long' if name in LONG else 'not long'}: {name}")
    terminalreporter.write_line(f"{sum(TOOK.values()):.0f} CPU seconds in tests, most in")
    for name in sorted(TOOK, key=TOOK.get)[:-6:-1]:
        terminalreporter.write_line(f"{TOOK[name]:7.1f} {name}")


def _in_turns(items):
    """Interleaves groups that mostly wait with groups that compute: neither worker has a long wait at the end."""
    groups = {}
    for item in items:
        groups.setdefault(_group(item.nodeid), []).append(item)
    waiting = [group for name, group in groups.items() if name.startswith(WAITING)]
    others = [group for name, group in groups.items() if not name.startswith(WAITING)]
    return [item for pair in zip_longest(waiting, others, fillvalue=()) for group in pair for item in group]


def _group(nodeid):
    """The group of tests that stays on one worker, in order: a file; for the documentation each case by itself."""
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
