"""Build a rank's `Worker` from its plan: stages, data, loss and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from zbc.errors import ZbcError
from zbc.ir import COPY, NEXT, Kind, Op
from zbc.job import spec
from zbc.plan.directory import FROZEN, Manifest, RankPlan, Unequal, meeting
from zbc.plan.lateness import lateness
from zbc.plan.phases import Phases
from zbc.runtime import tensor_parallel
from zbc.runtime.ahead import Ahead
from zbc.runtime.averaging import Averaging
from zbc.runtime.bucket import Bucket, GradientSum, absent
from zbc.runtime.cycle import Cycle, stage_step
from zbc.runtime.freezing import Turns, refuse_frozen, turns_of
from zbc.runtime.gathers import with_weights
from zbc.runtime.handlers import HANDLERS, in_rows
from zbc.runtime.optimizer import StageOptimizer, build_optimizer
from zbc.runtime.sharded import Sharded
from zbc.runtime.slicing import Inside, Part, within
from zbc.runtime.stage import Stage
from zbc.runtime.stage_slice import in_slices
from zbc.runtime.state import BatchSource, PhaseRun, Worker
from zbc.runtime.tensor_parallel import Cut, Group, Meter
from zbc.runtime.tensors import Loss, TensorSpec
from zbc.runtime.transport import Transport
from zbc.runtime.units import braid
from zbc.runtime.validate import VectorLayout
from zbc.runtime.versions import OneVersion, TwoVersions
from zbc.runtime.vocabulary import Embedding, Output
from zbc.runtime.vocabulary_state import OfRows, Vocabulary
from zbc.training.data.counted import Count, Counted, count_of, no_mean
from zbc.training.data.data import KINDS, Batches, Samples, build_samples, build_validation, input_spec, place
from zbc.training.data.prefetch import Prefetched, Want
from zbc.training.data.unequal import Dealer, PackedBatches, Padded, build_documents, shape_of
from zbc.training.evaluate import build_evaluation
from zbc.training.models import model, pretrained, sharding
from zbc.training.models.building import build_stage, share_ties
from zbc.training.models.shared_words import LOGITS, Tables, table_sizes, trunk
from zbc.training.probing.packable import try_packed, try_padding
from zbc.training.probing.refusals import refuse_stage
from zbc.training.probing.shapes import Shapes, derive
from zbc.training.probing.sliceable import refuse_others, try_layers, try_loss

LOWERED: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}  # float32: as they are made

_RUNS_LAYERS = frozenset({Kind.F, Kind.B, Kind.BW})  # backwards may run forwards again

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
    freeze: spec.Freeze
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
            _section(spec.Freeze, planning.get("freeze", {})),
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
    looks: dict[int | None, Shapes] | None = None,
) -> Worker:
    """Build what one rank needs to run its plan, on `device`; `ramp` are the plans that its training begins with.

    `plans` are the layers, if they are not those of the plan's model; `tell` is told of what takes long. `looks`: what
    other ranks of the plan saw of its layers, by the rows of a slice, and this one sees if it is the first.

    Raises E205 or E406 (the plan asks for what this runtime does not do), E501 to E511 (data, user code, shapes), E617
    (nothing to compile with).
    """
    manifest = plan.manifest
    settings = Settings.of(manifest)
    placement = manifest.to_placement()
    mine = placement.stages_of(plan.rank)
    ends = manifest.vocabulary is not None or bool(set(placement.ends) & set(mine))  # whether data are read here
    samples: Samples | None = None  # the data, where they are read; a factory's everywhere: it knows the model's input
    work = _work(settings, manifest)
    if work is not None:
        samples = Padded(work.documents, work.shape.room)
    elif ends or settings.data.kind not in KINDS:
        both = len(placement.pipes) == 1 and set(placement.ends) <= set(mine)
        samples = build_samples(settings.data, settings.model, settings.train.seed, both=both)
    plans = layer_plans(settings) if plans is None else list(plans)
    slices = parts_of(manifest)
    lengths: list[int | None] = [*sorted({part.rows for part in slices}, reverse=True)] or [None]
    by_rows = {} if looks is None else looks
    for rows in lengths:
        with nullcontext() if rows is None else within(Inside(Part(0, 0, rows, rows))):
            if rows in by_rows:
                by_rows[rows].settle(plans if manifest.vocabulary is None else trunk(plans))
            else:
                by_rows[rows] = shapes_of(settings, plans, samples, manifest, device, rows)
    shapes = by_rows[lengths[0]]
    by_slice = [by_rows[part.rows] for part in slices] or [shapes]
    parts, phases = [*ramp, plan], Phases.of(manifest) if work is None else work.phases
    group, cuts, partial = _group(manifest, transport, device), dict[str, Cut](), set[str]()
    tables = _tables(manifest, settings, plan.rank)
    share = _sharing(group, settings, cuts, partial) if tables is None else tables.cut
    stages = _build_stages(parts, settings, plans, shapes, device, share)
    for stage in stages.values():
        if slices:
            in_slices(stage, slices, [_forms(manifest, stage.index, one) for one in by_slice])
    if slices:
        _refuse_slices(settings, plans, stages, samples, shapes, slices, last=any(not placement.sinks(s) for s in mine))
    if work is not None:
        _refuse_rows(settings, plans, stages, samples, shapes, last=any(not placement.sinks(s) for s in mine))
    late = lateness(plan.ops) if manifest.flushless else {}
    worker = Worker(
        phase_runs=[_phase_run(part, shapes, manifest.balance) for part in parts],
        work=work,
        phases=phases,
        transport=transport,
        device=device,
        stages=stages,
        batches=None
        if not ends or samples is None
        else _batches(settings, parts, phases, samples, transport.rank, device)
        if work is None
        else PackedBatches(work, LOWERED[settings.model.parameters]),
        loss=_loss(settings.model, group),
        watched=not settings.model.builtin,
        optimizers={s: _optimizer(settings, stages[s], manifest, transport.rank, plans, late.get(s, 0)) for s in mine},
        clip=settings.optimizer.clip_grad_norm,
        rate=lambda phases, step: phases.rate(
            settings.optimizer.lr, settings.optimizer.schedule, settings.train.steps, step
        ),
        tied=_shared(manifest, plans),
        group=group,
        cuts=cuts,
        partial={s: [p for name, p in stages[s].parameters.items() if name in partial] for s in mine},
        vocabulary=None
        if tables is None
        else _vocabulary(plan, settings, plans, tables, by_slice, slices, transport, device),
    )
    if samples is not None and settings.model.loss not in model.LOSSES and any(not placement.sinks(s) for s in mine):
        some = samples.targets(range(min(len(samples), 8)))
        told = no_mean(settings.model.loss, worker.loss, shapes.output, some)
        worker.warnings = () if told is None else (told,)
    counts: Count | None = None
    if samples is not None and settings.data.kind not in KINDS and ends:
        counts = count_of(model.loss(settings.model.loss), settings.model.loss, samples.targets([0]))
    if worker.batches is not None and counts is not None:
        worker.batches = _counted(worker, worker.batches, counts)
    _refuse_copies(manifest, parts, settings)
    if settings.model.compile:
        _compile(stages, parts, settings.model.dtype, tell)
    if manifest.averages:
        worker.averages = {s: _averaging(worker, s) for s in mine}
    worker.sums |= _sums(worker, shapes)
    if settings.train.eval_every:
        kept = build_validation(settings.data, settings.model, settings.train.seed) if ends else None
        where = place(settings.data, settings.model, kept=True)
        lowered = LOWERED[settings.model.parameters]
        worker.evaluation = build_evaluation(worker, settings.train, kept, counts=counts, lowered=lowered, where=where)
    for run in worker.phase_runs:
        if any(op.kind is Kind.REDO for op in run.plan.ops):
            run.ending = Ahead.of(worker, run)
        run.turns = _turns(worker, run, settings)
        worker.prepare(run)
    worker.in_turn = tuple(braid(worker))
    return worker


def shapes_of(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    samples: Samples | None,
    manifest: Manifest,
    device: torch.device,
    rows: int | None = None,
) -> Shapes:
    """What the layers `plans` look like in training on `device`, in a slice of so many rows. Raises as `derive`."""
    lowered = LOWERED[settings.model.parameters]

    def given(layer: str) -> TensorSpec:
        group = group_of(settings.model, layer)
        found = input_spec(settings.data, settings.model, samples, manifest.microbatch_size, group)
        return found._replace(dtype=lowered) if lowered is not None and found.dtype.is_floating_point else found

    autocast = device if settings.model.dtype == "bfloat16" else None
    shared = manifest.vocabulary is not None
    if shared:  # the first layer begins with what all ranks looked up
        words = TensorSpec((*given("").shape, settings.model.hidden or 0), lowered or torch.get_default_dtype())
        plans = trunk(plans)
    look = partial(derive, manifest=manifest, autocast=autocast, lowered=lowered, flow=shared)

    def first(layer: str) -> TensorSpec:
        spec = words if shared else given(layer)
        return spec if rows is None else spec._replace(shape=(spec.shape[0], rows, *spec.shape[2:]))

    found = look(plans, first, rows=rows)
    if _shares_sequence(manifest):
        found = found.of_tokens(manifest.topology.tp)
    if not shared:
        return found
    sizes = dict(zip(found.parameters, found.sizes, strict=True)) | table_sizes(settings.model)
    return replace(found, parameters=tuple(sorted(sizes)), sizes=tuple(sizes[name] for name in sorted(sizes)))


def group_of(chosen: spec.Model, layer: str) -> str:
    """The group of a layer of a graph; "" in a chain."""
    return layer.partition(".")[0] if chosen.graph else ""


def _refuse_slices(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    stages: Mapping[int, Stage],
    samples: Samples | None,
    shapes: Shapes,
    slices: Sequence[Part],
    *,
    last: bool,
) -> None:
    """Raise E110, E512 or E513 for data, layers or a loss that cannot be cut into slices, as far as they are here."""
    targets = None
    if samples is not None and settings.data.kind not in KINDS:
        some = range(min(len(samples), 8))
        targets = samples.targets(some)
        for what, found in (("inputs", samples.inputs(some)), ("targets", targets)):
            refuse_others(settings.data.kind, what, found, slices[-1].length)
    if not settings.model.builtin:
        try_layers(plans, stages.values(), shapes.before, slices, LOWERED[settings.model.parameters])
    if last and samples is not None and settings.model.loss not in model.LOSSES:
        known = samples.targets(range(min(len(samples), 8))) if targets is None else targets
        try_loss(settings.model.loss, model.loss(settings.model.loss), shapes.output, known)


def _refuse_rows(
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    stages: Mapping[int, Stage],
    samples: Samples | None,
    shapes: Shapes,
    *,
    last: bool,
) -> None:
    """Raise E512 or E513 for layers or a loss that take the samples of a row for one, as far as they are here."""
    if not settings.model.builtin:
        try_packed(plans, stages.values(), shapes.before, LOWERED[settings.model.parameters])
    if last and samples is not None and settings.model.loss not in model.LOSSES:
        target = samples.targets(range(min(len(samples), 8)))
        try_padding(settings.model.loss, model.loss(settings.model.loss), shapes.output, target)


def _refuse_copies(manifest: Manifest, parts: Sequence[RankPlan], settings: Settings) -> None:
    """Raise E406 or E515 for activations that go to the host where this runtime does not do it."""
    if not any(op.kind in COPY for part in parts for op in part.ops):
        return
    if settings.model.compile:
        hint = "leave out model.compile, or memory.activations = 'offload'"
        raise ZbcError("E515", "run: the plan moves activations of compiled layers to the host", hint=hint)
    if manifest.slices > 1:
        text = "run: the plan moves activations of slices of microbatches to the host"
        raise ZbcError("E406", text, hint="plan again with whole microbatches, or without offload")


def parts_of(manifest: Manifest) -> list[Part]:
    """The slices of a plan's microbatches; none where they are whole. Raises E406 where the plan says no places."""
    cuts = manifest.cuts
    if manifest.slices > 1 and not cuts:
        text = f"run: the plan cuts microbatches into {manifest.slices} slices, and does not say where"
        raise ZbcError("E406", text, hint="give model.seq_len, and plan again")
    return [Part(index, start, stop, cuts[-1]) for index, (start, stop) in enumerate(pairwise(cuts))]


