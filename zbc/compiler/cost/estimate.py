"""Costs of each layer, counted from the model and the hardware: floating-point operations, bytes moved, bytes kept.

Times, in ms for one microbatch, are of the kernels that work.py counts, at the speeds of machine.py; bytes kept are
counted in footprint.py and selective.py. These are estimates; measured times, given in [costs] or by a profile, replace
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import truediv
from statistics import fmean
from typing import Any

from zbc.compiler.cost import adapters, footprint, profiled, staying, work
from zbc.compiler.cost.footprint import NOTHING, Footprint
from zbc.compiler.cost.machine import Machine
from zbc.compiler.cost.profiled import Measurement
from zbc.compiler.cost.selective import Spared, spared
from zbc.compiler.cost.sizes import Sizes
from zbc.excludes import HEAD_NORMS, WHOLE_NORMS
from zbc.ir import Placement
from zbc.job.graph import names
from zbc.job.model_section import AROUND, GEMMA
from zbc.job.sections import Memory
from zbc.job.spec import GivenCosts, Job, LayerCost, Model
from zbc.job.tokens import shares_of


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer for one microbatch: times in ms, memory in bytes, parameters as a count."""

    name: str
    f: float
    b: float
    w: float
    params: int = 0
    size: Footprint = NOTHING
    frozen: int = 0  # frozen parameters, not among `params`
    tied: int = 0  # the part of `params` in the weight that embedding and head share
    apart: tuple[int, ...] = ()  # elements of each parameter of experts, if replicas share these out
    parts: tuple[int, ...] = ()  # `params` by parameter; () if only their sum is known
    matrices: tuple[tuple[int, int], ...] = ()  # shapes of the parameters that Muon steps
    experts: int = 0  # that it has on a rank, whose matrices Muon steps together
    measured: Measurement | None = None  # by a profile
    spared: Mapping[bool, Spared] = field(default_factory=dict)  # with and without attention; {} if neither changes it
    whole: Footprint | None = None  # in a stage that runs all of F again, if another
    once: float = 0.0  # the share of F that no recompute repeats
    cheap: float = 0.0  # the share of F that is run again, if this layer recomputes selectively
    part: float = 1.0  # the share of F's activations that it then keeps
    lengths: Mapping[int, Layer] = field(default_factory=dict)  # it with rows of so many tokens, where they are unequal

    def selective(self, memory: Memory) -> Layer:
        """This layer with selective recompute; given or measured times take the estimated share."""
        if not self.spared:
            return self
        size, cheap = self.spared[memory.attends_again]
        more, one = cheap * self.f, self.measured
        one = one and replace(one, b=one.b + more, bw=one.bw + more)
        part = size.act_b / self.size.act_b if self.size.act_b else 1.0
        return replace(self, b=self.b + more, size=size, cheap=cheap, part=part, measured=one, spared={})

    def recomputed(self) -> Layer:
        """This layer in a stage that runs all of its F again."""
        return self if self.whole is None else replace(self, size=self.whole)

    @property
    def total(self) -> float:
        return self.f + self.b + self.w

    @property
    def backward(self) -> float:
        """ms of B and W in one op."""
        return self.b + self.w if self.measured is None else self.measured.bw

    @property
    def again(self) -> float:
        """ms that recompute adds to its backward."""
        return self.f * (1 - self.once) if self.measured is None else self.measured.again


def layers(job: Job) -> list[Layer]:
    """Every layer in order, with measured costs or given per-layer costs if the job has them."""
    table = _whole(job)
    if not job.tokens:
        return table
    each = {tokens: _of_length(job, table, tokens) for tokens in dict.fromkeys(job.tokens)}
    return [replace(one, lengths={tokens: found[i] for tokens, found in each.items()}) for i, one in enumerate(table)]


def on_the_mean(job: Job, table: Sequence[Layer]) -> Sequence[Layer]:
    """The table with the times of the mean of all microbatches."""
    return [_mean([one.lengths[tokens] for tokens in job.tokens]) for one in table] if job.tokens else table


