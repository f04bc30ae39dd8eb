"""Measured memory of a rank during a step: bytes of live tensors by category, on any device.

`Scale(worker)` wraps the ops of a worker; run steps as usual and read it, and `close` it to go on without. The first
step does not count, since the optimizer makes its state there. A dispatch mode registers every tensor that an op makes
and counts its storage, once for all views, until it is freed: tensors saved by autograd are included. Temporary memory
inside a kernel is not. Ops run about three times slower meanwhile, those of small kernels more.

    weights      parameters, buffers of modules, copies of weights in the autocast type, a rank's parts, and windows
    gradients    `.grad` of parameters
    masters      float32 copies of parameters in a lower type
    optimizer    the optimizer's state
    activations  all else that is alive between two ops, except tensors in flight
    buffers      tensors in flight to or from a neighbour while an op runs, and temporary memory of the op: bytes beyond
                 those alive before and after. A sent tensor is freed when the neighbour takes it, at any moment: if
                 that is while the op runs, it counts for the share of the op's time in which it was still alive. A
                 result that its own backward needs as well is an activation, whether it is taken or not
    host         slabs of offloaded activations: host memory, so not part of any peak, on a CPU neither

Each category has its own peak over all ops except transfers, between which no time passes; `peak` is the overall peak.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zbc.ir import Kind, Message, Op
from zbc.ops import Lane
from zbc.runtime.core.optimizer import StageOptimizer
from zbc.runtime.core.private import DEVICE, TorchDispatchMode, shares_memory, tree_leaves
from zbc.runtime.core.progress import Begins
from zbc.runtime.core.route import Edges, Here
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Handler, Worker
from zbc.runtime.features.groups.units import Braids
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.features.words.vocabulary_state import Vocabulary

CATEGORIES = ("weights", "gradients", "masters", "optimizer", "activations", "buffers")


@dataclass
class RankBytes:
    """Bytes of one rank by category; see the module's docstring."""

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    host: int = 0
    peak: int = 0


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live storages made by ops under this mode.

    Storages are numbered, since ids are reused. `moving` are storages that another rank's thread may free at any time;
    `kept` is the sum of all others, in bytes, and `peak` the maximum of `kept`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = self.peak = 0
        self.sizes: dict[int, int] = {}  # number -> bytes
        self.moving: set[int] = set()
        self.whole: set[int] = set()  # of whole numbers
        self.watched: set[int] = set()  # that an op was given
        self.reads = 0  # number of changes by when it had read these for the last time,
        self.meets: int | None = None  # and by when other ranks were met first
        self.left: list[tuple[int, int]] = []  # freed tensors that were in flight: bytes, and time in ns
        self._numbers: dict[int, int] = {}  # id of the storage's Python object -> number
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.count = 0
        self.changes: list[tuple[int, int]] = []  # allocations and frees counted in `kept`: number, bytes
        self._lock = threading.RLock()  # a storage may be freed by another thread, at any point of this code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and self.number(leaf) is None]
        if not (made or self.watched):
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if made:  # views of tensors from before this ledger began are not new
            given = {_id(leaf) for leaf in inputs}
            self.add(leaf for leaf in made if _id(leaf) not in given)
        if self.watched & self.numbers(inputs):
            self.reads = len(self.changes)
        return result

    def number(self, tensor: Tensor) -> int | None:
        return self._numbers.get(_id(tensor))

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        return {number for tensor in tensors if (number := self.number(tensor)) is not None}

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if id(storage) in self._numbers or not size or tensor.device.type == "meta":
                continue
            with self._lock:
                self.count = number = self.count + 1
                self._numbers[id(storage)] = number
                self.sizes[number] = size
                if not tensor.is_floating_point():
                    self.whole.add(number)
                self._watches[number] = weakref.ref(storage, functools.partial(self._free, id(storage), number))
                self.kept += size
                self.peak = max(self.peak, self.kept)
                self.changes.append((number, size))

    def move(self, numbers: set[int]) -> None:
        """Marks storages that another thread may free from here on."""
        with self._lock:
            fresh = numbers & self.sizes.keys() - self.moving
            self.moving |= fresh
            self.kept -= self.bytes(fresh)

    def keep(self, numbers: set[int]) -> None:
        """Unmarks storages that stay after all."""
        with self._lock:
            back = numbers & self.moving
            self.moving -= back
            self.kept += self.bytes(back)
            self.peak = max(self.peak, self.kept)

    def forget(self, numbers: set[int]) -> None:
        """Removes storages that are not device memory."""
        with self._lock:
            self.kept -= sum(self.sizes.pop(number, 0) for number in numbers)

    def resize(self) -> None:
        """Updates storages resized in place: weights that are gathered and freed."""
        with self._lock:
            for number, watch in list(self._watches.items()):
                storage = watch()
                more = 0 if storage is None else storage.nbytes() - self.sizes.get(number, storage.nbytes())
                if more and number not in self.moving:
                    self.sizes[number] += more
                    self.kept += more
                    self.peak = max(self.peak, self.kept, self.peak + more)  # in addition to other memory of the op

    def bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes.get(number, 0) for number in numbers)

    def _free(self, identity: int, number: int, _: object) -> None:
        with self._lock:
            del self._numbers[identity], self._watches[number]
            size = self.sizes.pop(number, 0)
            if number in self.moving:
                self.moving.remove(number)
                self.left.append((size, time.perf_counter_ns()))
            else:
                self.kept -= size
                self.changes.append((number, -size))


