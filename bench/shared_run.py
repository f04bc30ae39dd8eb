"""Layers that two ranks share, on 2 x 2 ranks as processes: how long a step takes that is predicted with its sums.

    python bench/shared_run.py [--steps N] [--quick]

Layers take `F`, `B` and `W` ms and meet once in F and once in B, over gloo; a sum that is over sooner is held back
until it has taken `A` ms. So what one machine can compute is not measured, but what waits for what is: F + a, B + a,
and a BW whose sum hides behind its W. The step of each schedule beside the predicted one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import joined, results
from record import Record
from sleeping import Sleeper, sleep_until

import zbc
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.features.tensor_parallel import Group

RANKS, LAYERS, MICROBATCHES, WARM_UP = 4, 8, 8, 1
F, B, W, A = 12.0, 12.0, 12.0, 6.0  # ms of a layer, and of each of its two sums
KINDS = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "gpipe")


class Slow:
    """A transport on which a sum takes `A` ms at least."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.rank = inner, inner.rank

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Held:
        return Held(self._inner.start_sum(tensor, ranks), time.perf_counter() + A / 1e3)


class Held:
    """A `Pending` that is not over before `end`."""

    def __init__(self, inner: Any, end: float) -> None:
        self._inner, self._end = inner, end

    def wait(self) -> None:
        self._inner.wait()
        sleep_until(self._end)

    def ready(self) -> bool:
        return time.perf_counter() >= self._end and bool(self._inner.ready())


class Shared(nn.Module):
    """A layer of which each rank of a group has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Sleeper(F, B, W, 1)
        self.enter = self.leave = lambda x: x
        self.size = 1

    def shard(self, group: Group) -> dict[str, int]:
        slow = group._replace(transport=Slow(group.transport))  # type: ignore[arg-type]
        self.enter, self.leave, self.size = slow.enter, slow.leave, group.size
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.part(self.enter(x))) / self.size


def layers(count: int) -> list[nn.Module]:
    return [Shared() for _ in range(count)]


def rank_main(rank: int, port: int, plan: StoredPlan, steps: int, sender: Any) -> None:
    with joined(rank, port, plan) as worker:
        found = []
        for step in range(steps + WARM_UP):
            dist.barrier()
            began = time.perf_counter()
            run_step(worker, step)
            found.append(1e3 * (time.perf_counter() - began))
    if rank == 0:
        sender.send(found[WARM_UP:])


def plan_of(kind: str, folder: Path) -> tuple[StoredPlan, float]:
    """A plan of that schedule with these times, and its predicted step."""
    text = f"""
[model]
family = "shared_run:layers"
layers = {LAYERS}
loss = "mse"
args = {{count = {LAYERS}}}
[parallel]
pp = 2
tp = 2
[schedule]
kind = "{kind}"
microbatches = {MICROBATCHES}
microbatch_size = 1
[costs]
per = "layer"
f = {F}
b = {B}
w = {W}
comm = 0.0
[optimizer]
kind = "sgd"
lr = 0.0
[data]
kind = "sleeping:Points"
"""
    path = folder / "zbc.toml"
    path.write_text(text)
    chunks = 2 if kind in ("zb-v", "interleaved-1f1b") else 1
    made = zbc.plan(zbc.load(path, [f"costs.tp={A * LAYERS / 2 / chunks}"]))
    made.write(folder / kind)
    return StoredPlan.read(folder / kind), made.simulate().makespan


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two steps, and write no file")
    given = parser.parse_args()
    record = Record("shared-run")
    record(f"# layers of {F} + {B} + {W} ms and two sums of {A} ms; 2 ranks of a pipeline, 2 that share their layers")
    record("schedule          predicted ms  measured ms  ratio")
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(KINDS):
            plan, predicted = plan_of(kind, Path(folder))
            steps = 2 if given.quick else given.steps
            preload = ("zbc.training.worker",)
            arguments = (29600 + number, plan, steps)
            (found,) = results(rank_main, arguments, ranks=RANKS, count=1, preload=preload, limit=240)
            middle = statistics.median(found)
            record(f"{kind:16}  {predicted:12.1f}  {middle:11.1f}  {middle / predicted:5.3f}")
    if not given.quick:
        record.write()


if __name__ == "__main__":
    main()
