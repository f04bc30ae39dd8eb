"""Experiments 1 to 6 of bench/gpu.py: correctness of results on a GPU."""

from __future__ import annotations

import importlib
import pkgutil
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments.job import Bench, apart_by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbc
from zbc.ir import Kind
from zbc.runtime.core.optimizer import primary
from zbc.runtime.core.state import Worker
from zbc.runtime.cuda import StreamHub
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.transport import Letter
from zbc.training.probing.checkup import plain_gradients

KINDS = ("1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "dualpipe")
TWO_PIPES = ("dualpipe",)  # gradients are sums over two copies: the last bit differs


def installed(bench: Bench) -> None:
    """Versions, `zbc explain machine`, every module, one matrix product per type."""
    for module in pkgutil.walk_packages(zbc.__path__, "zbc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    said = subprocess.run(
        [sys.executable, "-m", "zbc", "explain", "machine"], capture_output=True, text=True, check=False
    )
    for line in said.stdout.splitlines():
        bench.say(f"  {line}")
    bench.wants(said.returncode == 0, f"zbc explain machine ends with {said.returncode}: {said.stderr.strip()}")
    left, right = torch.randn(256, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)
    exact = left @ right
    for dtype, most in ((torch.float64, 1e-13), (torch.float32, 1e-2), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)):
        found = (left.to(bench.device, dtype) @ right.to(bench.device, dtype)).to("cpu", torch.float64)
        error = ((found - exact).abs().max() / exact.abs().max()).item()
        bench.say(f"matrix product in {dtype}: {error:.1e}")
        bench.wants(error < most, f"a matrix product in {dtype} is off by {error:.1e}")


def schedules(bench: Bench) -> None:
    """Threads on the default stream: losses and norms are those of pp = 1 to the bit, gradients those of autograd."""
    for dtype, most in (("float32", 1e-5), ("bfloat16", 2e-2)):
        for activations in ("keep", "recompute"):
            options = {"dtype": dtype, "activations": activations}
            one = bench.case(small=True, pp=1, kind="1f1b", **options)
            wanted, plain = one.told(), plain_gradients(one.plan, bench.device)[1]
            for kind in KINDS if activations == "keep" and (bench.cuda or dtype == "float32") else KINDS[3:4]:
                case = bench.case(small=True, pp=4, kind=kind, **options)
                _same(bench, f"{kind:16} {dtype} {activations}", case.told(), wanted, close=kind in TWO_PIPES)
                error = apart_by(case.gradients(), plain)
                bench.say(f"{'':16} gradients beside plain autograd {error:.1e}")
                bench.wants(error < most, f"{kind}: gradients are off by {error:.1e}, at most {most:.0e} was expected")


