"""One rank that runs one layer of each kind as a stage of its own, with the handlers of training runs.

Between the first two layers is one that does nothing: the times of its ops are a rank's overhead per op. Weights take
part in everything but do not change: the learning rate is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, Program, forward
from zbc.job.learning_rate import RateSchedule
from zbc.job.spec import Job
from zbc.ops import round_trip
from zbc.plan.directory import RankPlan, StoredPlan, assemble
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.transports.hub import Hub, HubTransport, Offer, Round, Started
from zbc.training.building.context import Settings, Site, layer_plans
from zbc.training.models.model import LayerPlan
from zbc.training.probing.shapes import Shapes
from zbc.training.profiling.alike import chain, kinds
from zbc.training.worker import build_worker

IDLE = "idle"
MICROBATCHES = 5  # the first makes the gradients, then two with separate B and W and two with BW, in turns
SPLIT = (1, 3)
FUSED = (2, 4)


@dataclass(frozen=True)
class Rig:
    """The layers to measure: `layers` are the stages by kind, `order` the kind of each layer of the model."""

    job: Job
    layers: tuple[LayerPlan, ...]
    kinds: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]  # of each stage
    order: tuple[str, ...]

    def worker(self, device: torch.device, *, microbatches: int = MICROBATCHES, cuts: Sequence[int] = ()) -> Worker:
        """A worker whose script is one step of every kind of op, all stages in turn; `cuts`: boundaries of slices."""
        names, slices = [layer.name for layer in self.layers], max(1, len(cuts) - 1)
        ops = _ops(len(self.layers), microbatches, slices)
        plan = _plan(self.job, names, ops, microbatches, cuts if slices > 1 else ())
        rank = RankPlan(0, plan.program.ranks[0], plan.manifest)
        return build_worker(rank, Apart(Hub(1), 0), device, plans=self.layers)

    def plain(self) -> Rig:
        """The rig without the layer that does nothing, which would share its tensors with its neighbours.

        Nothing is compiled in it: bytes are counted op by op, and ops that are compiled into one are not seen.
        """
        at = self.kinds.index(IDLE)
        layers, kinds, inputs = self.layers, self.kinds, self.inputs
        return replace(
            self,
            job=replace(self.job, model=self.job.model.model_copy(update={"compile": False})),
            layers=layers[:at] + layers[at + 1 :],
            kinds=kinds[:at] + kinds[at + 1 :],
            inputs=inputs[:at] + inputs[at + 1 :],
        )

    def output(self, stage: int) -> TensorSpec | None:
        """The output of a stage; None after the last."""
        return (*self.inputs[1:], None)[stage]


class Idle(nn.Module):
    """A layer that does nothing."""

    def forward(self, *x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return x[0] if len(x) == 1 else x

    def shard(self, group: Group) -> dict[str, int]:
        return {}


class Apart(HubTransport):
    """The transport of a tensor parallel rank without the other ranks, whose terms of sums are 0."""

    def _start(self, offer: Offer, ranks: tuple[int, ...]) -> Started:
        if offer.what == "gather":
            offer.target.copy_(offer.source.expand_as(offer.target))
        elif offer.what == "scatter":
            offer.target.copy_(offer.source[ranks.index(self.rank)])
        return Started(self._hub, self.rank, Round(ranks, over=True), (offer.source, offer.target))


def refuse_graph(job: Job) -> None:
    """Raises E110 for a graph of layers, which is no chain."""
    if job.model.graph:
        text = "profile: layers are run one after the other, and model.graph is no chain"
        raise ZbcError("E110", text, where=job.where("model", "graph"), hint="give times in [costs], per layer")


def build_rig(job: Job, device: torch.device) -> Rig:
    """A rig with each kind of layer of a job. Raises E110 for a graph of layers, E5xx if its model or its data do not
    work."""
    refuse_graph(job)
    plans = [replace(plan, ties={}) for plan in layer_plans(Settings.of(_plan(job, ["any"], [forward(0)], 1).manifest))]
    shapes = _shapes(job, plans, device)
    inputs, packed = shapes.inputs, [(shapes.inputs[i], shapes.packed[plan.name]) for i, plan in enumerate(plans)]
    order = kinds(plans, packed)
    chosen = chain(order, packed)
    at = min(1, len(chosen) - 1)
    idle = LayerPlan(IDLE, Idle)
    layers = [plans[i] for i in chosen]
    return Rig(
        job,
        layers=(*layers[:at], idle, *layers[at:]),
        kinds=(*(order[i] for i in chosen[:at]), IDLE, *(order[i] for i in chosen[at:])),
        inputs=(*(inputs[i] for i in chosen[:at]), inputs[chosen[at]], *(inputs[i] for i in chosen[at:])),
        order=tuple(order),
    )


def _shapes(job: Job, plans: Sequence[LayerPlan], device: torch.device) -> Shapes:
    """The shapes of the model with one stage per layer."""
    names = [plan.name for plan in plans]
    manifest = _plan(job, names, [forward(s) for s in range(len(names))], 1).manifest
    return Site([RankPlan(0, (), manifest)], Apart(Hub(1), 0), device, plans).shapes


def _ops(stages: int, microbatches: int, slices: int) -> list[Op]:
    ops, parts, (f, b, w), (_, bw) = [], range(slices), round_trip(split=True), round_trip(split=False)
    for mb in range(microbatches):
        back = b if mb in SPLIT else bw
        ops += [Op(f, s, mb, 0, part) for part in parts for s in range(stages)]
        ops += [Op(back, s, mb, 0, part) for part in reversed(parts) for s in reversed(range(stages))]
        ops += [Op(w, s, mb, 0, part) for part in parts for s in range(stages) if mb in SPLIT]
    closing = [kind for kind in Kind if kind.row.closes == "barrier"]
    return ops + [Op(kind, s) for kind in closing for s in (range(stages) if kind.stage_wide else [0])]


def _plan(job: Job, names: Sequence[str], ops: Sequence[Op], microbatches: int, cuts: Sequence[int] = ()) -> StoredPlan:
    """A plan of one rank with one stage per layer."""
    slices = max(1, len(cuts) - 1)
    place = Placement(((0,) * len(names),))
    program = Program(place, microbatches, (tuple(ops),), ("profile",), slices, cp=job.parallel.cp, tp=job.parallel.tp)
    planning, training = job.with_tokens(()).planning(), job.training()
    still = {"lr": 0.0, "schedule": RateSchedule().model_dump(mode="json"), "sync": "before-step", "zero1": False}
    manifest, _ = assemble(
        program,
        parameters={},
        layers=[[name] for name in names],
        boundaries=[None] * (len(names) - 1),
        microbatch_size=job.schedule.microbatch_size,
        predicted={},
        cuts=cuts,
        planning={**planning, "memory": {"activations": "keep"}},
        training={
            **training,
            "optimizer": {**training["optimizer"], **still},
            "train": {**training["train"], "eval_every": 0},
        },
    )
    return StoredPlan(manifest, program)