def _mean(each: Sequence[Layer]) -> Layer:
    f, b, w = (fmean(ms) for ms in zip(*((one.f, one.b, one.w) for one in each), strict=True))
    spared = {
        again: Spared(size, fmean(one.spared[again].cheap * one.f for one in each) / f if f else 0.0)
        for again, (size, _) in each[0].spared.items()
    }
    one, measured = each[0].measured, [layer.measured for layer in each if layer.measured]
    if one is not None:
        bw, again = fmean(found.bw for found in measured), fmean(found.again for found in measured)
        one = replace(one, f=f, b=b, w=w, bw=bw, again=again)
    return replace(each[0], f=f, b=b, w=w, spared=spared, measured=one)


def _whole(job: Job) -> list[Layer]:
    table = _counted(job)
    if job.profile is not None:
        found = profiled.measurements(job.profile, [layer.name for layer in table], job.optimizer.name)
        found = _without_words(job, table, found) if job.vocabulary else found
        measured = [_measured(layer, one) for layer, one in zip(table, found, strict=True)]
        return measured if job.profile.timed else list(map(_as_counted, measured, _priced(job, table)))
    return _priced(job, table)


def _priced(job: Job, table: list[Layer]) -> list[Layer]:
    """The table with the times of each layer that the job gives, if it does."""
    if job.costs.per != "layer" or job.costs.f is None:
        return table
    ends, given = [replace(layer, f=0.0, b=0.0, w=0.0) for layer in (table[0], table[-1])], _given(table, job.costs)
    return [ends[0], *given[1:-1], ends[1]] if job.vocabulary else given


def _as_counted(layer: Layer, counted: Layer) -> Layer:
    """The bytes of a layer with the times of `counted`."""
    f, b, w, one = counted.f, counted.b, counted.w, layer.measured
    if one is not None:
        one = replace(one, f=f, b=b, w=w, bw=b + w, again=counted.again, step=None, tentative=None)
    cheap = {again: Spared(size, counted.spared[again].cheap) for again, (size, _) in layer.spared.items()}
    return replace(layer, f=f, b=b, w=w, once=counted.once, spared=cheap, measured=one)


def _without_words(job: Job, table: Sequence[Layer], found: Sequence[Measurement]) -> list[Measurement]:
    """Measured layers for jobs whose ranks share the vocabulary: the first and the last have the rest of theirs.

    The rest of a time is the share of the kernels that don't handle words, or measured in a run that shared them; bytes
    are counted.
    """
    if sizes_of(job) is None:
        return list(found)
    ends = []
    for one, layer, (f, b, w) in zip((found[0], found[-1]), (table[0], table[-1]), _left(job, found), strict=True):
        part = layer.params / one.params if one.params else 0.0
        held = one.held and one.held.model_copy(
            update={name: part * getattr(one.held, name) for name in ("weights", "gradients", "optimizer")}
        )
        times = {"f": one.f * f, "b": one.b * b, "w": one.w * w, "bw": one.b * b + one.w * w, "again": one.again * f}
        step, tentative = (None if ms is None else ms * part for ms in (one.step, one.tentative))
        left = replace(one, **times, params=layer.params, frozen=0, parts=layer.parts, size=None, held=held)
        ends.append(replace(left, step=step, tentative=tentative))
    return [ends[0], *found[1:-1], ends[1]]


def _left(job: Job, found: Sequence[Measurement]) -> list[tuple[float, float, float]]:
    """The shares of F, B and W of the first and the last layer that don't handle words."""
    sizes, machine, profile = sizes_of(job), Machine.of(job), job.profile
    if profile is not None and profile.words is not None and profile.on.source == "trace":
        pairs = zip((found[0], found[-1]), profile.words.whole(job.model.vocab or 0), strict=True)
        shares = [_shares(ms, (one.f, one.b, one.w)) for one, ms in pairs]
    else:
        assert sizes is not None
        kernels = (work.look_up(sizes), work.embedding(sizes)), (work.words(sizes), work.head(sizes))
        shares = [shares_of_words(machine, words, whole) for words, whole in kernels]
    return [(1 - f, 1 - b, 1 - w) for f, b, w in shares]