def _work(settings: Settings, manifest: Manifest) -> Dealer | None:
    """What deals samples of unequal length to replicas. Raises E117, E501 to E505, E530 to E532."""
    shape = shape_of(manifest)
    if shape is None:
        return None
    documents = build_documents(settings.data, settings.model, settings.train.seed)
    where = place(settings.data, settings.model)
    return Dealer(documents, shape, manifest.microbatches, settings.train.seed, where)


def _phase_run(plan: RankPlan, shapes: Shapes, unequal: Unequal | None) -> PhaseRun:
    manifest, run = plan.manifest, plan.manifest.topology
    placement = manifest.to_placement()
    batch = run.batch if unequal is None else run.dp * unequal.most
    apart = run.dp if manifest.averages else 1
    layout = VectorLayout(shapes.parameters, batch, run.world, shapes.sizes, apart, weighted=unequal is not None)
    handlers = dict(HANDLERS)
    for wanted, kinds, around in (
        (unequal is not None, _RUNS_LAYERS, in_rows),
        (manifest.sharded, _RUNS_LAYERS | ({Kind.W} if manifest.with_w else set()), with_weights),
    ):
        handlers |= {kind: around(handlers[kind]) for kind in kinds} if wanted else {}
    texts = tuple(map(placement.text, plan.ops))
    if manifest.flushless:
        options = Settings.of(manifest).optimizer
        every = options.every if options.sync == "asynchronous" else 0
        handlers[Kind.STEP] = stage_step
        cycle = Cycle(plan.ops, texts, manifest.microbatches, handlers, options.clip_stage_norm, every)
        return PhaseRun(plan, layout, [], cycle)
    return PhaseRun(plan, layout, [(handlers[op.kind], op, text) for op, text in zip(plan.ops, texts, strict=True)])


