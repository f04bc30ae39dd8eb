"""Plan directories for runs in processes, and the files of such runs."""

import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.jobs import toml_text
from zbc.compiler.compile import compile_job
from zbc.compiler.compiled import Compiled
from zbc.compiler.shapes import load_job
from zbc.ir import Op
from zbc.training.launch import launch
from zbc.training.launch.launch import RunOptions

GPT = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 256, "seq_len": 8}
TABLES: dict[str, dict[str, Any]] = {
    "model": GPT,
    "parallel": {"pp": 4},
    "schedule": {"kind": "1f1b", "microbatches": 4, "microbatch_size": 2},
    "train": {"steps": 3, "seed": 7, "watchdog_s": 60.0},
    "data": {"kind": "synthetic"},
    "log": {"every": 1},
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the threads per kernel of this process; ranks have one, and sums depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compiled(folder: Path, **changes: Mapping[str, Any]) -> Compiled:
    """A small job, compiled; `changes` are merged into its tables. `folder` is for the job file."""
    tables = {name: {**TABLES.get(name, {}), **changes.get(name, {})} for name in {**TABLES, **changes}}
    if ":" in tables["model"].get("family", ""):  # a factory has sizes of its own
        tables["model"] |= {"hidden": None, "heads": None}
    path = folder / "job.toml"
    path.write_text(toml_text(**tables))
    return compile_job(load_job(path))


def write_plan(folder: Path, name: str = "plan", **changes: Mapping[str, Any]) -> Path:
    """Writes the plan of a small job on four ranks below `folder`."""
    compiled(folder, **changes).write(folder / name)
    return folder / name


def write_troubled_plan(folder: Path, how: str, good: int, **changes: Mapping[str, Any]) -> Path:
    """A plan on four ranks with four forwards per step; the layer on rank 2 misbehaves after `good` of them."""
    return write_plan(folder, **{**troubled(how, good), **changes})


def troubled(how: str, good: int) -> dict[str, Mapping[str, Any]]:
    model = {"family": "tests.processes.user_layers:layers", "loss": "mse", "args": {"how": how, "good": good}}
    return {"model": model, "data": {"kind": "tests.processes.user_layers:Vectors"}}


def write_program(folder: Path, ranks: Sequence[Sequence[str]], **changes: Mapping[str, Any]) -> Path:
    """A plan with replaced ops and valid hashes, without the checks of the compiler."""
    result = compiled(folder, **changes)
    ops = [[Op.parse(text) for text in lines] for lines in ranks]
    replace(result, program=result.program.with_ranks(ops, by="by-hand")).write(folder / "plan")
    return folder / "plan"


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def processes(out: Path) -> list[int]:
    """The process id of every rank of a run."""
    return [int(name.rpartition(":")[2]) for name in json.loads((out / "run.json").read_text())["processes"]]


def at_step(step: int, action: Callable[[], object]) -> Callable[[str], None]:
    """A callback that calls `action` when the line of that step is first shown."""
    left = [action]

    def each(line: str) -> None:
        if left and line.split()[0] == "step" and line.split()[1].startswith(f"{step}/"):
            left.pop()()

    return each


def killing(out: Path, victims: Mapping[int, int]) -> Callable[[str], None]:
    """A callback that kills these ranks (step -> rank) when the lines of the steps are first shown."""
    ways = [at_step(step, partial(_kill, out, rank)) for step, rank in victims.items()]
    return lambda line: [each(line) for each in ways] and None


def _kill(out: Path, rank: int) -> None:
    os.kill(processes(out)[rank], signal.SIGKILL)


def free_port() -> int:
    """A port that is free, and that no connection of another process gets by chance before it is used."""
    low = 32768  # from here on the system hands them out, unless it says otherwise
    with suppress(OSError, ValueError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(max(1024, low // 2), low) if low > 2048 else 0
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            return int(server.getsockname()[1])


def run_here(
    folder: Path, ranks: int, out: Path, each: Callable[[str], None] = lambda line: None, **options: Any
) -> list[str]:
    """`zbc run --local` in this process; `each(line)` is called for every line it shows."""
    lines: list[str] = []

    def emit(line: str) -> None:
        lines.append(line)
        each(line)

    launch.run(RunOptions(folder, local=ranks, out=out, **options), emit)
    return lines
