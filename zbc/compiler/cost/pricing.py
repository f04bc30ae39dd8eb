"""The costs of a job on one partition: given, estimated or measured, of whole microbatches or of their slices, or of
microbatches of unequal length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from operator import add, attrgetter, mul, sub
from typing import Any, NamedTuple

from zbc.compiler.cost import copies, estimate, nodes, profiled, stage_bytes, stepping, vocabulary
from zbc.compiler.cost.choices import Choices
from zbc.compiler.cost.cost import BY_PART, Column, Costs, Links, PerStage, Size, links_of
from zbc.compiler.cost.estimate import Layer, recomputed, selective
from zbc.compiler.cost.footprint import GRAD_BYTES
from zbc.compiler.cost.machine import Machine, message_of
from zbc.compiler.cost.stage_bytes import NO_BYTES, StageBytes, Stages, boundaries
from zbc.errors import ZbcError
from zbc.ir import Edge, Placement
from zbc.job.cuts import Cuts, cuts_of, share, shares_of
from zbc.job.spec import Job
from zbc.job.tokens import shares_of as shares_of_length
from zbc.ops import TIED, WORDS, experts_of

NEEDS = 8  # lengths whose ops' needs are counted, where microbatches have more; those of others are rounded up


def build(job: Job, placement: Placement, stages: Sequence[Sequence[int]]) -> Costs:
    """The costs of `job` with its layers `stages[s]`, by their indices, on stage s.

    Where layers recompute, B takes the time of F as well, and F keeps their inputs only; activations given
    in [costs] then keep the same share as the estimated bytes do, or all if no bytes are known. Raises E110
    (memory.activations names a stage that doesn't exist), E141 (a list has the wrong length, or the speed of copies to
    the host is not known).
    """
    check_stages(job, placement)
    table = estimate.layers(job)
    spared = {i for s, part in enumerate(stages) if job.memory.spares(s) for i in part}
    again = {i for s, part in enumerate(stages) for i in part[: job.memory.again(s, [table[i].name for i in part])]}

    def chosen(layers: Sequence[Layer]) -> Stages:
        def of(i: int) -> Layer:
            if i in spared:
                return selective(layers[i], job.memory.attends_again)
            return recomputed(layers[i]) if i in again else layers[i]

        return [[of(i) for i in part] for part in stages]

    layers = chosen(table)
    job = _seated(job, placement, layers)
    whole, cuts = _build(job, placement, layers, _given(job, placement, stages, table, layers)), cuts_of(job)
    if not job.tokens and not cuts:
        return _complete(whole, job, 1.0, placement)
    parts = _lengths(job, table) if job.tokens else _slices(job, table, cuts)
    tables, each, bytes = [chosen(part.layers) for part in parts.values()], dict[int, Costs](), whole.bytes
    for k, ((key, part), layers) in enumerate(zip(parts.items(), _with_ends(tables) if cuts else tables, strict=True)):
        if bytes is not None:
            needs = bool(cuts) or k % -(-len(parts) // NEEDS) == 0
            bytes = stage_bytes.of_length(part.job, placement, layers, bytes, needs=needs)
        each[key] = _weighed(_of_ops(part.job, placement, layers, bytes), whole, part.rows, layers)
    if cuts:  # the transfers of the longest are taken for all
        longest = each[max(parts, key=lambda j: parts[j].rows)]
        each = {j: replace(one, links=longest.links, occupies=longest.occupies) for j, one in each.items()}
    each = {key: _complete(one, parts[key].job, parts[key].rows, placement) for key, one in each.items()}
    whole = _complete(whole, job, 1.0, placement)
    return _joined(whole, [each[key] for key in job.tokens or parts], sliced=bool(cuts))


class _Part(NamedTuple):
    """Microbatches of one length, or a slice of each."""

    job: Job  # with its length as that of sequences
    rows: float  # its tokens as a share of those of whole rows
    layers: Sequence[Layer]  # without recompute


def _lengths(job: Job, table: Sequence[Layer]) -> dict[int, _Part]:
    """The lengths of microbatches, the longest first."""

    def part(tokens: int) -> _Part:
        one = _given_parts(job.of_length(tokens), shares_of_length(job, tokens))
        return _Part(one, tokens / job.row_tokens, [layer.lengths[tokens] for layer in table])

    return {tokens: part(tokens) for tokens in sorted({*job.tokens}, reverse=True)}


def _slices(job: Job, table: Sequence[Layer], cuts: Cuts) -> dict[int, _Part]:
    """The slices of a microbatch."""
    rows, shares, found = share(cuts, 1.0, 0.0), shares_of(job, cuts), dict[int, _Part]()
    for j, (begin, end) in enumerate(pairwise(cuts)):
        times = {name: each[j] for name, each in shares.items()}
        one = _given_parts(job, times | dict.fromkeys(("tp", "cp", "ep"), rows[j]))
        one = replace(one, model=job.model.model_copy(update={"seq_len": end - begin}))
        found[j] = _Part(one, rows[j], estimate.of_slice(job, table, cuts, j, times, rows[j]))
    return found


def _with_ends(slices: Sequence[Stages]) -> Iterator[Stages]:
    """Yields the layers of each slice: the last one's B makes gradients of all slices' keys and values, the first one's
    B frees these and what they belong to."""
    for j, stages in enumerate(slices):
        share = 2 * (j == 0) - (j == len(slices) - 1)
        yield [
            [
                replace(layer, size=replace(layer.size, ends_kv=share * sum(one[s][k].size.kv for one in slices)))
                for k, layer in enumerate(part)
            ]
            for s, part in enumerate(stages)
        ]


def _complete(costs: Costs, job: Job, rows: float, placement: Placement) -> Costs:
    """The costs with vocabulary, copies and messages; `rows`: their tokens as a share of those of whole rows."""
    return _with_messages(_with_words(_with_copies(costs, job), job, rows, placement), job, placement)


def _given_parts(job: Job, shares: Mapping[str, float]) -> Job:
    """The job of a part of a microbatch, with these `shares` of the times that it gives per rank or stage, by key."""
    given = job.costs
    if given.f is None or given.per == "layer":
        return job

    def of(value: Any, share: float) -> Any:
        return [share * ms for ms in value] if isinstance(value, list) else None if value is None else share * value

    times = {name: of(getattr(given, name), share) for name, share in shares.items()}
    return replace(job, costs=given.model_copy(update=times))


def _weighed(found: Costs, whole: Costs, rows: float, stages: Stages) -> Costs:
    """The costs `found` for a share of the `rows`; a unit of memory is as many bytes as in those of the `whole`.

    Keys and values of a slice are a value of their own; of layers that recompute, in addition to their inputs.
    """
    sizes, units = dict(found.sizes), {name: whole.units(name) for name in whole.amounts}
    kv = tuple(sum(layer.size.kv for layer in part) for part in stages)
    if sizes and any(kv):
        own = (sum(layer.size.kv for layer in part if not layer.reruns) for part in stages)
        sizes |= {"kept": tuple(map(sub, found.bytes_of("kept"), own)), "kv": kv}
        units["kv"] = units["kept"]
    weighed, amounts = replace(found, sizes=sizes), dict[str, Column]()
    for name, each in units.items():
        like = whole.bytes_of("kept" if name == "kv" else name)
        both = zip(each, like, weighed.bytes_of(name), strict=True)
        amounts[name] = tuple(one * (now / full if full else rows) for one, full, now in both)
    return replace(weighed, amounts=amounts)


def _joined(whole: Costs, each: Sequence[Costs], *, sliced: bool) -> Costs:
    """The costs of `whole` microbatches with an entry per slice, or per microbatch, in all that depends on its length;
    keys and values of the slices of one are in buffers for all."""

    def zipped(columns: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
        return {name: tuple(zip(*(one[name] for one in columns), strict=True)) for name in names}

    ms = zipped([one.ms for one in each], [name for name in BY_PART if name in whole.ms])
    amounts, sizes = (zipped(of, of[0]) for of in ([one.amounts for one in each], [one.sizes for one in each]))
    for of in (amounts, sizes) if "kv" in amounts else ():
        of["kv"] = tuple(map(sum, of["kv"]))
    links, occupies = (_of_each(of) for of in ([one.links for one in each], [one.occupies for one in each]))
    bytes = tuple(one.bytes or () for one in each) if whole.bytes is not None else ()
    shares = tuple(one.shares[0] for one in each) if whole.shares else ()
    found = replace(whole.with_ms(**ms), amounts=amounts, sizes=sizes, links=links, occupies=occupies)
    slices, unequal = (len(each), 0) if sliced else (1, len(each))
    return replace(found, sliced=bytes, shares=shares, slices=slices, unequal=unequal)


def _of_each(links: Sequence[tuple[Links, ...]]) -> tuple[Links, ...]:
    """Links with an entry for every edge, or one for each part if these differ."""

    def of(pipe: Sequence[Links], edge: Edge) -> Any:
        return found if len({*(found := tuple(one[edge] for one in pipe))}) > 1 else found[0]

    return tuple({edge: of(pipe, edge) for edge in pipe[0]} for pipe in zip(*links, strict=True))


def _with_messages(costs: Costs, job: Job, placement: Placement) -> Costs:
    """Adds the time for which a message keeps both of its ranks from computing, as a part of the F or the backward that
    sends or receives it."""
    constant, share = message_of(job)
    busy = replace(costs, links=costs.occupies or costs.links)
    lags, sent = ([*map(one.lags, range(len(placement.pipes)))] for one in (costs, busy))
    ms = profiled.messages(placement, lambda pipe, edge: constant + share * sent[pipe][edge])
    if not any(ms):
        return costs
    # The share that both ends spend on a message is a part of its transfer.
    both = zip(lags, sent, strict=True)
    less = tuple({edge: max(0.0, ms - 2 * share * pipe[edge]) for edge, ms in own.items()} for own, pipe in both)
    timed = replace(costs, links=less).with_ms(messages=ms)
    names = [name for name in ("f", "b", "bw") if name in costs.ms]
    return timed.with_ms(**{name: timed.each(add, name, "messages") for name in names})


def _with_words(costs: Costs, job: Job, rows: float, placement: Placement) -> Costs:
    """Adds vocabulary parallelism: columns of every rank, and the memory of a rank's shard."""
    if not job.vocabulary:
        return costs
    each = [vocabulary.columns(job, rows, slow) for slow in estimate.slowness(job)]
    costs = costs.with_ms(**{name: tuple(rank[name] for rank in each) for name in each[0]})
    if costs.bytes is None or (found := vocabulary.share_bytes(job)) is None:
        return costs
    return replace(costs, owners={**costs.owners, WORDS: found[0]}, shares=(found[1],))


