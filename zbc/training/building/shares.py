"""A rank's shards: of a parallel vocabulary, of layers, experts and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.runtime.core.optimizer import StageOptimizer, build_optimizer
from zbc.runtime.core.tensors import AUTOCAST, Loss
from zbc.runtime.features.context_parallel import Spread
from zbc.runtime.features.experts import expert_parallel
from zbc.runtime.features.moving import with_mean
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.features.tensor_parallel import Group, Meter, Shared, bounds
from zbc.runtime.features.words import cross_entropy
from zbc.runtime.features.words.vocabulary import Embedding, Output
from zbc.runtime.features.words.vocabulary_state import OfRows, Vocabulary
from zbc.runtime.features.words.words import AS_IS, PLAIN, Terms
from zbc.topology import INNER
from zbc.training.building.context import Site
from zbc.training.models import model, sharding
from zbc.training.models.shared_words import Tables, ends_of


def tables_of(site: Site) -> Tables | None:
    """The object that cuts tables to this rank's vocabulary shard, if the vocabulary is parallel. Raises E406 for
    models whose output layer this runtime cannot shard."""
    words = site.manifest.vocabulary
    if words is None:
        return None
    chosen = site.settings.model
    if not _by_words(chosen) or words.rows[-1] != chosen.vocab:
        text = "run: the plan shares a vocabulary over its ranks, which this model or its other axes do not allow"
        raise ZbcError("E406", text, hint='plan again, or with parallel.vocabulary = "ends"')
    return Tables(*words_of(site, site.topology.part(site.seat.at))[site.plan.rank], ends_of(chosen))


def words_of(site: Site, part: int) -> list[tuple[int, int]]:
    """The bounds of the words of each rank of the pipeline, for shard `part` of the layers."""
    rows = site.manifest.vocabulary.rows if site.manifest.vocabulary is not None else []
    parts = [(low, *bounds(high - low, part, site.topology.parts)) for low, high in pairwise(rows)]
    return [(low + start, low + stop) for low, start, stop in parts]


def vocabulary_of(site: Site, tables: Tables, group: Group | None) -> Vocabulary:
    """This rank's vocabulary shard."""
    settings, run, placement = site.settings, site.topology, site.placement
    words, low, lowered = site.manifest.vocabulary, tables.low, settings.lowered
    assert words is not None
    parameters = tables.parameters(site.layers, settings.train.seed, site.device)
    for table in parameters.values():
        table.requires_grad_(not settings.adapter.rank)
    embedding, *_, head = [*parameters.values()] * 2
    low_type, ends = AUTOCAST.get(settings.model.dtype), tables.ends
    output = Output(head, low, low_type, terms_of(settings.model), ends.shaped)
    replicas = run.ranks([site.plan.rank], site.seat.at)
    dealt, of = site.manifest.sharded and len(replicas) > 1, (settings.optimizer, parameters, (output.cast,))
    build = partial(Sharded, ranks=replicas, rank=site.rank) if dealt else build_optimizer
    optimizer: StageOptimizer = build(*of, lowered=lowered, masters=settings.model.master)
    seat = partial(run.rank, site.seat.dp, at=site.seat.at)
    ranks = tuple(sorted(map(seat, range(run.pp))))
    return Vocabulary(
        output,
        Embedding(embedding, low, ends.still),
        OfRows(with_mean(settings.optimizer, optimizer), low, ends.tables),
        ranks=ranks,
        bounds=[[words_of(site, part)[run.of(rank).pp] for rank in ranks] for part in range(run.parts)],
        replicas=replicas,
        first=seat(placement.rank_of(0)),
        last=seat(placement.rank_of(placement.ends[-1])),
        last_stage=placement.ends[-1],
        sums=words.sums,
        slices=site.slices,
        inputs=[shapes.inputs[0] for shapes in site.by_slice],
        outputs=[shapes.output for shapes in site.by_slice],
        group=group,
    )


def shared_with(site: Site) -> Shared:
    """The groups of ranks that shard layers, experts and tokens with this rank."""
    meter = Meter() if site.device.type == "cpu" else None  # on a GPU the host does not wait
    inner, folded = dict[str, Group | None](), site.manifest.folded
    for axis in INNER:
        ranks = site.topology.beside(axis.name, site.rank)
        sequence = axis.parts and bool(site.shares_sequence)
        group = Group(ranks, ranks.index(site.rank), site.transport, sequence, meter, folded)
        inner[axis.name] = group if group.size > 1 else None
    if not site.manifest.ep:
        return Shared(inner["tp"], None, inner["cp"])
    swaps, *steps = (
        Group(ranks, ranks.index(site.rank), site.transport, meter=meter)
        for ranks in (site.topology.sharing(site.rank), *site.topology.steps(site.rank))
    )
    return Shared(inner["tp"], swaps._replace(steps=tuple(steps)), inner["cp"])


def share_out(site: Site, shared: Shared, tables: Tables | None) -> Callable[[str, nn.Module], None]:
    """A function that cuts a layer to this rank's shard, and records the cuts in `shared`."""
    joined = not _by_words(site.settings.model)

    def share(name: str, layer: nn.Module) -> None:
        if tables is not None:
            tables.cut(name, layer)
        if shared.group is not None:
            found = sharding.shard(name, layer, shared.group, joined=joined)
            shared.cuts.update({f"{name}.{local}": cut for local, cut in found.cuts.items()})
            shared.partial.update(f"{name}.{local}" for local in found.partial)
        if shared.tokens is not None and site.tokens is not None:
            unequal = site.manifest.balance is not None or bool(site.manifest.tokens)
            sharding.spread(layer, Spread(shared.tokens), site.tokens.rows, unequal=unequal)
        if shared.swaps is not None:
            shared.experts.extend(expert_parallel.share(name, layer, shared.swaps))

    return share


def _by_words(chosen: spec.Model) -> bool:
    """Whether the loss can be computed from sharded logits."""
    return chosen.causal and chosen.loss == "cross_entropy"


def terms_of(chosen: spec.Model) -> Terms:
    return Terms(chosen.z_losses[0], chosen.label_smoothing, chosen.label_smoothing / (chosen.vocab or 1))


def loss_of(chosen: spec.Model, group: Group | None, layers: Iterable[nn.Module]) -> Loss:
    """The loss of a model; `layers` are this rank's, of which the head has the settings of a loss by chunks."""
    terms = terms_of(chosen)
    if not _by_words(chosen) or (group is None and terms == PLAIN and chosen.loss_chunk is None):
        return model.loss(chosen.loss)
    return cross_entropy.cross_entropy(chosen.vocab or 0, terms, group, _chunks(layers))


def log_probabilities_of(
    chosen: spec.Model, group: Group | None, layers: Iterable[nn.Module]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function that computes log probabilities of targets; None if the model's output is not logits."""
    if not _by_words(chosen):
        return None
    return cross_entropy.log_probabilities(chosen.vocab or 0, group, _chunks(layers))


def _chunks(layers: Iterable[nn.Module]) -> cross_entropy.Chunks | None:
    heads: Iterable[Any] = (layer for layer in layers if getattr(layer, "chunk", None) is not None)
    return next((cross_entropy.Chunks(head.logits, head.chunk, getattr(head, "shaped", AS_IS)) for head in heads), None)
