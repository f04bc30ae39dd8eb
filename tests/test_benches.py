"""Benches import each other's jobs and helpers: a change of one must not break others, which no test runs."""

import datetime
import re
import sys
from pathlib import Path

import pytest

from bench import results
from tests.limits import ended

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench"
IMPORT_ALL = """\
import importlib, pathlib, sys
sys.path.insert(0, sys.argv[1])
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    print(path.name, *getattr(importlib.import_module(path.stem), "PARTS", ()))
"""
NAMED = re.compile(r"`(?:python )?(bench/\w+\.py)(?: ([a-z]+))?[^`]*`(\s+at\s+[0-9a-f]{7,8}\b)?")


@pytest.mark.long
def test_every_bench_can_be_imported_and_those_that_pages_name_are_there() -> None:
    done = ended(sys.executable, "-c", IMPORT_ALL, str(BENCH), seconds=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    known = {name: parts for name, *parts in map(str.split, done.stdout.splitlines())}
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("zbc/**/*.py")]
    named = [found for page in pages for found in NAMED.finditer(page.read_text()) if found[3] is None]
    assert len(named) > 20
    for found in named:
        parts = known[found[1].removeprefix("bench/")]
        assert found[2] is None or not parts or found[2] in parts, found[0]


@pytest.mark.parametrize("row", results.ROWS, ids=lambda row: row.what)
def test_the_table_of_results_is_what_the_newest_records_say(row) -> None:
    record = results.newest(row.record)
    for page, folder in ((results.PAGE, "../"), (results.README, "")):
        lines = [results.line(row, record, late, folder) for late in (False, True)]
        assert len({*lines} & {*page.read_text().splitlines()}) == 1, "make results"


def test_a_record_older_than_what_it_measures_is_refused_except_on_a_gpu(tmp_path) -> None:
    record = tmp_path / "2026-01-02-split.txt"
    record.write_text("# split\n# a machine; commit 1; 2026-01-02 03:04\nfloat32   keep  10.0 11.0\n")
    assert results.measured(record) == datetime.datetime(2026, 1, 2, 3, 4) < results.changed(("zbc/ir.py",))
    assert results.newest("split", tmp_path) == record and results.newest("other", tmp_path) is None
    row = next(row for row in results.ROWS if row.record == "split")
    assert "| 11.0 ms | the fused backward: 10.0 ms | 1.100 | 1.100 |" in results.line(row, record, False, "")
    assert "|  | the fused backward |  |  | record of 2026-01-02, older" in results.line(row, record, True, "")
    assert "1.100 | `overhead.py split`, [2026-01-02]" in results.line(row._replace(gpu=True), record, True, "")
