"""How much of their idle time ranks spend in a filler, and how much longer steps take by it.

Ops and the filler's steps sleep, so ranks do not compete for cores; four processes over gloo. With the filler and
without it take turns, and each pair of runs gives a ratio.

    python bench/filler.py [--quick]
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from bench.sleeping import sleep_until
from tests.processes.plans import compiled, metrics

QUICK = "--quick" in sys.argv
MS = 20.0  # of F, B and W of a rank
PAIRS, STEPS = (1, 6) if QUICK else (2, 6)
FILLED = re.compile(r"(\d+) steps in ([\d.]+) s, \d+% of ([\d.]+) s of waits")
LEFT_OUT = 2  # the first steps of a run: the filler measures in one


class Sleeping:
    """A task whose steps sleep."""

    def __init__(self, ms: float) -> None:
        self.seconds = ms / 1e3

    def step(self) -> None:
        sleep_until(time.perf_counter() + self.seconds)


def make(rank: int, ranks: int, ms: float) -> Sleeping:
    """The factory that a job names."""
    return Sleeping(ms)


def run(plan: Path, out: Path) -> tuple[float, float, float]:
    """ms of a step at the median; seconds that all ranks spent in their fillers, and waiting."""
    command = [sys.executable, "-m", "zbc", "run", str(plan), "--local", "4", "--out", str(out)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = [tuple(map(float, match)) for match in FILLED.findall(said)]
    steps = [row["step_ms"] for row in metrics(out)][LEFT_OUT:]
    return statistics.median(steps), sum(one[1] for one in found), sum(one[2] for one in found)


def main() -> None:
    record = Record("filler")
    model = {"family": "bench.sleeping:layers", "loss": "mse", "layers": 8}
    record(f"4 ranks, 8 microbatches, F = B = W = {MS:g} ms by sleeping; {PAIRS} pairs of runs of {STEPS} steps")
    record(f"{'schedule':<10}{'filler ms':>10}{'idle, predicted':>17}{'of waits':>10}{'of idle':>9}{'step':>9}")
    for schedule, ms in (("1f1b", 0.5), ("1f1b", 3.0), ("zb-v", 0.5)):
        layers = {"count": 8, "f": MS / 2, "b": MS / 2, "w": MS / 2}
        job = {
            "model": {**model, "args": layers},
            "data": {"kind": "bench.sleeping:Points"},
            "schedule": {"kind": schedule, "microbatches": 8, "microbatch_size": 1},
            "costs": {"f": MS, "b": MS, "w": MS},
            "train": {"steps": STEPS},
        }
        ratios, shares, of_idle = [], [], []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            plain = compiled(folder, **job)
            plain.write(folder / "plain")
            filler = {"task": "bench.filler:make", "args": {"ms": ms}}
            compiled(folder, **job, filler=filler).write(folder / "filled")
            idle = plain.report.idle_rate * plain.report.makespan_ms * 4 / 1e3
            for pair in range(PAIRS):
                base, *_ = run(folder / "plain", folder / f"p{pair}")
                took, spent, waited = run(folder / "filled", folder / f"f{pair}")
                ratios.append(took / base)
                shares.append(spent / waited)
                of_idle.append(spent / (idle * (STEPS - 1)))
        told = [statistics.median(values) for values in (shares, of_idle, ratios)]
        head = f"{schedule:<10}{ms:>10g}{100 * plain.report.idle_rate:>16.1f}%"
        record(f"{head}{100 * told[0]:>9.0f}%{100 * told[1]:>8.0f}%{100 * (told[2] - 1):>+8.1f}%")
    record(
        "of idle: seconds in the filler over the predicted idle time of all steps but the first, which only measures"
    )
    if record.keeps:
        record.write()


if __name__ == "__main__":
    main()
