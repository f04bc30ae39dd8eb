"""Ranks as processes of a benchmark: started together, watched, taking turns, and ended with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PATIENCE = timedelta(seconds=120)


class Turn(NamedTuple):
    """A step of one contestant, from a moment that all ranks agreed on to the end of the last rank."""

    ms: float
    cpu: float  # ms of processor time, of all ranks and all their threads
    loss: float


class Noise(NamedTuple):
    late: float  # how much later than asked a sleep ended on average, ms
    others: float  # share of all cores that other programs used meanwhile; 0 if not known


# ---- on each rank --------------------------------------------------------------------------------------------


@contextmanager
def meeting(rank: int, ranks: int, place: Path) -> Iterator[None]:
    """A process group of all ranks, on gloo; no rank leaves while another still listens."""
    import torch
    import torch.distributed as dist
    from sleeping import calibrate

    from zbc.runtime.transports.network import bind_loopback

    torch.set_num_threads(1)
    bind_loopback()
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=ranks, timeout=PATIENCE)
    calibrate()
    yield
    dist.barrier()
    dist.destroy_process_group()


def in_turns(runs: Mapping[str, Callable[[int], Any]], steps: int, warm_up: int) -> tuple[dict[str, list[Turn]], Noise]:
    """Runs each for one step, then each for the next, and so on, so that a busy machine slows all of them."""
    import sleeping

    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    for step in range(warm_up + steps):
        if step == warm_up:
            sleeping.late.clear()
            began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        for name, run in runs.items():
            start = over_ranks(time.perf_counter() + 0.005)  # processes of one machine share this clock
            sleeping.sleep_until(start)
            spent = time.process_time()
            result = run(step)
            took, used = time.perf_counter() - start, time.process_time() - spent
            turn = Turn(1e3 * over_ranks(took), 1e3 * over_ranks(used, "SUM"), getattr(result, "loss", float("nan")))
            if step >= warm_up:
                turns[name].append(turn)
    own = over_ranks(time.process_time() - own, "SUM")
    others = (busy_seconds() - busy - own) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return turns, Noise(1e3 * over_ranks(statistics.fmean(sleeping.late)), max(0.0, others) if busy else 0.0)


def over_ranks(number: float, how: str = "MAX") -> float:
    """The largest of all ranks' numbers, or their sum; waits for all of them."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
    return tensor.item()


def busy_seconds() -> float:
    """Seconds of all cores that programs of this machine have used so far; 0 if not known."""
    try:
        fields = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for disks


# ---- in the process that was called --------------------------------------------------------------------------


def results(
    target: Callable[..., None], arguments: tuple[Any, ...], *, ranks: int, count: int = 1, limit: float = 300.0
) -> Iterator[Any]:
    """Runs `target(rank, *arguments, sender)` on every rank; yields the `count` objects that rank 0 sends.

    Ends the benchmark if a rank fails or not all came in `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "zbc.training.worker", "contestants"])
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=target, args=(rank, *arguments, sender), daemon=True) for rank in range(ranks)]
    end = time.monotonic() + limit
    try:
        for process in processes:
            process.start()
        for _ in range(count):
            while not receiver.poll(0.5):
                if any(process.exitcode for process in processes):
                    sys.exit(f"{sys.argv[0]}: a rank failed")
                if time.monotonic() > end:
                    sys.exit(f"{sys.argv[0]}: no result after {limit:.0f} s")
            yield receiver.recv()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()


def planned(job: str, folder: Path) -> Any:
    """Plans a job into `folder`; returns the compiled plan."""
    from zbc.compiler.compile import compile_job
    from zbc.compiler.shapes import load_job

    path = folder.with_suffix(".toml")
    path.write_text(job)
    compiled = compile_job(load_job(path))
    compiled.write(folder)
    return compiled


def zbc(folder: Path, *words: str) -> str:
    """Runs a command of zbc in a folder, with the layers of this one on the import path; returns its output."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    command = [sys.executable, "-m", "zbc", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def logged(out: Path, key: str) -> list[Any]:
    """The values of a key in metrics.jsonl, for every step that has it."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]
