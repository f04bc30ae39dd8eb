"""Steps with transfers as long as half an op and a whole one, beside what the time model says of them.

    python bench/long_links.py [--quick]

Four ranks under `zbc run --local`, sleeping layers (sleeping.py), gloo between them. A message takes what a slow link
would: the receiving end hands it over that much after gloo had it, one message of a direction at a time. gloo moves a
message once it was sent and its buffer was posted, so the links are those of `hardware.transfer = "rendezvous"`
with `costs.occupies = costs.comm`. The costs are what the layers and links sleep; nothing is measured beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from sleeping import calibrate, layers, sleep_until

from zbc.runtime.network import Network
from zbc.runtime.transport import Signal

JOB = """\
zbc = 1
[model]
family = "long_links:slow"
layers = {layers}
loss = "mse"
[model.args]
count = {layers}
f = {op}
b = {op}
w = {op}
[parallel]
pp = 4
[schedule]
kind = "{kind}"
microbatches = {m}
[hardware]
transfer = "rendezvous"
[costs]
per = "layer"
f = {op}
b = {op}
w = {op}
comm = {comm}
occupies = {comm}
[partition]
mode = "uniform"
[data]
kind = "long_links:Points"
"""
CASES = [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved-1f1b", 2), ("breadth-first", 2)]  # schedule, chunks
OP = 24.0  # ms of F, B and W of a stage
WARM_UP = 2  # first steps of a run that do not count
LINK = "LONG_LINK_MS"


class Handed(NamedTuple):
    """A message under way: set when it is handed over; what gloo said if that failed."""

    there: threading.Event
    failed: list[BaseException]


class Link:
    """One direction between two ranks. Its thread takes one message after the other."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: queue.SimpleQueue[tuple[Any, Handed]] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def post(self, work: Any) -> Handed:
        handed = Handed(threading.Event(), [])
        self._under_way.put((work, handed))
        return handed

    def _carry(self) -> None:
        while True:
            work, handed = self._under_way.get()
            try:
                work.wait()
                sleep_until(time.perf_counter() + self._seconds)
            except BaseException as error:
                handed.failed.append(error)
            handed.there.set()


class Slow:
    """A gloo work that ends when its link hands it over."""

    def __init__(self, handed: Handed) -> None:
        self._handed = handed

    def wait(self) -> None:
        self._handed.there.wait()
        if self._handed.failed:
            raise self._handed.failed[0]


def slow_links(seconds: float) -> None:
    """From now on a message between two ranks of this process takes that much longer."""
    links: dict[int, Link] = {}
    post = Network.post

    def late(self: Network, message: Any, buffer: Any, peer: int) -> None:
        post(self, message, buffer, peer)
        if not isinstance(message, Signal):
            work, *rest = self._posted[message]
            link = links.setdefault(peer, Link(seconds)) if peer not in links else links[peer]
            self._posted[message] = (Slow(link.post(work)), *rest)

    Network.post = late


def slow(count: int, f: float, b: float, w: float) -> list[Any]:
    """Sleeping layers, in a process whose links are slow."""
    return layers(count, f, b, w)


if LINK in os.environ:  # in the ranks; the other process only plans
    calibrate()
    slow_links(float(os.environ[LINK]) / 1e3)


def run_case(folder: Path, kind: str, chunks: int, m: int, share: float, steps: int) -> tuple[float, list[float]]:
    """What a step was to take and what steps took, ms."""
    comm = share * OP
    (folder / "job.toml").write_text(JOB.format(kind=kind, layers=4 * chunks, m=m, op=OP, comm=comm))
    here = Path(__file__).parent
    path = f"{here.parent}:{here}"
    told = json.loads(zbc(folder, {"PYTHONPATH": path}, "plan", "job.toml", "-o", "plan", "--json"))
    out = folder / f"run-{kind}-{share}"
    words = ("run", "plan", "--local", "4", "--steps", str(steps + WARM_UP), "--out", str(out))
    zbc(folder, {"PYTHONPATH": path, LINK: str(comm)}, *words)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return told["makespan_ms"], [row["step_ms"] for row in rows if "step_ms" in row][WARM_UP:]


def zbc(folder: Path, more: dict[str, str], *words: str) -> str:
    """A command of zbc in a folder; what it printed."""
    command, environment = [sys.executable, "-m", "zbc", *words], {**os.environ, **more}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    from record import Record

    parser = argparse.ArgumentParser(description="Steps with long transfers, beside predicted ones.")
    parser.add_argument("--quick", action="store_true", help="a step or two of each; writes no file")
    options = parser.parse_args()
    steps = 2 if options.quick else 9
    record, errors = Record("long-links"), []
    record("schedule           transfer/op  predicted  measured ms     off   quartiles")
    with tempfile.TemporaryDirectory() as name:
        for kind, chunks in CASES:
            for share in (0.5, 1.0):
                told, times = run_case(Path(name), kind, chunks, 8, share, steps)
                low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
                errors.append(told / middle - 1)
                record(f"{kind:18} {share:11} {told:10.1f} {middle:12.1f} {errors[-1]:+7.1%}   {low:.1f} to {high:.1f}")
    record(f"# off by {statistics.median(map(abs, errors)):.1%} at the median, {max(map(abs, errors)):.1%} at most")
    record()
    record("# the job:")
    record(JOB.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
