"""One dated file per measurement: the machine, the command, the jobs, the output."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Record:
    """Collects lines, prints them as they come, and writes them to bench/results/DATE-NAME.txt at the end."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{datetime.date.today().isoformat()}-{name}.txt"
        self.lines: list[str] = []
        self(f"# {name}: {' '.join(['python', *sys.argv])}")
        self(f"# {machine()}")

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("\n".join(self.lines) + "\n")
        print(f"written to {self.path.relative_to(Path.cwd())}" if self.path.is_relative_to(Path.cwd()) else self.path)


def machine() -> str:
    """What the numbers were measured on; shared machines are noisy, so only ratios within one file mean much."""
    parts = [f"Python {platform.python_version()}", platform.machine(), f"{os.cpu_count()} cores"]
    for package in ("torch", "zbc"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)
