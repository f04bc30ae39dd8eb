"""What the runtime adds to the work of a rank: `python bench/overhead.py split | ops | experts | llama [--quick]`.

split     B and W apart beside the fused backward: the same stage, in turns per microbatch, on one CPU thread. The fused
          side runs torch's own layers (under autocast our linear layers, which keep one cast of a weight for all
          microbatches). Times are of the processor, so that other programs of the machine count less. For recompute
          both sides run each forward a second time in backward. With --compile: forward and backward, with and without
          `model.compile`.

ops       the cost of an op for the main thread of a rank: stages that compute nothing, two gloo processes. us of the
          main thread's processor time per op, and the rest of it without the user's code that a step calls even so (a
          dataset, layers that pass on their input, torch's loss on the last rank), and without torch's transfers, which
          any runtime makes: in turns with the steps, a bare loop starts the same messages in the same order and waits
          where the plan does. Both are timed in separate loops, where they are faster than between ops, so the rest is
          an upper bound. Two numbers of microbatches separate the cost of each further op from the cost per step (its
          norm, its optimizer). torch.distributed.pipelining trains the same stages in turns with them. Last, the ops of
          the microbatches if every message exists at once, so that none waits: the difference to the same code with
          waits is the time that the machine needs to wake up.

experts   the experts of a layer as grouped products beside the loop over matrices, in one process, by turns: for each
          type the median of F + B + W of both, their ratio, and whether all results have the same bits.

llama     a Llama that transformers builds beside zbc's own of the same sizes, in turns step by step: processor time of
          a whole step of two ranks, threads of this process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from experiments.job import halved, job_text
from experiments.job import planned as plan_of
from ranks import PATIENCE, meeting, over_ranks, planned, results
from record import Record
from torch import Tensor, nn

from zbc.ir import Kind
from zbc.job.model_section import Model
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core import grouped
from zbc.runtime.core.execute import run_ops, run_step
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.split import split_backward
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.hub import Hub
from zbc.training.models.experts import Experts
from zbc.training.worker import build_worker

if TYPE_CHECKING:
    from zbc.ir import Op
    from zbc.runtime.transports.transport import Transport


# ---- B and W apart -------------------------------------------------------------------------------------------

STAGE = {"layers": 2, "hidden": 256, "heads": 4, "vocab": 512, "seq_len": 128, "size": 2, "m": 4}


class Timed:
    """A worker of one rank that measures ops of `kinds` in each step."""

    def __init__(self, plan: StoredPlan, kinds: tuple[Kind, ...] = (Kind.B, Kind.W, Kind.BW)) -> None:
        self.kinds = kinds
        ops = plan.program.ranks[0]
        self.worker = build_worker(RankPlan(0, ops, plan.manifest), Hub(1).end(0), torch.device("cpu"))
        self.seconds = 0.0
        self.worker.script[:] = [(self._clocked(handler), op, text) for handler, op, text in self.worker.script]

    def _clocked(self, handler: Any) -> Any:
        def run(worker: Worker, op: Any) -> None:
            began = time.thread_time()
            handler(worker, op)
            if op.kind in self.kinds:
                self.seconds += time.thread_time() - began

        return run

    def step(self, step: int) -> float:
        self.seconds = 0.0
        run_step(self.worker, step)
        return self.seconds


def split(record: Record, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    steps = 5 if asked.quick else asked.steps or 15
    (_compile if asked.compile else _split)(record, steps)
    record()
    record(_job("float32", "keep").rstrip())


def _split(record: Record, steps: int) -> None:
    record(f"# {STAGE}; ms of backward per microbatch, median of {steps} steps in turns")
    record(f"{'':9} {'':10} {'BW':>8} {'B + W':>8} {'ratio':>7}   quartiles")
    for dtype in ("float32", "bfloat16"):
        for activations in ("keep", "recompute"):
            plan = plan_of(_job(dtype, activations))
            sides = Timed(plan), Timed(StoredPlan(plan.manifest, halved(plan.program)))
            record(f"{dtype:9} {activations:10} {_compared(sides, steps)}")


def _compile(record: Record, steps: int) -> None:
    record(f"# {STAGE}; ms of forward and backward per microbatch, median of {steps} steps in turns")
    record(f"{'':7} {'':9} {'':6} {'as is':>8} {'compiled':>8} {'ratio':>7}   quartiles")
    kinds = (Kind.F, Kind.B, Kind.W, Kind.BW)
    for family in ("gpt", "llama"):
        for dtype in ("float32", "bfloat16"):
            job = _job(dtype, "keep").replace("[model]", f'[model]\nfamily = "{family}"')
            plans = [plan_of(text) for text in (job, job.replace("compile = false", "compile = true"))]
            for name, pair in (
                ("BW", plans),
                ("B + W", [StoredPlan(one.manifest, halved(one.program)) for one in plans]),
            ):
                compared = _compared((Timed(pair[0], kinds), Timed(pair[1], kinds)), steps)
                record(f"{family:7} {dtype:9} {name:6} {compared}")


def _job(dtype: str, activations: str) -> str:
    return job_text(**STAGE, pp=1, kind="1f1b", dtype=dtype, activations=activations)


def _compared(sides: tuple[Timed | Threads, Timed | Threads], steps: int) -> str:
    """ms per microbatch of both sides, in turns step by step, and the ratio of the second to the first."""
    pairs = [(sides[0].step(step), sides[1].step(step)) for step in range(steps + 2)][2:]
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    times = [statistics.median(column) * 1e3 / STAGE["m"] for column in zip(*pairs, strict=True)]
    return f"{times[0]:8.2f} {times[1]:8.2f} {middle:7.3f}   {low:.3f} to {high:.3f}"


# ---- an op --------------------------------------------------------------------------------------------------

RANKS, STEPS, QUICK, WARM_UP = 2, 100, 5, 20
NOTHING = """\
[model]
family = "sleeping:idle"
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
    import contestants

    plan = StoredPlan.read(folder)
    ops = plan.program.ranks[rank]
    runtime = contestants.zbc(plan, rank)
    peer = contestants.torch_training(plan, rank, folder, recompute=False)
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
    import torch.distributed as dist

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


