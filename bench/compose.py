"""Plans and trains the pairs that zbc/excludes.py excludes only because they have not been built.

    python bench/compose.py [PAIR ...]      # such as "slices offload"

The pairs without a reason are taken out of the table, one after the other; a job with both is planned, proven and
trained for three steps by ranks that are threads, and compared with the training without the feature that must not
change it. A pair that trains right should leave the table; for the others the bench prints how far they come.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.composed import CHANGES, SETTINGS, TOLERANCE, apart, beside, trained
from zbc import excludes
from zbc.errors import ZbcError


class Outcome(NamedTuple):
    """How far a pair came: "right", "wrong", "refused" or "crashed", and a text about it."""

    how: str
    text: str


def tried(one: str, other: str) -> Outcome:
    """Trains a job with both traits, and one with only those that change a training."""
    if {one, other} <= {*CHANGES}:
        return Outcome("no reference", "both change a training")
    both, plain = beside(one, other)
    try:
        expected = trained(plain)
    except Exception as error:
        return Outcome("no reference", f"{type(error).__name__} {str(error).splitlines()[0][:100]}")
    try:
        off = apart(trained(both), expected)
    except ZbcError as error:
        return Outcome("refused", f"{error.code} {error.message[:140]}")
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__} {(str(error).splitlines() or [''])[0][:120]}")
    right = off <= (0.02 if "bfloat16" in f"{one} {other}" else TOLERANCE)
    return Outcome("right" if right else "wrong", f"off by {off:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", help="two traits with a blank between them; all unwritten ones by default")
    asked = parser.parse_args()
    unwritten = [pair for pair in excludes.PAIRS if not pair.why and {pair.one, pair.other} <= SETTINGS.keys()]
    if asked.pairs:
        unwritten = [pair for pair in unwritten if f"{pair.one} {pair.other}" in asked.pairs]
    whole, record = excludes.PAIRS, Record("compose")
    for pair in unwritten:
        excludes.PAIRS = tuple(one for one in whole if one.why or one != pair)
        found = tried(pair.one, pair.other)
        record(f"{found.how:12} {pair.one} x {pair.other}: {found.text}")
    excludes.PAIRS = whole
    record.write()


if __name__ == "__main__":
    main()
