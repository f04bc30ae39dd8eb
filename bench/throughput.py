"""Steps per second beside torch.distributed.pipelining: the same model, order and microbatches on two gloo processes.

    python bench/throughput.py [--steps N] [--case NAME ...] [--quick]

Both runtimes run in the same processes and take turns, step by step, so that a busy machine slows both; one thread per
kernel. The peer is torch's general runtime with our order of ops and its own split of backward; with recompute its
layers are checkpointed as torch does it. Ours includes VALIDATE and STEP; the peer sums the norm of all gradients over
the ranks after its step, as torch does it, and runs the same optimizer. A ratio above 1 says that ours is faster; `cpu`
is the same for processor time, of both ranks and all their threads, which other programs disturb less. Last comes the
time the main thread spends per op when stages compute nothing, and what is left of it without the code of the user
that a step calls even so (a dataset, layers that pass on their input, torch's loss on the last rank), and what is left
without torch's transfers, which any runtime makes: in turns with the steps, a bare loop starts the same messages in the
same order and waits where the plan does. Both are timed in loops of their own, where they take less than between ops,
so what is left is rather too much. With two numbers of microbatches it is seen what each further op costs, and what a
step costs once (its norm, its optimizer).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ranks import results
from record import Record

if TYPE_CHECKING:
    from zbc.ir import Op

RANKS, WARM_UP, LIMIT = 2, 3, 600.0
PATIENCE = timedelta(seconds=120)
JOB = """\
zbc = 1
[model]
layers = {layers}
hidden = {hidden}
heads = 4
vocab = {vocab}
seq_len = {seq_len}
[parallel]
pp = 2
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = {size}
[memory]
activations = "{activations}"
[data]
kind = "synthetic"
"""
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
SMALL = {"layers": 2, "hidden": 16, "vocab": 256, "seq_len": 8, "size": 1, "m": 16, "activations": "keep"}
MEDIUM = {"layers": 4, "hidden": 128, "vocab": 512, "seq_len": 64, "size": 2, "m": 8, "activations": "keep"}
CASES: dict[str, dict[str, Any]] = {
    "small 1f1b": {**SMALL, "kind": "1f1b"},
    "small zb-h1": {**SMALL, "kind": "zb-h1"},
    "small zb-v": {**SMALL, "kind": "zb-v"},
    "medium 1f1b": {**MEDIUM, "kind": "1f1b"},
    "medium zb-h1": {**MEDIUM, "kind": "zb-h1"},
    "recompute 1f1b": {**MEDIUM, "kind": "1f1b", "activations": "recompute"},
    "recompute zb-h1": {**MEDIUM, "kind": "zb-h1", "activations": "recompute"},
}
IDLE = tuple((kind, m) for kind in ("1f1b", "zb-h1") for m in (32, 128))


# ---- on each rank --------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, cases: list[str], steps: int, results: Connection) -> None:
    """One rank's process: every case, both runtimes in turn. Rank 0 sends what it measured."""
    with meeting(rank, folder / "meet"):
        for number, case in enumerate(cases):
            found = take_turns(runtimes(CASES[case], rank, folder / str(number)), steps)
            if rank == 0:
                results.send(found)


def run_idle(rank: int, plan: Path, results: Connection) -> None:
    """One rank's process: stages that compute nothing. Rank 0 sends what it measured.

    Each plan has processes of its own: the threads of other groups would be in the way.
    """
    with meeting(rank, plan.with_suffix(".meet")):
        each = per_op(rank, plan)
        if rank == 0:
            results.send(each)


