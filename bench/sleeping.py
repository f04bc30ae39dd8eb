"""Layers that sleep for a given time: the rest of a step is the overhead of the runtime.

A model like any other to zbc: `family = "sleeping:layers"` and `data.kind = "sleeping:Points"`.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zbc
from zbc.ir import Op
from zbc.runtime.core.slot import Slot, accumulate, current_slot
from zbc.runtime.core.state import Worker
from zbc.runtime.features.offload import copying
from zbc.runtime.features.tensor_parallel import Group

late: list[float] = []  # delay of each `sleep_until`, seconds
_usual = 0.0  # delay of time.sleep here, seconds; see `calibrate`


def calibrate() -> None:
    """Measures the delay of `time.sleep` (some 0.1 ms on Linux), which `sleep_until` allows for."""
    global _usual
    found = []
    for _ in range(50):
        began = time.perf_counter()
        time.sleep(0.005)
        found.append(time.perf_counter() - began - 0.005)
    _usual = statistics.median(found)


def sleep_until(end: float) -> None:
    """Returns when `time.perf_counter()` reaches `end`.

    Sleeps until about then and loops for the last few microseconds only: a longer loop would take the core away from
    other ranks, which end their ops at the same moment.
    """
    left = end - time.perf_counter() - _usual
    if left > 0:
        time.sleep(left)
    while (now := time.perf_counter()) < end:
        pass
    late.append(now - end)


class Paced:
    """A `Clock` of a worker that makes each op take at least `ms(op)` from when it has its inputs."""

    def __init__(self, worker: Worker, ms: Callable[[Op], float]) -> None:
        self._inner, self._worker, self._ms = worker.clock, worker, ms
        self._began = 0.0
        self.read = self._inner.read

    def start(self) -> float:
        self._began = time.perf_counter()
        return self._inner.start()

    def stop(self, began: float) -> None:
        sleep_until(self._began + self._ms(Op.parse(self._worker.progress.op)) / 1e3)
        self._inner.stop(began)


class Jitter:
    """Factors of mean 1 for the times of ops, in every second step; 1 in the others and without $SLEEPING_JITTER.

    $SLEEPING_JITTER: the standard deviation and the microbatches of a step, "0.1 8".
    """

    def __init__(self, seed: int) -> None:
        deviation, count = os.environ.get("SLEEPING_JITTER", "0 1").split()
        self._sigma, self._count = math.sqrt(math.log1p(float(deviation) ** 2)), int(count)
        self._random, self._begun = random.Random(seed), {"forward": 0, "backward": 0}

    def draw(self, way: str, factors: int) -> list[float]:
        """Factors for one microbatch in direction `way`."""
        step, self._begun[way] = self._begun[way] // self._count, self._begun[way] + 1
        if not self._sigma or step % 2 == 0:
            return [1.0] * factors
        shift = -self._sigma * self._sigma / 2
        return [math.exp(self._random.gauss(shift, self._sigma)) for _ in range(factors)]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Sleeper, slot: Slot | None) -> Tensor:
        ctx.layer, ctx.slot, ctx.weight = layer, slot, weight
        began = time.perf_counter()
        y = x * weight
        if not x.is_meta:  # meta tensors are for shapes only
            sleep_until(began + layer.f * layer.jitter.draw("forward", 1)[0])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layer, slot, weight = ctx.layer, ctx.slot, ctx.weight
        apart = slot is not None and slot.split
        now, later = layer.jitter.draw("backward", 2)
        end = time.perf_counter() + layer.b * now

        def weight_grad() -> None:
            end = time.perf_counter() + layer.w * (later if apart else now)  # a fused backward is one op
            accumulate(weight, torch.zeros_like(weight))
            sleep_until(end)

        grad_x = grads[0] * weight
        sleep_until(end)
        if not ctx.needs_input_grad[1]:  # frozen in this microbatch
            return grad_x, None, None, None
        if slot is None:
            weight_grad()
        else:
            slot.defer(weight_grad)
        return grad_x, None, None, None


class Sleeper(nn.Module):
    """Takes `f`, `b` and `w` ms for the forward and the two halves of the backward, and passes its input on."""

    def __init__(self, f: float, b: float, w: float, width: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.jitter = Jitter(seed)
        self.weight = nn.Parameter(torch.ones(() if width is None else width))
        self.f, self.b, self.w = f / 1e3, b / 1e3, w / 1e3

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(x, self.weight, self, current_slot())  # type: ignore[no-untyped-call]
        return y


def layers(count: int, f: float, b: float, w: float) -> list[nn.Module]:
    """`count` layers; times in ms, of one microbatch."""
    return [Sleeper(f, b, w) for _ in range(count)]


def idle() -> list[nn.Module]:
    """Layers that compute nothing: the time of a step is the overhead of the runtime."""
    return [nn.Identity() for _ in range(4)]


def calibrated(count: int, f: float, b: float, w: float) -> list[nn.Module]:
    """The same as `layers`, with `calibrate` first."""
    calibrate()
    return layers(count, f, b, w)


def noisy(count: int, f: float, b: float, w: float) -> list[nn.Module]:
    """`count` layers, each with random numbers of its own."""
    return [Sleeper(f, b, w, seed=i) for i in range(count)]


def uneven(count: int, f: float, b: float, w: float, width: int = 1) -> list[nn.Module]:
    """`count` layers for `width` numbers; every third, from the second on, takes twice as long."""
    return [Sleeper(*(ms * (1 + (i % 3 == 1)) for ms in (f, b, w)), width) for i in range(count)]


def drawn(count: int, seed: int, least: float, most: float) -> list[nn.Module]:
    """`count` layers whose F, B and W take random ms, log-uniform between `least` and `most`."""
    numbers = random.Random(seed)
    return [Sleeper(*(least * (most / least) ** numbers.random() for _ in range(3))) for _ in range(count)]


def copied(count: int, f: float, b: float, w: float, copy: float) -> list[nn.Module]:
    """The same as `calibrated`, in a process in which an offload or reload takes `copy` ms."""

    def sleep(*_: object) -> None:
        sleep_until(time.perf_counter() + copy / 1e3)

    copying.copy_out = copying.copy_back = sleep
    return calibrated(count, f, b, w)


class Slow:
    """A transport on which a sum, or a swap of rows, takes at least `least` seconds."""

    def __init__(self, inner: Any, least: float) -> None:
        self._inner, self._least, self.rank = inner, least, inner.rank

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Held:
        return Held(self._inner.start_sum(tensor, ranks), time.perf_counter() + self._least)

    def start_swap(self, mine: Tensor, out: Sequence[int], parts: Tensor, into: Sequence[int], ranks: Any) -> Any:
        pending = self._inner.start_swap(mine, out, parts, into, ranks)
        return Held(pending, time.perf_counter() + self._least) if mine.is_floating_point() else pending


class Held:
    """A `Pending` that does not complete before `end`."""

    def __init__(self, inner: Any, end: float) -> None:
        self._inner, self._end = inner, end

    def wait(self) -> None:
        self._inner.wait()
        sleep_until(self._end)

    def ready(self) -> bool:
        return time.perf_counter() >= self._end and bool(self._inner.ready())


class Shared(nn.Module):
    """A layer shared by the ranks of a group: one collective in F and one in B, of at least `a` ms."""

    def __init__(self, f: float, b: float, w: float, a: float) -> None:
        super().__init__()
        self.part, self.least = Sleeper(f, b, w, 1), a / 1e3
        self.enter = self.leave = lambda x: x
        self.size = 1

    def shard(self, group: Group) -> dict[str, int]:
        slow = group._replace(transport=Slow(group.transport, self.least))  # type: ignore[arg-type]
        self.enter, self.leave, self.size = slow.enter, slow.leave, group.size
        return {}

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.part(self.enter(x))) / self.size


def shared(count: int, f: float, b: float, w: float, a: float) -> list[nn.Module]:
    return [Shared(f, b, w, a) for _ in range(count)]


class Exchanged(nn.Module):
    """A block: attention takes half of the time, then two experts, one on each rank of a group, with half of the rows
    each: two all-to-alls in F and two in B, of at least `a` ms together."""

    def __init__(self, f: float, b: float, w: float, a: float) -> None:
        super().__init__()
        self.attention = Sleeper(f / 2, b / 2, w / 2, 1)
        self.experts = nn.ModuleDict({str(e): Sleeper(f / 2, b / 2, w / 2, 1) for e in range(2)})
        self.exchange, self.least = zbc.experts(), a / 2e3

    def share_experts(self, group: Group) -> str:
        slow = group._replace(transport=Slow(group.transport, self.least))  # type: ignore[arg-type]
        self.exchange = zbc.experts(slow)
        self.experts = self.exchange.own(self.experts)
        return "experts"

    def forward(self, x: Tensor) -> Tensor:
        rows = self.attention(x).reshape(-1, x.shape[-1])
        counts = torch.full((2,), len(rows) // 2)
        return self.exchange.run(rows, counts, self.experts.values()).view_as(x)


def exchanged(count: int, f: float, b: float, w: float, a: float) -> list[nn.Module]:
    return [Exchanged(f, b, w, a) for _ in range(count)]


class Points:
    """`width` numbers in, as many out; always the same, so that reading data takes no time."""

    def __init__(self, width: int = 1) -> None:
        self.pair = torch.ones(width), torch.zeros(width)

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pair
