"""Activation offload: OFFLOAD, RELEASE, RELOAD, and the saving of activations in F and B (parcels.py)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.ir import Key, Kind, Op
from zbc.plan.directory import RankPlan
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.route import Keeps, Left, Made, Route
from zbc.runtime.core.slot import Slot, know
from zbc.runtime.core.stage import Finish, Stage
from zbc.runtime.core.state import Handler, PhaseRun, Worker
from zbc.runtime.core.tape import Inputs
from zbc.runtime.features.offload.copying import copier_for
from zbc.runtime.features.offload.parcels import Parcel, Pool


class Offloads(Feature):
    """Host memory for offloaded activations, and the keys that are offloaded; `plans` are the plans of all phases."""

    def __init__(self, plans: Sequence[RankPlan], stages: Mapping[int, Stage], device: torch.device) -> None:
        self._plans, self._stages, self._device = plans, stages, device
        self._keys = {id(plan): frozenset(op.key for op in plan.ops if op.kind is Kind.OFFLOAD) for plan in plans}

    def of(self, run: PhaseRun) -> frozenset[Key]:
        """The keys whose activations are offloaded in a phase."""
        return self._keys.get(id(run.plan), frozenset())

    def routes(self, worker: Worker, run: PhaseRun, op: Op, route: Route) -> Route:
        return route._replace(keeps=self.moves) if op.key in self.of(run) else route

    @functools.cached_property
    def moves(self) -> Moves:
        return Moves(self.pool, torch.zeros((), device=self._device, requires_grad=True))

    @functools.cached_property
    def pool(self) -> Pool:
        """Slabs for the maximum number of parcels of any phase."""
        counts: dict[int, int] = {}
        for plan in self._plans:
            for stage, count in plan.manifest.slabs(plan.rank).items():
                counts[stage] = max(count, counts.get(stage, 0))
        know(p for stage in self._stages.values() for p in stage.parameters.values())
        return Pool(copier_for(self._device, duplex=self._plans[0].manifest.duplex), counts)

    def ends(self) -> None:
        if "pool" in self.__dict__:
            self.pool.copier.close()


@dataclass(frozen=True)
class Moves(Keeps):
    """Keeps activations in a parcel, which may be offloaded. `anchor`: a leaf to which gradients of stage inputs flow;
    it never gets one."""

    pool: Pool
    anchor: Tensor

    def forward(self, stage: Stage, x: Tensor, step: int, number: int, finish: Finish, slot: Slot | None) -> Made:
        parcel, flows = Parcel(self.pool, x), stage.flows
        if stage.recompute:
            y, tape = stage.forward(x.requires_grad_() if flows else x, step, number, finish, slot)
            assert isinstance(tape, Inputs)
            parcel.adopt(tape.inputs, [layer.name for layer in stage.layers], flows=flows)
        else:
            with parcel.hooks():
                entered = parcel.enter(x, self.anchor) if flows else x
                y, tape = stage.forward(entered, step, number, finish, slot, parcel)
        parcel.leave(y, *(() if flows else (x,)))
        return y.detach(), Left(parcel, tape, slot)

    def back(self, worker: Worker, op: Op, left: Left) -> Left:
        """Waits for the reload; `progress` names it, since the rank then delays other ranks."""
        progress = worker.progress
        text = progress.op
        if left.entry.coming():
            progress.op = f"{text}, waits for {op._replace(kind=Kind.RELOAD)}"
        left.entry = left.entry.arrive(op)
        progress.op = text
        return left

    def zeros(self, entry: Parcel) -> Tensor:
        return entry.zeros()


def offload(worker: Worker, op: Op) -> None:
    """OFFLOAD: starts to copy the activations of F to the host, except those with other references."""
    left = worker.away[op.key] = _with_parcel(worker.kept, op)
    left.entry.offload(op)


def release(worker: Worker, op: Op) -> None:
    """RELEASE: waits for that copy, and frees the activations on the device."""
    _with_parcel(worker.away, op).entry.release(op)
    worker.kept.pop(op.key, None)


def reload(worker: Worker, op: Op) -> None:
    """RELOAD: starts to copy them back; B or BW waits."""
    left = worker.kept[op.key] = _with_parcel(worker.away, op)
    left.entry.reload(op)
    del worker.away[op.key]


def _with_parcel(store: Mapping[Key, Left], op: Op) -> Left:
    left = store.get(op.key)
    if left is None or not isinstance(left.entry, Parcel):
        raise ZbcError("E703", f"run: {op}: there is nothing that it could move", hint="plan again")
    return left


OFFLOAD: dict[Kind, Handler] = {Kind.OFFLOAD: offload, Kind.RELEASE: release, Kind.RELOAD: reload}


def build(context: Context) -> Offloads:
    return Offloads(context.plans, context.stages, context.device)
