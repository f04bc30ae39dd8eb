"""The cost of an op for the main thread of a rank: stages that compute nothing, two gloo processes.

    python bench/per_op.py [--quick]

us of the main thread's processor time per op, and the rest of it without the user's code that a step calls even so (a
dataset, layers that pass on their input, torch's loss on the last rank), and without torch's transfers, which any
runtime makes: in turns with the steps, a bare loop starts the same messages in the same order and waits where the plan
does. Both are timed in separate loops, where they are faster than between ops, so the rest is an upper bound. Two
numbers of microbatches separate the cost of each further op from the cost per step (its norm, its optimizer).
torch.distributed.pipelining trains the same stages in turns with them.

Last, the ops of the microbatches if every message exists at once, so that none waits: the difference to the same code
with waits is the time that the machine needs to wake up.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ranks import PATIENCE, meeting, over_ranks, planned, results
from record import Record

if TYPE_CHECKING:
    from zbc.ir import Op
    from zbc.runtime.transports.transport import Transport

RANKS, STEPS, QUICK, WARM_UP = 2, 100, 5, 20
NOTHING = """\
zbc = 1
[model]
family = "idle:layers"
layers = 4
loss = "mse"
[parallel]
pp = 2
[schedule]
kind = "{kind}"
microbatches = {m}
[costs]
f = 1
b = 1
w = 1
[data]
kind = "sleeping:Points"
"""
LEGEND = (
    "# us of the main thread per op where stages compute nothing: the runtime's own; with torch's transfers; with the",
    "# user's code. Beside them torch's runtime for the same ops, and how many times ours it is; how often ours",
    "# sleeps per op; what the runtime's own and the user's code take together where no op ever waits",
)
IDLE = tuple((kind, m) for kind in ("1f1b", "zb-h1") for m in (32, 128))


# ---- on each rank --------------------------------------------------------------------------------------------


def run_idle(rank: int, plan: Path, steps: int, sender: Connection) -> None:
    """One rank's process: stages that compute nothing. Rank 0 sends its measurements.

    Each plan has processes of its own: threads of other groups would disturb it.
    """
    with meeting(rank, RANKS, plan.with_suffix(".meet")):
        each = per_op(rank, plan, steps)
        if rank == 0:
            sender.send(each)


class PerOp(NamedTuple):
    """us of a rank's main thread per op, with its parts: torch's calls for transfers, the user's code.

    Then its sleeps per op, the us of the peer's main thread per op of ours, and ours with the user's code if no op
    ever waits.
    """

    ops: int
    whole: float
    bare: float
    user: float
    asleep: float
    peer: float
    awake: float


def per_op(rank: int, folder: Path, steps: int) -> list[PerOp]:
    """The times of all ranks' main threads if stages compute nothing.

    The main thread reads a user's dataset; built-in ones have a thread of their own.
    """
    import ours
    import torch_runtime

    from zbc.plan.directory import StoredPlan

    plan = StoredPlan.read(folder)
    ops = plan.program.ranks[rank]
    runtime = ours.build(plan, rank)
    peer = torch_runtime.build(plan, rank, folder, recompute=False)
    count = plan.manifest.microbatches
    transfers = bare_transfers(runtime.worker, ops)
    awake = never_waiting(plan, rank)
    rows = []
    for step in range(WARM_UP + steps):
        over_ranks(0.0)
        slept, began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time()
        runtime.step(step)
        whole, slept = time.thread_time() - began, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept
        over_ranks(0.0)
        began = time.thread_time()
        transfers()
        bare = time.thread_time() - began
        user = users_code(runtime.worker, count)
        over_ranks(0.0)
        began = time.thread_time()
        peer(step)
        theirs = time.thread_time() - began
        numbers = (whole, bare, user, slept / 1e6, theirs, awake(step))
        rows.append([number / len(ops) * 1e6 for number in numbers])
    mine = [len(ops), *(statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True))]
    each = [[over_ranks(number if rank == of else 0.0) for number in mine] for of in range(RANKS)]
    return [PerOp(int(found[0]), *found[1:]) for found in each]


class Present:
    """A transport of one rank whose messages arrive immediately, with arbitrary contents."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._posted: dict[Any, Any] = {}

    def send(self, message: Any, tensor: Any, peer: int) -> None:
        pass

    def post(self, message: Any, buffer: Any, peer: int) -> None:
        self._posted[message] = buffer

    def wait(self, message: Any) -> Any:
        return self._posted.pop(message)


