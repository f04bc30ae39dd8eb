"""Kills random ranks of a run repeatedly, and checks that the run ends as an undisturbed one.

    python bench/kills.py [--torchrun] [--shard WHAT [--one-sided]] [--balance] [--kills N] [--steps N] [--seed N]
        [--quick]

A run on four gloo processes with a checkpoint every few steps and restarts, by `zbc run --local 4 --max-restarts` or by
`torchrun --max-restarts`; ranks are killed with SIGKILL. In one run at random moments: during a step, a checkpoint or a
start. In another while a checkpoint is being written: its folder exists, and its `.complete` never came (other kills do
not count). In the end the losses of all steps, and every byte of the last checkpoint, are compared with those of an
undisturbed run. With --shard two pipelines of two ranks are sharded accordingly, with two stages on each rank; with
--one-sided they read weights from each other's memory; with --balance samples are of unequal length.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing.process
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from record import Record

from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.training.launch import launch
from zbc.training.launch.launch import RunOptions

RANKS = 4
JOB = """\
[model]
layers = 6
hidden = 64
heads = 4
vocab = 256
seq_len = 32
{parallel}
[optimizer]
lr = 1e-3
clip_grad_norm = 1.0
[data]
kind = "synthetic"{balance}
[train]
steps = {steps}
watchdog_s = 20.0
[checkpoint]
every = {every}
[log]
every = 1000
"""


ONE = """\
[parallel]
pp = 4
[schedule]
kind = "zb-h1"
microbatches = 8
microbatch_size = 2"""
TWO = """\
[parallel]
pp = 2
dp = 2
shard = "{shard}"{exchange}
[schedule]
kind = "{kind}"
chunks = 2
microbatches = 4
microbatch_size = 2{resident}"""
KINDS = {"none": "interleaved-1f1b", "optimizer": "interleaved-1f1b", "gradients": "interleaved-1f1b"}


def job_of(steps: int, shard: str | None, balance: bool, one_sided: bool) -> str:
    """The job to disturb; sharded weights are unsharded for one stage at a time."""
    parallel = ONE
    if shard is not None or balance:
        kind = KINDS["none"] if one_sided else KINDS.get(shard or "none", "breadth-first")
        exchange = '\nexchange = "one-sided"' if one_sided else ""
        resident = "\n[memory]\nresident = 1" if shard in ("weights", "all") else ""
        parallel = TWO.format(shard=shard or "none", exchange=exchange, kind=kind, resident=resident)
    told = '\nbalance = "length"' if balance else ""
    return JOB.format(steps=steps, every=max(2, steps // 40), parallel=parallel, balance=told)


class Launcher(Protocol):
    """Starts and restarts the ranks of a run."""

    def train(self, plan: Path, out: Path, restarts: int) -> int:
        """Trains to the end; returns how often ranks were started."""

    def ranks(self) -> dict[str, int]:
        """Name -> process id of the ranks that run now."""


class Local:
    """`zbc run --local 4 --max-restarts`, in this process."""

    def train(self, plan: Path, out: Path, restarts: int) -> int:
        lines: list[str] = []
        launch.run(RunOptions(plan, local=RANKS, out=out, max_restarts=restarts), lines.append)
        return 1 + sum(line.startswith("restart ") for line in lines)

    def ranks(self) -> dict[str, int]:
        children = list(multiprocessing.process._children)  # type: ignore[attr-defined]
        return {child.name: child.pid for child in children if child.name.startswith("rank ")}


class Torchrun:
    """`torchrun --max-restarts`, whose children are the ranks."""

    def __init__(self) -> None:
        self._agent: int | None = None

    def train(self, plan: Path, out: Path, restarts: int) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", str(restarts), "-m", "zbc", "run", str(plan), "-o", str(out)]
        log = out.with_suffix(".log")
        told = {**os.environ, "LOGLEVEL": "INFO"}  # torchrun says when it starts ranks again
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=told) as agent:
            self._agent = agent.pid
            try:
                code = agent.wait()
            finally:
                self._agent = None
                agent.terminate()
        if code:
            sys.exit(f"torchrun ended with {code}:\n{log.read_text()[-4000:]}")
        return 1 + log.read_text().count("will restart worker group")

    def ranks(self) -> dict[str, int]:
        agent, found = self._agent, {}
        try:
            pids = [] if agent is None else Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        except OSError:
            return {}
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            found |= {f"rank {word[5:].decode()}": int(pid) for word in words if word.startswith(b"RANK=")}
        return found


@dataclass
class Killer:
    """A thread that kills ranks of a run, one after the other."""

    launcher: Launcher
    out: Path
    wanted: int
    random: random.Random
    tell: Callable[[str], None]
    done: int = 0
    missed: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def at_random_moments(self, steps: int) -> None:
        """Kills ranks at moments spread over all steps, each at a random point of a step, and some during restarts."""
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
        """Kills a rank when the folder of an incomplete checkpoint changes; some folders are left alone."""
        known: dict[str, int] = {}  # time of the last change of each; leftovers of killed attempts do not change
        alone: set[str] = set()
        while self.done < self.wanted and not self.over.wait(0.001):
            changed = _changes(self.out)
            for name in sorted(changed.keys() - alone):
                if changed[name] == known.get(name):
                    continue
                known[name] = changed[name]
                if self.random.random() < 0.5 or self.over.wait(self.random.uniform(0.0, 0.01)):
                    alone.add(name)
                elif _complete(self.out, name):
                    self.missed += 1
                    alone.add(name)
                elif self._kill(f"{name} was being written", lambda name=name: not _complete(self.out, name)):
                    self._others_started()
                    known |= _changes(self.out)

    def _kill(self, when: str, counts: Callable[[], bool] = lambda: True) -> bool:
        """Kills a random rank; returns whether there was one."""
        ranks = sorted(self.launcher.ranks().items())
        if not ranks:  # they are starting, or have ended
            return False
        rank, pid = self.random.choice(ranks)
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # for the others to end, too
        if counts():
            self.done += 1
            self.tell(f"kill {self.done}: {rank}, {when}")
        else:
            self.missed += 1
        return True

    def _others_started(self) -> bool:
        """Waits until all ranks are new processes; returns whether that happened."""
        before = set(self.launcher.ranks().values())
        while not self.over.wait(0.002):
            now = self.launcher.ranks()
            if len(now) == RANKS and before.isdisjoint(now.values()):
                return True
        return False


def _checkpoints(out: Path) -> set[str]:
    folder = out / "checkpoints"
    return {entry.name for entry in folder.glob("step-*")}


def _changes(out: Path) -> dict[str, int]:
    """The time of the last change of each checkpoint's folder: a file in it was created or renamed."""
    found = {}
    for name in _checkpoints(out):
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            found[name] = (out / "checkpoints" / name).stat().st_mtime_ns
    return found


