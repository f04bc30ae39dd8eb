"""Kill a random rank of a run again and again, and see whether the run ends as if nobody had.

    python bench/kills.py [--kills N] [--steps N] [--seed N] [--quick]

A run on four gloo processes with a checkpoint every few steps and `max_restarts`; ranks are killed with SIGKILL. In one
run at random moments, whatever it is doing then: a step, a checkpoint, a start. In another while a checkpoint is being
written: its folder is there, and its `.complete` never came (other kills do not count). In the end the losses of all
steps are compared with those of a run that nobody disturbed, and so is every byte of the last checkpoint: weights,
optimizer, everything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.process
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from record import Record

from zbc.compiler.compile import compile_job, load_job
from zbc.runtime import launch

RANKS = 4
JOB = """\
zbc = 1
[model]
layers = 6
hidden = 64
heads = 4
vocab = 256
seq_len = 32
[parallel]
pp = 4
[schedule]
kind = "zb-h1"
microbatches = 8
microbatch_size = 2
[optimizer]
lr = 1e-3
clip_grad_norm = 1.0
[data]
kind = "synthetic"
[train]
steps = {steps}
watchdog_s = 20.0
[checkpoint]
every = {every}
[log]
every = 1000
"""


@dataclass
class Killer:
    """A thread that kills ranks of a run of this process, one after the other."""

    out: Path
    wanted: int
    random: random.Random
    tell: Callable[[str], None]
    done: int = 0
    missed: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def at_random_moments(self, steps: int) -> None:
        """Kill a rank at moments spread over all steps, each somewhere in a step, and some while ranks start again."""
        moments = sorted(self.random.uniform(0, steps - 1) for _ in range(self.wanted))
        while moments and not self.over.wait(0.002):
            if _steps(self.out) < int(moments[0]):
                continue
            if self.over.wait(moments.pop(0) % 1 * 0.2):
                return
            self._kill(f"step {_steps(self.out) + 1}")
            if moments and self.random.random() < 0.25:
                moments.pop(0)
                if self._others_started() and not self.over.wait(self.random.uniform(0.0, 1.0)):
                    self._kill("while it starts again")

    def while_writing(self) -> None:
        """Kill a rank when there is a folder of a checkpoint that is not complete; some folders are left alone."""
        seen: set[str] = set()
        while self.done < self.wanted and not self.over.wait(0.001):
            for name in sorted(_checkpoints(self.out) - seen):
                seen.add(name)
                if self.random.random() < 0.5 and not self.over.wait(self.random.uniform(0.0, 0.01)):
                    if _complete(self.out, name):
                        self.missed += 1
                    else:
                        seen.discard(name)
                        self._kill(f"{name} was being written", lambda name=name: not _complete(self.out, name))
                        self._others_started()

    def _kill(self, when: str, counts: Callable[[], bool] = lambda: True) -> None:
        rank, pid = self.random.choice(sorted(_ranks().items()))
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # for the others to be gone too
        if counts():
            self.done += 1
            self.tell(f"kill {self.done}: {rank}, {when}")
        else:
            self.missed += 1

    def _others_started(self) -> bool:
        """Wait until other processes are the ranks; whether that came to be."""
        before = set(_ranks().values())
        while not self.over.wait(0.002):
            now = _ranks()
            if len(now) == RANKS and before.isdisjoint(now.values()):
                return True
        return False


def _ranks() -> dict[str, int]:
    """The processes of the ranks that `zbc run --local` has started here."""
    children = list(multiprocessing.process._children)  # type: ignore[attr-defined]
    return {child.name: child.pid for child in children if child.name.startswith("rank ")}


def _checkpoints(out: Path) -> set[str]:
    folder = out / "checkpoints"
    return {entry.name for entry in folder.glob("step-*")}


def _complete(out: Path, name: str) -> bool:
    return (out / "checkpoints" / name / ".complete").exists()


def _steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# ---- runs ----------------------------------------------------------------------------------------------------


def run(plan: Path, out: Path, restarts: int) -> tuple[list[str], float]:
    """Train; what was shown, and the seconds it took."""
    lines: list[str] = []
    began = time.perf_counter()
    launch.run(plan, local=RANKS, out=out, max_restarts=restarts, emit=lines.append)
    return lines, time.perf_counter() - began


def result(out: Path) -> tuple[list[tuple[int, float]], dict[str, str]]:
    """The loss of every step, and the sha256 of every file of the last checkpoint."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    newest = max(name for name in _checkpoints(out) if _complete(out, name))
    files = sorted((out / "checkpoints" / newest).glob("*.safetensors"))
    return [(row["step"], row["loss"]) for row in rows], {f.name: sha256(f.read_bytes()).hexdigest() for f in files}


def disturbed(record: Record, plan: Path, out: Path, kills: int, seed: int, steps: int | None) -> int:
    """A run with kills, over so many steps, or while checkpoints are written if that is None; how many came to it."""
    killer = Killer(out, kills, random.Random(seed), record)
    thread = threading.Thread(target=killer.while_writing if steps is None else lambda: killer.at_random_moments(steps))
    thread.start()
    try:
        lines, seconds = run(plan, out, restarts=3 * kills)
    finally:
        killer.over.set()
        thread.join()
    restarts = sum(line.startswith("restart ") for line in lines)
    late = f" ({killer.missed} more came, or would have come, when it was complete)" if killer.missed else ""
    record(f"{killer.done} kills{late}; {restarts} restarts, {seconds:.1f} s")
    return killer.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="3 kills in 40 steps, and no record")
    args = parser.parse_args()
    kills, steps = (3, 40) if args.quick else (args.kills, args.steps)
    record, fine = Record("kills"), True
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        job = JOB.format(steps=steps, every=max(2, steps // 40))
        record("\n".join(f"    {line}" for line in job.splitlines()))
        (place / "job.toml").write_text(job)
        plan = place / "plan"
        compile_job(load_job(place / "job.toml")).write(plan)
        _, whole = run(plan, place / "whole", restarts=0)
        expected = result(place / "whole")
        record(f"undisturbed: {steps} steps in {whole:.1f} s")
        for what, over in (("at random moments", steps), ("while a checkpoint is written", None)):
            record(f"\n{what}")
            out = place / what.replace(" ", "-")
            done = disturbed(record, plan, out, kills, args.seed, over)
            found = result(out)
            same = [a == b for a, b in zip(found, expected, strict=True)]
            record(f"losses of all steps the same: {same[0]}; last checkpoint bit for bit the same: {same[1]}")
            fine = fine and all(same) and done == kills
    record(f"\n{'all as if undisturbed' if fine else 'NOT AS IT SHOULD BE'}")
    if not args.quick:
        record.write()
    if not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()
