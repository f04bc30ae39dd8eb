"""Steps of plans whose activations go to the host and back, beside what the time model says of them.

    python bench/offload_run.py [--quick]

Four ranks under `zbc run --local`, sleeping layers (sleeping.py), gloo between them. A copy takes 0.8 of an op: the
thread that copies sleeps that long. The costs are what the layers and copies sleep, and what `zbc profile` says that
the runtime and the link add. The hidden share is that of copies that nobody waits for (`zbc report`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sleeping import calibrate, layers, sleep_until
from slices_run import added

from zbc.runtime.features import copying

JOB = """\
zbc = 1
[model]
family = "offload_run:copied"
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
memory_limit = "{limit}"
[memory]
activations = "offload"
[costs]
per = "layer"
f = {f}
b = {b}
w = {w}
comm = {comm}
offload = {copy}
act_b = 1.0
act_w = 0.4
[partition]
mode = "uniform"
[data]
kind = "sleeping:Points"
args = {{width = 64}}
"""
CASES = (("1f1b", 1, "0.6x"), ("zb-h1", 1, "0.75x"), ("gis", 2, "0.5x"), ("zb-v", 2, "0.6x"))
OP, SHARE, WARM_UP, COPY = 40.0, 0.8, 2, "OFFLOAD_RUN_COPY"


def copied(count: int, f: float, b: float, w: float) -> list[Any]:
    """Sleeping layers, in a process whose copies sleep."""
    return layers(count, f, b, w)


def _sleep(*_: object) -> None:
    sleep_until(time.perf_counter() + float(os.environ[COPY]) / 1e3)


if COPY in os.environ:  # in the ranks; the other process only plans
    calibrate()
    copying.copy_out = copying.copy_back = _sleep


def run_case(
    folder: Path, case: tuple[str, int, str], more: dict[str, float], steps: int
) -> tuple[Any, list[float], Any]:
    """The plan, ms of steps, and the report of a recorded one."""
    from long_links import zbc

    kind, chunks, limit = case
    copy = SHARE * OP
    costs = {name: OP + ms for name, ms in more.items() if name != "comm"} | {"comm": more["comm"]}
    job = JOB.format(kind=kind, layers=4 * chunks, m=8, op=OP, limit=limit, copy=copy * chunks, **costs)
    (folder / "job.toml").write_text(job)
    here = Path(__file__).parent
    path = {"PYTHONPATH": f"{here.parent}:{here}"}
    chunked = ["--set", f"schedule.chunks={chunks}"] if chunks > 1 else []
    told = json.loads(zbc(folder, path, "plan", "job.toml", *chunked, "-o", "plan", "--json"))
    out = folder / f"run-{kind}"
    words = ("run", "plan", "--local", "4", "--steps", str(steps + WARM_UP + 1), "--trace", str(steps + WARM_UP))
    zbc(folder, {**path, COPY: str(copy)}, *words, "--out", str(out))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    report = json.loads(zbc(folder, path, "report", str(out), "--json"))
    return told, [row["step_ms"] for row in rows if "step_ms" in row][WARM_UP : WARM_UP + steps], report


def main() -> None:
    from record import Record

    parser = argparse.ArgumentParser(description="Steps with copies to the host, beside predicted ones.")
    parser.add_argument("--quick", action="store_true", help="a step or two of one; writes no file")
    options = parser.parse_args()
    record = Record("offload-run")
    with tempfile.TemporaryDirectory() as name:
        more = added(Path(name))
        record("# added to an op, ms: " + ", ".join(f"{key} {ms:.3f}" for key, ms in more.items()))
        record("schedule limit   moved  predicted  measured ms     off   copies hidden, predicted and measured")
        errors = []
        for case in CASES[: 1 if options.quick else None]:
            told, times, report = run_case(Path(name), case, more, 2 if options.quick else 7)
            middle = statistics.median(times)
            errors.append(told["barrier_ms"] / middle - 1)
            both = [[one[f"{side}_hidden"] for one in report["copies"]] for side in ("predicted", "measured")]
            hidden = " ".join(f"{min(each):.0%}" for each in both)
            record(
                f"{case[0]:8} {case[2]:5} {told['copied']['moved']:7.0%} {told['barrier_ms']:10.1f} {middle:12.1f} "
                f"{errors[-1]:+7.1%}   of the rank that waits most: {hidden}"
            )
    record(f"# off by {max(map(abs, errors)):.1%} at most")
    record()
    record(JOB.rstrip())
    if not options.quick:
        record.write()


if __name__ == "__main__":
    sys.exit(main())
