"""One dated file per measurement: the command, the machine, the commit, the jobs, the output."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Record:
    """Prints lines as they come, and writes them to bench/results/DATE-NAME.txt at the end.

    Until then they are in DATE-NAME.partial next to it, so that a stopped bench leaves its results so far; not with
    --quick, which writes no file.
    """

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{datetime.date.today().isoformat()}-{name}.txt"
        self.partial = self.path.with_suffix(".partial")
        self.partial.parent.mkdir(exist_ok=True)
        self.keeps = "--quick" not in sys.argv
        if self.keeps:
            self.partial.unlink(missing_ok=True)
        self.lines: list[str] = []
        self(f"# {name}: {' '.join(['python', *sys.argv])}")
        self(f"# {machine()}; {commit()}; {datetime.datetime.now():%Y-%m-%d %H:%M}")

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)
        if self.keeps:
            with self.partial.open("a") as file:
                file.write(line + "\n")

    def write(self) -> None:
        self.path.write_text("\n".join(self.lines) + "\n")
        self.partial.unlink(missing_ok=True)
        print(f"written to {self.path.relative_to(Path.cwd())}" if self.path.is_relative_to(Path.cwd()) else self.path)


def commit() -> str:
    """The commit of the measured code, and the folders in which files differ from it."""

    def git(*arguments: str) -> str:
        told = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return told.stdout.strip()

    changed = sorted({path.partition("/")[0] for path in git("diff", "HEAD", "--name-only").splitlines()})
    return f"commit {git('rev-parse', '--short', 'HEAD')}{' with changes in ' * bool(changed)}{', '.join(changed)}"


def machine() -> str:
    """The machine of the measurement; shared machines are noisy, so only ratios within one file mean much."""
    parts = [f"Python {platform.python_version()}", platform.machine(), f"{os.cpu_count()} cores"]
    for package in ("torch", "zbc"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)