def _shares(parts: Sequence[float], whole: Sequence[float]) -> tuple[float, float, float]:
    f, b, w = (min(1.0, part / ms) if ms else 0.0 for part, ms in zip(parts, whole, strict=True))
    return f, b, w


def times_of(machine: Machine, done: work.Work) -> tuple[float, float, float]:
    """ms of F, B and W."""
    return machine.ms(done.f), machine.ms(done.b), machine.ms(done.w)


def slowness(job: Job) -> list[float]:
    """The time of each pipeline rank's ops relative to the fastest rank's."""
    given, count = job.hardware, job.parallel.pp
    slow = given.slow or [1.0] * count
    sizes = sizes_of(job)
    if not given.unequal or (sizes is None and not isinstance(given.tflops, list)):
        return slow
    if sizes is None:
        assert isinstance(given.tflops, list)
        return [k * max(given.tflops) / one for k, one in zip(slow, given.tflops, strict=True)]
    done = work.block(sizes)
    each = [sum(times_of(Machine.of(job, given.of(rank)), done)) for rank in range(count)]
    best = sum(times_of(Machine.of(job), done))
    return [k * ms / best for k, ms in zip(slow, each, strict=True)]


def slow_of(job: Job, placement: Placement) -> list[float]:
    """The slowness of each stage's ranks, on average; 1 if times were given for stages or ranks, which include it."""
    return [sum(each) / len(each) for each in zip(*_by_pipe(job, placement), strict=True)]


def paces_of(job: Job, placement: Placement) -> tuple[tuple[float, ...], ...]:
    """For each pipe, the time of its rank of a stage relative to that stage's mean; () with one pipe, or no
    difference."""
    each, mean = _by_pipe(job, placement), slow_of(job, placement)
    found = tuple(tuple(map(truediv, one, mean)) for one in each)
    return found if any(pace != 1.0 for pipe in found for pace in pipe) else ()


def _by_pipe(job: Job, placement: Placement) -> list[list[float]]:
    if not job.hardware.unequal or (job.costs.f is not None and job.costs.per != "layer"):
        return [[1.0] * placement.stages]
    each = slowness(job)
    return [[each[rank] for rank in pipe] for pipe in placement.pipes]


def shares_of_words(machine: Machine, words: work.Work, whole: work.Work) -> tuple[float, float, float]:
    """The shares of F, B and W of a whole layer that words take."""
    return _shares(times_of(machine, words), times_of(machine, whole))


def _counted(job: Job) -> list[Layer]:
    table = _family(job)
    if table is None:  # a factory's layers are unknown until they are built: equal, with no bytes
        table = [Layer(name, 1.0, 1.0, 1.0) for name in names(job.model)]
    return table


def of_slice(job: Job, table: Sequence[Layer], begin: int, share: Mapping[str, float], rows: float) -> list[Layer]:
    """The table for one slice of a microbatch, from token `begin` on; `job` has its length for `model.seq_len`.

    Estimated times are of the slice's own kernels. Given or measured times of whole microbatches are multiplied by
    `share` (f, b and w of a block) or `rows` (any other layer), measured bytes by `rows`.
    """
    own = _family(job, begin)
    if own is not None and job.profile is None and not (job.costs.per == "layer" and job.costs.f is not None):
        return own
    found = [part_of(layer, None if own is None else own[i], share, rows) for i, layer in enumerate(table)]
    return list(map(_as_counted, found, own)) if own is not None and job.profile and not job.timed else found


def _of_length(job: Job, table: Sequence[Layer], tokens: int) -> list[Layer]:
    """The table of layers for rows of `tokens` tokens, from the table for whole rows."""
    return of_slice(job.of_length(tokens), table, 0, shares_of(job, tokens), tokens / job.row_tokens)


