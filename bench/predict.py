"""Steps and memory predicted from a profile of this machine, compared with measured ones.

    python bench/predict.py [--quick] [--model sleeping|gpt|pipes|ahead ...]

`zbc profile` measures once for each model; every plan is made with that file and run by `zbc run --local`. Emulated
layers sleep (sleeping.py), of two lengths; the GPT is real, on two ranks with one thread each. The predicted step is in
steady state with its optimizer, the measured one the median of a run without its first steps; `ahead` are steps without
a barrier, whose period is predicted. Memory is measured in the same run, in a later step (`zbc report`); its error is
that of the worst rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ranks import logged, zbc
from record import Record

from zbc.compiler.recorded.report import build
from zbc.trace import recording as trace

SLEEPING = """\
zbc = 1
[model]
family = "sleeping:uneven"
layers = 8
loss = "mse"
[model.args]
count = 8
f = 8.0
b = 9.0
w = 7.0
width = 4096
[parallel]
pp = {pp}
[schedule]
kind = "{kind}"
microbatches = {m}
[data]
kind = "sleeping:Points"
args = {{width = 4096}}
"""
GPT = """\
zbc = 1
[model]
layers = 8
hidden = 256
heads = 4
vocab = 2048
seq_len = 128
[parallel]
pp = {pp}
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = 2
[data]
kind = "synthetic"
"""
AHEAD = f"""\
{SLEEPING}[optimizer]
sync = "post-validate"
"""
JOBS = {"sleeping": SLEEPING, "gpt": GPT, "pipes": SLEEPING, "ahead": AHEAD}
CASES = {  # schedule, ranks, microbatches
    "sleeping": [
        ("1f1b", 2, 4),
        ("zb-h1", 2, 8),
        ("zb-v", 2, 4),
        ("gpipe", 2, 4),
        ("1f1b", 4, 8),
        ("zb-h1", 4, 4),
        ("zb-v", 4, 8),
        ("interleaved-1f1b", 4, 8),
    ],
    "gpt": [("1f1b", 2, 4), ("zb-h1", 2, 8), ("zb-v", 2, 4), ("gpipe", 2, 8)],
    # on request
    "pipes": [("bitpipe", 4, 8), ("chimera", 4, 8), ("dualpipe-v", 4, 8), ("bitpipe-zb", 4, 8)],
    "ahead": [("zb-v", 4, 8), ("zb-h2", 4, 8), ("zb-h1", 2, 8), ("1f1b", 4, 8)],
}
QUICK = {
    "sleeping": CASES["sleeping"][4:6],
    "gpt": CASES["gpt"][:1],
    "pipes": CASES["pipes"][:1],
    "ahead": CASES["ahead"][:1],
}
WARM_UP = 3  # first steps of a run, which do not count
CATEGORIES = ("weights", "gradients", "masters", "optimizer", "activations", "buffers")


class Outcome(NamedTuple):
    """The result of a case: ms of a step, and per category the error of the worst rank's memory, as a share."""

    predicted: float
    measured: float
    low: float
    high: float
    memory: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def profiled(folder: Path, model: str, rounds: int) -> tuple[Path, str]:
    """Profiles a model; returns the file, and the output of the command."""
    job = folder / f"{model}.toml"
    job.write_text(JOBS[model].format(kind="1f1b", pp=2, m=4))
    target = folder / f"{model}.json"
    return target, zbc(folder, "profile", str(job), "-o", str(target), "--rounds", str(rounds))


def run_case(folder: Path, model: str, profile: Path, case: tuple[str, int, int], steps: int) -> Outcome:
    kind, pp, m = case
    job = folder / "job.toml"
    job.write_text(JOBS[model].format(kind=kind, pp=pp, m=m))
    told = json.loads(zbc(folder, "plan", str(job), "--profile", str(profile), "-o", "plan", "--json"))
    out = folder / f"run-{model}-{kind}-{pp}-{m}"
    last = steps + WARM_UP  # then one step is recorded, and memory measured in one
    options = ["--local", str(pp), "--steps", str(last + 2), "--trace", str(last + 1), "--out", str(out)]
    zbc(folder, "run", "plan", *options)
    times = logged(out, "step_ms")[WARM_UP:last]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    predicted = told["steady_state_ms" if model == "ahead" else "barrier_ms"]
    return Outcome(predicted, middle, low, high, dict(memory(out)))


def memory(out: Path) -> Iterator[tuple[str, float]]:
    """The error of each category on the worst rank of a run, from `zbc report`."""
    compared = build(trace.read(out), again=False).memory
    ranks = [(one.predicted or {}, one.measured) for one in compared]
    yield "all", worst([(one.predicted_peak or 0, one.peak) for one in compared])
    for name in CATEGORIES:
        yield name, worst([(told[name], found[name]) for told, found in ranks])


def worst(pairs: Sequence[tuple[float, float]]) -> float:
    """The largest relative error of the first number against the second."""
    return max(((a - b) / b if b else float(a > 0) for a, b in pairs), key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted from a profile, beside measured.")
    parser.add_argument("--quick", action="store_true", help="a few cases; writes no file")
    parser.add_argument("--model", choices=JOBS, action="append", help="only this one (repeatable)")
    parser.add_argument("--steps", type=int, default=9, help="steps of a run that count")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the profile")
    options = parser.parse_args()
    record = Record("-".join(("predict", *(options.model or ()))))
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for model in options.model or ("sleeping", "gpt"):
            cases = (QUICK if options.quick else CASES)[model]
            errors[model] = measure(record, Path(name), model, cases, options.steps, options.rounds)
    for model, found in errors.items():
        record(f"# {model}: step off by {statistics.median(found):.1%} at the median, {max(found):.1%} at most")
    for model in errors:
        record()
        record(f"# the job of {model}")
        record(JOBS[model].rstrip())
    if not options.quick:
        record.write()


def measure(
    record: Record, folder: Path, model: str, cases: Sequence[tuple[str, int, int]], steps: int, rounds: int
) -> list[float]:
    """Runs all cases of a model; returns the errors of the steps, as shares."""
    profile, said = profiled(folder, model, rounds)
    record(f"# {model}: the profile")
    for line in said.splitlines()[:-2]:  # without the names of files
        record(f"#   {line}")
    record(
        f"{'model':9} {'schedule':16} {'p':>2} {'m':>3} {'predicted':>10} {'measured ms':>12} {'off':>6}   quartiles"
    )
    found = []
    for kind, pp, m in cases:
        one = run_case(folder, model, profile, (kind, pp, m), steps)
        found.append(abs(one.error))
        record(
            f"{model:9} {kind:16} {pp:2} {m:3} {one.predicted:10.1f} {one.measured:12.1f} {one.error:+6.1%}   "
            f"{one.low:.1f} to {one.high:.1f}"
        )
        wrong = ", ".join(f"{name} {value:+.1%}" for name, value in one.memory.items())
        record(f"{'':9} # memory: {wrong}")
    return found


if __name__ == "__main__":
    main()
