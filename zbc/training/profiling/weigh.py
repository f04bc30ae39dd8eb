"""Bytes that each stage of a rig saves and needs, measured with the `Scale` for whole ranks (measure.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from zbc.ir import Kind, Op
from zbc.job.profile import LayerBytes
from zbc.ops import round_trip
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.route import stage_loss
from zbc.runtime.core.slot import Slot, swap_slot
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import TensorSpec
from zbc.training.profiling.rig import Rig
from zbc.training.recording.measure import Ledger, Reading, Scale, categories

Handler = Callable[[Worker, Op], None]
# Microbatches: the first has a BW that makes the gradients, then come B and W and a BW that add to them, B and W that
# make them again, and an F that recomputes.
_MADE, _APART, _WHOLE, _AGAIN, _ALONE = range(5)


@dataclass(frozen=True)
class Weighed:
    """The measurements of one kind of layer."""

    bytes: LayerBytes
    parameters: int
    parts: list[int]  # elements of each parameter that trains


def weigh(rig: Rig, device: torch.device) -> dict[str, Weighed]:
    """Measures every kind of layer of a rig, in steps of a separate worker."""
    rig = rig.plain()
    worker = rig.worker(device)
    gradients = _gradients(worker)
    scale = Scale(worker)
    _prepare(worker)
    run_step(worker, 0)
    changes = _changes(scale.readings)
    found = {
        kind: Weighed(
            _layer(rig, worker, stage, changes, gradients[stage]),
            sum(p.numel() for p in worker.stages[stage].parameters.values()),
            [p.numel() for p in worker.stages[stage].parameters.values() if p.requires_grad],
        )
        for stage, kind in enumerate(rig.kinds)
    }
    worker.close()
    return found


@dataclass(frozen=True)
class _Change:
    """Bytes of activations that an op added, and temporary bytes beyond these."""

    held: int
    more: int
    rise: int  # peak during the op above the bytes alive before, gradients included
    came: int  # bytes of gradients that it made new


def _changes(readings: Iterable[Reading]) -> dict[Op, _Change]:
    found, before = {}, 0
    for reading in readings:
        if reading.op.kind.computes:
            found[reading.op] = _Change(reading.activations - before, reading.extra, reading.rise, reading.came)
        before = reading.activations
    return found


def _prepare(worker: Worker) -> None:
    """Changes stages between the microbatches of a step: gradients go, then F recomputes."""

    def forgets(stage: Stage) -> None:
        for parameter in stage.parameters.values():
            parameter.grad = None

    def recomputes(stage: Stage) -> None:
        stage.recompute = True

    def after(change: Callable[[Stage], None], handler: Handler) -> Handler:
        def run(worker: Worker, op: Op) -> None:
            change(worker.stages[op.stage])
            handler(worker, op)

        return run

    split, changed = round_trip(split=True), list[tuple[Handler, Op, str]]()
    for handler, op, text in worker.script:
        if op.mb == _AGAIN and op.kind is split[1]:
            handler = after(forgets, handler)
        elif op.mb == _ALONE and op.kind is split[0]:
            handler = after(recomputes, handler)
        changed.append((handler, op, text))
    worker.script[:] = changed


def _gradients(worker: Worker) -> dict[int, int]:
    """A dict that will have the bytes of each stage's gradients, once a step has run. Makes them 0 from then on: the
    optimizer has no state after steps that are skipped."""
    found: dict[int, int] = {}

    def look(worker: Worker, op: Op) -> None:
        found.update({stage: _held(worker, stage)["gradients"] for stage in worker.stages})
        for gradient in (p.grad for stage in worker.stages.values() for p in stage.parameters.values()):
            if gradient is not None:
                gradient.zero_()

    at = next(index for index, (_, op, _) in enumerate(worker.script) if op.kind.is_barrier)
    worker.script.insert(at, (look, worker.script[at][1], "look"))
    return found


def _layer(
    rig: Rig,
    worker: Worker,
    stage: int,
    changes: dict[Op, _Change],
    gradients: int,
) -> LayerBytes:
    of, given = worker.stages[stage], rig.output(stage)
    split, (forward, fused) = round_trip(split=True), round_trip(split=False)

    def of_mb(mb: int, *kinds: Kind) -> list[_Change]:
        return [changes[Op(kind, stage, mb)] for kind in kinds]

    f, b, w = of_mb(_APART, *split)
    (bw,), (first_bw,), (alone,) = of_mb(_WHOLE, fused), of_mb(_MADE, fused), of_mb(_ALONE, forward)
    first_b, first_w = of_mb(_AGAIN, *split[1:])
    entry, result = _bytes(rig.inputs[stage]), 0 if given is None else _bytes(given)
    keeps = _keeps(of, rig.inputs[stage], worker, last=given is None)
    # B ends with the gradient it passes on, without the one it got.
    after = b.held + (0 if stage == 0 else entry) - result
    held = _held(worker, stage)
    trained = [p.numel() for p in of.parameters.values() if p.requires_grad]
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
        more_b=b.more + max(0, after),
        more_w=w.more,
        more_bw=bw.more,
        first_b=first_b.more + max(0, after),
        first_w=first_w.more,
        first_bw=first_bw.more,
        rise_b=first_b.rise,
        rise_w=first_w.rise,
        rise_bw=first_bw.rise,
        weights=held["weights"],
        gradients=gradients,
        gradients_b=first_b.came,
        masters=held["masters"],
        optimizer=held["optimizer"],
        largest=max(trained, default=0),
        pair=max((before + 2 * count for before, count in pairwise([0, *trained])), default=0),
        ends=[trained[0], trained[-1]] if trained else [],
    )


class _Kept(NamedTuple):
    """Tensors saved by the graph of a stage's forward: bytes until B, without its input and output; bytes until W.

    And whether it saves its input, its output, and whether W needs the same gradient tensor that B got.
    """

    b: int
    w: int
    input: bool
    output: bool
    given: bool


def _keeps(stage: Stage, takes: TensorSpec, worker: Worker, *, last: bool) -> _Kept:
    """Runs forward and backward of a stage alone: in a step, its neighbours also reference the tensors between them."""
    stage.recompute = False
    x = torch.zeros(takes.shape, dtype=takes.dtype, device=worker.device)
    leaf, finish = x.requires_grad_(stage.flows), stage.fit
    with Ledger() as ledger:
        if last and worker.batches is not None:
            target = worker.batches.targets(0, 0).to(worker.device)
            ledger.add([target])
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
        slot.split, before = True, swap_slot(slot)
        try:
            tape.backward(grad)
        finally:
            swap_slot(before)
        del tape, grad, leaf, x
        left = set(ledger.sizes)
        sizes |= ledger.sizes
        own = ledger.numbers(t for _, tensors in _categories(worker, stage.index) for t in tensors)
        slot.run()
    for p in stage.parameters.values():
        p.grad = None
    kept_b, kept_w = (sum(sizes[n] for n in found - own) for found in (alive - given - made - came, left))
    return _Kept(kept_b, kept_w, bool(given & alive), bool(made & alive), bool(came & left))


def _bytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _categories(worker: Worker, stage: int) -> Iterator[tuple[str, list[Tensor]]]:
    return categories([worker.stages[stage]], [worker.optimizers[stage]])


def _held(worker: Worker, stage: int) -> dict[str, int]:
    """Bytes of each category of a stage, each storage counted once."""
    found, seen = dict[str, int](), set[int]()
    for name, tensors in _categories(worker, stage):
        storages = {id(storage): storage.nbytes() for t in tensors for storage in [t.untyped_storage()]}
        found[name] = sum(size for key, size in storages.items() if key not in seen)
        seen |= storages.keys()
    return found
