"""The cost of a checkpoint for a step, written during the next steps or between two: two gloo processes.

    python bench/checkpoint.py [--rounds N] [--quick]

In a round each contestant runs two steps in a row: nothing between them, a checkpoint written during the second, or
one that the second waits for. All begin together and end when both ranks have run both steps and everything is on
the disk; the order changes from round to round. The cost of a checkpoint is the additional time of its pair compared
with the pair without, in each round, as a share of a step; the median counts. It is also given in seconds of rank 0's
core, which other programs of the machine disturb less. Ranks compute on one core each, so a write during a step takes
part of that core; a machine with a GPU has cores to spare.

Then one process writes the tensors of one rank, in turn by zbc and by torch.save and fsync: milliseconds of its core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from ranks import meeting, planned, results
from record import Record

JOB = """\
zbc = 1
[model]
family = "gpt"
layers = {layers}
hidden = {hidden}
heads = 4
vocab = {vocab}
seq_len = {seq_len}
[parallel]
pp = 2
[schedule]
kind = "1f1b"
microbatches = {microbatches}
microbatch_size = 2
[data]
kind = "synthetic"
[train]
steps = 1000000
[checkpoint]
every = 1
keep = 2
"""
MEDIUM = {"layers": 8, "hidden": 256, "vocab": 4096, "seq_len": 256, "microbatches": 16}
QUICK = {"layers": 4, "hidden": 64, "vocab": 512, "seq_len": 64, "microbatches": 4}
NONE, BESIDE, BETWEEN = "no checkpoint", "beside the next step", "between two steps"
WAYS = (NONE, BESIDE, BETWEEN)
RANKS = 2
FILE = (25, 512, 1024)  # number and shape of the tensors in a file that is written alone: 52 MB


class Pair(NamedTuple):
    """Seconds: of two steps with the save between them, of the save alone, and of rank 0's core."""

    all: float
    save: float
    core: float


Turn = dict[str, Pair]


# ---- on each rank --------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, rounds: int, sender: Connection) -> None:
    """One rank's process. Rank 0 sends the bytes of a checkpoint, and then each round."""
    import ours
    import torch.distributed as dist

    from zbc.job.spec import Checkpoint
    from zbc.plan.directory import StoredPlan
    from zbc.training.checkpoint.saving import Checkpoints
    from zbc.training.launch.board import Board

    with meeting(rank, RANKS, folder / "meet"):
        mine = ours.build(StoredPlan.read(folder / "plan"), rank)
        store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
        kinds = {BESIDE: Checkpoint(every=1, keep=2), BETWEEN: Checkpoint(every=1, keep=2, asynchronous=False)}
        savers = {
            way: Checkpoints(mine.worker, Board(dist.PrefixStore(way, store), rank, RANKS), options, folder / way)
            for way, options in kinds.items()
        }
        step = 0
        for turn in range(1 + rounds):
            found: Turn = {}
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                dist.barrier()
                found[way] = _pair(mine, savers.get(way), step)
                step += 2
            if rank == 0:
                size = sum(file.stat().st_size for file in (folder / BESIDE).glob("step-*/*"))
                sender.send(found if turn else size)


def _pair(mine: object, saver: object, step: int) -> Pair:
    """Runs two steps with a save by `saver` between them; ends when both ranks are done."""
    import torch.distributed as dist

    began, core = time.perf_counter(), time.process_time()
    mine.step(step)  # type: ignore[attr-defined]
    paused = time.perf_counter()
    if saver is not None:
        saver.save(step)  # type: ignore[attr-defined]
    saved = time.perf_counter() - paused
    mine.step(step + 1)  # type: ignore[attr-defined]
    if saver is not None:
        saver.wait()  # type: ignore[attr-defined]
    core = time.process_time() - core
    dist.barrier()
    return Pair(time.perf_counter() - began, saved, core)


# ---- in the process that was called --------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint costs a step.")
    parser.add_argument("--rounds", type=int, default=8, help="of two steps of each contestant; the median counts")
    parser.add_argument("--quick", action="store_true", help="a tiny model, three rounds; writes no file")
    options = parser.parse_args()
    sizes, rounds = (QUICK, 3) if options.quick else (MEDIUM, options.rounds)
    record = Record("checkpoint")
    with tempfile.TemporaryDirectory() as name:
        turns, size = measure(Path(name), JOB.format(**sizes), rounds)
        ours, theirs = files(Path(name), rounds)
    report(record, turns, size)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    millis = f"{statistics.median(ours):.0f} ms of a core, by torch.save {statistics.median(theirs):.0f} ms"
    record(f"a file of 52 MB and its checksum: {millis}; {ratio:.2f} times as much in the same round")
    record()
    record("# the job")
    record(JOB.format(**sizes).rstrip())
    if not options.quick:
        record.write()


def measure(folder: Path, job: str, rounds: int) -> tuple[list[Turn], int]:
    """Every round but the first, and the bytes of a checkpoint."""
    import torch.distributed as dist

    planned(job, folder / "plan")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "port").write_text(str(store.port))
    limit = 300.0 + 120.0 * rounds
    size, *turns = results(run_rank, (folder, rounds), ranks=RANKS, count=1 + rounds, limit=limit)
    return turns, size


def files(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of this process's core for a file by zbc, with its checksum, and by torch.save."""
    import torch

    from zbc.training.checkpoint.files import TensorPart, write_parts

    count, *shape = FILE
    tensors = {f"tensor {number}": torch.randn(shape) for number in range(count)}
    parts = [TensorPart(name, tuple(shape), 0, tensor) for name, tensor in tensors.items()]

    def torchs() -> None:
        with (folder / "torch").open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def core(work: Callable[[], object]) -> float:
        os.sync()
        began = time.process_time()
        work()
        return 1e3 * (time.process_time() - began)

    turns = [(core(lambda: write_parts(folder, 0, parts)), core(torchs)) for _ in range(1 + rounds)][1:]
    return [ours for ours, _ in turns], [theirs for _, theirs in turns]


def report(record: Record, turns: list[Turn], size: int) -> None:
    step = statistics.median(turn[NONE].all / 2 for turn in turns)
    core = statistics.median(turn[NONE].core / 2 for turn in turns)
    record(f"# {RANKS} gloo processes with one thread each, {len(turns)} rounds; a checkpoint has {size / 1e6:.1f} MB")
    record(f"# a step takes {1e3 * step:.0f} ms, of which rank 0 computes {1e3 * core:.0f} ms")
    head = f"{'step waits, ms':>15s} {'costs in all, ms':>17s} {'of a step':>10s} {'of its computing':>17s}"
    record(f"{'checkpoint':22s} {head}   rounds, %")
    for way in (BESIDE, BETWEEN):
        shares = [(turn[way].all - turn[NONE].all) / (turn[NONE].all / 2) for turn in turns]
        waits = statistics.median(turn[way].save for turn in turns)
        cost = statistics.median(shares)
        computed = statistics.median(turn[way].core - turn[NONE].core for turn in turns) / core
        rounds = " ".join(f"{100 * share:.1f}" for share in shares)
        numbers = f"{1e3 * waits:15.1f} {1e3 * cost * step:17.1f} {100 * cost:9.1f}% {100 * computed:16.1f}%"
        record(f"{way:22s} {numbers}   {rounds}")


if __name__ == "__main__":
    main()