def _given(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer], layers: Stages
) -> dict[str, PerStage]:
    """What the job gives of "act_b", "act_w" and "optimizer", by stage; "act_b" with the share that recompute keeps."""
    found = dict[str, PerStage]()
    for key in ("act_b", "act_w", "optimizer"):
        like = "act_b" if key == "act_w" and job.costs.act_w is None else key
        if getattr(job.costs, like) is None:
            continue
        if job.costs.per == "layer":
            each = estimate.each(getattr(job.costs, like), table)
            kept = [[layer.part if key == "act_b" else 1.0 for layer in part] for part in layers]
            both = zip(stages, kept, strict=True)
            found[key] = tuple(sum(each[i] * one for i, one in zip(*of, strict=True)) for of in both)
        else:
            whole = _per_stage(job, like, placement)
            found[key] = tuple(map(mul, whole, map(_share, layers))) if key == "act_b" else whole
    return found


def _build(job: Job, placement: Placement, stages: Stages, given: Mapping[str, PerStage]) -> Costs:
    """The costs of whole microbatches."""
    costs = _of_ops(job, placement, stages, stage_bytes.of_stages(job, placement, stages))
    costs = replace(costs, amounts=_amounts(costs, job, placement, stages, given), node=job.node, near=job.near)
    costs = replace(costs, paces=estimate.paces_of(job, placement))
    costs = costs.over("eager" if job.costs.f is not None else "rendezvous")
    if job.timed is not None:
        costs = costs.with_ms(agree=(profiled.agree_ms(job.timed.host, job.parallel.copies * placement.ranks),))
    costs = _with_optimizer(costs, job, placement, stages, given.get("optimizer"))
    return _with_sums(costs, job, placement, stages)