def _complete(out: Path, name: str) -> bool:
    return (out / "checkpoints" / name / ".complete").exists()


def _steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# ---- runs ----------------------------------------------------------------------------------------------------


def result(out: Path) -> tuple[list[tuple[int, float]], dict[str, str]]:
    """The loss of every step, and the sha256 of every file of the last checkpoint."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    newest = max(name for name in _checkpoints(out) if _complete(out, name))
    files = sorted((out / "checkpoints" / newest).glob("*.safetensors"))
    return [(row["step"], row["loss"]) for row in rows], {f.name: sha256(f.read_bytes()).hexdigest() for f in files}


def disturbed(
    record: Record, launcher: Launcher, plan: Path, out: Path, kills: int, seed: int, steps: int | None
) -> int:
    """A run with kills, over `steps` steps, or while checkpoints are written if that is None; returns their number."""
    killer, began = Killer(launcher, out, kills, random.Random(seed), record), time.perf_counter()
    thread = threading.Thread(target=killer.while_writing if steps is None else lambda: killer.at_random_moments(steps))
    thread.start()
    try:
        starts = launcher.train(plan, out, restarts=3 * kills)
    finally:
        killer.over.set()
        thread.join()
    late = f" ({killer.missed} more came, or would have come, when it was complete)" if killer.missed else ""
    record(f"{killer.done} kills{late}; {starts - 1} restarts, {time.perf_counter() - began:.1f} s")
    return killer.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", action="store_true", help="torchrun starts the ranks, and starts them again")
    parser.add_argument("--shard", choices=("optimizer", "gradients", "weights", "all"))
    parser.add_argument("--one-sided", action="store_true", help="with --shard weights or all")
    parser.add_argument("--balance", action="store_true", help="samples of unequal length")
    parser.add_argument("--quick", action="store_true", help="3 kills in 40 steps, and no record")
    args = parser.parse_args()
    kills, steps = (3, 40) if args.quick else (args.kills, args.steps)
    launcher: Launcher = Torchrun() if args.torchrun else Local()
    how = (
        ["torchrun"] * args.torchrun + [args.shard or ""] + ["one-sided"] * args.one_sided + ["balance"] * args.balance
    )
    record, fine = Record("-".join(["kills", *filter(None, how)])), True
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        job = job_of(steps, args.shard, args.balance, args.one_sided)
        record("\n".join(f"    {line}" for line in job.splitlines()))
        (place / "job.toml").write_text(job)
        plan = place / "plan"
        compile_job(load_job(place / "job.toml")).write(plan)
        began = time.perf_counter()
        launcher.train(plan, place / "whole", restarts=0)
        expected = result(place / "whole")
        record(f"undisturbed: {steps} steps in {time.perf_counter() - began:.1f} s")
        for what, over in (("at random moments", steps), ("while a checkpoint is written", None)):
            record(f"\n{what}")
            out = place / what.replace(" ", "-")
            done = disturbed(record, launcher, plan, out, kills, args.seed, over)
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
