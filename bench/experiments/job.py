"""Shared by the experiments of bench/gpu.py: small jobs, planned and run with ranks as threads of one device."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from record import Record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.threads import run_threads
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.shapes import load_job
from zbc.ir import Kind, Program
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.state import Worker
from zbc.runtime.cuda import StreamHub
from zbc.runtime.transports.hub import Hub
from zbc.training.launch.local import own_stream
from zbc.training.recording.measure import CATEGORIES, Scale

JOB = """\
[model]
family = "{family}"
layers = {layers}
{sizes}
dtype = "{dtype}"
compile = {compile}
[parallel]
pp = {pp}
dp = {dp}
shard = "{shard}"
[hardware]
device = "{device}"
{hardware}
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = {size}
{schedule}
[memory]
activations = "{activations}"
{adapter}
[optimizer]
{optimizer}
[checkpoint]
every = {every}
[train]
{train}
[data]
{data}
"""
GPT = "hidden = {hidden}\nheads = {heads}\nvocab = {vocab}\nseq_len = {seq_len}\nties = {tied}\n{more}"
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "seq_len": 1024, "size": 4, "m": 8},
    "cpu": {"layers": 8, "hidden": 32, "heads": 2, "vocab": 64, "seq_len": 16, "size": 2, "m": 4},
}
SMALL = {"layers": 8, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128, "size": 2, "m": 8}  # of a GPU, too
USUAL = {
    "family": "gpt",
    "dtype": "float32",
    "compile": "false",
    "dp": 1,
    "shard": "none",
    "activations": "keep",
    "adapter": "",
    "hardware": "",
    "schedule": "",
    "optimizer": 'sync = "before-step"',
    "every": 0,
    "train": "steps = 4",
    "data": 'kind = "synthetic"',
    "tied": "false",
    "more": "",
}


class FoundError(Exception):
    """An experiment failed."""


class Bench:
    """The device of an experiment and its record."""

    def __init__(self, device: torch.device, record: Record) -> None:
        self.device, self.say = device, record
        self.cuda = device.type == "cuda"

    def wants(self, fine: bool, text: str) -> None:
        """Stops the experiment with this text unless `fine`."""
        if not fine:
            raise FoundError(text)

    def case(self, *, small: bool = False, apart: bool = False, streams: bool = False, **options: Any) -> Case:
        gc.collect()  # cycles in workers of the previous case hold the device's memory
        sizes = SMALL if small and self.cuda else SIZES[self.device.type]
        return Case(self.device, {**sizes, **options}, apart=apart, streams=streams)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)


class Case:
    """A job planned and run; `options` fill the gaps of JOB."""

    def __init__(self, device: torch.device, options: dict[str, Any], *, apart: bool, streams: bool) -> None:
        self.device, self.streams = device, streams
        self.job = job_text(**{"device": device.type, **options})
        self.compiled = compiled(self.job)
        program = self.compiled.program
        self.plan = StoredPlan(self.compiled.assemble()[0], halved(program) if apart else program)
        self.times: dict[str, list[float]] = defaultdict(list)  # kind -> ms of each op
        self._lock = threading.Lock()

    def run(self, steps: int, setup: Callable[[Worker], None] | None = None, **more: Any) -> list[Worker]:
        """Runs some steps; with `streams` a stream per rank, else all on the default one, in the hub lock's order."""
        world = self.plan.manifest.topology.world
        around: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.streams and self.device.type == "cuda":
            more["hub"] = more.get("hub") or StreamHub(world)
            around = self._own_stream
        return run_threads(self.plan, steps, setup=setup, device=self.device, around=around, **more)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)  # weights were made on the default stream
        with own_stream(self.device):
            yield

    def told(self, steps: int = 3, hub: Hub | None = None) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        workers = self.run(steps, hub=hub)
        return [(result.loss, result.grad_norm) for result in workers[0].results]

    def wrapped(self, steps: int, around: Callable[[Worker, Any, Callable[[], None]], None]) -> None:
        """Runs with `around(worker, op, call)` in place of every op; it must call `call`."""

        def of(handler: Any) -> Any:
            return lambda worker, op: around(worker, op, lambda: handler(worker, op))

        def setup(worker: Worker) -> None:
            worker.script[:] = [(of(handler), op, text) for handler, op, text in worker.script]

        self.run(steps, setup)

    def step_ms(self, steps: int = 8) -> float:
        """ms of a step without waits for the device inside; the first two are left out."""
        began = list[float]()

        def note(worker: Worker) -> None:
            inner = worker.script[0][0]

            def first(worker: Worker, op: Any) -> None:
                self._wait()
                began.append(time.perf_counter())
                inner(worker, op)

            worker.script[0] = (first, *worker.script[0][1:])

        self.run(steps, note)
        return 1e3 * statistics.median(b - a for a, b in pairwise(began[2:]))

    def timed(self, steps: int = 4, *, waits: bool = True) -> dict[str, float]:
        """Median ms of each kind of op, the first step left out; `waits`: until the device has finished it."""
        self.times.clear()

        def timing(worker: Worker, op: Any, call: Callable[[], None]) -> None:
            if waits:
                self._wait()
            began = time.perf_counter()
            call()
            if waits:
                self._wait()
            with self._lock:
                self.times[op.kind.value].append((time.perf_counter() - began) * 1e3)

        self.wrapped(steps, timing)
        return {kind: statistics.median(times[len(times) // steps :]) for kind, times in self.times.items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def held(self) -> dict[str, float]:
        """Bytes of the fullest rank by category."""
        scales: list[Scale] = []
        self.run(2, lambda worker: scales.append(Scale(worker)))
        return {name: max(getattr(scale.held, name) for scale in scales) for name in CATEGORIES}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the first step, just before the optimizer."""
        found: dict[str, Tensor] = {}

        def keep(worker: Worker, op: Any, call: Callable[[], None]) -> None:
            if op.kind is Kind.STEP:
                for name, p in worker.optimizers[op.stage].parameters.items():
                    if p.grad is not None:
                        found[name] = p.grad.detach().clone()
            call()

        self.wrapped(1, keep)
        return found


def apart_by(found: dict[str, Tensor], expected: dict[str, Tensor | None]) -> float:
    """The largest difference of any parameter, as a share of its largest gradient."""
    worst = 0.0
    for name, grad in expected.items():
        if grad is not None:
            worst = max(worst, ((found[name] - grad).abs().max() / grad.abs().max().clamp_min(1e-30)).item())
    return worst


def halved(program: Program) -> Program:
    """The program with every BW as B and W in a row."""
    halves = {op: (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) for _, _, op in program if op.kind is Kind.BW}
    return program.with_ranks(
        [[part for op in ops for part in halves.get(op, (op,))] for ops in program.ranks], "halved"
    )


def job_text(**options: Any) -> str:
    """A job; `options` fill the gaps of JOB."""
    settings = {**USUAL, "device": "cpu", **options}
    return JOB.format(**{**settings, "sizes": settings.get("args") or GPT.format(**settings)})


def planned(job: str) -> StoredPlan:
    found = compiled(job)
    return StoredPlan(found.assemble()[0], found.program)


def compiled(job: str) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(job)
        return compile_job(load_job(path))