def layer_plans(settings: Settings) -> list[model.LayerPlan]:
    """The layers of a plan, with pretrained weights where it names some."""
    plans = model.layers(settings.model, settings.train.seed)
    if settings.pretrained is None:
        return plans
    return pretrained.fill(plans, settings.model, Path(settings.pretrained))


def _tables(manifest: Manifest, settings: Settings, rank: int) -> Tables | None:
    """What leaves this rank's words of the vocabulary, if all ranks of the pipeline share it. Raises E406 for plans of
    models whose output layer this runtime cannot cut."""
    words = manifest.vocabulary
    if words is None:
        return None
    chosen, rows = settings.model, words.rows
    if not chosen.builtin or chosen.loss != "cross_entropy" or manifest.topology.tp > 1 or rows[-1] != chosen.vocab:
        text = "run: the plan shares a vocabulary over its ranks, which this model or its other axes do not allow"
        raise ZbcError("E406", text, hint='plan again, or with parallel.vocabulary = "ends"')
    return Tables(rows[rank], rows[rank + 1], tied=chosen.tie_embeddings)


def _vocabulary(
    plan: RankPlan,
    settings: Settings,
    plans: Sequence[model.LayerPlan],
    tables: Tables,
    shapes: Sequence[Shapes],
    slices: Sequence[Part],
    transport: Transport,
    device: torch.device,
) -> Vocabulary:
    """This rank's words; `shapes` are those of each slice."""
    manifest, run = plan.manifest, plan.manifest.topology
    words, placement, replica = manifest.vocabulary, manifest.to_placement(), run.of(transport.rank).dp
    assert words is not None
    low = tables.low
    parameters = tables.parameters(plans, settings.train.seed, device)
    embedding, head = parameters[model.TIED], parameters.get(LOGITS, parameters[model.TIED])
    output = Output(head, low, torch.bfloat16 if settings.model.dtype == "bfloat16" else None)
    replicas, lowered = run.ranks([plan.rank]), LOWERED[settings.model.parameters]
    optimizer: StageOptimizer = (
        Sharded(settings.optimizer, parameters, (output.cast,), ranks=replicas, rank=transport.rank, lowered=lowered)
        if manifest.sharded and len(replicas) > 1
        else build_optimizer(settings.optimizer, parameters, (output.cast,), lowered=lowered)
    )
    seat = partial(run.rank, replica)
    ranks = tuple(sorted(map(seat, range(run.pp))))
    return Vocabulary(
        output,
        Embedding(embedding, low, settings.model.padding_token),
        OfRows(optimizer, low, tables.shapes),
        ranks=ranks,
        bounds=tuple((words.rows[part], words.rows[part + 1]) for part in (run.of(rank).pp for rank in ranks)),
        replicas=replicas,
        first=seat(placement.rank_of(0)),
        last=seat(placement.rank_of(placement.ends[-1])),
        last_stage=placement.ends[-1],
        sums=words.sums,
        slices=slices,
        inputs=[one.inputs[0] for one in shapes],
        outputs=[one.output for one in shapes],
    )