def ops(record: Record, asked: argparse.Namespace) -> None:
    for line in LEGEND:
        record(line)
    titles = f"{'own':>7} {'+ transfers':>11} {'+ user':>9} {'torch':>9} {'ratio':>7} {'sleeps':>7} {'awake':>7}"
    record(f"{'case':16} {'rank':>4} {'ops':>5} {titles}")
    few: list[PerOp] = []
    with tempfile.TemporaryDirectory() as name:
        for kind, m in IDLE[: 1 if asked.quick else None]:
            folder = Path(name) / f"idle-{kind}-{m}"
            planned(NOTHING.format(kind=kind, m=m), folder)
            steps = QUICK if asked.quick else asked.steps or STEPS
            (found,) = results(run_idle, (folder, steps), ranks=RANKS, limit=600.0)
            few = report_idle(record, kind, found, few)
    record()
    record(NOTHING.rstrip())


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


# ---- experts ------------------------------------------------------------------------------------------------


def experts_of(hidden: int, width: int, count: int) -> Experts:
    """The experts of a block of a llama, two for each token, with split backwards."""
    how = {"hidden": hidden, "ffn_hidden": width, "experts": count, "top_k": 2, "layers": 1}
    layer = Experts(Model(family="llama", **how), nn.SiLU())
    split_backward(layer)
    return layer


