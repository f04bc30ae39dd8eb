"""Bytes that each stage of a rig saves and needs, measured with the `Scale` for whole ranks (measure.py)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbc.ir import Kind, Op, Placement
from zbc.job.profile import LayerBytes, LayerProfile, Measured
from zbc.ops import owners_among, round_trip
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.muon import is_matrix
from zbc.runtime.core.optimizer import StageOptimizer
from zbc.runtime.core.private import real_tensors
from zbc.runtime.core.route import stage_loss
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Entry, Worker
from zbc.runtime.core.tensors import TensorSpec, each
from zbc.runtime.features.slices.stage_slice import StageSlice
from zbc.runtime.transports.transport import Offer
from zbc.training.models.shared_words import LOGITS
from zbc.training.profiling.kernels import Kernels
from zbc.training.profiling.rig import Rig
from zbc.training.recording.measure import Ledger, Reading, Scale, categories

# Microbatches: the first has a BW that makes the gradients, then come B and W and a BW that add to them, B and W that
# make them again, and an F that recomputes.
_MADE, _APART, _WHOLE, _AGAIN, _ALONE = range(5)
_BACK = (round_trip(split=True)[1], round_trip(split=False)[1])


def parts(
    rig: Rig, device: torch.device, kernels: Kernels | None = None, cuts: Sequence[int] = ()
) -> list[dict[str, LayerProfile]]:
    """The bytes of every kind of layer of a rig, without times, for each slice of microbatches that are cut at `cuts`,
    else for whole ones; `kernels` counts those of its ops."""
    rig, scales = rig.plain(), list[Scale]()

    def joined(offer: Offer, ranks: tuple[int, ...]) -> AbstractContextManager[None]:
        for scale in scales:
            scale.met()
        return nullcontext() if kernels is None else kernels.joined(offer, ranks)

    worker = rig.worker(device, cuts=cuts, joined=joined)
    slotted = any(stage.slotted for stage in worker.stages.values())
    alone = _unsplit(rig, device, cuts) if worker.meets and not slotted else {}
    if kernels is not None:
        kernels.watch(worker, _name)
    scales.append(scale := Scale(worker))
    gradients, buffers = _prepare(worker)
    run_step(worker, 0)
    changes = _changes(scale.readings, rig.placement)
    whole = rig.worker(device) if cuts else worker  # a slice alone keeps as the whole does
    no_times: dict[str, Any] = dict.fromkeys("fbw", Measured(ms=0.0))
    keeps = [_keeps(whole.stages[s], rig.inputs[s], whole, last=gives is None) for s, gives in enumerate(rig.outputs)]
    ties = {LOGITS} if rig.job.model.tie_embeddings else rig.job.model.tied.keys()
    shares, found = [stop - start for start, stop in pairwise(cuts)], list[dict[str, LayerProfile]]()
    for part in range(max(1, len(shares))):
        found.append({})
        for stage, kind in enumerate(rig.kinds):
            parameters = worker.stages[stage].parameters
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            steps = {name: p for name, p in trained.items() if is_matrix(rig.job.optimizer, name, p)}
            apart = {id(p) for p in _experts(worker, stage)}
            share = shares[part] / sum(shares) if shares else 1.0
            size = _layer(rig, worker, stage, changes, gradients[stage], keeps[stage], part, share)
            if alone:
                first, later = (alone[Op(_BACK[1], stage, mb, 0, part)] for mb in range(2))
                late = {"bw": later.late, "rise_bw": first.late}
                size = size.model_copy(update={"whole": [later.rise, first.rise], "whole_late": late})
            if shares:
                size = _of_slice(size, changes, stage, part, share, buffers[stage])
            found[-1][kind] = LayerProfile(
                **no_times,
                bytes=size,
                parameters=sum(p.numel() for p in parameters.values()),
                parts=[size for name, p in trained.items() for size in _pieces(p, name in steps)],
                apart=[size for name, p in trained.items() for size in _pieces(p, name in steps) if id(p) in apart],
                tied=sum(p.numel() for name, p in parameters.items() if name in ties),
                matrices=[(p.shape[-2], p.shape[-1]) for name, p in steps.items() for _ in _pieces(p, True)],
                experts=max((len(p) for p in steps.values() if p.dim() > 2), default=0),
            )
    worker.close()
    return found


def _unsplit(rig: Rig, device: torch.device, cuts: Sequence[int]) -> dict[Op, _Change]:
    """What BW takes in plans that split no backward, first and later, if it differs: where layers are torch's own, no
    weight gradient waits until ranks meet."""
    worker = rig.worker(device, microbatches=2, split=False, cuts=cuts)
    scale = Scale(worker)
    run_step(worker, 0)
    changes = _changes(scale.readings, rig.placement)
    worker.close()
    return changes


def _of_slice(
    size: LayerBytes, changes: dict[Op, _Change], stage: int, part: int, share: float, buffers: int
) -> LayerBytes:
    """The bytes of a slice with `share` of the tokens; `buffers` are of all keys and values, which the first F makes
    and the last B frees with as many gradients."""
    f, _, w = (changes[Op(kind, stage, _APART, 0, part)].held for kind in round_trip(split=True))
    kept = f - size.input - size.output * size.keeps_output - buffers * (part == 0)
    again = size.kept_again - (0 if part else buffers)
    made = {"kept_b": max(0, kept), "kept_w": -w, "tensors": [round(share * one) for one in size.tensors or []]}
    return size.model_copy(update={**made, "kept_again": max(0, again), "kv": round(buffers * share)})


def _name(op: Op) -> str | None:
    """The name of an op of the rig whose kernels count: "again" of a backward that recomputes."""
    names = {(kind, _APART): name for kind, name in zip(round_trip(split=True), "fbw", strict=True)}
    return {**names, (_BACK[1], _WHOLE): "bw", (_BACK[1], _ALONE): "again"}.get((op.kind, op.mb))


def _pieces(parameter: Tensor, stepped: bool) -> list[int]:
    """Elements of a parameter; of each matrix of a stack that Muon steps one by one."""
    count = len(parameter) if stepped and parameter.dim() > 2 else 1
    return count * [parameter.numel() // count]


@dataclass(frozen=True)
class _Change:
    """Bytes of activations that an op added, and its peak."""

    held: int
    more: int  # beyond the bytes alive before and after
    rise: int  # above the bytes alive before, gradients included
    came: int  # bytes of gradients that it made new
    late: int  # `rise` after the last kernel that reads the gradient that came; it is until then
    alone: int | None  # `rise` until it meets other ranks, if it does


def _changes(readings: Iterable[Reading], placement: Placement) -> dict[Op, _Change]:
    found, before = {}, 0  # a first layer has the gradient until its weights' is made
    for reading in readings:
        if reading.op.kind.computes:
            held = reading.held.activations - before
            whole = reading.op.kind not in _BACK or not placement.sources(reading.op.stage)
            rise, late = (reading.rise, 0) if whole else (reading.until, reading.after)
            found[reading.op] = _Change(held, reading.extra, rise, reading.came, late, reading.alone)
        before = reading.held.activations
    return found


def _prepare(worker: Worker) -> tuple[dict[int, int], dict[int, int]]:
    """Changes stages between the microbatches of a step: gradients go, then F recomputes; at its end they become 0, as
    is their norm, which no rank computes: the optimizer has no state if steps are skipped. The results will have, once
    it has run, the bytes of each stage's gradients, and of keys and values that it keeps for slices of a microbatch."""
    gradients, buffers, script = dict[int, int](), dict[int, int](), list[Entry]()

    def forget(worker: Worker, op: Op) -> None:
        for parameter in worker.stages[op.stage].parameters.values():
            parameter.grad = None

    def recompute(worker: Worker, op: Op) -> None:
        for one in (worker.stages[op.stage], *worker.stages[op.stage].slices):
            one.recompute = len(one.layers)

    def look(worker: Worker, op: Op) -> None:
        for first in worker.stages[op.stage].slices[:1]:
            if isinstance(first, StageSlice):
                buffers[op.stage] = sum(past.nbytes for each in first.pasts.values() for past in each.values())

    def end(worker: Worker, op: Op) -> None:
        gradients.update({stage: _held(worker, stage)["gradients"] for stage in worker.stages})
        for gradient in (p.grad for stage in worker.stages.values() for p in stage.parameters.values()):
            if gradient is not None:
                gradient.zero_()
        worker.settle(*worker.stages)
        worker.entries()
        worker.losses.clear()
        with real_tensors():
            worker.verdict = worker.learn(torch.zeros(worker.layout.size))

    f, b, _ = round_trip(split=True)
    before = {(f, _ALONE): recompute, (b, _AGAIN): forget}
    for entry in worker.script:
        op = entry[1]
        place = op.kind, op.mb
        script += [(before[place], op, "")] if place in before else []
        script += [entry, (look, op, "")] if place == (f, _APART) and op.slice == 0 else [entry]
    at = next(index for index, (_, op, _) in enumerate(script) if op.kind.is_barrier)
    script[at] = end, *script[at][1:]
    worker.script[:] = script
    return gradients, buffers


