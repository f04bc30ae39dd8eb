"""Damaged inputs and random jobs, for some minutes: job files, costs of zero, plan directories, CSV files, checkpoints.

    python bench/fuzz.py [--minutes 10] [--first 0] [--kind NAME ...]

Each ends in success or in a ZbcError, and accepted orders run to their end on a machine independent of the proofs
(tests/check/operational.py). Anything else, a process that dies, and an input that takes more than 20 s of a core, or
two minutes, are printed with the seed that reproduces it, and the exit code is 1. Each kind of input has its own
process and its share of the time, and begins with the seed `--first`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.fuzzing import KINDS, Inputs, survives

SHARES = {"job": 6, "plan": 3, "csv": 2, "checkpoint": 2}  # of the time; other kinds have 1
HANG_S, WAIT_S = 20.0, 120.0  # limits per input: CPU time, and time
START_S = 300.0  # to compile the kernels of the search


def tried(kind: str, first: int, pipe: Connection) -> None:
    """Tries one seed after the other; sends its begin and its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(Path(folder))
        if kind == "job":
            survives(inputs, kind, 0)
        for seed in itertools.count(first):
            pipe.send(("begins", seed))
            signal.setitimer(signal.ITIMER_PROF, HANG_S)  # ends this process
            try:
                pipe.send(("read" if survives(inputs, kind, seed) else "refused", seed))
            except Exception:
                pipe.send((f"{kind} {seed}\n{traceback.format_exc()}", seed))


class Found:
    """The outcomes of the inputs of one kind."""

    def __init__(self, record: Record, kind: str) -> None:
        self.record, self.kind, self.counts, self.slowest = record, kind, {"read": 0, "refused": 0, "wrong": 0}, 0.0

    def wrong(self, text: str) -> None:
        self.counts["wrong"] += 1
        self.record(text)

    def until(self, end: float, first: int) -> None:
        """Tries inputs until this time; a process that dies or hangs is replaced by one that begins after that seed."""
        context = multiprocessing.get_context("spawn")
        while time.monotonic() < end:
            mine, theirs = context.Pipe()
            process = context.Process(target=tried, args=(self.kind, first, theirs), daemon=True)
            process.start()
            theirs.close()
            first = self.listen(mine, end, first) + 1
            process.kill()
            process.join()

    def listen(self, pipe: Connection, end: float, seed: int) -> int:
        """Counts outcomes until the time or the process ends; returns the last seed."""
        limit, began = START_S, time.monotonic()
        while True:
            if not pipe.poll(limit):
                self.wrong(f"{self.kind} {seed} takes more than {limit:.0f} s")
                return seed
            try:
                what, seed = pipe.recv()
            except EOFError:
                self.wrong(f"{self.kind} {seed} ended its process, or took {HANG_S:.0f} s of a core")
                return seed
            if what == "begins":
                limit, began = WAIT_S, time.monotonic()
                continue
            self.slowest = max(self.slowest, time.monotonic() - began)
            if what in self.counts:
                self.counts[what] += 1
            else:
                self.wrong(what)
            if time.monotonic() > end:
                return seed


def main() -> None:
    parser = argparse.ArgumentParser(description="Damaged inputs and random jobs.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="seed of the first input of each kind")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one (repeatable); writes no file")
    options = parser.parse_args()
    record, failed, kinds = Record("fuzz"), 0, options.kind or KINDS
    whole = sum(SHARES.get(kind, 1) for kind in kinds)
    for kind in kinds:
        found, began = Found(record, kind), time.monotonic()
        found.until(began + 60 * options.minutes * SHARES.get(kind, 1) / whole, options.first)
        read, refused, wrong = found.counts.values()
        took = time.monotonic() - began
        text = f"{kind:10} {read + refused + wrong:6d} inputs  {read:6d} read  {refused:6d} refused  {wrong:3d} wrong"
        record(f"{text}  {took:6.1f} s  slowest {found.slowest:.1f} s")
        failed += wrong
    record(f"crashes, hangs over {HANG_S:.0f} s, tracebacks and unsound plans accepted: {failed}")
    if not options.kind:
        record.write()
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
