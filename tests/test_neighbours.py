"""Which stages are neighbours is known to placements, and to those who make orders; all others ask."""

import re
from pathlib import Path

import zbc

ROOT = Path(zbc.__file__).parent
NEXT = re.compile(
    r"\b(?:stage|s)\]?\s*[-+]\s*1\b|\bstages\)?\s*-\s*1\b|\bstages\s*//|\bpairwise\((?:pipe|homes|stages)\b"
)

MAKERS = ("compiler/schedules/", "compiler/search/")  # orders of stages in a row
CUTS = {  # the layers of a model come in a row: where the stages begin and end in it, one point more than stages
    "compiler/partition/balance.py",
    "compiler/planner/case.py",
}
COUNTED = {  # numbers of stages in words, and of what lies between them
    "compiler/cost/pricing.py": "stages are numbered from 0 to",
    "compiler/partition/initial.py": "bars",
    "plan/reading.py": "boundaries",
}


def _found() -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for path in sorted(ROOT.rglob("*.py")):
        lines = [line.strip() for line in path.read_text().splitlines() if NEXT.search(line)]
        if lines:
            found[path.relative_to(ROOT).as_posix()] = lines
    return found


def test_nobody_else_adds_one_to_a_stage_or_divides_stages_by_ranks():
    for name, lines in _found().items():
        if name.startswith(MAKERS) or name in CUTS:
            continue
        assert all(name in COUNTED and COUNTED[name] in line for line in lines), (name, lines)


def test_what_is_excepted_is_still_there():
    found = _found()
    gone = {name for name in {*CUTS, *COUNTED} if (ROOT / name).exists() and name not in found}
    assert not gone, "drop them from the lists"