def _layer(
    rig: Rig,
    worker: Worker,
    stage: int,
    changes: dict[Op, _Change],
    gradients: int,
    keeps: _Kept,
    part: int,
    share: float,
) -> LayerBytes:
    of, given = worker.stages[stage], rig.outputs[stage]
    split, (forward, fused) = round_trip(split=True), round_trip(split=False)
    apart = {id(p) for p in _experts(worker, stage)}

    def of_mb(mb: int, *kinds: Kind) -> list[_Change]:
        return [changes[Op(kind, stage, mb, 0, part)] for kind in kinds]

    f, b, w = of_mb(_APART, *split)
    (bw,), (first_bw,), (alone,) = of_mb(_WHOLE, fused), of_mb(_MADE, fused), of_mb(_ALONE, forward)
    first_b, first_w = of_mb(_AGAIN, *split[1:])
    specs = rig.inputs[stage], given
    entry, result = (round(share * math.prod(s.shape) * s.dtype.itemsize) if s is not None else 0 for s in specs)
    held = _held(worker, stage)
    trained = [p.numel() for p in of.parameters.values() if p.requires_grad and id(p) not in apart]
    return LayerBytes(
        input=entry,
        output=result,
        kept_b=keeps.b,
        kept_w=keeps.w,
        keeps_input=keeps.input,
        keeps_output=keeps.output and given is not None,
        keeps_given=keeps.given and given is not None,
        more_f=f.more,
        kept_again=max(0, alone.held - entry),
        more_alone=alone.more,
        more_b=b.rise,
        more_w=w.rise,
        more_bw=bw.rise,
        rise_b=first_b.rise,
        rise_w=first_w.rise,
        rise_bw=first_bw.rise,
        late={"b": b.late, "rise_b": first_b.late, "bw": bw.late, "rise_bw": first_bw.late},
        until_bw=bw.alone,
        tensors=keeps.tensors,
        weights=held["weights"],
        casts=sum(cast.low.nbytes for cast in of.casts if cast.low is not None),
        buffers=sum(b.nbytes for layer in of.layers for b in layer.module.buffers()),
        gradients=gradients,
        gradients_b=first_b.came,
        masters=held["masters"],
        optimizer=held["optimizer"],
        largest=max(trained, default=0),
        pair=max((before + 2 * count for before, count in pairwise([0, *trained])), default=0),
        ends=[trained[0], trained[-1]] if trained else [],
    )


