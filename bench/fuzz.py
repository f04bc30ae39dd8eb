"""Drawn inputs against what has to hold of each: `python bench/fuzz.py inputs | orders | groups | jobs`.

inputs   damaged job files, costs of zero, plan directories, CSV files, checkpoints, for some minutes. Each ends in
         success or in a ZbcError, and accepted orders run to their end on a machine independent of the proofs
         (tests/check/operational.py). Anything else, a process that dies, and an input that takes more than two
         minutes, or 20 s of a core (of a slow one longer), are printed with the seed that reproduces it. Each kind of
         input has its own process and its share of the time.

orders   bidirectional and wave schedules of up to 12 ranks and 48 microbatches: every program has to pass all checks
         and to run to its end on that machine; both also have to agree on a damaged copy of each.

groups   overlap groups in random orders, and braid-v against its bars, the best known orders for chunks of F = B = W =
         1 with sums of .3 in each F and B. Half of the programs are braid-v at random costs, the other half orders of
         other schedules with marks at random, many of which deadlock; also a copy with a moved mark and a damaged one.

jobs     draws of three to six features, planned, run on that machine, trained, compared with the same training on one
         rank without the features that must not change it, and their memory measured, each in a process of its own
         with a time limit of five minutes. With `--emulate N`, of every Nth that trains right also a step in which ops
         take given times, beside what is predicted of it. Every draw has a line; the last lines count outcomes and
         refusals, and summarize the errors of predictions.

The exit code is 1 if something does not hold. A file `bench/stop` ends orders and groups with what they have so far.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.emulated import emulated
from bench.record import Record
from tests.check import braids, pairs
from tests.check.pairs import damaged, verdicts
from tests.drawn import Found, drawn, outcome
from tests.fuzzing import KINDS, Inputs, survives
from tests.tiers import slowness
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Placement, Program, groups

# ---- inputs -------------------------------------------------------------------------------------------------

SHARES = {"job": 6, "plan": 3, "csv": 2, "checkpoint": 2}  # of the time; other kinds have 1
HANG_S, WAIT_S = 20.0, 120.0  # limits per input: CPU time, times `slowness`, and time
START_S = 300.0  # to compile the kernels of the search


def tried(kind: str, first: int, pipe: Connection) -> None:
    """Tries one seed after the other; sends its begin and its outcome."""
    slow = slowness()
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(Path(folder))
        if kind == "job":
            survives(inputs, kind, 0)
        for seed in itertools.count(first):
            pipe.send(("begins", seed))
            signal.setitimer(signal.ITIMER_PROF, HANG_S * slow)  # ends this process
            try:
                pipe.send(("read" if survives(inputs, kind, seed) else "refused", seed))
            except Exception:
                pipe.send((f"{kind} {seed}\n{traceback.format_exc()}", seed))


class Outcomes:
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


def inputs(record: Record, asked: argparse.Namespace) -> int:
    failed, kinds = 0, asked.kind or KINDS
    whole = sum(SHARES.get(kind, 1) for kind in kinds)
    for kind in kinds:
        found, began = Outcomes(record, kind), time.monotonic()
        found.until(began + 60 * asked.minutes * SHARES.get(kind, 1) / whole, asked.first)
        read, refused, wrong = found.counts.values()
        took = time.monotonic() - began
        text = f"{kind:10} {read + refused + wrong:6d} inputs  {read:6d} read  {refused:6d} refused  {wrong:3d} wrong"
        record(f"{text}  {took:6.1f} s  slowest {found.slowest:.1f} s")
        failed += wrong
    record(f"crashes, hangs over {HANG_S:.0f} s, tracebacks and unsound plans accepted: {failed}")
    return failed


# ---- orders -------------------------------------------------------------------------------------------------


def stopped() -> bool:
    """Whether there is a file `stop` next to this one: then the bench ends and records its results so far."""
    return (Path(__file__).parent / "stop").exists()


def orders(record: Record, asked: argparse.Namespace) -> int:
    count, first, began = asked.count or 10_000, asked.first, time.perf_counter()
    record(f"# up to {12} ranks and {48} microbatches, seeds {first} to {first + count - 1}")
    good = refused = disagreements = ops = 0
    names: dict[str, int] = {}
    done = 0
    for seed in range(first, first + count):
        if stopped():
            break
        done += 1
        pair = pairs.draw(seed, ranks=12, microbatches=48)
        names[pair.name] = names.get(pair.name, 0) + 1
        ops += pair.program.size
        fine = verdicts(pair.program, seed)
        broken = verdicts(damaged(pair.program, random.Random(seed)), seed)
        good += fine == (True, True)
        refused += broken == (False, False)
        if fine != (True, True) or broken[0] != broken[1]:
            disagreements += 1
            record(f"seed {seed}: {pair}: check and machine say {fine} as it is, {broken} damaged")
        if (seed - first + 1) % 1000 == 0:
            print(f"{seed - first + 1} of {count}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    record(", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    record(f"{done} programs of {ops / done:.0f} ops on average: {good} complete, deadlock-free and run to their end")
    record(f"{done} damaged copies: {refused} refused by both, {done - refused - disagreements} harmless to both")
    record(f"{disagreements} disagreements; {time.perf_counter() - began:.0f} s")
    return disagreements


# ---- overlap groups -----------------------------------------------------------------------------------------

RANKS, MICROBATCHES, SUMS = 8, 24, 0.3
BARS = {
    (4, 12): 78.3,
    (8, 24): 157.9,
    (6, 20): 130.1,
    (3, 9): 58.7,
    (2, 6): 38.5,
    (4, 8): 59.7,
    (4, 5): 40.6,
    (4, 4): 35.3,
    (4, 1): 21.8,
    (8, 8): 72.6,
    (2, 2): 16.4,
}


def agreement(record: Record, count: int, first: int) -> int:
    """The number of disagreements between checks and machine."""
    began, names, ops, wrong, done = time.perf_counter(), Counter[str](), 0, 0, 0
    refused = Counter[str]()
    for seed in range(first, first + count):
        if stopped():
            break
        done += 1
        one = braids.draw(seed, ranks=RANKS, microbatches=MICROBATCHES)
        names[one.name] += 1
        ops += one.program.size
        found = {"as drawn": verdicts(one.program, seed)}
        for change in (braids.unmarked, damaged):
            found[change.__name__] = verdicts(change(one.program, random.Random(seed)), seed)
        for name, verdict in found.items():
            refused[name] += verdict == (False, False)
        sound = one.name != "braid-v" or found["as drawn"] == (True, True)
        if not sound or any(a != b for a, b in found.values()):
            wrong += 1
            record(f"seed {seed}: {one}: check and machine say {found}")
    record(f"# up to {RANKS} ranks, {MICROBATCHES} microbatches; seeds {first} to {first + done - 1}")
    record(", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    record(f"{done} programs of {ops / max(1, done):.0f} ops on average; refused by both: {dict(refused)}")
    record(f"{wrong} disagreements; {time.perf_counter() - began:.0f} s")
    return wrong


def bars(record: Record) -> int:
    """The number of missed bars."""
    missed = 0
    record(f"chunks of F = B = W = 1, sums of {SUMS}: step of rows of p, m; zb-v as it is for comparison")
    for (p, m), bar in BARS.items():
        costs = braids.with_sums(Costs.uniform(Placement.vshape(p), 2.0, 2.0, 2.0), SUMS)
        made, plain = (SCHEDULES[name].make(Request(p, m, 2, costs=costs)) for name in ("braid-v", "zb-v"))
        timeline = simulate(made, costs)
        chunks = max(rank.units for rank in peaks(made, costs)) * 2
        missed += timeline.makespan > bar + 1e-9 or chunks > 4 * p - 1
        most, other = max(exposed(made, costs)), simulate(plain, costs).makespan
        record(
            f"p={p} m={m:2d}  step {timeline.makespan:6.1f}  bar {bar:6.1f}  zb-v {other:6.1f}"
            f"  exposed at most {most:4.1f}, {(2 * p + 1) * SUMS:.1f} by formula  {chunks:.0f} chunks of {4 * p - 1}"
        )
    return missed


def exposed(program: Program, costs: Costs) -> list[float]:
    """ms of each rank in which its ops wait for sums."""
    found = []
    for ops in program.ranks:
        inside, ms = groups(ops), 0.0
        for step, op in enumerate(ops):
            if op.kind is Kind.OVERLAP:
                pair = ops[step + 1], ops[step + 2]
                alone = [costs.duration(one) - costs.sums(one)[1] for one in pair]
                ms += max(0.0, sum(costs.sums(one)[0] for one in pair) - sum(alone))
            elif step not in inside:
                ms += costs.sums(op)[1]
        found.append(ms)
    return found


def overlap(record: Record, asked: argparse.Namespace) -> int:
    return bars(record) + agreement(record, asked.count or 5_000, asked.first)


# ---- jobs ---------------------------------------------------------------------------------------------------

LONGEST, EMULATED = 300.0, 600.0  # seconds per draw
NEAR = 0.03  # of predicted memory: what is on its way depends on when neighbours take it
LATE = 0.05  # of an emulated step


def found_of(seed: int, found: Queue[Found], emulate: bool) -> None:
    faulthandler.enable()
    sys.setswitchinterval(5e-4)  # a rank whose sleep ends does not wait long for the others
    try:
        found.put(outcome(drawn(seed), weigh=True, emulate=emulated if emulate else None))
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


def draws(seeds: Iterable[int], record: Record, every: int) -> int:
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
    return how["wrong"] + how["crashed"] + how["hangs"]


def jobs(record: Record, asked: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    return draws(asked.only or range(asked.first, asked.first + (asked.count or 200)), record, asked.emulate)


PARTS = {  # with the names of their records
    "inputs": ("fuzz", inputs),
    "orders": ("pairs", orders),
    "groups": ("braids", overlap),
    "jobs": ("drawn", jobs),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--minutes", type=float, default=10.0, help="inputs: of all kinds")
    parser.add_argument("--kind", choices=KINDS, action="append", help="inputs: only this one (repeatable)")
    parser.add_argument("--count", type=int, help="the others: how many (10000, 5000, 200)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first, of each kind")
    parser.add_argument("--only", type=int, nargs="+", default=[], help="jobs: these seeds")
    parser.add_argument("--emulate", type=int, default=0, help="jobs: emulated steps of every so many")
    parser.add_argument("--quick", action="store_true", help="writes no file")
    asked = parser.parse_args()
    name, part = PARTS[asked.part]
    record = Record(name)
    wrong = part(record, asked)
    if not (asked.quick or asked.kind):
        record.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
