"""Steps of runs whose ops take random times, beside the distribution that `zbc simulate --jitter` predicts.

    python bench/jitter.py [--quick] [--steps N]

Four gloo ranks, a layer on each. Layers sleep, in every second step each op for its time by a factor of its own, drawn
as noise.py draws it (sleeping.py). The plan is made with a profile. Steps under noise count as multiples of the median
of the steps without it between them, simulated ones as multiples of the prediction; both with the end of a step. The
last column is what the machine does by itself: below that lie 95% of the steps without noise. Where it is far from 1
something else ran, and the tail of the steps under noise is that one's, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

from predict import steps_of, zbc
from record import Record

JOB = """\
zbc = 1
[model]
family = "sleeping:noisy"
layers = 4
loss = "mse"
[model.args]
count = 4
f = 5.0
b = 6.0
w = 4.0
[parallel]
pp = 4
[schedule]
kind = "{kind}"
microbatches = {m}
[data]
kind = "sleeping:Points"
"""
CASES = [  # schedule, microbatches, noise
    ("1f1b", 8, 0.1),
    ("1f1b", 8, 0.3),
    ("zb-h1", 8, 0.1),
    ("zb-h1", 8, 0.3),
    ("gpipe", 4, 0.3),
]
SHARES = (0.05, 0.5, 0.95)
WARM_UP = 4  # steps, an even number


class Steps(NamedTuple):
    """Of some steps: their quantiles at `SHARES`, their mean, and the standard error of that."""

    quantiles: tuple[float, ...]
    mean: float
    error: float

    @classmethod
    def of(cls, steps: list[float]) -> Steps:
        ordered = sorted(steps)
        found = tuple(ordered[round(share * (len(ordered) - 1))] for share in SHARES)
        return cls(found, statistics.fmean(steps), statistics.stdev(steps) / len(steps) ** 0.5)


def run(folder: Path, steps: int, jitter: float, m: int) -> tuple[list[float], list[float]]:
    """ms of steps of the plan in a folder, without noise and with it."""
    out = folder / f"run-{jitter}"
    os.environ["SLEEPING_JITTER"] = f"{jitter} {m}"
    try:
        zbc(folder, "run", "plan", "--local", "4", "--steps", str(2 * steps + WARM_UP), "--out", str(out))
    finally:
        del os.environ["SLEEPING_JITTER"]
    found = steps_of(out)[WARM_UP:]
    shutil.rmtree(out)
    return found[::2], found[1::2]


def once(folder: Path, case: tuple[str, int, float], steps: int) -> str:
    """The line of a case."""
    kind, m, jitter = case
    (folder / "job.toml").write_text(JOB.format(kind=kind, m=m))
    told = json.loads(zbc(folder, "plan", "job.toml", "--profile", "profile.json", "-o", "plan", "--json"))
    quiet, noisy = run(folder, steps, jitter, m)
    base = statistics.median(quiet)
    found = Steps.of([ms / base for ms in noisy])
    predicted, rest = told["barrier_ms"], told["barrier_ms"] - told["makespan_ms"]
    noise = ["--jitter", f"{100 * jitter:g}%", "--trials", "1000", "--json"]
    simulated = json.loads(zbc(folder, "simulate", "plan", *noise))["steps_ms"]
    meant = Steps.of([(ms + rest) / predicted for ms in simulated])
    pairs = [*zip(meant.quantiles, found.quantiles, strict=True), (meant.mean, found.mean)]
    cells = "  ".join(f"{a:5.3f} {b:5.3f} {b / a - 1:+6.1%}" for a, b in pairs)
    alone = Steps.of([ms / base for ms in quiet]).quantiles[-1]
    return f"{kind:6} {m:2} {jitter:4.0%} {predicted:9.1f} {base:8.1f}  {cells}  +-{found.error:.3f}  {alone:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs with random op times beside zbc simulate --jitter.")
    parser.add_argument("--quick", action="store_true", help="two cases of few steps; writes no file")
    parser.add_argument("--steps", type=int, default=110, help="steps under noise, and as many without between them")
    options = parser.parse_args()
    steps = 30 if options.quick else options.steps
    record = Record("jitter")
    record(f"# {steps} steps with noise and {steps} without, in turns; simulated, measured, change; standard error")
    names = "  ".join(f"{name:^18}" for name in ("5% below", "median", "95% below", "mean"))
    record(f"{'':6} {'m':>2} {'sd':>4} {'predicted':>9} {'quiet ms':>8}  {names}  {'error':>7}  machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.format(kind="zb-h1", m=8))
        zbc(folder, "profile", "job.toml", "-o", "profile.json", "--rounds", "5" if options.quick else "15")
        for case in CASES[1:4:2] if options.quick else CASES:
            record(once(folder, case, steps))
    record()
    record(JOB.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    main()