def part_of(layer: Layer, own: Layer | None, share: Mapping[str, float], rows: float) -> Layer:
    """A layer's slice; `own` is the layer as counted for the slice, None if it can't be counted."""
    parts = share if layer.name.startswith("layers.") else dict.fromkeys("fbw", rows)
    times = {name: getattr(layer, name) * parts[name] for name in "fbw"}
    one = layer.measured
    if one is not None:
        both = (times["b"] + times["w"]) / (layer.b + layer.w) if layer.b + layer.w else parts["b"]
        one = replace(one, **times, bw=one.bw * both, again=one.again * parts["f"])
    if own is not None and (layer.measured is None or layer.measured.size is None):
        size, spared, whole = own.size, own.spared, own.whole
    else:
        whole = layer.whole and layer.whole.scaled(rows)
        size, spared = layer.size.scaled(rows), _with(layer.spared, lambda _, size: size.scaled(rows))
        if own is not None:
            kv, fused = own.size.kv, {again: size.fused for again, (size, _) in own.spared.items()}
            size, spared = replace(size, kv=kv), {again: spared[again] for again in fused}
            spared = _with(spared, lambda again, size: replace(size, kv=kv, fused=fused[again]))
    return replace(layer, **times, size=size, measured=one, spared=spared, whole=whole)


def _with(spared: Mapping[bool, Spared], change: Callable[[bool, Footprint], Footprint]) -> dict[bool, Spared]:
    return {again: Spared(change(again, size), cheap) for again, (size, cheap) in spared.items()}


def _family(job: Job, past: int = 0) -> list[Layer] | None:
    model, machine = job.model, Machine.of(job)
    sizes = sizes_of(job, past)
    if sizes is None:
        return None
    first, last = (work.embedding(sizes), footprint.embedding(sizes)), (work.head(sizes), footprint.head(sizes))
    tables, ends, shared = _tables(sizes), _head(sizes), job.vocabulary > 0
    if shared:  # every rank has a vocabulary shard, and stages have the rest: see vocabulary.py
        first, last = (work.places(sizes), footprint.places(sizes)), (work.last_norm(sizes), footprint.last_norm(sizes))
        tables, ends = tables[1:], ends[:-1]
    kinds = [model.block(i) for i in range(model.layers)]
    dense: dict[str, Any] = {
        "mlp": model.mlp_width // job.parallel.tp,
        **dict.fromkeys(("experts", "choices", "top_k", "common"), 0),
        "fold": 1,
    }
    blocks = {
        kind: replace(
            sizes, window=kind.window or 0, turned=sizes.rotary and kind.turned, **(dense if kind.dense else {})
        )
        for kind in dict.fromkeys(kinds)
    }
    embed, head, *each = (
        Layer(name, *times_of(machine, done), sum(parts), size, parts=parts)
        for name, (done, size), parts in (
            ("embed", first, tables),
            ("head", last, ends),
            *(("block", (work.block(z), footprint.learning(z)), z.parameters) for z in blocks.values()),
        )
    )
    known = {
        kind: replace(
            one,
            spared={
                again: Spared(
                    spared(z, attention=again),
                    machine.ms(work.cheap(z, attention=again)) / one.f if one.f else 0.0,
                )
                for again in (True, False)
            },
            whole=footprint.learning(replace(z, regathers=False)) if z.regathers else None,  # it keeps what it gathers
            once=machine.ms(work.largest(z)) / one.f if one.f else 0.0,
            apart=z.apart if job.parallel.ep > 1 else (),
            experts=z.experts,
            matrices=tuple((shape[0], shape[1]) for shape in z.shapes if len(shape) == 2) if z.by_matrix else (),
        )
        for (kind, z), one in zip(blocks.items(), each, strict=True)
    }
    found = [replace(known[kind], name=f"layers.{i}") for i, kind in enumerate(kinds)]
    tied = sizes.vocab * sizes.hidden if model.tie_embeddings and not shared else 0
    if shared and not sizes.rotary:  # a stage that recomputes any of its forward keeps the rows it was given
        kept = replace(embed.size, act_b=embed.size.entry)
        again = {attention: Spared(kept, 0.0) for attention in (True, False)}
        embed = replace(embed, spared=again, size=kept if job.parallel.regathers else embed.size)
    if sizes.swaps_only and not shared:  # with selective recompute a stage computes weight gradients in collectives
        later = Spared(footprint.head(sizes, defers=True), 0.0)
        head = replace(head, spared={True: later, False: later})
    found = [replace(embed, tied=tied), *found, replace(head, tied=tied)]
    found = adapters.frozen(job, found, [blocks[kind] for kind in kinds], sizes) if job.adapter.rank else found
    return _staying(found, [blocks[kind] for kind in kinds], sizes)


