"""Interleaved ops of an overlap group with tensor parallelism: each computes during the other's all-reduce.

A *unit* is the part of an op between two all-reduces: norm, qkv, attention and proj of a block, or its norm and MLP. At
the end of a unit an op starts its all-reduce and yields to the other op, which runs its next unit; it waits for the
all-reduce when its turn comes back. An op without all-reduces (W, and the weight gradients of a BW) yields between the
weight gradients of two layers. Each op runs its own computation unchanged: results are bitwise equal.

Both ops begin when both have their inputs, as in the plan's prediction. Without collectives inside of ops, and in the
cases of `_reason`, the two run one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zbc.ir import Op
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.progress import Busy, Clock
from zbc.runtime.core.state import Entry, PhaseRun, Script, Worker
from zbc.runtime.features.freezing import Resting
from zbc.runtime.features.groups.strands import Pair
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.unflushed.cycle import Cycle


class Together(Clock):
    """The `Clock` of a group: one interval for both ops, from when both have their inputs to when both have ended.
    `second_leads`: the second op computes first."""

    def __init__(self, inner: Clock, pair: Pair, *, second_leads: bool) -> None:
        self._inner, self._pair, self._second_leads = inner, pair, second_leads
        self._began: float | None = None
        self._ended = 0

    def start(self) -> float:
        self._pair.turn()  # until the other op has its inputs, too
        if self._began is None:
            self._began = self._inner.start()
            if self._second_leads:
                self._pair.turn()
        return self._began

    def stop(self, began: float) -> None:
        self._ended += 1
        if self._ended == 2:
            self._inner.stop(began)

    def read(self) -> Busy:
        return self._inner.read()


@dataclass
class Units:
    worker: Worker = field(repr=False)
    stamp: Callable[[], Any] | None = None  # the clock by which turns are recorded, if they are
    turns: tuple[list[int], list[Any]] = field(default_factory=lambda: ([], []))  # index of the op in the script, start
    _ops: tuple[tuple[int, str], tuple[int, str]] = ((0, ""), (0, ""))  # of the current group: index and text

    def __post_init__(self) -> None:
        self._pair = Pair(self.worker.device, self._switched)
        self._swaps = self.worker.features.of(SharedLayers).swaps is not None
        self.close = self._pair.close

    def run(self, first: Entry, second: Entry) -> None:
        worker, progress = self.worker, self.worker.progress
        ops = first[1], second[1]
        self._ops = (progress.index, first[2]), (progress.index + 1, second[2])
        clock = worker.clock
        # Of experts a B begins with an all-to-all, and an F with attention, which hides it.
        worker.clock = Together(clock, self._pair, second_leads=self._swaps and not ops[1].kind.is_forward)
        try:
            one, other = (partial(handler, worker, op) for handler, op, _ in (first, second))
            # Ops of one kind and stage have the same number of all-reduces.
            self._pair.run(one, other, (ops[0][:2], ops[1][:2]))
        finally:
            worker.clock, progress.thread = clock, None

    def _switched(self, side: int) -> None:
        """Sets the rank's progress to the op that has the turn, and records the turn."""
        progress = self.worker.progress
        progress.index, progress.op = self._ops[side]
        progress.since, progress.thread = time.monotonic(), self._pair.thread_of(side)
        if self.stamp is not None:
            self.turns[0].append(progress.index)
            self.turns[1].append(self.stamp())


class Braids(Feature):
    """Groups with interleaved ops: `units` runs them, if any; `in_turn`: why others run one after the other."""

    def __init__(self) -> None:
        self.units: Units | None = None
        self.in_turn: tuple[str, ...] = ()
        self.one_by_one = False  # whether ops of groups are to run one after the other now

    def completes(self, worker: Worker, run: PhaseRun) -> None:
        marks = [at for at, (_, op, _) in enumerate(run.script) if op.kind.is_mark]
        for at in marks if worker.meets else ():
            first, second = run.script[at + 1 : at + 3]
            why = _reason(worker, run, first[1], second[1])
            if why is None:
                if self.units is None:
                    self.units = Units(worker)
                    # All threads share autocast's cache, where casts of a forward without a graph have no gradient.
                    for stage in worker.stages.values():
                        if isinstance(now := stage.autocast, torch.autocast):
                            stage.autocast = torch.autocast(worker.device.type, now.fast_dtype, cache_enabled=False)
                run.script[at + 1 : at + 3] = self._joined(self.units, first, second)
            elif why and why not in self.in_turn:
                self.in_turn = (*self.in_turn, why)

    def _joined(self, units: Units, first: Entry, second: Entry) -> Script:
        """The entries of a group of which the first runs both ops, and the second one nothing."""

        def both(worker: Worker, op: Op) -> None:
            if self.one_by_one:
                first[0](worker, op)
            else:
                units.run(first, second)

        def rest(worker: Worker, op: Op) -> None:
            if self.one_by_one:
                second[0](worker, op)

        return [(both, *first[1:]), (rest, *second[1:])]

    def ends(self) -> None:
        if self.units is not None:
            self.units.close()


def _reason(worker: Worker, run: PhaseRun, *ops: Op) -> str | None:
    """The reason why two ops run one after the other; None if they can be interleaved, "" if that gains nothing."""
    if isinstance(run.ending, Cycle):
        return "steps have no flush between them"
    if not any(op.kind.is_forward for op in ops) or not all(op.kind.computes for op in ops):
        return ""
    if run.plan.manifest.slices > 1:
        return "microbatches come in slices"
    if worker.features.of(Resting).of(run):
        return "layers are frozen in some microbatches"
    if any(op.key in worker.features.of(Offloads).of(run) for op in ops):
        return "their activations go to the host"
    for op in ops:
        for layer in worker.stages[op.stage].layers:
            traits = layer.traits
            if traits.random:
                return f"{layer.name} draws random numbers (dropout)"
            if layer.buffers or traits.carries or traits.mixes:
                return f"{layer.name} keeps something from one forward to the next"
    return None


def overlap(worker: Worker, op: Op) -> None:
    """OVERLAP: a mark, does nothing. `Braids` changes the script entries of the two ops after it."""


def build(context: Context) -> Braids:
    return Braids()
