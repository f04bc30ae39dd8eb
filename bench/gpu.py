"""Twenty experiments on correctness and cost of zbc on a GPU, for one GPU and forty minutes.

    python bench/gpu.py all                   one after the other
    python bench/gpu.py all --part 1          experiments 1 to 6 (ten minutes at most), --part 2: 7 to 16,
                                              --part 3: 17 to 20, what is newest
    python bench/gpu.py streams memory        these
    python bench/gpu.py all --device cpu      those that can run without a GPU, on small sizes

Each writes bench/results/DATE-gpu-NAME.txt and stops at the first failure; the others go on. Exit code 1 if any failed.
--quick writes no files. Ranks are threads of this process, except in `processes`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic; cuBLAS reads it at its first use

import torch
from experiments import cost, newest, price, right
from experiments.job import SIZES, Bench, FoundError
from record import Record

EXPERIMENTS: dict[str, Callable[[Bench], None]] = {
    "installed": right.installed,
    "schedules": right.schedules,
    "training": right.training,
    "own-thread": right.own_thread,
    "reads": right.reads,
    "streams": right.streams,
    "layers": cost.layers,
    "memory": cost.memory,
    "host": cost.host,
    "profiled": cost.profiled,
    "optimizers": cost.optimizers,
    "driver": cost.driver,
    "processes": cost.processes,
    "copies": cost.copies,
    "priced": price.priced,
    "plain": price.plain,
    "cards": newest.cards,
    "experts": newest.products_of_experts,
    "waits": newest.waits,
    "whole": newest.whole,
}
TURNS = {1: list(EXPERIMENTS)[:6], 2: list(EXPERIMENTS)[6:16], 3: list(EXPERIMENTS)[16:]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Experiments on one GPU.")
    parser.add_argument("names", nargs="+", choices=["all", *EXPERIMENTS], metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--part", type=int, choices=list(TURNS), help="of all: these")
    parser.add_argument("--device", default="cuda", choices=list(SIZES), help="cpu: to see that it runs")
    parser.add_argument("--quick", action="store_true", help="write no files")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu runs what can run without one")
    names = TURNS.get(options.part, list(EXPERIMENTS)) if "all" in options.names else options.names
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cpu":
        torch.set_num_threads(1)  # threads that are ranks share the cores
    wrong = [name for name in names if not run(name, device, quick=options.quick)]
    print(f"{len(names)} experiments, {len(wrong)} found something wrong{': ' if wrong else ''}{', '.join(wrong)}")
    return int(bool(wrong))


def run(name: str, device: torch.device, *, quick: bool) -> bool:
    """Runs one experiment; returns whether it succeeded."""
    experiment = EXPERIMENTS[name]
    suffix = "" if device.type == "cuda" else "-cpu"
    record = Record(f"gpu-{name}{suffix}")
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU: no numbers of a GPU"
    record(f"# on {on}")
    record(f"# {(experiment.__doc__ or '').strip()}")
    exact = name in right.__dict__ or name == "own-thread"
    torch.use_deterministic_algorithms(exact, warn_only=True)
    began, fine = time.perf_counter(), False
    try:
        experiment(Bench(device, record))
        fine = True
        record(f"= as expected, in {time.perf_counter() - began:.0f} s")
    except FoundError as found:
        record(f"= WRONG: {found}")
    except Exception:
        record(f"= FAILED:\n{traceback.format_exc()}")
    finally:
        torch.use_deterministic_algorithms(False)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if not quick:
        record.write()
    return fine


if __name__ == "__main__":
    sys.exit(main())