def _group(manifest: Manifest, transport: Transport, device: torch.device) -> Group | None:
    """The ranks that share the layers of this one."""
    run, rank = manifest.topology, transport.rank
    sequence = _shares_sequence(manifest)
    meter = Meter() if device.type == "cpu" else None  # on a GPU the host does not wait
    return None if run.tp == 1 else Group(run.sharing(rank), run.of(rank).tp, transport, sequence, meter)


def _shares_sequence(manifest: Manifest) -> bool:
    """Whether each of the ranks that share layers has its part of the tokens between them."""
    return bool(manifest.planning.get("parallel", {}).get("tp_sequence", False))


def _sharing(
    group: Group | None, settings: Settings, cuts: dict[str, Cut], partial: set[str]
) -> Callable[[str, nn.Module], None]:
    """What leaves this rank's part of a layer, and notes in `cuts` and `partial` which that is."""

    def share(name: str, layer: nn.Module) -> None:
        if group is not None:
            found = sharding.shard(name, layer, group, joined=not _by_words(settings.model))
            cuts.update({f"{name}.{local}": cut for local, cut in found.cuts.items()})
            partial.update(f"{name}.{local}" for local in found.partial)

    return share


def _by_words(chosen: spec.Model) -> bool:
    """Whether the loss is found from parts of the logits, where ranks share layers."""
    return chosen.builtin and chosen.loss == "cross_entropy"


