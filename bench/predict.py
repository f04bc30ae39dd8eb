"""Predicted beside measured on this machine: `python bench/predict.py steps | memory [--quick]`.

steps    steps and memory of runs by `zbc run --local`, planned with a profile that `zbc profile` measures once for each
         model. Emulated layers sleep (sleeping.py), of two lengths; the GPT is real, on two ranks with one thread each.
         The predicted step is in steady state with its optimizer, the measured one the median of a run without its
         first steps; `ahead` are steps without a barrier, whose period is predicted. Memory is measured in the same
         run, in a later step (`zbc report`); its error is that of the worst rank.

memory   bytes per rank by category, with ranks as threads (training/recording/measure.py), in two steps in which each
         op takes a fixed multiple of its time in the step before (`Pace`): inspecting tensors slows small ops down more
         than large ones, which would shift the ranks against each other. The error of a category is a share of its own
         measured bytes. The time of a tensor in flight depends on its receiver: `buffers` is predicted with op times of
         that step before, as a plan with a profile of its ranks would be, and `planned` is the same with the plan's
         times, which are estimated here. Both differ a little from run to run, more on a busy machine. `all` is the
         peak of all categories together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranks import logged, zbc
from record import Record

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.threads import run_threads
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import RankMemory, peaks
from zbc.compiler.recorded.report import build
from zbc.compiler.shapes import load_job
from zbc.ir import Kind, Op
from zbc.plan.directory import Manifest, StoredPlan
from zbc.runtime.core.execute import Step, StepResult, run_step
from zbc.runtime.core.state import Handler, Worker
from zbc.runtime.transports.hub import Hub
from zbc.trace import recording as trace
from zbc.trace.recording import Timing
from zbc.training.recording.measure import CATEGORIES, RankBytes, Scale
from zbc.training.recording.tracing import Recorder

# ---- steps --------------------------------------------------------------------------------------------------

SLEEPING = """\
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
STEPS = {  # schedule, ranks, microbatches
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
FEW = {
    "sleeping": STEPS["sleeping"][4:6],
    "gpt": STEPS["gpt"][:1],
    "pipes": STEPS["pipes"][:1],
    "ahead": STEPS["ahead"][:1],
}
WARM_UP = 3  # first steps of a run, which do not count


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
    options = ["--local", str(pp), "--steps", str(last + 2), "--trace", str(last + 1), "-o", str(out)]
    zbc(folder, "run", "plan", *options)
    times = logged(out, "step_ms")[WARM_UP:last]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    predicted = told["steady_state_ms" if model == "ahead" else "barrier_ms"]
    return Outcome(predicted, middle, low, high, dict(errors(out)))


def errors(out: Path) -> Iterator[tuple[str, float]]:
    """The error of each category on the worst rank of a run, from `zbc report`."""
    compared = build(trace.read(out), again=False).memory
    ranks = [(one.predicted or {}, one.measured) for one in compared]
    yield "all", worst([(one.predicted_peak or 0, one.peak) for one in compared])
    for name in CATEGORIES:
        yield name, worst([(told[name], found[name]) for told, found in ranks])


def worst(pairs: Sequence[tuple[float, float]]) -> float:
    """The largest relative error of the first number against the second."""
    return max(((a - b) / b if b else float(a > 0) for a, b in pairs), key=abs)


def steps(record: Record, asked: argparse.Namespace) -> None:
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for model in asked.model or ("sleeping", "gpt"):
            cases = (FEW if asked.quick else STEPS)[model]
            errors[model] = measure(record, Path(name), model, cases, asked.steps, asked.rounds)
    for model, found in errors.items():
        record(f"# {model}: step off by {statistics.median(found):.1%} at the median, {max(found):.1%} at most")
    for model in errors:
        record()
        record(f"# the job of {model}")
        record(JOBS[model].rstrip())


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


# ---- memory -------------------------------------------------------------------------------------------------

LOOKING_S = 0.005  # of measuring the kernels of a layer, on a CPU
MOST = 8.0  # maximum factor

Pace = Mapping[tuple[Kind, int], float]  # kind and stage -> seconds from when an op has its inputs

JOB = """\
[model]
family = "{family}"
layers = {layers}
hidden = {hidden}
heads = {heads}
vocab = {vocab}
seq_len = {seq_len}
{variant}
dtype = "{dtype}"
parameters = "{parameters}"
[parallel]
pp = {pp}
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = {size}
[memory]
activations = "{activations}"
[hardware]
link_us = 0
[data]
kind = "synthetic"
"""
ROTARY = 'variant = "rotary"'
BASE: dict[str, Any] = {
    "family": "gpt",
    "layers": 6,
    "hidden": 64,
    "heads": 4,
    "vocab": 512,
    "seq_len": 64,
    "variant": "",
    "dtype": "float32",
    "parameters": "float32",
    "pp": 2,
    "m": 6,
    "size": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "base": {},
    "bf16": {"dtype": "bfloat16"},
    "masters": {"dtype": "bfloat16", "parameters": "bfloat16"},
    "rotary": {"variant": ROTARY},
    "llama": {"family": "llama", "hidden": 96, "heads": 6},
    "wide": {"hidden": 192, "heads": 6, "seq_len": 32, "size": 3, "pp": 4, "layers": 10, "m": 8},
    "long": {"seq_len": 256, "heads": 2, "size": 1},
    "vocabulary": {"vocab": 8000, "layers": 4, "dtype": "bfloat16", "variant": ROTARY},
}
RUN, TIMED = 7, 3  # the first steps allocate optimizer states and other permanent tensors
RECORDED = ("base", "wide", "vocabulary")
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-v")


class Row(NamedTuple):
    predicted: RankMemory  # with op times as they were
    planned: RankMemory  # with op times of the plan
    measured: RankBytes

    def error(self, name: str, predicted: RankMemory | None = None) -> float:
        """The error of the prediction, as a share of the measured bytes."""
        found, told = getattr(self.measured, name), getattr(predicted or self.predicted, name)
        return (told - found) / found if found else 0.0 if told == 0 else float("inf")

    @property
    def whole(self) -> float:
        """The error for the peak of all categories together."""
        return (self.predicted.bytes - self.measured.peak) / self.measured.peak


def rows(options: dict[str, Any]) -> Iterator[Row]:
    """Plans a job, runs some steps of it, and yields each rank's prediction and measurement."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "job.toml"
        path.write_text(JOB.format(**options))
        compiled = compile_job(load_job(path))
        compiled.write(Path(name) / "plan")
        plan = StoredPlan.read(Path(name) / "plan")
    watches: dict[int, Watched] = {}

    def watched(worker: Worker) -> Step:
        watches[worker.rank] = one = Watched(worker)
        return one

    run_threads(plan, RUN, step=watched, hub=Hub(plan.manifest.topology.world, prompt=True))
    found = [watches[rank] for rank in range(plan.manifest.topology.world)]
    timed = with_times(compiled.costs, [one.usual for one in found])
    both = zip(peaks(compiled.program, timed), peaks(compiled.program, compiled.costs), strict=True)
    for one, (predicted, planned) in zip(found, both, strict=True):
        yield Row(predicted, planned, one.scale.held)


class Watched:
    """Runs the steps of a rank: the first unchanged, then one that is timed, then some with memory measured."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.usual: Pace = {}
        self.scale: Scale

    def __call__(self, worker: Worker, step: int, *, stop: bool = False) -> StepResult | None:
        if step != TIMED:
            return run_step(worker, step, stop=stop)
        result, stamped = Recorder(worker).record(step, stop)
        timing = stamped.timing()
        self.usual = usual(worker, timing)
        if result is not None:
            pace, began = self._pace(result), lambda: self.scale.began
            worker.script[:] = [(paced(handler, pace, began), op, text) for handler, op, text in worker.script]
        self.scale = Scale(worker)
        return result

    def _pace(self, result: StepResult) -> Pace:
        """The pace of the steps to come; all ranks compute the same factor."""
        factor = slower(self.worker.phase_run.plan.manifest, result)
        return {what: factor * seconds for what, seconds in self.usual.items()}


def paced(handler: Handler, pace: Pace, began: Callable[[], int]) -> Handler:
    """A handler that takes as long as `pace` says, from when an op has its inputs."""

    def run(worker: Worker, op: Op) -> None:
        handler(worker, op)
        time.sleep(max(0.0, pace.get((op.kind, op.stage), 0.0) - (time.perf_counter_ns() - began()) / 1e9))

    return run


def usual(worker: Worker, timing: Timing) -> Pace:
    """Seconds of the compute ops of a step, without their waits: the median over microbatches."""
    found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    computing = ((index, op) for index, (_, op, _) in enumerate(worker.script) if op.kind.computes)
    for (index, op), lead in zip(computing, timing.lead_ns, strict=True):
        found[op.kind, op.stage].append((timing.took_ns[index] - lead) / 1e9)
    return {what: statistics.median(seconds) for what, seconds in found.items()}


def slower(manifest: Manifest, result: StepResult) -> float:
    """The factor that gives an op of mean length enough time for its measurement. The same on every rank."""
    ops = 3 * manifest.microbatches * manifest.stages / manifest.ranks
    mean = max(result.busy_seconds) / ops
    layers = max(map(len, manifest.layers))
    return MOST if mean <= 0 else min(MOST, 1 + LOOKING_S * layers / mean)


def with_times(costs: Costs, ranks: Sequence[Pace]) -> Costs:
    """The costs with the measured times of ops."""
    seconds = {what: took for rank in ranks for what, took in rank.items()}

    def ms(kind: Kind) -> tuple[float, ...]:
        return tuple(1e3 * seconds.get((kind, stage), 0.0) for stage in range(costs.stages))

    whole = ms(Kind.BW) if any(kind is Kind.BW for kind, _ in seconds) else ()
    return costs.with_ms(f=ms(Kind.F), b=ms(Kind.B), w=ms(Kind.W), bw=whole)


def memory(record: Record, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    record("# (predicted - measured) / measured of the worst rank, in %; measured MiB of all ranks together")
    names = " ".join(f"{name:>11}" for name in CATEGORIES)
    record(f"{'model':10} {'schedule':8} {'activations':11} {names} {'planned':>8} {'all':>7} {'MiB':>8}")
    worst = dict.fromkeys(CATEGORIES, 0.0)
    for model in asked.model or RECORDED[: 1 if asked.quick else None]:
        for kind in SCHEDULES:
            for activations in asked.activations or ("keep", "selective", "recompute"):
                settings = {**BASE, **MODELS[model], "kind": kind, "activations": activations}
                report(record, (model, kind, activations), list(rows(settings)), worst)
    record("# worst of all: " + ", ".join(f"{name} {100 * value:+.1f}%" for name, value in worst.items()))
    record()
    record("# the base job")
    record(JOB.format(**BASE, kind="KIND", activations="ACTIVATIONS").rstrip())
    record("# changes: " + "; ".join(f"{name} {changes}" for name, changes in MODELS.items()))


def report(record: Record, labels: tuple[str, str, str], found: list[Row], worst: dict[str, float]) -> None:
    cells = []
    for name in CATEGORIES:
        error = max((row.error(name) for row in found), key=abs)
        worst[name] = max(worst[name], error, key=abs)
        cells.append(f"{100 * error:+11.1f}")
    planned = max((row.error("buffers", row.planned) for row in found), key=abs)
    whole = max((row.whole for row in found), key=abs)
    total = sum(getattr(row.measured, name) for row in found for name in CATEGORIES) / 2**20
    model, kind, activations = labels
    record(
        f"{model:10} {kind:8} {activations:11} {' '.join(cells)} {100 * planned:+8.1f} {100 * whole:+7.1f} {total:8.2f}"
    )


PARTS = {"steps": ("predict", JOBS, steps), "memory": ("memory", MODELS, memory)}  # record, models, what runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", action="append", help="only this one (repeatable); of memory, writes no file")
    parser.add_argument("--steps", type=int, default=9, help="steps: of a run that count")
    parser.add_argument("--rounds", type=int, default=20, help="steps: of the profile")
    parser.add_argument("--activations", action="append", help="memory: only these (repeatable)")
    parser.add_argument("--quick", action="store_true", help="a few cases; writes no file")
    asked = parser.parse_args()
    name, known, part = PARTS[asked.part]
    if unknown := {*(asked.model or ())} - {*known}:
        parser.error(f"--model of {asked.part} is {', '.join(known)}; not {', '.join(sorted(unknown))}")
    record = Record("-".join((name, *(asked.model or ()))))
    part(record, asked)
    if not (asked.quick or (asked.part == "memory" and asked.model)):
        record.write()


if __name__ == "__main__":
    main()