def experts(record: Record, asked: argparse.Namespace) -> None:
    """16 experts of 512 x 1024, two for each of 1,024 tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = experts_of(512, 1024, 16).to(dtype)
        ms, found = beside(layer, torch.randn(1, 1024, 512, dtype=dtype), runs=3 if asked.quick else asked.steps or 9)
        equal = all(map(torch.equal, found["grouped"], found["loop"]))
        shown = " ".join(f"{name} {value:.1f} ms" for name, value in ms.items())
        bits = "same bits" if equal else "other bits"
        record(f"{str(dtype).removeprefix('torch.')}: {shown}, {ms['grouped'] / ms['loop']:.3f} of it, {bits}")


def beside(layer: Experts, x: Tensor, *, runs: int) -> tuple[dict[str, float], dict[str, list[Tensor]]]:
    """Median ms of F + B + W of "grouped" and "loop", and what `_ran` returns of each."""
    ways: dict[str, Callable[..., bool]] = {"grouped": grouped._together, "loop": lambda rows, *sizes: False}
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[Tensor]] = {}
    for _ in range(runs):
        for name, way in ways.items():
            grouped._together = way
            began = time.perf_counter()
            found[name] = _ran(layer, x)
            times[name].append(time.perf_counter() - began)
    grouped._together = ways["grouped"]
    return {name: 1e3 * statistics.median(some[1:]) for name, some in times.items()}, found


def _ran(layer: Experts, x: Tensor) -> list[Tensor]:
    """F, B and W; the output, and the gradients of the input and of all parameters."""
    for parameter in layer.parameters():
        parameter.grad = None
    given, slot = x.clone().requires_grad_(True), Slot()
    with using(slot):
        y = layer(given)
    slot.split = True
    y.sum().backward()
    slot.run()
    if x.is_cuda:
        torch.cuda.synchronize()
    return [y.detach(), *(t.grad for t in (given, *layer.parameters()) if t.grad is not None)]


# ---- a model of transformers ---------------------------------------------------------------------------------

LLAMA = """\
[model]
{model}
seq_len = 128
[parallel]
pp = {ranks}
[schedule]
kind = "{kind}"
microbatches = {m}
microbatch_size = 2
[costs]
f = 1
b = 1
w = 1
[data]
kind = "synthetic"
"""


class Threads:
    """The ranks of a plan as threads; a step takes the processor time of this process."""

    def __init__(self, plan: StoredPlan) -> None:
        hub, cpu, parts = Hub(RANKS), torch.device("cpu"), plan.program.ranks
        own = [RankPlan(rank, parts[rank], plan.manifest) for rank in range(RANKS)]
        self.workers = [build_worker(one, hub.end(rank), cpu) for rank, one in enumerate(own)]
        self.ranks = ThreadPoolExecutor(RANKS)

    def step(self, step: int) -> float:
        began = time.process_time()
        list(self.ranks.map(lambda worker: run_step(worker, step), self.workers))
        return time.process_time() - began


def llama(record: Record, asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    steps = 5 if asked.quick else asked.steps or 40
    record(f"# 4 blocks, {RANKS} ranks; ms of the processor per microbatch, median of {steps} steps in turns")
    record(f"{'hidden':>6} {'':8} {'zbc':>8} {'itself':>8} {'ratio':>7}   quartiles")
    for hidden in (64, 256, 512):
        sizes = {"hidden_size": hidden, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
        sizes |= {"model_type": "llama", "num_hidden_layers": 4, "intermediate_size": 4 * hidden}
        ours = f'family = "llama"\nlayers = 4\nhidden = {hidden}\nheads = 4\nvocab = 512\nffn_hidden = {4 * hidden}'
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(sizes))
            for kind in ("1f1b", "zb-h1"):
                texts = [
                    LLAMA.format(model=one, ranks=RANKS, kind=kind, m=STAGE["m"])
                    for one in (ours, f'config = "{path}"')
                ]
                record(
                    f"{hidden:6} {kind:8} {_compared((Threads(plan_of(texts[0])), Threads(plan_of(texts[1]))), steps)}"
                )


PARTS = {
    "split": ("split", split),  # with the names of records
    "ops": ("per-op", ops),
    "experts": ("grouped", experts),
    "llama": ("llama", llama),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, help="of each side; the median counts")
    parser.add_argument("--compile", action="store_true", help="split: what model.compile gains, instead")
    parser.add_argument("--quick", action="store_true", help="few steps; writes no file")
    asked = parser.parse_args()
    name, part = PARTS[asked.part]
    record = Record(f"{name}-compile" if asked.compile else name)
    part(record, asked)
    if not asked.quick:
        record.write()


if __name__ == "__main__":
    main()
