"""One rank that runs one layer of each kind as a stage of its own, with the handlers of training runs.

Between the first two layers is one that does nothing: the times of its ops are a rank's overhead per op. Weights take
part in everything but do not change: the learning rate is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zbc.ir import Kind, Op, Placement, Program, forward
from zbc.job.graph import spans
from zbc.job.sections import OptimizerGroup
from zbc.job.spec import Job
from zbc.ops import round_trip
from zbc.plan.directory import RankPlan, StoredPlan, assemble
from zbc.runtime.core.muon import by_muon
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import TensorSpec
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.transports.hub import Hub, HubTransport, Round, Started
from zbc.runtime.transports.transport import Offer, Ranks
from zbc.training.building.context import Settings, Site, layer_plans
from zbc.training.models.model import LayerPlan
from zbc.training.models.shared_words import between_words
from zbc.training.probing.shapes import read_by
from zbc.training.profiling.alike import chain, kinds
from zbc.training.worker import build_worker

Joined = Callable[[Offer, tuple[int, ...]], AbstractContextManager[None]]

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
    outputs: tuple[TensorSpec | None, ...]  # None of the last
    order: tuple[str, ...]
    policy: str = "keep"  # what stages keep from F to B: all, or with "selective" what memory.attention says

    @property
    def placement(self) -> Placement:
        """All stages on one rank."""
        names, read = [layer.name for layer in self.layers], read_by(self.layers)
        edges = ((names.index(source), s) for s, name in enumerate(names) for source in read[name])
        return Placement(((0,) * len(names),), tuple(edges))

    def worker(
        self,
        device: torch.device,
        *,
        microbatches: int = MICROBATCHES,
        split: bool = True,
        cuts: Sequence[int] = (),
        joined: Joined | None = None,
    ) -> Worker:
        """A worker whose script is one step of every kind of op, all stages in turn, or without `split` one that has
        BW alone; `cuts`: boundaries of slices, `joined`: is told each collective, around what takes its place."""
        names, slices = [layer.name for layer in self.layers], max(1, len(cuts) - 1)
        ops = _ops(_program(self.job, names, (), 1), microbatches, slices, SPLIT if split else ())
        cuts = cuts if slices > 1 else ()
        plan = _plan(self.job, names, ops, microbatches, cuts, self.placement, self.policy)
        rank = RankPlan(0, plan.program.ranks[0], plan.manifest)
        return build_worker(rank, Apart(Hub(1), 0, joined), device, plans=self.layers)

    def plain(self) -> Rig:
        """The rig without the layer that does nothing, which would share its tensors with its neighbours, and with
        nothing compiled: bytes are counted op by op, and ops that are compiled into one are not seen."""
        model = self.job.model.model_copy(update={"compile": False})
        return replace(self.of({*self.kinds} - {IDLE}), job=replace(self.job, model=model))

    def of(self, some: Container[str]) -> Rig:
        at = [i for i, kind in enumerate(self.kinds) if kind in some]
        names = ("layers", "kinds", "inputs", "outputs")
        kept: dict[str, Any] = {name: tuple(getattr(self, name)[i] for i in at) for name in names}
        return replace(self, order=tuple(kind for kind in self.order if kind in some), **kept)


class Idle(nn.Module):
    def forward(self, *x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return x[0] if len(x) == 1 else x

    def shard(self, group: Group) -> dict[str, int]:
        return {}


class Apart(HubTransport):
    """The transport of a rank without the others with which it shares layers, tokens or experts: their terms of sums
    are 0."""

    def __init__(self, hub: Hub, rank: int, joined: Joined | None = None) -> None:
        super().__init__(hub, rank)
        self._joined = joined

    def start(self, offer: Offer, ranks: Ranks) -> Started:
        with nullcontext() if self._joined is None else self._joined(offer, ranks):
            self._run(offer, ranks)
        return Started(self._hub, self.rank, Round(ranks, over=True), (offer.source, offer.target))

    def _run(self, offer: Offer, ranks: tuple[int, ...]) -> None:
        if offer.what == "gather":
            offer.target.copy_(offer.source.expand_as(offer.target))
        elif offer.what == "scatter":
            offer.target.copy_(offer.source[ranks.index(self.rank)])
        elif offer.what == "swap":  # the others send what this one sends to itself, and nothing back
            own, target = torch.split(offer.source, list(offer.rows))[ranks.index(self.rank)], offer.target
            alike = len(target) == len(ranks) * len(own)
            target.view(len(ranks), *own.shape).copy_(own) if alike else target.zero_()


def build_rig(job: Job, device: torch.device, policy: str = "keep", *, apart: bool = False) -> Rig:
    """A rig with each kind of layer of a job, under a `policy` for activations; that of a graph has no layer that does
    nothing. `apart`: the tables of words are stages of their own, which `order` does not have. Raises E5xx if its model
    or its data do not work."""
    stepped, job = job.optimizer, replace(job, optimizer=job.optimizer.model_copy(update={"groups": []}))
    plans = [replace(plan, ties={}) for plan in layer_plans(Settings.of(_plan(job, ["any"], [forward(0)], 1).manifest))]
    names = {plan.name for plan in plans}
    plans = between_words(plans, job) if apart else plans
    layers = [plan.name for plan in plans]  # a stage of each
    manifest = _plan(job, layers, [forward(s) for s in range(len(layers))], 1).manifest
    shapes = Site([RankPlan(0, (), manifest)], Apart(Hub(1), 0), device, plans).shapes
    forms = shapes.stages
    packed = [(forms[i].takes, shapes.packed[plan.name], forms[i].flows) for i, plan in enumerate(plans)]
    spared = [name for name in shapes.parameters if not by_muon(stepped, name)]
    own = [[one.removeprefix(plan.name) for one in spared if one.startswith(f"{plan.name}.")] for plan in plans]
    order = kinds(plans, [(*takes, *names) for takes, names in zip(packed, own, strict=True)])
    groups = [*spans(job.model).values()] or [range(len(plans))]
    chosen = [g[i] for g in groups for i in chain(order[g.start : g.stop], packed[g.start : g.stop])]
    if adamw := [plans[i].name + name for i in chosen for name in own[i]]:
        job.optimizer.groups.append(OptimizerGroup(names=adamw, muon=False))
    rig = Rig(
        job,
        layers=tuple(
            _chained([plans[i] for i in chosen], read_by(plans)) if job.model.graph else [plans[i] for i in chosen]
        ),
        kinds=tuple(order[i] for i in chosen),
        inputs=tuple(forms[i].takes for i in chosen),
        outputs=tuple(forms[i].gives for i in chosen),
        order=tuple(kind for kind, plan in zip(order, plans, strict=True) if plan.name in names),
        policy=policy,
    )
    at = min(1, len(chosen) - 1)
    idle = {"layers": LayerPlan(IDLE, Idle), "kinds": IDLE, "inputs": rig.inputs[at], "outputs": rig.inputs[at]}
    more = {name: (of := getattr(rig, name))[:at] + (one,) + of[at:] for name, one in idle.items()}
    return rig if job.model.graph else replace(rig, **more)


def _chained(layers: Sequence[LayerPlan], read: Mapping[str, tuple[str, ...]]) -> Iterator[LayerPlan]:
    """Some layers of a graph: where one reads a layer that was left out, it reads the one before it in its group."""
    last = dict[str, str]()  # of each group so far
    for layer in layers:
        yield replace(layer, after=tuple(last[name.rpartition(".")[0]] for name in read[layer.name]))
        last[layer.name.rpartition(".")[0]] = layer.name


def passes(mbs: Sequence[int], stages: int, slices: int, split: Callable[[int, int], bool]) -> list[Op]:
    """F, then B or BW, then W of some microbatches through all stages; `split`: whether B and W of a stage and
    microbatch are apart."""
    parts, (f, b, w), (_, bw) = range(slices), round_trip(split=True), round_trip(split=False)
    ops = [Op(f, s, mb, 0, part) for mb in mbs for part in parts for s in range(stages)]
    back = [(s, mb, part) for mb in mbs for part in reversed(parts) for s in reversed(range(stages))]
    ops += [Op(b if split(s, mb) else bw, s, mb, 0, part) for s, mb, part in back]
    return ops + [Op(w, s, mb, 0, part) for mb in mbs for part in parts for s in range(stages) if split(s, mb)]


def _ops(program: Program, microbatches: int, slices: int, split: Sequence[int]) -> list[Op]:
    """The ops of `program`, which has none yet; B and W of microbatches in `split` are apart."""
    each = (passes([mb], program.placement.stages, slices, lambda s, mb: mb in split) for mb in range(microbatches))
    ops = [op for some in each for op in some]
    closing = [kind for kind in Kind if kind.row.closes == "barrier"]
    return ops + [Op(kind, s) for kind in closing for s in (program.owners(0) if kind.stage_wide else [0])]


def _program(
    job: Job, names: Sequence[str], ops: Sequence[Op], count: int, slices: int = 1, placement: Placement | None = None
) -> Program:
    parallel, blocks = job.parallel, {f"layers.{i - 1}" for i in job.model.routed} if job.model.builtin else {*names}
    return Program(
        placement or Placement(((0,) * len(names),)),
        count,
        (tuple(ops),),
        ("profile",),
        slices,
        dp=parallel.dp if parallel.ep > 1 else 1,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep if parallel.ep > 1 else 0,
        folded=parallel.folded,
        dense=tuple(s for s, name in enumerate(names) if name not in blocks) if parallel.ep > 1 else (),
    )


def _plan(
    job: Job,
    names: Sequence[str],
    ops: Sequence[Op],
    microbatches: int,
    cuts: Sequence[int] = (),
    placement: Placement | None = None,
    policy: str = "keep",
) -> StoredPlan:
    program = _program(job, names, ops, microbatches, max(1, len(cuts) - 1), placement)
    planning = job.with_tokens(()).planning()
    training = replace(job, optimizer=job.optimizer.still()).training()
    manifest, _ = assemble(
        program,
        layers=[[name] for name in names],
        microbatch_size=job.schedule.microbatch_size,
        cuts=cuts,
        planning={**planning, "memory": {**planning.get("memory", {}), "activations": policy}},
        training={**training, "train": {**training["train"], "eval_every": 0}},
    )
    return StoredPlan(manifest, program)