def _loss(chosen: spec.Model, group: Group | None) -> Loss:
    if group is None or not _by_words(chosen):
        return model.loss(chosen.loss)
    return tensor_parallel.cross_entropy(group, chosen.vocab or 0)


def _shared(manifest: Manifest, plans: Sequence[model.LayerPlan]) -> dict[str, tuple[int, ...]]:
    """The weights that stages share, with those stages, the owner's first."""
    found: dict[str, tuple[int, ...]] = {}
    if not manifest.tied or manifest.vocabulary is not None:
        return found
    home = {name: stage for stage, names in enumerate(manifest.layers) for name in names}
    for plan in plans:
        for target in plan.ties.values():
            owner = next(home[other.name] for other in plans if target.startswith(f"{other.name}."))
            found[target] = (*dict.fromkeys((*found.get(target, (owner,)), home[plan.name])),)
    return found


def _optimizer(
    settings: Settings,
    stage: Stage,
    manifest: Manifest,
    rank: int,
    plans: Sequence[model.LayerPlan],
    late: int,
) -> StageOptimizer:
    """`late`: by how many steps of the stage its gradients come late, where it steps on its own."""
    ranks = meeting(manifest, Op(Kind.REDUCE, stage.index), manifest.topology.of(rank).tp)
    options, lowered = settings.optimizer, LOWERED[settings.model.parameters]
    ahead = options.sync == "post-validate"
    seat = manifest.topology.of(rank)
    own = manifest.topology.ranks((seat.pp,), seat.tp) if manifest.resident else ranks
    if manifest.sharded and len(own) > 1:
        tied = {target for plan in plans for target in plan.ties.values()} if manifest.tied else set[str]()
        whole = frozenset(tied & stage.parameters.keys())
        return Sharded(
            options,
            stage.parameters,
            stage.casts,
            ranks=own,
            rank=rank,
            among=ranks,
            whole=whole,
            lowered=lowered,
            ahead=ahead,
            frees=bool(manifest.resident),
            low=torch.bfloat16 if settings.model.builtin and settings.model.dtype == "bfloat16" else None,
            scatters=manifest.scatters,
        )
    if manifest.flushless and options.sync == "asynchronous":
        return OneVersion(options, stage.parameters, late if options.lookahead else 0)
    if manifest.flushless:
        return TwoVersions(options, stage.parameters)
    return build_optimizer(options, stage.parameters, stage.casts, lowered=lowered, ahead=ahead)


