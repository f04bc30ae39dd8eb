"""Build a rank's `Worker` from its plan: stages, data, loss and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.job import spec
from zbc.ops import UNIT_SCOPES
from zbc.plan.directory import Manifest, RankPlan, meeting
from zbc.plan.phases import Phases
from zbc.runtime.bucket import Bucket, GradientSum, absent
from zbc.runtime.handlers import HANDLERS
from zbc.runtime.optimizer import StageOptimizer, build_optimizer
from zbc.runtime.pending import Ahead
from zbc.runtime.sharded import Sharded
from zbc.runtime.stage import Stage
from zbc.runtime.state import PhaseRun, Worker
from zbc.runtime.transport import Transport
from zbc.runtime.validate import VectorLayout
from zbc.training.data.data import KINDS, Batches, Samples, build_samples, build_validation, input_spec, place
from zbc.training.data.prefetch import Prefetched, Want
from zbc.training.evaluate import build_evaluation
from zbc.training.models import model, pretrained
from zbc.training.models.building import build_stage, share_ties
from zbc.training.probing.refusals import refuse_stage
from zbc.training.probing.shapes import Shapes, derive

LOWERED: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}  # float32: as they are made

_Section = TypeVar("_Section", bound=spec.Section)


@dataclass(frozen=True)
class Settings:
    """The sections of a plan that the runtime reads, checked again."""

    model: spec.Model
    data: spec.Data
    train: spec.Train
    optimizer: spec.Optimizer
    memory: spec.Memory
    checkpoint: spec.Checkpoint
    pretrained: str | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Settings:
        planning, training = manifest.planning, manifest.training
        return cls(
            _section(spec.Model, planning["model"]),
            _section(spec.Data, training["data"]),
            _section(spec.Train, training["train"]),
            _section(spec.Optimizer, training["optimizer"]),
            _section(spec.Memory, planning.get("memory", {})),
            _section(spec.Checkpoint, training.get("checkpoint", {})),
            training.get("pretrained"),
        )


def _section(section: type[_Section], values: Any) -> _Section:
    return section.model_validate(values, strict=False)  # JSON has lists where the models have tuples


def build_worker(
    plan: RankPlan,
    transport: Transport,
    device: torch.device,
    ramp: Sequence[RankPlan] = (),
    plans: Sequence[model.LayerPlan] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Worker:
    """Build what one rank needs to run its plan, on `device`; `ramp` are the plans that its training begins with.

    `plans` are the layers, if they are not those of the plan's model; `tell` is told of what takes long.

    Raises E205 or E406 (the plan asks for what this runtime does not do), E501 to E511 (data, user code, shapes), E617
    (nothing to compile with).
    """
    manifest = plan.manifest
    if manifest.slices > 1:
        text = f"run: the plan cuts microbatches into {manifest.slices} slices, which this runtime cannot execute"
        raise ZbcError("E406", text, hint="plan without sequence slices")
    settings = Settings.of(manifest)
    placement = manifest.to_placement()
    mine = placement.stages_of(plan.rank)
    ends = set(placement.ends) & set(mine)
    samples = None  # the data, where they are read; a factory's everywhere: only it knows the model's input
    if ends or settings.data.kind not in KINDS:
        samples = build_samples(settings.data, settings.model, settings.train.seed)
    plans = layer_plans(settings) if plans is None else list(plans)
    shapes = shapes_of(settings, plans, samples, manifest, device)
    parts, phases = [*ramp, plan], Phases.of(manifest)
    stages = _build_stages(parts, settings, plans, shapes, device)
    worker = Worker(
        phase_runs=[_phase_run(part, shapes) for part in parts],
        phases=phases,
        transport=transport,
        device=device,
        stages=stages,
        batches=None
        if not ends or samples is None
        else _batches(settings, parts, phases, samples, transport.rank, device),
        loss=model.loss(settings.model.loss),
        optimizers={s: _optimizer(settings, stages[s], manifest, transport.rank, plans) for s in mine},
        clip=settings.optimizer.clip_grad_norm,
        rate=lambda phases, step: phases.rate(
            settings.optimizer.lr, settings.optimizer.schedule, settings.train.steps, step
        ),
        tied=_shared(manifest, plans),
    )
    if settings.model.compile:
        _compile(stages, parts, settings.model.dtype, tell)
    worker.sums |= _sums(worker, dict(zip(shapes.parameters, shapes.sizes, strict=True)))
    if settings.train.eval_every:
        kept = build_validation(settings.data, settings.model, settings.train.seed) if ends else None
        where = place(settings.data, settings.model, kept=True)
        lowered = LOWERED[settings.model.parameters]
        worker.evaluation = build_evaluation(worker, settings.train, kept, lowered=lowered, where=where)
    for run in worker.phase_runs:
        run.ahead = _ahead(worker, run)
    return worker


def shapes_of(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    samples: Samples | None,
    manifest: Manifest,
    device: torch.device,
) -> Shapes:
    """What the layers `plans` look like in training on `device`. Raises as `derive`."""
    lowered = LOWERED[settings.model.parameters]
    first = input_spec(settings.data, settings.model, samples, manifest.microbatch_size)
    if lowered is not None and first.dtype.is_floating_point:
        first = first._replace(dtype=lowered)
    autocast = device if settings.model.dtype == "bfloat16" else None
    return derive(plans, first, manifest, autocast=autocast, lowered=lowered)


def _phase_run(plan: RankPlan, shapes: Shapes) -> PhaseRun:
    manifest = plan.manifest
    placement = manifest.to_placement()
    layout = VectorLayout(shapes.parameters, manifest.topology.batch, manifest.topology.world, shapes.sizes)
    return PhaseRun(plan, layout, [(HANDLERS[op.kind], op, placement.text(op)) for op in plan.ops])


def layer_plans(settings: Settings) -> list[model.LayerPlan]:
    """The layers of a plan, with pretrained weights where it names some."""
    plans = model.layers(settings.model, settings.train.seed)
    if settings.pretrained is None:
        return plans
    return pretrained.fill(plans, settings.model, Path(settings.pretrained))


def _shared(manifest: Manifest, plans: Sequence[model.LayerPlan]) -> dict[str, tuple[int, ...]]:
    """The weights that stages share, with those stages, the owner's first."""
    found: dict[str, tuple[int, ...]] = {}
    if not manifest.tied:
        return found
    home = {name: stage for stage, names in enumerate(manifest.layers) for name in names}
    for plan in plans:
        for target in plan.ties.values():
            owner = next(home[other.name] for other in plans if target.startswith(f"{other.name}."))
            found[target] = (*dict.fromkeys((*found.get(target, (owner,)), home[plan.name])),)
    return found