def _same(
    bench: Bench, what: str, found: list[tuple[float, float]], wanted: list[tuple[float, float]], *, close: bool = False
) -> None:
    equal = found == wanted
    near = len(found) == len(wanted) and all(
        abs(a - b) <= 1e-3 * abs(b)
        for one, other in zip(found, wanted, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    bench.say(f"{what}: {'equal to the bit' if equal else 'close' if near else 'different'}")
    bench.wants(equal or (close and near), f"{what}: {found}, expected {wanted}")


def training(bench: Bench) -> None:
    """Replicas, ZeRO-1, tied weights, no barrier with clipping, dropout; resumed runs equal uninterrupted ones."""
    clip = "clip_grad_norm = 0.01\n"
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "tied": {"tied": "true"},
        "no barrier": {"optimizer": clip + 'sync = "post-validate"'},
        "with it": {"optimizer": clip + 'sync = "before-step"'},
        "two replicas": {"dp": 2},
        "ZeRO-1": {"dp": 2, "shard": "optimizer"},
        "evaluation": {
            "train": "steps = 4\neval_every = 2\neval_batches = 1",
            "data": 'kind = "synthetic"\nvalidation = 0.1',
        },
        "dropout": {
            "family": "experiments.right:dropping",
            "args": 'loss = "mse"',
            "data": 'kind = "experiments.right:Vectors"',
        },
    }
    told = {}
    for name, options in ways.items():
        one, four = ({"pp": 2, "kind": "zb-v"}, {"pp": 2, "kind": "zb-v"})
        if "dp" not in options:
            one, four = {"pp": 1, "kind": "1f1b"}, {"pp": 4, "kind": "zb-h1"}
        wanted = bench.case(small=True, **one, **options).told(4)
        told[name] = bench.case(small=True, **four, **options).told(4)
        _same(bench, name, told[name], wanted, close=name == "tied")  # the order of a sum over two ranks is not fixed
    bench.wants(told["two replicas"] == told["ZeRO-1"], "ZeRO-1 differs from two replicas")
    bench.wants(told["no barrier"] == told["with it"], "clipped steps without a barrier differ from those with it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = bench.case(small=True, pp=4, kind="zb-h1", every=2)
        whole = case.told(4)
        case.run(2, folder=folder)
        saved = sorted(folder.glob("step-*"))[-1]
        workers = bench.case(small=True, pp=2, kind="zb-v", every=2).run(4, resume=saved)
        _same(bench, "resumed on two ranks", [(r.loss, r.grad_norm) for r in workers[0].results], whole[2:])


class Dropping(nn.Module):
    """A layer that draws in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.linear(x))
        return dropped


class Reentrant(nn.Module):
    """A layer whose forward torch runs again in the backward, the reentrant way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = checkpoint(self.inner, x, use_reentrant=True)
        return again


def dropping() -> list[nn.Module]:
    return [Dropping() for _ in range(8)]


def reentrant() -> list[nn.Module]:
    return [nn.Linear(16, 16), *(Reentrant() for _ in range(7))]


class Vectors:
    """A dataset of small vectors."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, 16) * (index % 7 + 1) / 7, torch.full((16,), index % 5 / 5)


def own_thread(bench: Bench) -> None:
    """Backward runs on the rank's thread: a reentrant layer leaves its W to a later op, and results are exact."""
    user = {
        "family": "experiments.right:reentrant",
        "args": 'loss = "mse"',
        "data": 'kind = "experiments.right:Vectors"',
    }
    case = bench.case(pp=2, kind="zb-h1", apart=True, **user)
    left: list[int] = []

    def counting(worker: Worker, op: Any, call: Callable[[], None]) -> None:
        before = sum(p.grad is not None for p in primary(worker).values())
        call()
        if op.kind is Kind.B and op.mb == 0:
            left.append(sum(p.grad is not None for p in primary(worker).values()) - before)

    case.wrapped(1, counting)
    bench.say(f"weights whose gradient the first B of a stage made, and did not leave for W: {left}")
    bench.wants(bool(left) and not any(left), "B of a reentrant layer does all of W's work: it runs on another thread")
    whole, parts = bench.case(pp=2, kind="1f1b", **user).gradients(), case.gradients()
    same = all(torch.equal(whole[name], grad) for name, grad in parts.items())
    bench.say(f"gradients of B and W apart and in one: {'equal to the bit' if same else 'different'}")
    bench.wants(same, "B and W apart give other gradients than in one")


def reads(bench: Bench) -> None:
    """The number of host waits for the device in a step of pp = 1: one, for the verdict."""
    if not bench.cuda:
        bench.say("needs a GPU: torch counts waits of the host there only")
        return
    for sync in ("before-step", "post-validate"):
        found: Counter[str] = Counter()
        places: Counter[str] = Counter()

        def counting(worker: Worker, op: Any, call: Callable[[], None], found: Counter[str] = found) -> None:
            if worker.step < 1:
                call()
                return
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda text, *_: note(op, str(text))
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    call()
                finally:
                    torch.cuda.set_sync_debug_mode("default")

        def note(op: Any, text: str, found: Counter[str] = found, places: Counter[str] = places) -> None:
            if "called a synchronizing" in text:
                found[op.kind.value] += 1
                stack = (f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_stack()[:-1])
                places[f"{op.kind.value} in {threading.current_thread().name}: {' '.join([*stack][-9:])}"] += 1

        bench.case(pp=1, kind="zb-h1", optimizer=f'sync = "{sync}"').wrapped(3, counting)
        waits = {kind: count / 2 for kind, count in found.items() if count}
        bench.say(f"{sync}: waits of the host per step {waits or 'none'}")
        for place in places:
            bench.say(f"  {place}")
        wrong = {kind: count for kind, count in waits.items() if kind not in ("VALIDATE", "VERDICT") or count > 1}
        bench.wants(not wrong, f"{sync}: the host waits within a step: {wrong}")


class Sleepy(StreamHub):
    """Streams that sleep before they send and before they take, so that races show."""

    def __init__(self, ranks: int, seed: int) -> None:
        super().__init__(ranks)
        self._draw = random.Random(seed)

    def put(self, source: int, message: Letter, tensor: Tensor, peer: int) -> None:
        torch.cuda._sleep(self._draw.randrange(2_000_000))  # cycles: up to a millisecond
        super().put(source, message, tensor, peer)

    def take(self, rank: int, message: Letter, peer: int) -> Tensor:
        torch.cuda._sleep(self._draw.randrange(2_000_000))
        return super().take(rank, message, peer)


class Drowsy(Hub):
    """The same on a CPU: threads that sleep."""

    def __init__(self, ranks: int, seed: int) -> None:
        super().__init__(ranks, prompt=bool(seed % 2))
        self._draw = random.Random(seed)

    def put(self, source: int, message: Letter, tensor: Tensor, peer: int) -> None:
        time.sleep(self._draw.random() * 1e-3)
        super().put(source, message, tensor, peer)


def streams(bench: Bench) -> None:
    """A stream per rank, with sleeps before sends and takes: losses and norms stay those of pp = 1."""
    rounds = 20 if bench.cuda else 2
    hub = Sleepy if bench.cuda else Drowsy
    for options in ({}, {"dp": 2, "shard": "optimizer"}, {"optimizer": 'sync = "post-validate"'}):
        pp = 2 if "dp" in options else 4
        wanted = bench.case(small=True, pp=pp if "dp" in options else 1, kind="1f1b", **options).told()
        case = bench.case(small=True, pp=pp, kind="zb-v", streams=True, **options)
        world = case.plan.manifest.topology.world
        for seed in range(rounds):
            _same(bench, f"zb-v {options or ''} round {seed}", case.told(hub=hub(world, seed)), wanted)