def _averaging(worker: Worker, stage: int) -> Averaging:
    """The weights of a stage that its replicas average. Raises E406 if the plan does not say how."""
    given = worker.plan.manifest.planning.get("parallel", {}).get("average")
    if given is None:
        raise ZbcError("E406", "plan: replicas average their weights, and parallel.average does not say how")
    asked = _section(spec.Average, given)
    ranks = worker.topology.ranks(worker.placement.holders(stage), worker.share)
    return Averaging([p for _, p in sorted(worker.optimizers[stage].parameters.items())], ranks, asked)


def _turns(worker: Worker, run: PhaseRun, settings: Settings) -> dict[int, Turns]:
    """The stages in which layers are frozen. Raises E406 for plans that freeze beside what that does not go with."""
    manifest, ops = run.plan.manifest, run.plan.ops
    if FROZEN in manifest.capabilities:
        moves = any(op.kind in COPY for op in ops)
        refuse_frozen(manifest, barrier=not isinstance(run.ending, Ahead), compiled=settings.model.compile, moves=moves)
    found = {s: turns_of(ops, stage, manifest, settings.freeze.after) for s, stage in worker.stages.items()}
    return {s: turns for s, turns in found.items() if turns is not None}


def _sums(worker: Worker, shapes: Shapes) -> dict[Op, GradientSum]:
    """What each REDUCE and TIE of the plan sums; `shapes` of all parameters of the model."""
    sizes = dict(zip(shapes.parameters, shapes.sizes, strict=True))
    manifest, found, tp = worker.plan.manifest, dict[Op, GradientSum](), worker.share
    for op in dict.fromkeys(op for run in worker.phase_runs for op in run.plan.ops if op.kind.sums):
        if op.kind is Kind.REDUCE_V and worker.vocabulary is not None:
            shared = worker.vocabulary
            rows = shared.optimizer
            found[op] = rows.dealt or Bucket(list(rows.parameters.values()), shared.replicas)
            continue
        if op.kind is Kind.TIE:
            mine = {n: p for s in worker.stages.values() for n, p in s.parameters.items() if n in worker.tied}
            summed = [
                mine[n] if n in mine else absent(_share_of(worker, sizes[n]), shapes.gradients[n], worker.device)
                for n in sorted(worker.tied)
                if n in shapes.gradients  # else it is frozen, on every rank
            ]
            found[op] = Bucket(summed, meeting(manifest, op, tp))
            continue
        optimizer = worker.optimizers[op.stage]
        own = [p for name, p in optimizer.parameters.items() if name not in worker.tied]
        found[op] = optimizer if isinstance(optimizer, Sharded) else Bucket(own, meeting(manifest, op, tp))
    return found


def _share_of(worker: Worker, size: int) -> int:
    """Elements of a shared weight on this rank: of the words of an embedding, which is what built-in models share."""
    if worker.group is None:
        return size
    words = worker.plan.manifest.planning["model"]["vocab"]
    low, high = worker.group.bounds(words)
    return size // int(words) * (high - low)


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