def _optimizer(
    settings: Settings, stage: Stage, manifest: Manifest, rank: int, plans: Sequence[model.LayerPlan]
) -> StageOptimizer:
    ranks = meeting(manifest, Op(Kind.REDUCE, stage.index))
    options, lowered = settings.optimizer, LOWERED[settings.model.parameters]
    ahead = options.sync == "post-validate"
    if manifest.sharded and len(ranks) > 1:
        tied = {target for plan in plans for target in plan.ties.values()} if manifest.tied else set[str]()
        whole = frozenset(tied & stage.parameters.keys())
        return Sharded(
            options, stage.parameters, stage.casts, ranks=ranks, rank=rank, whole=whole, lowered=lowered, ahead=ahead
        )
    return build_optimizer(options, stage.parameters, stage.casts, lowered=lowered, ahead=ahead)


def _ahead(worker: Worker, run: PhaseRun) -> Ahead | None:
    """What REDO runs again, and which messages come to it that nothing before REDO uses; None for plans without it."""
    kinds = [op.kind for op in run.plan.ops]
    if Kind.REDO not in kinds:
        return None
    again = [entry for entry in run.script[: kinds.index(Kind.REDO)] if entry[1].kind.row.scope in UNIT_SCOPES]
    messages = [(op.kind, worker.routes[op].message) for _, op, _ in again]
    posted = [message for kind, message in messages if kind.is_recv and message is not None]
    used = {message for kind, message in messages if kind.computes}
    buffers = tuple(place for stage in worker.stages.values() for layer in stage.layers for place in layer.buffers)
    return Ahead(again, [message for message in posted if message not in used], buffers=buffers)


