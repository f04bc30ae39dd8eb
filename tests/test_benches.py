"""Benches import each other's jobs and helpers: a change of one must not break others, which no test runs."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"
IMPORT_ALL = """\
import importlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
failed = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    try:
        importlib.import_module(path.stem)
    except Exception as error:
        failed.append(f"{path.name}: {error!r}")
print(len(failed), *failed, sep="\\n")
"""


def test_every_bench_can_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, str(BENCH)], capture_output=True, text=True, cwd=BENCH.parent, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"], done.stdout