def _of_ops(job: Job, placement: Placement, stages: Stages, bytes: tuple[StageBytes, ...] | None) -> Costs:
    """The costs of F, B, W and transfers, and the bytes of activations that F keeps ("kept"; of layers that recompute
    the input only) and that B leaves for W ("left")."""
    source = "given" if job.costs.f is not None else "estimated" if job.counted else "assumed equal"
    links, occupies = _transfers(job, placement, stages)
    sizes = dict[str, Column]()
    if bytes is not None:
        both = enumerate(zip(stages, bytes, strict=True))
        kept = (stage_bytes.kept_by(part, moves=job.memory.offloads(s)) - one.given for s, (part, one) in both)
        sizes = {"kept": tuple(kept), "left": _summed(stages, lambda layer: layer.size.act_w)}
    return Costs(
        _times(job, placement, stages),
        {},
        links,
        sizes,
        bytes,
        "profiled" if job.timed else source,
        overlap=job.costs.overlap,
        occupies=occupies,
    )


def _summed(stages: Stages, of: Callable[[Layer], float]) -> PerStage:
    """The sum over the layers of each stage."""
    return tuple(sum(map(of, part)) for part in stages)


def _with_copies(costs: Costs, job: Job) -> Costs:
    """Adds offload copies of the stages whose activations may move."""
    if not any(job.memory.offloads(s) for s in range(costs.stages)):
        return costs
    speed = copies.speed_of(job, bytes_known=costs.bytes is not None)
    kept = enumerate(map(Size, costs.units("kept"), costs.bytes_of("kept")))
    away = [copies.movable(one, costs.bytes_at(s)) if job.memory.offloads(s) else Size(0.0) for s, one in kept]
    out, back = zip(*(speed.ms(*one) for one in away), strict=True)
    amounts, sizes = (
        {**of, "host": one} for of, one in zip((costs.amounts, costs.sizes), zip(*away, strict=True), strict=True)
    )
    found = replace(costs.with_ms(out=out, back=back), amounts=amounts, sizes=sizes)
    return replace(found, shared=job.hardware.host_shared, alone=copies.alone(job))