def _staying(table: list[Layer], blocks: Sequence[Sizes], ends: Sizes) -> list[Layer]:
    """The layers with the bytes that offload leaves on the device."""
    embed, *inner, head = table
    first = _with(embed.spared, lambda _, size: staying.embedding(ends, size))
    found = [replace(embed, size=staying.embedding(ends, embed.size), spared=first)]
    for layer, z in zip(inner, blocks, strict=True):
        spared = _with(layer.spared, lambda again, size, z=z: staying.block(z, size, spared=True, attention=again))  # type: ignore[misc]
        whole = layer.whole and staying.block(replace(z, regathers=False), layer.whole)
        found.append(replace(layer, size=staying.block(z, layer.size), spared=spared, whole=whole))
    last = _with(head.spared, lambda _, size: staying.head(ends, size))
    return [*found, replace(head, size=staying.head(ends, head.size), spared=last)]


def sizes_of(job: Job, past: int = 0) -> Sizes | None:
    """The sizes of a built-in model; None for a factory's layers, which are unknown before they are built.

    `past`: tokens of the sequence before the counted ones.
    """
    model = job.model
    if not model.builtin or model.hidden is None or model.vocab is None or model.seq_len is None:
        return None
    # Each of the tp ranks has a part of every matrix, and of the vocabulary; but experts are whole with a `fold`.
    tp, fold = job.parallel.tp, job.parallel.topology.fold
    return Sizes(
        fp8=model.matmul == "fp8",
        hidden=model.hidden,
        heads=max(1, (model.heads or 1) // tp),
        queries=(model.heads or 1) * model.head_width // tp,
        keys=model.kv_width // tp,
        mlp=model.expert_width * fold // tp if model.experts else model.mlp_width // tp,
        gated=model.family == "llama",
        cuda=job.hardware.device == "cuda",
        vocab=-(-model.vocab // tp),
        seq_len=model.seq_len,
        sequences=job.schedule.microbatch_size,
        width=4 if model.dtype == "float32" else 2,
        stream=2 if model.parameters == "bfloat16" else 4,
        rotary=model.rotary,
        scaled=model.variant in GEMMA or model.embedding_scale != 1.0,
        clipped=job.optimizer.qk_clip is not None,
        logits_cap=model.logits_cap is not None,
        chunk=model.loss_chunk or 0,
        terms=bool(model.z_loss or model.label_smoothing),
        qkv_bias=model.qkv_bias,
        proj_bias=model.attention_bias,
        qk_norm=model.variant in (*WHOLE_NORMS, *HEAD_NORMS),
        qk_whole=model.variant in WHOLE_NORMS,
        wide_norm=model.variant in GEMMA,
        around=model.variant in AROUND,
        capped=model.scores_cap is not None,
        experts=(model.experts or 0) // job.parallel.ep,
        choices=model.experts or 0,
        by_matrix=job.optimizer.kind == "muon",
        top_k=model.met / fold,
        fold=fold,
        uneven=model.imbalance if job.parallel.ep > 1 else 1.0,
        common=(model.shared_hidden or 0) // tp,
        past=past,
        tp=tp,
        fused_grads=job.train.fused_gradients,
        shared=job.parallel.shared,
        regathers=job.parallel.regathers,
        cp=job.parallel.cp,
    )


def _tables(z: Sizes) -> tuple[int, ...]:
    """Elements of each parameter of the embedding."""
    return (z.vocab * z.hidden, *(() if z.rotary else (z.seq_len * z.hidden,)))


def _head(z: Sizes) -> tuple[int, ...]:
    """Elements of each parameter of the head and the norm before it."""
    return (*((z.hidden,) if z.gated else (z.hidden, z.hidden)), z.hidden * z.vocab)


def _measured(layer: Layer, one: Measurement) -> Layer:
    if layer.apart and one.params > layer.params:  # measured with all experts: a rank has some
        part = layer.params / one.params
        held = one.held and one.held.model_copy(
            update={name: round(part * getattr(one.held, name)) for name in ("weights", "gradients", "optimizer")}
        )
        step, tentative = (None if ms is None else ms * part for ms in (one.step, one.tentative))
        one = replace(one, held=held, step=step, tentative=tentative, params=layer.params, parts=layer.parts)
    size, spared = layer.size, layer.spared
    if one.size is not None:  # the estimated savings, subtracted from the measured bytes
        found, plain = one.size, layer.size
        size = staying.measured(found, plain if plain is not NOTHING else None)

        def lessened(_: bool, other: Footprint) -> Footprint:
            return staying.measured(found.remade(plain.act_b - other.act_b, other.more_b - plain.more_b), other)

        spared = _with(spared, lessened)
    parts = one.parts or (layer.parts if one.params in (0, layer.params) else ())
    params, frozen = (one.params, one.frozen) if one.params or one.frozen else (layer.params, layer.frozen)
    return replace(
        layer,
        f=one.f,
        b=one.b,
        w=one.w,
        params=params,
        frozen=frozen,
        parts=parts,
        size=size,
        whole=layer.whole if one.size is None else None,
        measured=one,
        spared=spared,
    )


def _given(table: list[Layer], costs: GivenCosts) -> list[Layer]:
    """The table with the times of `[costs]` with per = "layer"; bytes and parameters stay."""
    block = 0
    result = []
    for layer in table:
        if layer.name in ("embed", "head"):
            extra: LayerCost = getattr(costs, layer.name)
            f, b, w = extra.f, extra.b, extra.w
        else:
            f, b, w = (_pick(value, block) for value in (costs.f, costs.b, costs.w))
            block += 1
        result.append(replace(layer, f=f, b=b, w=w))
    return result


def _pick(value: float | list[float] | None, index: int) -> float:
    return float(value[index] if isinstance(value, list) else value or 0.0)


def given_activations(job: Job, table: list[Layer]) -> list[tuple[float, float]] | None:
    """`act_b` and `act_w` of each layer if the job gives them per layer, else None."""
    costs = job.costs
    if costs.per != "layer" or costs.act_b is None:
        return None
    block = 0
    result = []
    for layer in table:
        if layer.name in ("embed", "head"):
            extra: LayerCost = getattr(costs, layer.name)
            result.append((extra.act_b, extra.act_w))
        else:
            kept = _pick(costs.act_b, block)
            result.append((kept, kept if costs.act_w is None else _pick(costs.act_w, block)))
            block += 1
    return result


def given_optimizer(costs: GivenCosts, table: Sequence[Layer]) -> list[float]:
    """`costs.optimizer` of each layer; 0 for embedding and head, which are extra."""
    block = 0
    result = []
    for layer in table:
        outside = layer.name in ("embed", "head")
        result.append(0.0 if outside else _pick(costs.optimizer, block))
        block += not outside
    return result


def boundary_bytes(model: Model, size: int, shared: int = 1) -> float:
    """Bytes of the tensor between two stages for one microbatch, split by tokens over `shared` ranks; 0 if only the
    runtime can know it (factories)."""
    if not model.builtin or model.hidden is None or model.seq_len is None:
        return 0.0
    # The residual stream has the type of the parameters, under autocast too.
    return (2.0 if model.parameters == "bfloat16" else 4.0) * size * model.seq_len * model.hidden / shared
