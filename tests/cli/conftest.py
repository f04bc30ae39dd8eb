"""`zbc(...)` runs a command in this process, in an empty folder, the way the console script does."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs import write_job
from zbc.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def json(self):
        return json.loads(self.out)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory; output has no colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture
def zbc(folder, capsys):
    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(left.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def job(folder):
    """`job(**changes)` writes zbc.toml, as `tests.jobs.toml_text` makes it."""

    def write(**changes):
        write_job(folder, **changes)
        return "zbc.toml"

    return write


@pytest.fixture
def plan(zbc, job):
    """A good plan directory of a small job, in ./plan."""
    assert zbc("plan", job(pp=2, m=3), "-q").code == 0
    return Path("plan")