@contextmanager
def meeting(rank: int, place: Path) -> Iterator[None]:
    """A process group of all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=RANKS, timeout=PATIENCE)
    yield
    dist.barrier()
    dist.destroy_process_group()


def runtimes(case: dict[str, Any], rank: int, folder: Path) -> dict[str, Callable[[int], None]]:
    import ours
    import torch_runtime

    from zbc.plan import Plan

    plan = Plan.read(folder)
    mine = ours.build(plan, rank, PATIENCE)
    theirs = torch_runtime.build(plan, rank, folder, recompute=case["activations"] == "recompute")
    return {"zbc": lambda step: mine.step(step) and None, "torch": theirs}


def take_turns(runs: dict[str, Callable[[int], None]], steps: int) -> dict[str, list[float]]:
    """ms of every step of each runtime, from a moment that all ranks agreed on to the end of the last one.

    Under "NAME cpu" the ms of processor time that all ranks spent on it together.
    """
    times: dict[str, list[float]] = {key: [] for name in runs for key in (name, f"{name} cpu")}
    for step in range(WARM_UP + steps):
        for name, run in runs.items():
            over_ranks(0.0)
            began, spent = time.perf_counter(), time.process_time()
            run(step)
            took, used = time.perf_counter() - began, time.process_time() - spent
            took, used = over_ranks(took), over_ranks(used, "SUM")
            if step >= WARM_UP:
                times[name].append(took * 1e3)
                times[f"{name} cpu"].append(used * 1e3)
    return times


def over_ranks(number: float, how: str = "MAX") -> float:
    """The largest of all ranks' numbers, or their sum; waits for all of them."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
    return tensor.item()


class PerOp(NamedTuple):
    """us of a rank's main thread per op, and what is in it: torch's calls for transfers, the user's code; sleeps."""

    ops: int
    whole: float
    bare: float
    user: float
    asleep: float


def per_op(rank: int, folder: Path) -> list[PerOp]:
    """What the main threads of all ranks spend where stages compute nothing.

    A dataset of the user's is read by the main thread, whatever that costs; built-in ones have a thread of their own.
    """
    import ours

    from zbc.plan import Plan

    plan = Plan.read(folder)
    ops = plan.program.ranks[rank]
    runtime = ours.build(plan, rank, PATIENCE)
    count = plan.manifest.microbatches
    transfers = bare_transfers(runtime.worker, ops)
    rows = []
    for step in range(120):
        over_ranks(0.0)
        slept, began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.thread_time()
        runtime.step(step)
        whole, slept = time.thread_time() - began, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept
        over_ranks(0.0)
        began = time.thread_time()
        transfers()
        bare = time.thread_time() - began
        user = users_code(runtime.worker, step + 1, count)  # of the next step, whose order of samples is not known yet
        rows.append((whole / len(ops) * 1e6, bare / len(ops) * 1e6, user / len(ops) * 1e6, slept / len(ops)))
    mine = [len(ops), *(statistics.median(column) for column in zip(*rows[20:], strict=True))]
    each = [[over_ranks(number if rank == of else 0.0) for number in mine] for of in range(RANKS)]
    return [PerOp(int(found[0]), *found[1:]) for found in each]


