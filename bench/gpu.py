"""The runtime on one GPU: ranks as threads of this process, a stream each. For a person who has one.

    python bench/gpu.py [--device cpu]

For one rank and for four: are gradients those of one piece of plain autograd, how long do B and W take beside the fused
backward and what do they keep, with and without recompute, and what does the optimizer without a barrier cost per op.
Times are of the device: each op is waited for, so that they are no measure of a step. With --device cpu the same runs
without a GPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from record import Record
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.threads import run_threads
from zbc.ir import Kind, Program
from zbc.plan.directory import StoredPlan
from zbc.runtime.hub import Hub
from zbc.runtime.state import Worker
from zbc.training.probing.checkup import plain_gradients
from zbc.training.recording.measure import CATEGORIES, Scale

JOB = """\
zbc = 1
[model]
layers = {layers}
hidden = {hidden}
heads = {heads}
vocab = {vocab}
seq_len = {seq_len}
dtype = "{dtype}"
[parallel]
pp = {pp}
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = {size}
[memory]
activations = "{activations}"
[optimizer]
sync = "{sync}"
[data]
kind = "synthetic"
"""
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 32000, "seq_len": 1024, "size": 4, "m": 8},
    "cpu": {"layers": 8, "hidden": 32, "heads": 2, "vocab": 256, "seq_len": 16, "size": 2, "m": 4},
}
STEPS = 4
COMPUTE = ("F", "B", "W", "BW")


class StreamHub(Hub):
    """A hub between streams: a stream waits for what another one made, and says when it no longer reads it."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._made: dict[tuple[int, Any], torch.cuda.Event] = {}

    def put(self, source: int, message: Any, tensor: Tensor, peer: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._made[peer, message] = event
        super().put(source, message, tensor, peer)

    def take(self, rank: int, message: Any, peer: int) -> Tensor:
        tensor = super().take(rank, message, peer)
        stream = torch.cuda.current_stream()
        stream.wait_event(self._made.pop((rank, message)))
        tensor.record_stream(stream)
        return tensor

    def reduce(self, rank: int, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        torch.cuda.synchronize()  # whoever comes last sums the tensors of all
        super().reduce(rank, tensor, ranks)
        torch.cuda.synchronize()


class Case:
    """A job planned and run; `options` fill the gaps of JOB."""

    def __init__(self, device: torch.device, *, apart: bool = False, **options: Any) -> None:
        self.device = device
        settings = {**SIZES[device.type], "dtype": "float32", "activations": "keep", "sync": "before-step", **options}
        plan = planned(JOB.format(**settings))
        self.plan = StoredPlan(plan.manifest, halved(plan.program)) if apart else plan
        self.times: dict[str, list[float]] = defaultdict(list)  # kind -> ms of each op
        self._lock = threading.Lock()

    def run(self, steps: int, setup: Any = None) -> list[Worker]:
        world = self.plan.manifest.topology.world
        if self.device.type == "cpu":
            return run_threads(self.plan, steps, setup=setup)
        return run_threads(
            self.plan, steps, setup=setup, device=self.device, hub=StreamHub(world), around=self._own_stream
        )

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        torch.cuda.synchronize(self.device)  # weights were made on another stream
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    def timed(self) -> dict[str, float]:
        """Median ms of each kind of op, every op waited for; the first step does not count."""

        def setup(worker: Worker) -> None:
            worker.script[:] = [(self._clocked(handler), op, text) for handler, op, text in worker.script]

        self.run(STEPS, setup)
        found = {}
        for kind, times in self.times.items():
            found[kind] = statistics.median(times[len(times) // STEPS :])
        return found

    def _clocked(self, handler: Any) -> Any:
        def run(worker: Worker, op: Any) -> None:
            self._wait()
            began = time.perf_counter()
            handler(worker, op)
            self._wait()
            with self._lock:
                self.times[op.kind.value].append((time.perf_counter() - began) * 1e3)

        return run

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def held(self) -> dict[str, float]:
        """MiB of the fullest rank by category."""
        scales: list[Scale] = []
        self.run(2, lambda worker: scales.append(Scale(worker)))
        return {name: max(getattr(scale.held, name) for scale in scales) / 2**20 for name in CATEGORIES}

    def gradient_error(self) -> float:
        """Largest difference to plain autograd of any parameter, as a share of its largest gradient."""
        found: dict[str, Tensor] = {}

        def keep(worker: Worker) -> None:
            def before_step(handler: Any) -> Any:
                def run(worker: Worker, op: Any) -> None:
                    for name, p in worker.optimizers[op.stage].parameters.items():
                        if p.grad is not None:
                            found[name] = p.grad.detach().clone()
                    handler(worker, op)

                return run

            worker.script[:] = [
                (before_step(handler) if op.kind.value == "STEP" else handler, op, text)
                for handler, op, text in worker.script
            ]

        self.run(1, keep)
        wait_all(self.device)
        worst = 0.0
        for name, grad in plain_gradients(self.plan, self.device)[1].items():
            if grad is not None:
                worst = max(worst, ((found[name] - grad).abs().max() / grad.abs().max()).item())
        return worst


def halved(program: Program) -> Program:
    """The program with every BW as B and W behind each other."""
    halves = {op: (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) for _, _, op in program if op.kind is Kind.BW}
    return program.with_ranks(
        [[part for op in ops for part in halves.get(op, (op,))] for ops in program.ranks], "halved"
    )


def wait_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def planned(job: str) -> StoredPlan:
    from zbc.compiler.compile import compile_job, load_job

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(job)
        compiled = compile_job(load_job(path))
    return StoredPlan(compiled.assemble()[0], compiled.program)


def main() -> None:
    parser = argparse.ArgumentParser(description="The runtime on one GPU, ranks as threads with a stream each.")
    parser.add_argument("--device", default="cuda", choices=list(SIZES), help="cpu: only to see that it runs")
    parser.add_argument("--no-file", action="store_true", help="write no file")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    record = Record(f"gpu-{options.device}")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU: these numbers say nothing of a GPU"
    record(f"# on {name}; torch {torch.__version__}")
    for pp in (1, 4):
        gradients(record, device, pp)
        halves(record, device, pp)
        optimizers(record, device, pp)
    record()
    record(f"# {SIZES[device.type]}")
    record(JOB.rstrip())
    if not options.no_file:
        record.write()


def gradients(record: Record, device: torch.device, pp: int) -> None:
    record()
    record(
        f"# pp = {pp}: gradients beside plain autograd of the uncut model, largest difference by the largest gradient"
    )
    for kind in ("1f1b", "zb-h1", "zb-v"):
        for activations in ("keep", "recompute"):
            error = Case(device, pp=pp, kind=kind, activations=activations).gradient_error()
            record(f"{kind:8} {activations:10} {error:9.1e}")


def halves(record: Record, device: torch.device, pp: int) -> None:
    record()
    record(f"# pp = {pp}: ms of ops (median), and MiB of the fullest rank")
    record(f"{'':28} {'F':>8} {'B':>8} {'W':>8} {'BW':>8} {'B+W / BW':>9} {'activations':>12} {'buffers':>8}")
    for dtype in ("float32", "bfloat16"):
        for activations in ("keep", "recompute"):
            options = {"pp": pp, "dtype": dtype, "activations": activations}
            fused, apart = Case(device, kind="1f1b", **options), Case(device, kind="1f1b", apart=True, **options)
            whole, parts = fused.timed(), apart.timed()
            held = {"fused": fused.held(), "apart": apart.held()}
            shown = [parts["F"], parts["B"], parts["W"], whole["BW"], (parts["B"] + parts["W"]) / whole["BW"]]
            for how, kept in held.items():
                times = " ".join(f"{number:8.2f}" for number in shown)
                record(
                    f"{dtype:9} {activations:10} {how:7} {times if how == 'apart' else ' ' * len(times)}"
                    f" {kept['activations']:12.1f} {kept['buffers']:8.1f}"
                )


def optimizers(record: Record, device: torch.device, pp: int) -> None:
    record()
    record(f"# pp = {pp}: ms of the ops that end a step (median)")
    for sync in ("before-step", "post-validate"):
        times = Case(device, pp=pp, kind="zb-h1", sync=sync).timed()
        shown = ", ".join(f"{kind} {ms:.3f}" for kind, ms in times.items() if not kind.computes and "_" not in kind)
        record(f"{sync:14} {shown}")


if __name__ == "__main__":
    main()
