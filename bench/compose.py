"""Combinations of features: the pairs that zbc/excludes.py excludes for now, and random draws of three to six.

    python bench/compose.py [PAIR ...]                  # such as "slices offload"
    python bench/compose.py --drawn 400 [--first 0] [--emulate 4]     # or --only SEED ..

The pairs without a reason are taken out of the table, one after the other; a job with both is planned, proven and
trained for three steps by ranks that are threads, and compared with the training without the feature that must not
change it. A pair that trains right should leave the table; for the others the bench prints how far they come.

A draw is planned with the table as it is, run on the operational machine of the tests, trained, compared with the same
training on one rank without the features that must not change it, and its memory is measured, each in a process of its
own with a time limit of five minutes. With `--emulate N`, of every Nth that trains right also a step in which ops take
given times, beside what is predicted of it. Every draw has a line; the last lines count outcomes and refusals, and
summarize the errors of predictions.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.composed import CHANGES, SETTINGS, TOLERANCE, apart, beside, trained
from tests.drawn import Found, drawn, outcome
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


LONGEST, EMULATED = 300.0, 600.0  # seconds per draw
NEAR = 0.03  # of predicted memory: what is on its way depends on when neighbours take it
LATE = 0.05  # of an emulated step


def found_of(seed: int, found: Queue[Found], emulate: bool) -> None:
    faulthandler.enable()
    sys.setswitchinterval(5e-4)  # a rank whose sleep ends does not wait long for the others
    try:
        found.put(outcome(drawn(seed), weigh=True, emulate=emulate))
    except Exception as error:
        at = " < ".join(
            f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[:-5:-1]
        )
        found.put(Found("crashed", f"{type(error).__name__} {(str(error).splitlines() or [''])[0][:160]} @ {at}"))


def answer_of(process: ForkProcess, queue: Queue[Found], longest: float) -> Found:
    """What a draw's process found, or why it did not, within `longest` seconds."""
    until = time.monotonic() + longest
    while time.monotonic() < until:
        ended = not process.is_alive()
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if ended:
                return Found("crashed", f"the process ended with {process.exitcode}")
    process.kill()
    return Found("hangs", f"after {longest:.0f} s")


def draws(seeds: Iterable[int], record: Record, every: int) -> None:
    context, how, why = multiprocessing.get_context("fork"), Counter[str](), Counter[str]()
    memory, steps = list[float](), list[float]()
    for place, seed in enumerate(seeds):
        emulate = every > 0 and place % every == 0
        longest = EMULATED if emulate else LONGEST
        queue = context.Queue()
        process = context.Process(target=found_of, args=(seed, queue, emulate))
        process.start()
        found = answer_of(process, queue, longest)
        process.join()
        how[found.how] += 1
        if found.how == "refused":
            why[re.sub(r"\b\d[\d.]*", "N", found.why)[:100]] += 1
        memory += [found.memory] * (found.memory is not None)
        told = f"; memory {found.memory:+.1%}, host {found.host:+.1%}" if found.memory is not None else ""
        if found.step is not None:
            steps.append(found.step)
            told += f"; step {found.step:+.1%}"
        record(f"{seed:5} {found.how:8} {drawn(seed).name}: {found.why[:240]}{told}")
    record(", ".join(f"{count} {name}" for name, count in how.most_common()))
    for what, each, near in (("memory", memory, NEAR), ("steps", steps, LATE)):
        off = sorted(map(abs, each))
        if off:
            over = sum(one > near for one in off)
            record(f"{what} of {len(off)}: half within {off[len(off) // 2]:.2%}, {over} not within {near:.0%}")
    for text, count in why.most_common():
        record(f"{count:4} {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", help="two traits with a blank between them; all unwritten ones by default")
    parser.add_argument("--drawn", type=int, default=0, help="so many draws of features")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--emulate", type=int, default=0, help="emulated steps of every so many")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="these seeds")
    asked = parser.parse_args()
    if asked.drawn or asked.only:
        torch.set_num_threads(1)
        record = Record("drawn")
        draws(asked.only or range(asked.first, asked.first + asked.drawn), record, asked.emulate)
        record.write()
        return
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