def users_code(worker: Any, step: int, count: int) -> float:
    """Seconds of the main thread for what a step of `count` microbatches calls of the user's: data, layers, a loss."""
    (stage,) = worker.stages.values()
    began = time.thread_time()
    for mb in range(count):
        x = worker.batches.targets(step, mb) if stage.gives is None else worker.batches.inputs(step, mb)
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

    from zbc.ir import TRANSFER, Kind

    cpu, number, there = torch.device("cpu"), torch.zeros(1), 1 - worker.rank
    ways: list[Any] = [dist.new_group([0, 1], timeout=PATIENCE) for _ in range(RANKS)]  # one for what each rank sends
    out, back = (ways[rank]._get_backend(cpu) for rank in (worker.rank, there))
    waiting = TRANSFER | {Kind.F, Kind.B, Kind.BW}
    routes = [(op, worker.routes[op].message) for op in ops if op.kind in waiting]
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
    parser = argparse.ArgumentParser(description="Steps per second beside torch.distributed.pipelining.")
    parser.add_argument("--steps", type=int, default=60, help="steps of each runtime; the median counts")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one (repeatable); writes no file")
    parser.add_argument("--quick", action="store_true", help="few steps of one case; writes no file")
    options = parser.parse_args()
    if options.quick:
        options.case, options.steps = options.case or ["small 1f1b"], min(options.steps, 5)
    cases = options.case or list(CASES)
    record = Record("throughput")
    record(f"# {RANKS} gloo processes, one thread each; ms per step, median of {options.steps} in turns")
    record(f"{'case':16} {'ops':>5} {'zbc ms':>9} {'torch ms':>9} {'ratio':>7} {'cpu':>7}   quartiles of the ratio")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = [write_plan(JOB.format(**CASES[case]), folder / str(i)) for i, case in enumerate(cases)]
        for kind, m in IDLE:
            write_plan(NOTHING.format(kind=kind, m=m), folder / f"idle-{kind}-{m}")
        found = measure(run_rank, (folder, cases, options.steps), len(cases))
        for case, count, times in zip(cases, counts, found, strict=True):
            report(record, case, count, times)
        record()
        record(
            "# us of the main thread per op where stages compute nothing: the runtime's own; with torch's transfers;"
        )
        record("# and with the user's code; and how often it sleeps per op")
        record(f"{'case':16} {'rank':>4} {'ops':>5} {'own':>7} {'+ transfers':>11} {'+ user':>9} {'sleeps':>7}")
        few: list[PerOp] = []
        for kind, m in IDLE:
            few = report_idle(record, kind, next(measure(run_idle, (folder / f"idle-{kind}-{m}",), 1)), few)
    record()
    record("# the cases: " + json.dumps(CASES))
    record(JOB.rstrip())
    if not options.case:
        record.write()


def report(record: Record, case: str, count: int, times: dict[str, list[float]]) -> None:
    ratios = [theirs / mine for mine, theirs in zip(times["zbc"], times["torch"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    mine, theirs, our_cpu, their_cpu = (
        statistics.median(times[name]) for name in ("zbc", "torch", "zbc cpu", "torch cpu")
    )
    ratio = f"{theirs / mine:7.3f} {their_cpu / our_cpu:7.3f}"
    record(f"{case:16} {count:5} {mine:9.2f} {theirs:9.2f} {ratio}   {low:.2f} to {high:.2f}")


def report_idle(record: Record, kind: str, ranks: list[PerOp], few: list[PerOp]) -> list[PerOp]:
    """What the main thread of each rank spends; beside it with fewer microbatches, what each further op costs.

    Gives back what the next one is put beside: nothing after these two.
    """
    for rank, one in enumerate(ranks):
        record(idle_row(f"idle {kind}", rank, one) + f" {one.asleep:7.2f}")
    for rank, (one, less) in enumerate(zip(ranks, few, strict=False)):
        ops = one.ops - less.ops
        each = [(one.ops * a - less.ops * b) / ops for a, b in zip(one[1:], less[1:], strict=True)]
        further = PerOp(ops, *each)
        once = one.ops * (one.whole - further.whole)
        record(idle_row("  each further", rank, further) + f"   and {once:.0f} us once a step")
    return [] if few else ranks


def idle_row(name: str, rank: int, one: PerOp) -> str:
    without = one.whole - one.user
    return f"{name:16} {rank:4} {one.ops:5} {without - one.bare:7.1f} {without:11.1f} {one.whole:9.1f}"


def write_plan(job: str, folder: Path) -> int:
    """Plan a job into `folder`; the number of its ops."""
    from zbc.compiler.compile import compile_job, load_job

    path = folder.with_suffix(".toml")
    path.write_text(job)
    compiled = compile_job(load_job(path))
    compiled.write(folder)
    return compiled.program.size


def measure(target: Callable[..., None], arguments: tuple[Any, ...], count: int) -> Iterator[Any]:
    """The `count` things that rank 0 sends."""
    return results(target, arguments, ranks=RANKS, count=count, preload=("torch_runtime", "ours"), limit=LIMIT)


if __name__ == "__main__":
    main()