def _sums(worker: Worker, sizes: Mapping[str, int]) -> dict[Op, GradientSum]:
    """What each REDUCE and TIE of the plan sums; `sizes` of all parameters of the model."""
    manifest, found = worker.plan.manifest, dict[Op, GradientSum]()
    for op in dict.fromkeys(op for run in worker.phase_runs for op in run.plan.ops if op.kind.sums):
        if op.kind is Kind.TIE:
            mine = {n: p for s in worker.stages.values() for n, p in s.parameters.items() if n in worker.tied}
            summed = [mine[n] if n in mine else absent(sizes[n], worker.device) for n in sorted(worker.tied)]
            found[op] = Bucket(summed, meeting(manifest, op))
            continue
        optimizer = worker.optimizers[op.stage]
        own = [p for name, p in optimizer.parameters.items() if name not in worker.tied]
        found[op] = optimizer if isinstance(optimizer, Sharded) else Bucket(own, meeting(manifest, op))
    return found


def _batches(
    settings: Settings, plans: Sequence[RankPlan], phases: Phases, samples: Samples, rank: int, device: torch.device
) -> Batches | Prefetched:
    """What the rank reads, in its order; a user's dataset may draw random numbers, so it stays in the rank's thread."""
    manifest = plans[-1].manifest
    batches = Batches(
        samples,
        seed=settings.train.seed,
        microbatches=manifest.topology.batch,
        size=manifest.microbatch_size,
        phases=phases,
        lowered=LOWERED[settings.model.parameters],
        where=place(settings.data, settings.model),
    )
    if settings.data.kind not in KINDS:
        return batches
    return Prefetched(batches, [_wants(plan, rank) for plan in plans], device)


def _wants(plan: RankPlan, rank: int) -> list[Want]:
    """What a step of `plan` reads on a rank of the run, in its order."""
    manifest = plan.manifest
    first = manifest.topology.of(rank).dp * manifest.microbatches  # of the microbatches of this replica
    forwards = [op for op in plan.ops if op.kind is Kind.F]
    placement = manifest.to_placement()
    ends = (("inputs", placement.sources), ("targets", placement.sinks))
    return [(kind, first + op.mb) for op in forwards for kind, others in ends if not others(op.stage)]


def _build_stages(
    parts: Sequence[RankPlan],
    settings: Settings,
    plans: list[model.LayerPlan],
    shapes: Shapes,
    device: torch.device,
) -> dict[int, Stage]:
    manifest = parts[-1].manifest
    by_name, split = {layer.name: layer for layer in plans}, _split(parts)
    stages = {}
    placement = manifest.to_placement()
    for s in placement.stages_of(parts[-1].rank):
        stages[s] = build_stage(
            s,
            [by_name[name] for name in manifest.layers[s]],
            takes=shapes.inputs[s],
            gives=next((shapes.inputs[other] for other in placement.sinks(s)), None),
            came=shapes.layouts[s],
            goes=next((shapes.layouts[other] for other in placement.sinks(s)), None),
            traits=shapes.traits,
            seed=settings.train.seed,
            device=device,
            dtype=settings.model.dtype,
            splits=s in split,
            recompute=settings.memory.recomputes(s),
            flows=shapes.flows[s],
            needed=shapes.needed[s],
            compiles=settings.model.compile,
            laid=shapes.laid[s],
        )
        for part in parts:
            refuse_stage(part.manifest, part.ops, stages[s])
    share_ties(stages.values(), plans, settings.train.seed, device)
    return stages


def _split(parts: Sequence[RankPlan]) -> set[int]:
    """The stages of which some B and W stand apart."""
    return {op.stage for plan in parts for op in plan.ops if op.kind is Kind.B}


def _compile(stages: Mapping[int, Stage], parts: Sequence[RankPlan], dtype: str, tell: Callable[[str], None]) -> None:
    """Compile now what is to be compiled, and see that it comes out right."""
    from zbc.training.models.compiled import make_room  # takes a second or two to import
    from zbc.training.probing.proof import prove

    make_room(sum(len(stage.layers) for stage in stages.values()))
    split = _split(parts)
    for index, stage in sorted(stages.items()):
        prove(stage, dtype, splits=index in split, tell=tell)