def _seated(job: Job, placement: Placement, stages: Stages) -> Job:
    """The job with its ranks assigned to nodes, and with the ranks on a node if exchanges of rows between nodes are
    faster in two steps."""
    if job.node is None:
        job = replace(job, node=_node(job, placement, stages))
    if job.parallel.ep == 1:
        return job
    rows = max(_rows(layer) for part in stages for layer in part)
    one, two = Machine.of(job).swaps_ms(rows, choices_of(job))
    return replace(job, near=job.hardware.ranks_per_node if two < one else 0)


def _node(job: Job, placement: Placement, stages: Stages) -> tuple[int, int]:
    parallel = job.parallel
    if parallel.order is not None or job.links is not None:  # the given order has replicas one after another
        return parallel.pp, 1
    return nodes.choose(
        placement,
        parallel.topology,
        max(1, job.hardware.ranks_per_node // parallel.width),
        job.schedule.microbatches,
        boundaries(stages),
        _summed(stages, lambda layer: float(GRAD_BYTES * layer.params)),
        together=parallel.one_sided,
        # in F and B, and back
        swapped=_summed(stages, lambda layer: 4 * _rows(layer)) if parallel.ep > 1 else (),
        choices=choices_of(job),
    )


def _times(job: Job, placement: Placement, stages: Stages) -> Mapping[str, Column]:
    """The columns of F, B and W, and BW if it is not B + W, and of the collectives that ranks run inside of them."""
    if job.costs.f is not None and job.costs.per != "layer":
        f, b, w = (_per_stage(job, key, placement) for key in ("f", "b", "w"))
        b = tuple(ms + own * _cheap(part) for ms, own, part in zip(b, f, stages, strict=True))
        again = zip(f, _summed(stages, lambda layer: layer.reruns), stages, strict=True)
        more = tuple(ms * count / (len(part) or 1) for ms, count, part in again)
    else:
        f, b, w = (_summed(stages, attrgetter(key)) for key in ("f", "b", "w"))
        more = tuple(sum(layer.again for layer in part if layer.reruns) for part in stages)
    times = {"f": f, "b": tuple(map(add, b, more)), "w": w}
    if job.timed is not None:
        times["bw"] = _summed(stages, attrgetter("bw"))
        host = profiled.host_ms(job.timed.host, placement)
        times = {name: tuple(map(add, ms, host[name])) for name, ms in times.items()}
        times["bw"] = tuple(map(add, times["bw"], more))
    slow = estimate.slow_of(job, placement)
    return _with_shared_layers({name: tuple(map(mul, each, slow)) for name, each in times.items()}, job, stages)


def _cheap(part: Sequence[Layer]) -> float:
    """The share of a stage's F that selective recompute runs again."""
    whole = sum(layer.f for layer in part)
    return sum(layer.cheap * layer.f for layer in part if layer.part < 1) / whole if whole else 0.0


def _share(part: Sequence[Layer]) -> float:
    """The share of a stage's activations that F keeps with selective recompute."""
    whole = sum(layer.size.act_b / layer.part for layer in part)
    return sum(layer.size.act_b for layer in part) / whole if whole else 1.0


def _with_shared_layers(times: dict[str, PerStage], job: Job, stages: Stages) -> dict[str, PerStage]:
    """Adds the time of collectives that ranks run inside of ops.

    In a BW its W hides the collectives of B, but not those of a recomputed F, nor one ahead of the first W. Measured
    times are without exchanges; if op times are given but exchanges are not, exchanges take no time.
    """
    exchanged = exchanges(job, stages)
    if not exchanged:
        return times
    forward, backward, late = (tuple(map(math.fsum, zip(*each, strict=True))) for each in zip(*exchanged, strict=True))
    plain = Costs(times, {}, ()).column("bw")
    f, b = (tuple(map(add, times[name], ms)) for name, ms in (("f", forward), ("b", backward)))
    bw = tuple(max(ms, alone + more) for ms, alone, more in zip(b, plain, late, strict=True))
    sums = {"f_sums": forward, "b_sums": backward, "bw_waits": tuple(map(sub, bw, plain))}
    return {**times, "f": f, "b": b, "bw": bw, **sums}


class Sums(NamedTuple):
    """Collectives inside the ops of each stage: ms in its F, in its B, and of B's those that no W hides: of an F that
    runs again, or whose tokens are gathered again, and of experts' rows ahead of the first W.
    """

    forward: PerStage
    backward: PerStage
    late: PerStage


def exchanges(job: Job, stages: Stages) -> list[Sums]:
    """The collectives along each axis, if they take time: given, or those that the cards of layers have."""
    parallel, measured, given = job.parallel, job.profile, job.costs
    timed = given.f is None and not (measured is not None and measured.on.source == "trace")  # its ops have them
    axes = (
        ("tp", parallel.tp, given.tp),
        ("cp", parallel.cp, given.cp),
        ("ep", parallel.ep, given.tp if given.ep is None and parallel.tp == 1 else given.ep),
    )
    found = list[Sums]()
    for axis, count, ms in axes:
        if count > 1 and (ms or (ms is None and timed)):
            forward, backward, again = _told(job, stages, axis)
            if ms:  # of both ways, each
                whole = (float(all(layer.reruns for layer in part)) for part in stages)
                shares = [more / f if f else rerun for more, f, rerun in zip(again, forward, whole, strict=True)]
                forward = backward = (ms,) * len(stages)
                again = tuple(ms * share for share in shares)
            late = map(add, again, _ahead(job, stages, backward)) if axis == "ep" else again
            found.append(Sums(forward, tuple(map(add, backward, again)), tuple(late)))
    return found


def _told(job: Job, stages: Stages, axis: str) -> Iterator[PerStage]:
    """ms of the collectives along an axis in each stage's F, in its B without those that it repeats, and of these; by
    the cards of layers, at the speeds of links."""
    machine, choices, two = Machine.of(job), choices_of(job), bool(job.near)
    sums = None if job.profile is None else job.profile.sums

    @cache  # layers are alike
    def ms(how: str, size: int) -> float:
        if how == "swap":
            return machine.swaps_ms(size, choices)[two]
        if sums is not None and axis == "tp":
            return sums.ms(size) / (1 if how == "sum" else 2)
        return machine.rings_ms(machine.topology.circles(axis), size, halves=2 if how == "sum" else 1)

    def of(layer: Layer, op: str) -> float:
        return sum(ms(how, size) for name, how, size in layer.collectives.get(op, ()) if name == axis)

    def each(layer: Layer) -> tuple[float, float, float]:
        forward, once = of(layer, "f"), of(layer if layer.plain is None else layer.plain(), "b")
        return forward, once, forward if layer.reruns else of(layer, "b") - once

    found = [[each(layer) for layer in part] for part in stages]
    return (tuple(sum(one[k] for one in part) for part in found) for k in range(3))


def _ahead(job: Job, stages: Stages, backward: PerStage) -> PerStage:
    """ms of the first all-to-all of a B, of two per block. The W of a shared expert or of the head is there by then."""
    known = job.model.builtin
    blocks = [sum(bool(layer.apart) or not known for layer in part) for part in stages]
    soon = [known and (bool(job.model.shared_hidden) or part[-1].name == "head") for part in stages]
    return tuple(ms / (2 * n) if n and not w else 0.0 for ms, n, w in zip(backward, blocks, soon, strict=True))


def _rows(layer: Layer) -> float:
    """Bytes of the rows that a layer has for experts in an F."""
    return float(max((size for _, how, size in layer.collectives.get("f", ()) if how == "swap"), default=0))


def choices_of(job: Job) -> Choices | None:
    """The choices of a token among experts, if they are known, and are told in two bytes each."""
    model = job.model
    if not model.experts or not model.builtin or model.experts > 2**15:
        return None
    return Choices(model.experts, model.met, *(model.expert_groups or (1, 1)))


def _with_optimizer(costs: Costs, job: Job, placement: Placement, stages: Stages, asked: PerStage | None) -> Costs:
    """Adds the time of optimizer steps: given, measured, or estimated from the bytes they move.

    If op times are given without `costs.optimizer`, the optimizer takes no time.
    """
    given, slow = job.costs.f is not None, estimate.slow_of(job, placement)
    hop = (job.costs.comm or 0.0) if given else Machine.of(job).link(range(placement.ranks)).latency
    if asked is not None:
        step = tentative = asked
    elif all(layer.step is not None for part in stages for layer in part):
        step = _summed(stages, lambda layer: layer.step or 0.0)
        # a tentative step does the work of a step, on copies
        tentative = tuple(map(max, step, _summed(stages, lambda layer: layer.tentative or 0.0)))
    elif given or not job.counted:
        return costs.with_ms(hop=(hop,))
    else:
        each = [stepping.ms_of(job, part, sum(layer.params for layer in part)) for part in stages]
        step, tentative = (tuple(map(mul, ms, slow)) for ms in zip(*each, strict=True))
    plain = step
    if job.parallel.shard != "none":
        shares = [stage_bytes.dealt(job, placement, s, stages).most for s in range(len(stages))]
        plain, tentative = (tuple(map(mul, each, shares)) for each in (step, tentative))
    columns: dict[str, Column] = {"step": plain, "tentative": tentative, "hop": (hop,)}
    if job.parallel.ep > 1:
        of = [sum(sum(one.apart) for one in part) / (sum(one.params for one in part) or 1) for part in stages]
        most = [stage_bytes.dealt(job, placement, s, stages, experts=True).most for s in range(len(stages))]
        columns["step e"] = tuple(map(mul, map(mul, step, of), most))
        columns["step"] = tuple(ms * (1 - share) for ms, share in zip(plain, of, strict=True))
    if job.vocabulary and job.costs.optimizer is None:
        count, rows = sum(_summed(stages, lambda layer: layer.params)), vocabulary.parameters(job)
        columns["step v"] = (sum(plain) / (count or 1) * rows,)
    return costs.with_ms(**columns)


def _with_sums(costs: Costs, job: Job, placement: Placement, stages: Stages) -> Costs:
    """Adds the time of collectives over replicas: given, or estimated from the link if bytes are known; and the memory
    of experts and of a weight that two stages share."""
    parallel, by_pipe = job.parallel, stage_bytes.by_pipe(job.parallel)
    halves = 2 if parallel.shard == "none" else 1
    share = 0.0 if parallel.average is None else parallel.average.share
    all_of, columns = [placement.holders(s) for s in range(len(stages))], dict[str, list[float]]()

    def add_sums(owner: str, size: float, gathered: float, holders: Sequence[int], experts: bool = False) -> None:
        """Those of an owner's gradients, and of its weights, of which each rank has `gathered` bytes."""
        # Sharded over one holder's replicas, reduced over all.
        alone = by_pipe and len(set(holders)) > 1
        ms = _sum(job, size, holders, 2 if alone and not experts else halves, experts=experts)
        again = _sum(job, gathered, holders[:1] if alone else holders, 1, experts=experts) if halves == 1 else 0.0
        for name, each in (("reduce", ms), ("gather", again), ("average", share * ms)):
            columns.setdefault(f"{name} {owner}".strip(), []).append(each)

    for s, (part, holders) in enumerate(zip(stages, all_of, strict=True)):
        params, tied = (sum(ms) for ms in zip(*((one.params - sum(one.apart), one.tied) for one in part), strict=True))
        count: float = params - (tied if len(stages) > 1 else 0)
        if parallel.shard != "none":
            dealt = stage_bytes.dealt(job, placement, s, stages)
            count = dealt.ranks * dealt.row
        lowered = stage_bytes.lowered(job, stage_bytes.owned(range(len(part)), part)) / params if params else 0.0
        add_sums("", GRAD_BYTES * count, (2 if job.model.lowered else 4 - 2 * lowered) * count, holders)
    if job.vocabulary:
        words = vocabulary.parameters(job)
        add_sums("v", GRAD_BYTES * words, (2 if job.model.lowered else 4) * words, [0])
    owners = dict[int, StageBytes]()
    if parallel.ep > 1:
        for s, holders in enumerate(all_of):
            one = owners[experts_of(s)] = stage_bytes.of_owner(job, placement, s, stages, experts=True)
            rows = parallel.of_experts * len({*(holders[:1] if by_pipe else holders)})  # in addition to each rank's own
            add_sums("e", one.summed, one.gathered * rows / (rows + 1), holders, experts=True)
    tied = GRAD_BYTES * stages[-1][-1].tied if len(stages) > 1 else 0
    if tied:
        owners[TIED] = replace(NO_BYTES, summed=float(tied), gradients=float(tied))
        add_sums("t", tied, 0.0, [rank for stage in placement.ends for rank in placement.holders(stage)])
    if share:  # replicas that average weights sum only gradients of shared tokens and experts
        some, all_ranks = parallel.topology.span * parallel.cp, parallel.dp * parallel.cp
        among = (1 - 1 / some) / (1 - 1 / all_ranks)  # the share of a vector that each sends in half of a ring
        columns["reduce"] = [among * ms for ms in columns["reduce"]]
        if tied:
            columns["average t"] = [share * _sum(job, tied, placement.holders(placement.ends[0]), 2)]
    return replace(costs, owners=owners).with_ms(**{name: tuple(column) for name, column in columns.items()})


def _sum(job: Job, size: float, holders: Sequence[int], halves: int, *, experts: bool = False) -> float:
    """ms of an all-reduce over these ranks of all replicas of the pipeline, or of those with the same `experts`; with
    `halves` = 1 of half of it."""
    replicas = job.parallel.of_experts if experts else job.parallel.copies
    if replicas * len(set(holders)) == 1 or (not size and (experts or job.costs.reduce is None)):
        return 0.0
    if job.costs.reduce is not None:
        return job.costs.reduce * halves / 2
    machine, run = Machine.of(job), job.topology
    rings = run.experts(holders).values() if experts else {run.ranks(holders, at) for at in run.every}
    return machine.rings_ms(rings, size, halves=halves)


def check_stages(job: Job, placement: Placement) -> None:
    """Raise E110 if memory.activations names a stage that doesn't exist."""
    named = job.memory.activations
    for key in named if isinstance(named, dict) else ():
        if int(key) >= placement.stages:
            text = f"config: memory.activations names stage {key}, there are {placement.stages}"
            where = job.where("memory", "activations", key)
            raise ZbcError("E110", text, where=where, hint=f"stages are numbered from 0 to {placement.stages - 1}")


def _per_stage(job: Job, key: str, placement: Placement) -> PerStage:
    """A number or list of `[costs]` given per rank or per stage, as one number per stage."""
    value, per = getattr(job.costs, key), job.costs.per
    count = placement.ranks if per == "rank" else placement.stages
    if isinstance(value, list) and len(value) != count:
        text = f"costs: {key} has {len(value)} numbers, there are {count} {per}s"
        raise ZbcError("E141", text, where=job.where("costs", key), hint=f"give one number, or {count}")
    numbers = [float(x) for x in value] if isinstance(value, list) else [float(value)] * count
    if per == "stage":
        return tuple(numbers)
    homes = placement.pipes[0]
    return tuple(numbers[rank] / homes.count(rank) for rank in homes)


def _amounts(
    costs: Costs, job: Job, placement: Placement, stages: Stages, given: Mapping[str, PerStage]
) -> dict[str, Column]:
    """Units of the activations that F keeps and that B leaves: given, else from bytes, else equal shares of 1 per rank
    without recompute."""
    if "act_b" in given:
        kept, left = given["act_b"], given["act_w"]
    elif costs.bytes is not None and job.costs.f is None:
        kept, left = tuple(stage.share for stage in costs.bytes), costs.bytes_of("left")
    else:
        kept = left = (placement.ranks / placement.stages,) * placement.stages
    unit = sum(kept) / placement.ranks or 1.0
    kept, left = (tuple(one / unit for one in each) for each in (kept, left))
    if costs.bytes is not None:
        both = zip(kept, costs.bytes_of("kept"), costs.bytes, strict=True)
        kept = tuple(units * size / (stage.share or 1.0) for units, size, stage in both)
    return {"kept": kept, "left": left}


def _transfers(job: Job, placement: Placement, stages: Stages) -> tuple[tuple[Links, ...], tuple[Links, ...]]:
    """ms of transfers, and the ms for which they occupy their link: given, or estimated from the links.

    If costs are given without `comm`, transfers take no time.
    """
    if job.costs.comm is not None or (job.costs.f is not None and job.links is None):
        ms = job.costs.comm or 0.0
        return links_of(placement, lambda stage, edge: ms), ()
    sizes, machine = boundaries(stages), Machine.of(job)
    return (
        links_of(placement, lambda stage, edge: machine.link(edge).ms(sizes[stage])),
        links_of(placement, lambda stage, edge: sizes[stage] / machine.link(edge).speed),
    )