@dataclass
class Reading:
    """The memory of one op, in bytes."""

    op: Op
    held: RankBytes  # after it; buffers and the peak are those during the op
    transit: int  # in flight, see `buffers` in the module's docstring
    extra: int  # temporary memory, beyond the bytes alive before and after
    rise: int  # peak during the op, above the bytes alive before it
    until: int  # the same until the last kernel that reads what the op was given,
    after: int  # and after it
    alone: int | None  # the same until it meets other ranks, if it does: see `Scale.met`
    came: int  # gradients that it made new


@dataclass
class Scale:
    """Measures a worker's memory: `held` is the maximum of all steps but the first, `readings` are the last step's."""

    worker: Worker
    held: RankBytes = field(default_factory=RankBytes)
    readings: list[Reading] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ledger = Ledger()
        self._plain = list(self.worker.script)
        self._posted: dict[Message, set[int]] = {}
        self._kept: set[int] = set()  # results that are sent, and saved as well
        self._steps = 0
        worker = self.worker
        if worker.batches is not None:
            worker.batches.close()  # the mode sees tensors made on this thread only; no op needs those read ahead
            worker.batches.targets(0, 0)  # makes the order of an epoch's samples, which is not part of a step
        self._ledger.add(tensor for _, tensors in self._categories() for tensor in tensors)
        worker.features.of(Braids).one_by_one = True  # tensors of two interleaved ops could not be distinguished
        worker.phase_run.wrap([*Kind], self._weighed)
        self._clock, worker.clock = worker.clock, Begins(worker.clock, self._begin)

    def close(self) -> None:
        self.worker.script[:] = self._plain
        self.worker.clock = self._clock
        self.worker.features.of(Braids).one_by_one = False
        if self.worker.batches is not None:
            self.worker.batches.open()

    def _weighed(self, handler: Handler, worker: Worker, op: Op) -> None:
        ledger = self._ledger
        if op == worker.script[0][1]:
            if self._steps < 2:
                self.held = RankBytes()
            self._steps += 1
            ledger.add(one for _, all_ in self._categories() for one in all_ if one.dim())  # of late updates, too
            self.readings.clear()
            self._kept.clear()
        if worker.features.of(Gathers).freed:
            ledger.resize()
        ledger.watched, ledger.reads, ledger.meets = self._taken(op), 0, None
        ledger.keep(ledger.watched)
        ledger.peak = before = ledger.kept
        last = ledger.count
        ledger.changes.clear()
        ledger.left.clear()
        self._begin()
        with ledger:
            handler(worker, op)
        if worker.features.of(Gathers).freed:
            ledger.resize()
        if op.kind.row.lane is Lane.OUT:
            ledger.forget(ledger.numbers(slab.memory for slab in worker.features.of(Offloads).pool.slabs))
        gone, came = self._left(), self._came(last)
        rise, reads, meets = ledger.peak - before, ledger.reads, ledger.meets
        rises = list(accumulate((size for _, size in ledger.changes), initial=0))
        # Gradients are a category of their own: those that the first backward of a step makes are none of it.
        extra = max(0, max(rises) - max(ledger.bytes(came), ledger.kept - before))
        until, after = max(rises[: reads + 1]), max(rises[reads:])
        alone = None if meets is None else max(rises[: meets + 1])
        peak = ledger.peak + ledger.bytes(list(ledger.moving))  # its own result is in the first of these
        self._mark(op, last)
        self._note(Reading(op, RankBytes(peak=peak), gone, extra, rise, until, after, alone, ledger.bytes(came)))

    def _begin(self) -> None:
        self.began = time.perf_counter_ns()  # of the current op: not its waits before

    def met(self) -> None:
        """To be called where the current op meets other ranks."""
        if self._ledger.meets is None:
            self._ledger.meets = len(self._ledger.changes)

    def _left(self) -> int:
        """Bytes in flight that were freed during the last op, each weighted by its share of the op's time."""
        began, ended = self.began, time.perf_counter_ns()
        shares = ((size, (at - began) / max(1, ended - began)) for size, at in list(self._ledger.left))
        return round(sum(size * min(1.0, max(0.0, share)) for size, share in shares))

    def _came(self, last: int) -> set[int]:
        """Gradients whose storages were made after the storage `last`."""
        gradients = next(tensors for name, tensors in self._categories() if name == "gradients")
        return {number for number in self._ledger.numbers(gradients) if number > last}

    def _taken(self, op: Op) -> set[int]:
        """Storages that the op takes over from a neighbour: no longer in flight, but part of the op's own."""
        worker, route = self.worker, self.worker.routes.get(op)
        if route is None or not op.kind.computes:
            return set()
        if route.brought is not None:
            return self._posted.pop(route.brought, set())
        edge = route.takes.edge if isinstance(route.takes, Here) else None
        return self._ledger.numbers([worker.edges[edge]] if edge in worker.edges else [])

    def _mark(self, op: Op, last: int) -> None:
        """Marks storages in flight to or from a neighbour from now on; `last` is the newest storage before the op."""
        worker, ledger, route = self.worker, self._ledger, self.worker.routes.get(op)
        if op.kind.is_recv and route is not None and route.message is not None:
            self._posted[route.message] = {number for number in list(ledger.sizes) if number > last}
            ledger.move(self._posted[route.message])
        if op.kind.is_forward and route is not None and isinstance(route.gives, Edges):
            result = worker.edges.get(route.gives.edges[0])
            if result is not None and shares_memory(result):
                self._kept |= ledger.numbers([result])
        ledger.move(ledger.numbers(worker.edges.values()) - self._kept)

    def _note(self, reading: Reading) -> None:
        """Completes and stores a reading, which has the peak and the bytes in flight freed during the op."""
        ledger, found = self._ledger, reading.held
        counted = set[int]()
        for name, tensors in self._categories():
            numbers = ledger.numbers(tensors) - counted
            setattr(found, name, ledger.bytes(numbers))
            counted |= numbers
        there = ledger.bytes(list(ledger.moving))
        found.activations = ledger.kept - ledger.bytes(counted - ledger.moving)
        reading.transit += there
        found.buffers = reading.transit + reading.extra
        if (offloads := self.worker.features.of(Offloads)).of(self.worker.phase_run):
            found.host = sum(slab.memory.nbytes for slab in offloads.pool.slabs)
        self.readings.append(reading)
        seen = RankBytes(peak=found.peak) if reading.op.kind.is_transfer else found
        for name in (entry.name for entry in fields(RankBytes)):
            setattr(self.held, name, max(getattr(self.held, name), getattr(seen, name)))

    def _categories(self) -> Iterator[tuple[str, list[Tensor]]]:
        shared = self.worker.features.find(Vocabulary)
        casts = () if shared is None else (shared.output.cast,)
        for name, tensors in categories(self.worker.stages.values(), self.worker.optimizers.values(), casts):
            shards = self.worker.features.of(Gathers).freed if name == "weights" else ()
            yield name, [*tensors, *(one for shard in shards for one in shard.kept)]


def categories(
    stages: Iterable[Stage], optimizers: Iterable[StageOptimizer], casts: Iterable[SplitLinear] = ()
) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors of stages and optimizers between ops, by category, without activations; the first one counts."""
    stages, optimizers = list(stages), list(optimizers)
    parameters = [p for opt in optimizers for p in opt.parameters.values()]
    buffers = [b for stage in stages for layer in stage.layers for b in layer.module.buffers()]
    casting = [*casts, *(cast for stage in stages for cast in stage.casts)]
    updated = [opt.optimizer for opt in optimizers if opt.optimizer is not None]
    yield "weights", [*parameters, *buffers, *(cast.low for cast in casting if cast.low is not None)]
    yield "gradients", [p.grad for p in parameters if p.grad is not None]
    yield "masters", [p for opt in updated for group in opt.param_groups for p in group["params"]]
    yield "optimizer", [leaf for opt in updated for leaf in tree_leaves(opt.state) if isinstance(leaf, Tensor)]


def _id(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())