def never_waiting(plan: Any, rank: int) -> Callable[[int], float]:
    """Seconds of the ops of microbatches in a step without waits and without torch's transfers."""
    import torch

    from zbc.plan.directory import RankPlan
    from zbc.runtime.core.execute import run_ops
    from zbc.training.worker import build_worker

    own = RankPlan(rank, plan.program.ranks[rank], plan.manifest)
    worker = build_worker(own, cast("Transport", Present(rank)), torch.device("cpu"))
    worker.phase_run.script = [entry for entry in worker.script if entry[1].kind.computes or entry[1].kind.is_transfer]

    def run(step: int) -> float:
        worker.step = step
        began = time.thread_time()
        run_ops(worker)
        took = time.thread_time() - began
        worker.losses.clear()
        return took

    return run


def users_code(worker: Any, count: int) -> float:
    """Seconds of the main thread for the user's code in a step of `count` microbatches: a dataset's items, layers, a
    loss. Seeding, reading and stacking of items are the runtime's."""
    import torch
    from sleeping import Points

    (stage,), data, x = worker.stages.values(), Points(), torch.ones(1, 1)
    began = time.thread_time()
    for mb in range(count):
        data[mb]
        y = x
        for layer in stage.layers:
            y = layer.module(y)
        if stage.gives is None:
            worker.loss(y, x)
    return time.thread_time() - began


def bare_transfers(worker: Any, ops: tuple[Op, ...]) -> Callable[[], None]:
    """The messages of a rank's plan by torch's process groups alone, started and waited for where the plan does."""
    import torch
    import torch.distributed as dist

    from zbc.ir import Kind

    cpu, number, there = torch.device("cpu"), torch.zeros(1), 1 - worker.rank
    ways: list[Any] = [dist.new_group([0, 1], timeout=PATIENCE) for _ in range(RANKS)]  # one for what each rank sends
    out, back = (ways[rank]._get_backend(cpu) for rank in (worker.rank, there))
    waiting = {kind for kind in Kind if kind.is_transfer} | {Kind.F, Kind.B, Kind.BW}
    routes = [(op, worker.routes[op].brought) for op in ops if op.kind in waiting]
    todo = [(op.kind, 2 * op.mb + message.forward, torch.zeros(1)) for op, message in routes if message is not None]

    def run() -> None:
        posted, sent = {}, []
        for kind, tag, buffer in todo:
            if kind.is_send:
                sent.append(out.send([number], there, tag))
            elif kind.is_recv:
                posted[tag] = back.recv([buffer], there, tag)
            else:
                posted.pop(tag).wait()
        for work in sent:
            work.wait()

    return run


# ---- in the process that was called --------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="What an op costs the main thread of a rank.")
    parser.add_argument("--quick", action="store_true", help="few steps of one case; writes no file")
    options = parser.parse_args()
    record = Record("per-op")
    for line in LEGEND:
        record(line)
    titles = f"{'own':>7} {'+ transfers':>11} {'+ user':>9} {'torch':>9} {'ratio':>7} {'sleeps':>7} {'awake':>7}"
    record(f"{'case':16} {'rank':>4} {'ops':>5} {titles}")
    few: list[PerOp] = []
    with tempfile.TemporaryDirectory() as name:
        for kind, m in IDLE[: 1 if options.quick else None]:
            folder = Path(name) / f"idle-{kind}-{m}"
            planned(NOTHING.format(kind=kind, m=m), folder)
            (found,) = results(run_idle, (folder, QUICK if options.quick else STEPS), ranks=RANKS, limit=600.0)
            few = report_idle(record, kind, found, few)
    record()
    record(NOTHING.rstrip())
    if not options.quick:
        record.write()


def report_idle(record: Record, kind: str, ranks: list[PerOp], few: list[PerOp]) -> list[PerOp]:
    """Records the time of each rank's main thread; given fewer microbatches, also the cost of each further op.

    Returns the measurements to compare the next ones with: none after the second.
    """
    for rank, one in enumerate(ranks):
        record(idle_row(f"idle {kind}", rank, one))
    for rank, (one, less) in enumerate(zip(ranks, few, strict=False)):
        ops = one.ops - less.ops
        each = [(one.ops * a - less.ops * b) / ops for a, b in zip(one[1:], less[1:], strict=True)]
        further = PerOp(ops, *each)
        once = one.ops * (one.whole - further.whole)
        record(idle_row("  each further", rank, further) + f"   and {once:.0f} us once a step")
    return [] if few else ranks


def idle_row(name: str, rank: int, one: PerOp) -> str:
    without = one.whole - one.user
    parts = f"{without - one.bare:7.1f} {without:11.1f} {one.whole:9.1f} {one.peer:9.1f}"
    parts += f" {one.peer / one.whole:7.2f} {one.asleep:7.2f} {one.awake:7.1f}"
    return f"{name:16} {rank:4} {one.ops:5} {parts}"


if __name__ == "__main__":
    main()