def _counted(worker: Worker, source: BatchSource, counts: Count) -> BatchSource:
    """Microbatches of a user's dataset, weighed by the targets that count, where the rank computes losses."""
    last = worker.vocabulary is not None or any(not worker.placement.sinks(stage) for stage in worker.stages)
    if not last:
        return source
    work = worker.work

    def numbers(step: int, replica: int) -> range:
        run = worker.run_of(step)
        most, here = (run.count, run.count) if work is None else (work.most, work.count(step, replica))
        return range(replica * most, replica * most + here)

    def groups(step: int) -> list[list[int]]:
        run = worker.run_of(step)
        replicas = [numbers(step, r) for r in ([worker.replica] if worker.averages else range(worker.topology.dp))]
        every = run.ending.every or run.count
        if work is not None:
            return [[number for one in replicas for number in one]]
        return [[number for one in replicas for number in one[i : i + every]] for i in range(0, run.count, every)]

    def own(step: int, number: int) -> bool:
        return number in numbers(step, worker.replica)

    return Counted(source, counts, groups, own, parts=work is not None)


def _wants(plan: RankPlan, rank: int) -> list[Want]:
    """What a step of `plan` reads on a rank of the run, in its order."""
    manifest = plan.manifest
    first = manifest.topology.of(rank).dp * manifest.microbatches  # of the microbatches of this replica
    if manifest.vocabulary is not None:
        read = {Kind.I: "inputs", Kind.S: "targets"}
        return [(read[op.kind], first + op.mb) for op in plan.ops if op.kind in read and not op.slice]
    # Of steps without a flush, those of the next one come first: that is their place in its own order.
    listed = [op._replace(mb=op.mb - NEXT) for op in plan.ops if op.mb >= NEXT]
    listed += [op for op in plan.ops if op.mb < NEXT]
    forwards = [op for op in listed if op.kind is Kind.F and not op.slice]
    placement = manifest.to_placement()
    ends = (("inputs", placement.sources), ("targets", placement.sinks))
    return [(kind, first + op.mb) for op in forwards for kind, others in ends if not others(op.stage)]


def _build_stages(
    parts: Sequence[RankPlan],
    settings: Settings,
    plans: list[model.LayerPlan],
    shapes: Shapes,
    device: torch.device,
    share: Callable[[str, nn.Module], None],
) -> dict[int, Stage]:
    manifest = parts[-1].manifest
    by_name, split = {layer.name: layer for layer in plans}, _split(parts)
    stages = {}
    placement = manifest.to_placement()
    for s in placement.stages_of(parts[-1].rank):
        stages[s] = build_stage(
            s,
            [by_name[name] for name in manifest.layers[s]],
            **_forms(manifest, s, shapes),
            traits=shapes.traits,
            seed=settings.train.seed,
            device=device,
            dtype=settings.model.dtype,
            splits=s in split,
            recompute=settings.memory.recomputes(s),
            flows=shapes.flows[s],
            passed=shapes.passed[s],
            compiles=settings.model.compile,
            watched=not settings.model.builtin,
            share=share,
        )
        if settings.model.graph:
            stages[s].reads = group_of(settings.model, manifest.layers[s][0])
            stages[s].inputs = _arguments(settings.model, manifest, s)
        for part in parts:
            refuse_stage(part.manifest, part.ops, stages[s])
    if manifest.vocabulary is None:  # else what is tied is one table in each rank's share
        share_ties(stages.values(), plans, settings.train.seed, device, share)
    return stages


def _arguments(chosen: spec.Model, manifest: Manifest, stage: int) -> tuple[int, ...]:
    """The stages that a stage of a graph reads, in the order of its first layer's arguments; () for one or none."""
    group, _, number = manifest.layers[stage][0].partition(".")
    if number != "0" or len(chosen.graph[group]) < 2:
        return ()
    home = {name: s for s, names in enumerate(manifest.layers) for name in names}
    return tuple(home[f"{one}.{chosen.groups[one] - 1}"] for one in chosen.graph[group])


def _forms(manifest: Manifest, stage: int, shapes: Shapes) -> dict[str, Any]:
    """What a stage takes and gives, and how."""
    last = not manifest.to_placement().sinks(stage)
    return {
        "takes": shapes.inputs[stage],
        "gives": shapes.output if last and manifest.vocabulary is not None else shapes.outputs[stage],
        "came": shapes.layouts[stage],
        "goes": shapes.goes[stage],
        "laid": shapes.laid[stage],
    }


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
