"""The inputs to building a rank: the sections of its plan, the layers, their shapes, and the data in the order in which
the rank reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zbc.errors import ZbcError
from zbc.ir import NEXT
from zbc.job import spec, userobject
from zbc.job.model_section import TRANSFORMERS
from zbc.plan.directory import Manifest, RankPlan
from zbc.plan.phases import Phases
from zbc.runtime.core.bundle import Ways
from zbc.runtime.core.state import BatchSource, PhaseRun, Work
from zbc.runtime.core.tensors import AUTOCAST, Loss, Part, TensorSpec
from zbc.runtime.seeding import seed_of, seeded
from zbc.runtime.transports.transport import Transport
from zbc.training.data.counted import Count, Weights, count_of, counting, no_mean, rows_of
from zbc.training.data.data import (
    KINDS,
    RankBatches,
    Tokens,
    build_dataset,
    build_samples,
    input_spec,
    place,
    tokens_of,
)
from zbc.training.data.pairs import Samples, Targets, Words
from zbc.training.data.prefetch import Prefetched, Together, Want
from zbc.training.data.split import SplitBatches, Steps, count_of_step
from zbc.training.data.unequal import ByTokens, Dealer, Fixed, PackedBatches, build_documents, dealer_of
from zbc.training.models import adapters, model, pretrained
from zbc.training.models.shared_words import ends_of, trunk
from zbc.training.probing.shapes import Shapes, derive, in_a_slice
from zbc.training.probing.trials import unscaled

_FILL = "zbc.training.models.hfweights:fill"  # imports transformers


@dataclass(frozen=True)
class Settings:
    """The sections of a plan that the runtime reads, validated again."""

    model: spec.Model
    data: spec.Data
    train: spec.Train
    optimizer: spec.Optimizer
    memory: spec.Memory
    checkpoint: spec.Checkpoint
    freeze: spec.Freeze
    adapter: spec.Adapter
    pretrained: str | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Settings:
        every = {**manifest.planning, **manifest.training}  # planning has some keys of what training has whole
        *names, _ = (field.name for field in fields(cls))
        # JSON has lists where the models have tuples.
        read: dict[str, Any] = {n: spec.SECTIONS[n].model_validate(every.get(n, {}), strict=False) for n in names}
        return cls(**read, pretrained=every.get("pretrained"))

    @property
    def lowered(self) -> torch.dtype | None:
        """The type that weights are cast to for forward; None if they stay in their own type."""
        return torch.bfloat16 if self.model.lowered else None

    @property
    def where(self) -> str:
        """The source of the samples, for messages."""
        return place(self.data, self.model)


def layer_plans(settings: Settings) -> list[model.LayerPlan]:
    """The layers of a plan, with pretrained weights and adapters if it has them."""
    foreign = settings.model.family == TRANSFORMERS
    plans = model.layers(settings.model, settings.train.seed)
    if settings.pretrained is not None:
        fill = userobject.load(_FILL, "the reader of weights") if foreign else pretrained.fill
        plans = fill(plans, settings.model, Path(settings.pretrained))
    return adapters.adapted(plans, settings.adapter, settings.model)


@dataclass
class Site:
    """A rank of a run, and the inputs of its worker, computed on first access.

    `parts` are its plans by phase, the last one's is the final phase; `given` the layers, if they are not those of the
    plan's model; `looks` caches their shapes, by the rows of a slice, for other ranks of the plan in this process.
    """

    parts: Sequence[RankPlan]
    transport: Transport
    device: torch.device
    given: Sequence[model.LayerPlan] | None = None
    looks: dict[int | None, Shapes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan, self.rank = self.parts[-1], self.transport.rank  # of the run
        self.manifest = manifest = self.plan.manifest
        self.settings, self.topology, self.placement = Settings.of(manifest), manifest.topology, manifest.to_placement()
        self.seat, self.mine = self.topology.of(self.rank), self.placement.stages_of(self.plan.rank)
        self.last = any(not self.placement.sinks(s) for s in self.mine)  # whether it has the last stage
        self.reads = manifest.vocabulary is not None or bool(set(self.placement.ends) & set(self.mine))  # data
        # Whether it is sequence parallel; or "regather" (job/sections.py).
        self.shares_sequence: bool | str = manifest.planning.get("parallel", {}).get("tp_sequence", False)

    @cached_property
    def dealer(self) -> Dealer | None:
        """The dealer of samples of unequal length, if any. Raises E110, E501 to E505."""
        return dealer_of(self.manifest, self.tokens)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Of each microbatch of a replica the tokens of its rows; () if all have whole rows, or a dealer decides."""
        return () if self.dealer is not None else lengths_of(self.settings, self.manifest)

    @property
    def unequal(self) -> bool:
        """Whether microbatches have rows of unequal length."""
        return bool(self.lengths) or isinstance(self.dealer, ByTokens)

    @cached_property
    def work(self) -> Work:
        """Each replica's share of a step."""
        if self.dealer is not None or not self.lengths:
            return self.dealer or Work()
        options, rows = self.settings.optimizer, self.topology.dp * self.manifest.microbatch_size
        every = options.every if options.sync == "asynchronous" else len(self.lengths)
        return Fixed(self.lengths, self.settings.model.seq_len or 0, rows, every)

    @cached_property
    def samples(self) -> Samples | None:
        """The data, if this rank reads them; a factory's on every rank, since it determines the model's input."""
        if self.dealer is not None:
            return self.dealer.documents
        if not self.reads and self.settings.data.kind in KINDS:
            return None
        if self.settings.data.items == "steps":
            return steps_of(self.settings, self.manifest)
        both = len(self.placement.pipes) == 1 and set(self.placement.ends) <= set(self.mine)
        return samples_of(self.settings, both=both)

    @cached_property
    def layers(self) -> Sequence[model.LayerPlan]:
        return layer_plans(self.settings) if self.given is None else self.given

    @cached_property
    def some_targets(self) -> Any:
        """Targets of the first samples, if the loss is user-defined and this rank computes it."""
        if not self.last or self.settings.model.loss in model.LOSSES or isinstance(self.samples, Steps | None):
            return None
        return self.samples.targets(range(min(len(self.samples), 8)))

    def made_up(self, rows: int) -> Any:
        """An output of the last layer with random numbers, for so many samples."""
        ends, size = self.shapes.ends, (self.manifest.microbatch_size,)
        specs = [self.shapes.output] if ends is None else [part.laid.spec for part in ends.parts]
        shapes = [(rows, *spec.shape[1:]) if spec.shape[:1] == size else spec.shape for spec in specs]
        with seeded(seed_of("made up")):
            made = tuple(spec._replace(shape=shape).drawn() for spec, shape in zip(specs, shapes, strict=True))
        return made[0] if ends is None else made if ends.form is None else ends.form.around(made)

    @cached_property
    def slices(self) -> list[Part]:
        """The slices of a microbatch; empty if it is whole. Raises E406 if the plan has no boundaries for them."""
        manifest, cuts = self.manifest, self.manifest.cuts
        if manifest.slices > 1 and not cuts:
            text = f"run: the plan cuts microbatches into {manifest.slices} slices, and does not say where"
            raise ZbcError("E406", text, hint="give model.seq_len, and plan again")
        cuts = [cut // self.ranks for cut in cuts]
        return [Part(index, start, stop, cuts[-1]) for index, (start, stop) in enumerate(pairwise(cuts))]

    @cached_property
    def ranks(self) -> int:
        """The number of ranks over which the tokens of a microbatch are sharded."""
        return self.topology.along("cp")

    @cached_property
    def tokens(self) -> Tokens | None:
        """This rank's tokens of each sequence, with context parallelism."""
        return tokens_of(self.manifest, self.settings.model, self.seat.at)

    @cached_property
    def by_slice(self) -> list[Shapes]:
        """The shapes of the layers in training, per slice of a microbatch, or for a whole one. Raises as `derive`."""
        lengths: list[int | None] = [part.rows for part in self.slices]
        lengths = lengths or [None]
        for rows in sorted({*lengths} - self.looks.keys(), key=lambda rows: rows or 0, reverse=True):
            with in_a_slice(rows):
                self.looks[rows] = self.look(rows)
        return [self.looks[rows] for rows in lengths]

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes in the longest slice of a microbatch, or in a whole one."""
        _ = self.by_slice
        return self.looks[max((part.rows for part in self.slices), default=None)]

    def ways(self, layer: str) -> Ways:
        """The packings of a layer's input and output, by the rows of a slice."""
        return {rows: shapes.packed[layer] for rows, shapes in self.looks.items()}

    def look(self, rows: int | None) -> Shapes:
        """The shapes for rows of `rows` tokens, None for whole ones. Raises as `derive`."""
        settings, lowered, shared = self.settings, self.settings.lowered, self.manifest.vocabulary is not None
        samples, named = self.samples, Targets.of(settings.model)

        def lower(spec: TensorSpec) -> TensorSpec:
            return spec if lowered is None or not spec.dtype.is_floating_point else spec._replace(dtype=lowered)

        def first(layer: str) -> TensorSpec | dict[str, TensorSpec]:
            size, group = self.manifest.microbatch_size, group_of(settings.model, layer)
            found = input_spec(settings.data, settings.model, samples, size)
            if group and not isinstance(found, TensorSpec):
                if group not in found:
                    text = f"data: samples of {settings.data.kind} have {', '.join(found)}, and nothing for {group}"
                    hint = "give a tensor for each group that reads no other one"
                    raise ZbcError("E505", text, hint=hint)
                found = found[group]
            if not isinstance(found, TensorSpec):
                if rows is not None or self.ranks > 1:
                    text = f"data: samples of {settings.data.kind} have entries called {', '.join(found)}"
                    hint = "return pairs, or set schedule.slices = 1 and parallel.cp = 1"
                    raise ZbcError("E110", f"{text}; ranks and slices that share tokens take pairs yet", hint=hint)
                return {name: lower(spec) for name, spec in found.items()}
            if self.ranks > 1:
                found = found._replace(shape=(size, found.shape[1] // self.ranks, *found.shape[2:]))
            if words is not None:  # the input of the first layer is the embedding
                shape = *found.shape, next(iter(words.tables.values()))[1]
                found = TensorSpec(shape, lowered or torch.get_default_dtype())
            else:
                found = lower(found)
            return found if rows is None else found._replace(shape=(found.shape[0], rows, *found.shape[2:]))

        plans, learnt = trunk(self.layers) if shared else self.layers, shared and not settings.adapter.rank
        words = ends_of(settings.model) if shared else None
        low = AUTOCAST.get(settings.model.dtype)
        autocast = None if low is None else (self.device, low)
        ends = None if named is None or named.free else frozenset(named.names)
        found = derive(
            plans, first, self.manifest, ends=ends, autocast=autocast, lowered=lowered, rows=rows, flow=learnt
        )
        if self.shares_sequence:
            whole, firsts = [plan.name for plan in plans if plan.whole], [names[0] for names in self.manifest.layers]
            found = found.of_tokens(self.topology.along("tp"), whole, firsts)
        if words is None:
            return found
        sizes = dict(zip(found.parameters, found.sizes, strict=True)) | words.sizes
        names, (*stages, last) = tuple(sorted(sizes)), found.stages
        stages.append(last._replace(gives=found.output))  # which all ranks turn into words
        return replace(found, stages=tuple(stages), parameters=names, sizes=tuple(sizes[name] for name in names))


def steps_of(settings: Settings, manifest: Manifest, *, as_given: bool = False) -> Steps:
    """The dataset of a user whose items are steps; `as_given`: in whole rows, in its order. Raises E501 to E505."""
    data, chosen = settings.data, settings.model
    return Steps(
        build_dataset(data, chosen, settings.train.seed),
        data.kind,
        settings.train.seed,
        count=count_of_step(manifest),
        size=manifest.microbatch_size,
        length=chosen.seq_len if chosen.builtin else None,
        ignores=chosen.loss == "cross_entropy",
        tokens=() if as_given else lengths_of(settings, manifest),
        words=Words.of(chosen),
    )


def samples_of(settings: Settings, *, both: bool = False) -> Samples:
    """The training samples in whole rows. Raises as `build_samples`."""
    data, chosen, seed = settings.data, settings.model, settings.train.seed
    if data.balance != "none" and data.kind not in KINDS:
        return build_documents(data, chosen, seed)
    return build_samples(data, chosen, seed, both=both)


def lengths_of(settings: Settings, manifest: Manifest) -> tuple[int, ...]:
    """Of each microbatch of a replica the tokens of its rows; () if they are whole, as of users' layers that get steps
    of a dataset, or of a model that has no length."""
    whole, padded = settings.model.seq_len, settings.data.items == "steps" and not settings.model.builtin
    if whole is None or padded:
        return ()
    return tuple(min(whole, -(-tokens // manifest.unit) * manifest.unit) for tokens in manifest.tokens)


def group_of(chosen: spec.Model, layer: str) -> str:
    """The group of a layer of a graph; "" in a chain."""
    return layer.partition(".")[0] if chosen.graph else ""


def batches_of(site: Site, phases: Phases, runs: Sequence[PhaseRun], count: Count | None) -> BatchSource | None:
    """The data source of a rank of the run; None if it reads no data. On ranks that compute losses microbatches have
    weights, by the targets that count, or as steps of a dataset say."""
    source = _source(site, phases)
    weighs = count is not None or isinstance(source, SplitBatches)
    if not weighs or not isinstance(source, RankBatches) or not (site.last or site.manifest.vocabulary is not None):
        return source
    source.weights = Weights(runs, site.work, site.topology, site.rank, count or counting)
    return source


def _source(site: Site, phases: Phases) -> BatchSource | None:
    """A user's dataset may draw random numbers, so it is read in the rank's thread, without prefetch."""
    settings, manifest = site.settings, site.manifest
    if site.samples is None or not site.reads:
        return None
    if site.dealer is not None:
        return PackedBatches(site.dealer, settings.lowered, site.tokens)
    if isinstance(site.samples, Steps):
        return split_batches(settings, site.samples, site.tokens)
    order = [wants(plan, site.rank) for plan in site.parts]
    how: dict[str, Any] = {
        "seed": settings.train.seed,
        "microbatches": manifest.topology.batch,
        "size": manifest.microbatch_size,
        "phases": phases,
        "lowered": settings.lowered,
        "where": settings.where,
        "tokens": site.tokens,
        "lengths": site.lengths,
    }
    if settings.data.kind in KINDS:
        return Prefetched(site.samples, order, site.device, **how)
    return Together(site.samples, order, **how)


def split_batches(settings: Settings, steps: Steps, tokens: Tokens | None = None) -> SplitBatches:
    return SplitBatches(steps, seed=settings.train.seed, lowered=settings.lowered, where=settings.where, tokens=tokens)


def count_of_targets(site: Site) -> Count | None:
    """Counts the targets of a microbatch that count; None if all microbatches have equal weights, or those of steps."""
    settings = site.settings
    if site.samples is None or isinstance(site.samples, Steps) or settings.data.kind in KINDS or not site.reads:
        return None
    return count_of(model.loss(settings.model.loss), settings.model.loss, site.samples.targets([0]))


def warnings_of(site: Site, loss: Loss) -> tuple[str, ...]:
    """Remarks on a loss that is no mean, and on layers whose gradients do not scale with it."""
    chosen, found = site.settings.model, list[str | None]()
    if site.some_targets is not None:
        found.append(no_mean(chosen.loss, loss, site.made_up(rows_of(site.some_targets)), site.some_targets))
    adds = [name for name, traits in site.shapes.traits.items() if traits.adds]
    if adds and site.last and (site.topology.batch > 1 or chosen.dtype == "float16"):
        found.append(" ".join(unscaled(adds)))
    return tuple(text for text in found if text is not None)


def wants(plan: RankPlan, rank: int) -> list[Want]:
    """The inputs and targets that a step of `plan` reads on a rank of the run, in order."""
    manifest = plan.manifest
    first = manifest.topology.of(rank).dp * manifest.microbatches  # of the microbatches of this replica
    if manifest.vocabulary is not None:
        return [(op.kind.row.data, first + op.mb) for op in plan.ops if op.kind.row.data and not op.slice]
    # Without a flush, microbatches of the next step come first, as in that step's own order.
    listed = [op._replace(mb=op.mb - NEXT) for op in plan.ops if op.mb >= NEXT]
    listed += [op for op in plan.ops if op.mb < NEXT]
    forwards = [op for op in listed if op.kind.is_forward and not op.slice]
    placement = manifest.to_placement()
    ends = (("inputs", placement.sources), ("targets", placement.sinks))
    return [(kind, first + op.mb) for op in forwards for kind, others in ends if not others(op.stage)]
