"""Compiled and plain kernels make the same decisions on the same numbers: same orders, same costs, to the last bit."""

import errno
import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.search.instances import instance
from tests.tiers import few
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.search import engine as engines
from zbc.compiler.search import moves
from zbc.compiler.search.portfolio import search


@pytest.mark.parametrize("name", ["zb-auto", "v-auto", "chimera-zb"])
def test_times_given_as_whole_numbers_are_those_given_as_fractions(name):
    """Compiled kernels take arrays of one type only."""
    where = SCHEDULES[name].placement(3, SCHEDULES[name].default_chunks)
    whole = Costs.uniform(where).with_ms(f=(1, *[2.5] * (where.stages - 1)), b=(3,) * where.stages)
    parts = whole.with_ms(**{name: tuple(map(float, whole.column(name))) for name in ("f", "b")})
    made = [
        SCHEDULES[name].make(Request(3, 5, SCHEDULES[name].default_chunks, costs=one, memory_limit=4, budget=0.002))
        for one in (whole, parts)
    ]
    assert made[0] == made[1]


def found_by(engine, given, objective, visits):
    return search(given.problem, objective, visits, engine, orders=given.simplest)


@pytest.mark.long
@pytest.mark.parametrize("objective", few(["span", "makespan"], ("makespan",)))
def test_whole_searches_find_the_same(objective, plain, compiled):
    for seed in range(200, 212):
        asked = instance(seed), objective, 200_000
        assert found_by(plain, *asked) == found_by(compiled, *asked)
    many = instance(14, ranks=2, chunks=2, microbatches=30)  # more than 4p take another way through the search
    assert many.m > 6 * many.problem.p
    assert found_by(plain, many, "span", 1_000_000) == found_by(compiled, many, "span", 1_000_000)


CHILD = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
import kernel, numba, zbc
from zbc.compiler.search import engine
engine._MODULES = (kernel,)
engine._compile.__wrapped__()["doubled"](1)  # loads what another user may not read
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
numba.config.CACHE_DIR, tempfile.tempdir = "", os.environ["TMPDIR"]
os.environ.pop("NUMBA_CACHE_DIR")
before = engine.compiles_first()
print(engine._compile()["doubled"](21), engine.cache_folder(), before)
"""


@pytest.fixture
def public():
    """A folder that other users may read, as pytest's own is not."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.long
@pytest.mark.parametrize("writable", ["home", "temporary", "nothing"])
def test_kernels_compile_wherever_their_cache_can_be(writable, public):
    """As a user whose package folder is read-only; without any folder, each process compiles again."""
    pytest.importorskip("numba")
    for name in ("package", "home", "temporary"):
        (public / name).mkdir()
        (public / name / "kernel.py").write_text("def doubled(x):\n    return 2 * x\n")
        (public / name).chmod(0o777 if name == writable else 0o555)
    env = {**os.environ, "HOME": str(public / "home"), "TMPDIR": str(public / "temporary")}
    env |= {"PYTHONPATH": str(Path(engines.__file__).parents[3])}
    env.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-P", "-c", CHILD, str(public / "package")]
    run = partial(subprocess.run, command, cwd="/", text=True, check=True, stdout=subprocess.PIPE)
    first, second = (run(env=env | {"NUMBA_CACHE_DIR": str(public / n)}).stdout.split() for n in "12")
    private = f"temporary/zbc-{os.getuid() or 65534}"
    where = {"home": public / "home/.cache/zbc", "temporary": public / private}.get(writable)
    assert first == ["42", str(where), "True"]
    assert second == ["42", str(where), str(where is None)]


def test_a_full_disk_costs_the_cache_only(monkeypatch):
    numba = pytest.importorskip("numba")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "save", full)
    monkeypatch.setattr(engines, "_kernels", lambda: ["following"])
    monkeypatch.setattr(engines, "_version", lambda: "full")
    assert engines._compile.__wrapped__()["following"](12345) == moves.following(12345)


def test_a_folder_of_somebody_else_holds_no_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_beside", list)
    monkeypatch.setattr(engines, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    private = engines.cache_folder()
    assert private == tmp_path / f"zbc-{os.getuid()}"
    private.chmod(0o770)
    assert engines.cache_folder() is None


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed_in_another_file(tmp_path, monkeypatch):
    """numba itself checks a kernel's own file only, and would keep the code that was linked into it before."""
    pytest.importorskip("numba")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernel_that_calls.py").write_text("def calling(x):\n    return called(x) + 1\n")
    found = []
    for factor in (10, 1000):
        (tmp_path / "kernel_called.py").write_text(f"def called(x):\n    return {factor} * x\n")
        importlib.invalidate_caches()
        modules = tuple(map(importlib.import_module, ("kernel_called", "kernel_that_calls")))
        monkeypatch.setattr(engines, "_MODULES", modules)
        found.append(engines._compile.__wrapped__()["calling"](3))
        for module in modules:
            del sys.modules[module.__name__]
    assert found == [31, 3001]