class _Kept(NamedTuple):
    """Tensors saved by the graph of a stage's forward: bytes until B, without its input and output; bytes until W. And
    whether it saves its input, its output, and whether W needs the same gradient tensor that B got."""

    b: int
    tensors: list[int]  # of b, each of no whole numbers
    w: int
    input: bool
    output: bool
    given: bool


def _keeps(stage: Stage, takes: TensorSpec, worker: Worker, *, last: bool) -> _Kept:
    """Runs forward and backward of a stage alone: in a step, its neighbours also reference the tensors between them."""
    stage.recompute = 0
    x = torch.zeros(takes.shape, dtype=takes.dtype, device=worker.device)
    leaf, finish = x.requires_grad_(stage.flows), stage.fit
    with Ledger() as ledger:
        if last and worker.batches is not None:
            worker.batches.close()  # another thread would run fake tensors beside this one
            target = each(methodcaller("to", worker.device), worker.batches.targets(0, 0))
            ledger.add([target] if isinstance(target, Tensor) else [*target.values()])
            finish = functools.partial(stage_loss, worker.loss, target)
            del target
        inner, slot = leaf.clone(), Slot()
        given = ledger.numbers([inner])
        y, tape = stage.forward(inner, 0, 0, finish, slot)
        made = ledger.numbers([y])
        grad = torch.zeros_like(y)
        came = ledger.numbers([grad])
        del inner, y, finish
        alive, sizes = set(ledger.sizes), dict(ledger.sizes)
        slot.split = True
        with using(slot):
            tape.backward(grad)
        del tape, grad, leaf, x
        left = set(ledger.sizes)
        sizes |= ledger.sizes
        own = ledger.numbers(t for _, tensors in _categories(worker, stage.index) for t in tensors)
        slot.run()
    for p in stage.parameters.values():
        p.grad = None
    inside = alive - given - made - came - own
    kept_b, kept_w = (sum(sizes[n] for n in found) for found in (inside, left - own))
    tensors = sorted(sizes[n] for n in inside - ledger.whole)
    return _Kept(kept_b, tensors, kept_w, bool(given & alive), bool(made & alive), bool(came & left))


def _optimizers(worker: Worker, stage: int) -> list[StageOptimizer]:
    """The optimizers of a stage and of its experts that ranks share out."""
    return [worker.optimizers[owner] for owner in owners_among(stage, worker.optimizers)]


def _experts(worker: Worker, stage: int) -> list[Tensor]:
    """The parameters of a stage's experts that ranks share out."""
    return [p for one in _optimizers(worker, stage)[1:] for p in one.parameters.values()]


def _categories(worker: Worker, stage: int) -> Iterator[tuple[str, list[Tensor]]]:
    return categories([worker.stages[stage]], _optimizers(worker, stage))


def _held(worker: Worker, stage: int) -> dict[str, int]:
    """Bytes of each category of a stage, each storage counted once."""
    found, seen = dict[str, int](), set[int]()
    for name, tensors in _categories(worker, stage):
        storages = {id(storage): storage.nbytes() for t in tensors for storage in [t.untyped_storage()]}
        found[name] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    return found
