"""The costs of a job on one partition: given, estimated or measured, of whole microbatches or of their slices, or of
microbatches of unequal length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from operator import add, mul, sub
from typing import Any, NamedTuple

from zbc.compiler.cost import copies, estimate, nodes, profiled, stage_bytes, stepping, vocabulary
from zbc.compiler.cost.choices import Choices
from zbc.compiler.cost.cost import BY_MICROBATCH, BY_SLICE, Column, Costs, Links, PerStage, Size, less_links, links_of
from zbc.compiler.cost.estimate import Layer
from zbc.compiler.cost.footprint import GRAD_BYTES
from zbc.compiler.cost.machine import Machine, message_of
from zbc.compiler.cost.stage_bytes import StageBytes, boundaries
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job.cuts import cuts_of, share, shares_of
from zbc.job.spec import Job
from zbc.job.tokens import shares_of as shares_of_length

NEEDS = 8  # lengths whose ops' needs are counted, where microbatches have more; those of others are rounded up


def build(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> Costs:
    """The costs of `job` with layers `stages[s]` (indices into `table`) on stage s.

    Where layers recompute, B takes the time of F as well, and F keeps their inputs only; activations given
    in [costs] then keep the same share as the estimated bytes do, or all if no bytes are known. Raises E110
    (memory.activations names a stage that doesn't exist), E141 (a list has the wrong length, or the speed of copies to
    the host is not known).
    """
    check_stages(job, placement)
    plain, spared = table, {i for s, part in enumerate(stages) if job.memory.spares(s) for i in part}
    again = {i for s, part in enumerate(stages) for i in part[: job.memory.again(s, [plain[i].name for i in part])]}

    def chosen(layers: Sequence[Layer]) -> Sequence[Layer]:
        return (
            [
                layer.selective(job.memory) if i in spared else layer.recomputed() if i in again else layer
                for i, layer in enumerate(layers)
            ]
            if spared or again
            else layers
        )

    table = chosen(plain)
    job = _seated(job, placement, stages, table)
    whole, cuts = _build(job, placement, stages, table), cuts_of(job)
    if job.tokens:
        lengths, each, bytes = sorted({*job.tokens}, reverse=True), dict[int, Costs](), whole.bytes
        for k, tokens in enumerate(lengths):
            layers = chosen([layer.lengths[tokens] for layer in plain])
            one = _given_parts(job.of_length(tokens), shares_of_length(job, tokens))
            if bytes is not None:
                needs = k % -(-len(lengths) // NEEDS) == 0
                bytes = stage_bytes.of_length(one, placement, stages, layers, bytes, needs=needs)
            each[tokens] = _of_length(tokens / job.row_tokens, _of_ops(one, placement, stages, layers, bytes), whole)
            each[tokens] = _complete(each[tokens], one, tokens / job.row_tokens, placement)
        return _of_unequal(_complete(whole, job, 1.0, placement), [each[tokens] for tokens in job.tokens])
    if not cuts:
        return _complete(whole, job, 1.0, placement)
    rows, shares = share(cuts, 1.0, 0.0), shares_of(job, cuts)
    tables, jobs = list[Sequence[Layer]](), list[Job]()
    for j, (begin, end) in enumerate(pairwise(cuts)):
        times = {name: each[j] for name, each in shares.items()}
        one = _given_parts(job, times | dict.fromkeys(("tp", "cp", "ep"), rows[j]))
        one = replace(one, model=job.model.model_copy(update={"seq_len": end - begin}))
        tables.append(chosen(estimate.of_slice(job, plain, cuts, j, times, rows[j])))
        jobs.append(one)
    ended = zip(jobs, _with_ends(tables), strict=True)
    parts = [_build(one, placement, stages, layers) for one, layers in ended]
    names = [name for name in BY_SLICE if name in whole.ms]
    found = whole.cut(rows)
    found = found.with_ms(**{name: tuple(zip(*(one.column(name) for one in parts), strict=True)) for name in names})
    longest = parts[rows.index(max(rows))]  # its transfers are taken for all slices
    found = _with_words(replace(found, links=longest.links, occupies=longest.occupies), jobs, rows, placement)
    found = _with_messages(found, job, placement)
    if whole.bytes is None:
        return _with_copies(found, job)
    kv, own = (
        [[sum((one[i].size.kv for i in part if every or not one[i].reruns), 0.0) for part in stages] for one in tables]
        for every in (True, False)
    )
    return _with_copies(_weighed(found, whole, parts, kv, own), job)


def _with_ends(tables: Sequence[Sequence[Layer]]) -> Iterator[list[Layer]]:
    """Yields the layers of each slice: the last one's B makes gradients of all slices' keys and values, the first one's
    B frees these and what they belong to."""
    whole = [sum(layer.size.kv for layer in each) for each in zip(*tables, strict=True)]
    for j, layers in enumerate(tables):
        share = 2 * (j == 0) - (j == len(tables) - 1)
        ends = zip(layers, whole, strict=True)
        yield [replace(layer, size=replace(layer.size, ends_kv=share * kv)) for layer, kv in ends]


def _complete(costs: Costs, job: Job, rows: float, placement: Placement) -> Costs:
    """The costs with collectives, vocabulary and messages, for uncut microbatches; `rows`: their tokens as a share of
    those of whole rows."""
    return _with_messages(_with_words(_with_copies(costs, job), [job], [rows], placement), job, placement)


def _given_parts(job: Job, shares: Mapping[str, float]) -> Job:
    """The job of a part of a microbatch, with these `shares` of the times that it gives per rank or stage, by key."""
    given = job.costs
    if given.f is None or given.per == "layer":
        return job

    def of(value: Any, share: float) -> Any:
        return [share * ms for ms in value] if isinstance(value, list) else None if value is None else share * value

    times = {name: of(getattr(given, name), share) for name, share in shares.items()}
    return replace(job, costs=given.model_copy(update=times))


def _of_length(rows: float, found: Costs, whole: Costs) -> Costs:
    """The costs `found` for a share of the `rows`; a unit of memory is as many bytes as in those of the `whole`."""
    size = {}
    for name in whole.size:
        each = zip(whole.units(name), whole.bytes_of(name), found.bytes_of(name), strict=True)
        size[name] = tuple(Size(units * (now / full if full else rows), now) for units, full, now in each)
    return replace(found, size=size)


def _of_unequal(whole: Costs, each: Sequence[Costs]) -> Costs:
    """The costs of `whole` rows with an entry per microbatch in each column that depends on its length."""
    names = [name for name in BY_MICROBATCH if name in whole.ms]
    ms = {name: tuple(zip(*(one.ms[name] for one in each), strict=True)) for name in names}
    size = {name: tuple(zip(*(one.size[name] for one in each), strict=True)) for name in whole.size}
    links, occupies = (_of_each(of) for of in ([one.links for one in each], [one.occupies for one in each]))
    sliced = tuple(one.bytes or () for one in each) if whole.bytes is not None else ()
    shares = tuple(one.shares[0] for one in each) if whole.shares else ()
    found = whole.with_ms(**ms)
    return replace(found, size=size, links=links, occupies=occupies, unequal=len(each), sliced=sliced, shares=shares)


def _of_each(links: Sequence[tuple[Links, ...]]) -> tuple[Links, ...]:
    """Links with an entry per microbatch for every edge."""
    return tuple({edge: tuple(one[edge] for one in pipe) for edge in pipe[0]} for pipe in zip(*links, strict=True))


def _with_messages(costs: Costs, job: Job, placement: Placement) -> Costs:
    """Adds the time for which a message keeps both of its ranks from computing, as a part of the F or the backward that
    sends or receives it."""
    (constant, share), busy = message_of(job), costs.occupies or costs.links
    sent = replace(costs, links=busy)
    lags = [*map(sent.lags, range(len(placement.pipes)))]
    ms = profiled.messages(placement, lambda pipe, edge: constant + share * lags[pipe][edge])
    if not any(ms):
        return costs
    # The share that both ends spend on a message is a part of its transfer.
    timed = replace(costs, links=less_links(costs.links, busy, 2 * share)).with_ms(messages=ms)
    names = [name for name in ("f", "b", "bw") if name in costs.ms]
    return timed.with_ms(**{name: timed.each(add, name, "messages") for name in names})


def _with_words(costs: Costs, jobs: Sequence[Job], rows: Sequence[float], placement: Placement) -> Costs:
    """Adds vocabulary parallelism: columns of every rank, for each of the slices that `jobs` have as sequences, and the
    memory of a rank's shard."""
    job = jobs[0]
    if not job.vocabulary:
        return costs
    slow, parts = estimate.slowness(job), list(zip(jobs, rows, strict=True))
    found = [[vocabulary.columns(one, share, pace) for one, share in parts] for pace in slow]
    columns: dict[str, Column] = {}
    for name in found[0][0]:
        of = [tuple(one[name] for one in rank) for rank in found]
        columns[name] = tuple(one if len(jobs) > 1 else one[0] for one in of)
    shares = [vocabulary.share_bytes(one) for one in jobs] if costs.bytes is not None else []
    return replace(costs.with_ms(**columns), shares=tuple(one for one in shares if one is not None))


def _weighed(
    costs: Costs, whole: Costs, parts: Sequence[Costs], kv: Sequence[Sequence[float]], own: Sequence[Sequence[float]]
) -> Costs:
    """Adds the bytes that slices keep: all that `parts` keep except keys and values, `kv[slice][stage]`.

    Keys and values are kept for the whole microbatch; those of layers that recompute, all but the `own` ones, in
    addition to their inputs. A byte is as many units as in the `whole` microbatch.
    """
    rates = {
        name: [
            units / size if size else 0.0 for units, size in zip(whole.units(name), whole.bytes_of(name), strict=True)
        ]
        for name in whole.size
    }
    size = dict[str, tuple[Size | tuple[Size, ...], ...]](costs.size)
    for name in whole.size:
        each = [list(part.bytes_of(name)) for part in parts]
        if name == "kept":
            each = [[kept - own[j][s] for s, kept in enumerate(one)] for j, one in enumerate(each)]
        size[name] = tuple(
            tuple(Size(one[s] * rates[name][s], one[s]) for one in each) if rates[name][s] else costs.size[name][s]
            for s in range(whole.stages)
        )
    all_kv = [sum(one[s] for one in kv) for s in range(whole.stages)]
    size["kv"] = tuple(Size(each * rate, each) for each, rate in zip(all_kv, rates["kept"], strict=True))
    return replace(costs, size=size, sliced=tuple(part.bytes or () for part in parts))


def _build(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> Costs:
    """The costs of whole microbatches."""
    costs = _of_ops(job, placement, stages, table, stage_bytes.of_stages(job, placement, stages, table))
    costs = replace(costs, paces=estimate.paces_of(job, placement))
    costs = costs.over("eager" if job.costs.f is not None else "rendezvous")
    if job.timed is not None:
        costs = costs.with_ms(agree=(profiled.agree_ms(job.timed.host, job.parallel.copies * placement.ranks),))
    costs = _with_optimizer(costs, job, placement, stages, table)
    return replace(_with_sums(costs, job, placement, stages, table), node=job.node, near=job.near)


def _of_ops(
    job: Job,
    placement: Placement,
    stages: Sequence[Sequence[int]],
    table: Sequence[Layer],
    bytes: tuple[StageBytes, ...] | None,
) -> Costs:
    """The costs of F, B, W and transfers, and the activations they keep."""
    given, times = job.costs.f is not None, _times(job, placement, stages, table)
    size = _sizes(job, placement, stages, table, bytes)
    source = "profiled" if job.timed else "given" if given else "estimated" if job.counted else "assumed equal"
    links, occupies = _transfers(job, placement, stages, table)
    return Costs(times, size, links, bytes, source, overlap=job.costs.overlap, occupies=occupies)


def _with_copies(costs: Costs, job: Job) -> Costs:
    """Adds offload copies of the stages whose activations may move, slice by slice."""
    if not any(job.memory.offloads(s) for s in range(costs.stages)):
        return costs
    speed = copies.speed_of(job, bytes_known=costs.bytes is not None)
    host, out, back = list[Size | tuple[Size, ...]](), *(list[float | tuple[float, ...]]() for _ in range(2))
    for s, entry in enumerate(costs.size["kept"]):
        whole, may = isinstance(entry, Size), job.memory.offloads(s)
        kept = (entry,) if isinstance(entry, Size) else entry
        away = tuple(copies.movable(one, costs.bytes_at(s, j)) if may else Size(0.0) for j, one in enumerate(kept))
        there, again = zip(*(speed.ms(*one) for one in away), strict=True)
        host.append(away[0] if whole else away)
        out.append(there[0] if whole else there)
        back.append(again[0] if whole else again)
    timed = costs.with_ms(out=tuple(out), back=tuple(back))
    size = {**costs.size, "host": tuple(host)}
    return replace(timed, size=size, shared=job.hardware.host_shared, alone=copies.alone(job))


def _seated(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> Job:
    """The job with its ranks assigned to nodes."""
    if job.node is None:
        job = replace(job, node=_node(job, placement, stages, table))
    return replace(job, near=_near(job, table)) if job.parallel.ep > 1 else job


def _node(job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> tuple[int, int]:
    parallel = job.parallel
    if parallel.order is not None or job.links is not None:  # the given order has replicas one after another
        return parallel.pp, 1
    grads = [float(GRAD_BYTES * sum(table[i].params for i in part)) for part in stages]
    sent, size = boundaries(job, stages, table), job.hardware.ranks_per_node
    size, together = max(1, size // parallel.width), parallel.one_sided
    swapped = [4 * sum(_rows(table[i]) for i in part) for part in stages if parallel.ep > 1]  # in F and B, and back
    return nodes.choose(
        placement,
        parallel.topology,
        size,
        job.schedule.microbatches,
        sent,
        grads,
        together=together,
        swapped=swapped,
        choices=choices_of(job),
    )


def _times(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> Mapping[str, Column]:
    """The columns of F, B and W, and BW if it is not B + W."""
    if job.costs.f is not None and job.costs.per != "layer":
        f, b, w = (_per_stage(job, key, placement) for key in ("f", "b", "w"))
        b = tuple(ms + own * _cheap(part, table) for ms, own, part in zip(b, f, stages, strict=True))
        more = tuple(
            ms * sum(table[i].reruns for i in part) / (len(part) or 1) for ms, part in zip(f, stages, strict=True)
        )
    else:
        f, b, w = (tuple(sum(getattr(table[i], key) for i in part) for part in stages) for key in ("f", "b", "w"))
        more = tuple(sum(table[i].again for i in part if table[i].reruns) for part in stages)
    b = tuple(map(add, b, more))
    slow = estimate.slow_of(job, placement)
    if job.timed is None:
        times = {"f": f, "b": b, "w": w}
        return _with_shared_layers(_slowed(times, slow), job, stages, table)
    fused = tuple(sum(table[i].bw for i in part) for part in stages)
    host = profiled.host_ms(job.timed.host, placement)
    f, b, w, bw = (tuple(map(add, ms, host[key])) for key, ms in (("f", f), ("b", b), ("w", w), ("bw", fused)))
    times = {"f": f, "b": b, "w": w, "bw": tuple(map(add, bw, more))}
    return _with_shared_layers(_slowed(times, slow), job, stages, table)


def _slowed(times: Mapping[str, PerStage], slow: Sequence[float]) -> dict[str, PerStage]:
    """The columns multiplied by the slowness of each stage's rank."""
    return {name: tuple(map(mul, each, slow)) for name, each in times.items()}


def _cheap(part: Sequence[int], table: Sequence[Layer]) -> float:
    """The share of a stage's F that selective recompute runs again."""
    whole = sum(table[i].f for i in part)
    return sum(table[i].cheap * table[i].f for i in part if table[i].part < 1) / whole if whole else 0.0


def _part(part: Sequence[int], table: Sequence[Layer]) -> float:
    """The share of a stage's activations that F keeps with selective recompute."""
    whole = sum(table[i].size.act_b / table[i].part for i in part)
    return sum(table[i].size.act_b for i in part) / whole if whole else 1.0


def _with_shared_layers(
    times: dict[str, PerStage], job: Job, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> dict[str, PerStage]:
    """Adds the time of collectives that ranks run inside of ops.

    In a BW its W hides the collectives of B, but not those of a recomputed F, nor one ahead of the first W. Measured
    times are without exchanges; if op times are given but exchanges are not, exchanges take no time.
    """
    exchanged = exchanges(job, stages, table)
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


def exchanges(job: Job, stages: Sequence[Sequence[int]], table: Sequence[Layer]) -> list[Sums]:
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
            forward, backward, again = _told(job, stages, table, axis)
            if ms:  # of both ways, each
                whole = (float(all(table[i].reruns for i in part)) for part in stages)
                shares = [more / f if f else rerun for more, f, rerun in zip(again, forward, whole, strict=True)]
                forward = backward = (ms,) * len(stages)
                again = tuple(ms * share for share in shares)
            late = map(add, again, _ahead(job, stages, table, backward)) if axis == "ep" else again
            found.append(Sums(forward, tuple(map(add, backward, again)), tuple(late)))
    return found


def _told(
    job: Job, stages: Sequence[Sequence[int]], table: Sequence[Layer], axis: str
) -> tuple[PerStage, PerStage, PerStage]:
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
        return machine.shared_ms(axis, size, halves=2 if how == "sum" else 1)

    def of(layer: Layer, op: str) -> float:
        return sum(ms(how, size) for name, how, size in layer.collectives.get(op, ()) if name == axis)

    def plain(layer: Layer) -> float:
        return of(layer if layer.plain is None else layer.plain(), "b")

    each = [
        (of(one, "f"), plain(one), of(one, "f" if one.reruns else "b") - (not one.reruns) * plain(one)) for one in table
    ]
    forward, backward, again = (tuple(sum(each[i][k] for i in part) for part in stages) for k in range(3))
    return forward, backward, again


def _ahead(job: Job, stages: Sequence[Sequence[int]], table: Sequence[Layer], backward: PerStage) -> PerStage:
    """ms of the first all-to-all of a B, of two per block. The W of a shared expert or of the head is there by then."""
    known, head = job.model.builtin, len(table) - 1
    blocks = [sum(bool(table[i].apart) or not known for i in part) for part in stages]
    soon = [known and (bool(job.model.shared_hidden) or head in part) for part in stages]
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


def _near(job: Job, table: Sequence[Layer]) -> int:
    """The ranks on a node, if exchanges of rows between nodes are faster in two steps; else 0."""
    one, two = Machine.of(job).swaps_ms(max(map(_rows, table)), choices_of(job))
    return job.hardware.ranks_per_node if two < one else 0


def _with_optimizer(
    costs: Costs, job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> Costs:
    """Adds the time of optimizer steps: given, or estimated from the bytes they move.

    If op times are given without `costs.optimizer`, the optimizer takes no time.
    """
    given, slow = job.costs.f is not None, estimate.slow_of(job, placement)
    hop = (job.costs.comm or 0.0) if given else Machine.of(job).link(range(placement.ranks)).latency
    if job.costs.optimizer is not None:
        step = tentative = _given_optimizer(job, placement, stages, table)
    elif (measured := _measured_optimizer(job, stages, table)) is not None:
        step, tentative = measured
    elif given or not job.counted:
        return costs.with_ms(hop=(hop,))
    else:
        layers = [[table[i] for i in part] for part in stages]
        each = [stepping.ms_of(job, some, sum(one.params for one in some)) for some in layers]
        step, tentative = (tuple(map(mul, ms, slow)) for ms in zip(*each, strict=True))
    if job.parallel.shard != "none":
        shares = [stage_bytes.dealt(job, placement, s, part, table).most for s, part in enumerate(stages)]
        plain, tentative = (tuple(map(mul, each, shares)) for each in (step, tentative))
    else:
        plain = step
    columns: dict[str, Column] = {"step": plain, "tentative": tentative, "hop": (hop,)}
    if job.parallel.ep > 1:
        of = [sum(sum(table[i].apart) for i in part) / (sum(table[i].params for i in part) or 1) for part in stages]
        most = [stage_bytes.dealt(job, placement, s, part, table, experts=True).most for s, part in enumerate(stages)]
        columns["step e"] = tuple(map(mul, map(mul, step, of), most))
        columns["step"] = tuple(ms * (1 - share) for ms, share in zip(plain, of, strict=True))
    if job.vocabulary and job.costs.optimizer is None:
        count, rows = sum(layer.params for layer in table), vocabulary.parameters(job)
        columns["step v"] = (sum(plain) / (count or 1) * rows,)
    return costs.with_ms(**columns)


def _measured_optimizer(
    job: Job, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> tuple[PerStage, PerStage] | None:
    """ms of STEP and of TENTATIVE by a profile; None if it does not know this job's optimizer."""
    if job.profile is None or any(layer.step is None for layer in table):
        return None
    step = tuple(sum(table[i].step or 0.0 for i in part) for part in stages)
    ahead = tuple(sum(table[i].tentative or 0.0 for i in part) for part in stages)
    return step, tuple(map(max, step, ahead))  # a tentative step does the work of a step, on copies


def _given_optimizer(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> PerStage:
    if job.costs.per != "layer":
        return _per_stage(job, "optimizer", placement)
    each = estimate.each(job.costs.optimizer, table)
    return tuple(sum(each[i] for i in part) for part in stages)


def _with_sums(
    costs: Costs, job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> Costs:
    """Adds the time of collectives over replicas: given, or estimated from the link if bytes are known."""
    parallel, halves = job.parallel, 2 if job.parallel.shard == "none" else 1
    reduce, gather, average = [], [], []
    share = 0.0 if parallel.average is None else parallel.average.share
    for s, part in enumerate(stages):
        holders = placement.holders(s)
        own = sum(sum(table[i].apart) for i in part)
        count: float = sum(table[i].params - (table[i].tied if len(stages) > 1 else 0) for i in part) - own
        if job.parallel.shard != "none":
            shares = stage_bytes.dealt(job, placement, s, part, table)
            count = shares.ranks * shares.row
        # Sharded over one holder's replicas, reduced over all.
        alone = stage_bytes.by_pipe(parallel) and len(set(holders)) > 1
        reduce.append(_sum(job, GRAD_BYTES * count, holders, 2 if alone else halves))
        params = sum(table[i].params for i in part) - own
        lowered = stage_bytes.lowered(job, stage_bytes.owned(part, table)) / params if params else 0.0
        weight = 2 if job.model.lowered else 4 - 2 * lowered
        gather.append(_sum(job, weight * count, holders[:1] if alone else holders, 1) if halves == 1 else 0.0)
        average.append(share * _sum(job, GRAD_BYTES * count, holders, 2))
    ends = [rank for stage in placement.ends for rank in placement.holders(stage)]
    tied = GRAD_BYTES * table[-1].tied if len(stages) > 1 else 0
    tie = _sum(job, tied, ends, 2) if tied else 0.0
    columns: dict[str, Column] = {"gather": tuple(gather), "reduce": tuple(reduce)}
    summed = 0.0
    if job.vocabulary:
        words = vocabulary.parameters(job)
        summed = _sum(job, GRAD_BYTES * words, [0], halves)
        again = _sum(job, (2 if job.model.lowered else 4) * words, [0], 1) if halves == 1 else 0.0
        columns |= {"gather v": (again,), "reduce v": (summed,)}
    if share:  # replicas that average weights sum only gradients of shared tokens and experts
        once = _sum(job, tied, placement.holders(placement.ends[0]), 2) if tied else 0.0
        columns |= {"average": tuple(average), "average v": (share * summed,), "average t": (share * once,)}
        among = _parts(parallel.topology.span * parallel.cp) / _parts(parallel.dp * parallel.cp)
        columns["reduce"] = tuple(among * ms for ms in reduce)
    if parallel.ep > 1:
        costs = replace(costs, experts=stage_bytes.of_experts(job, placement, stages, table))
        of = [(one, placement.holders(s)) for s, one in enumerate(costs.experts)]
        apart = tuple(_sum(job, one.summed, ranks, halves, experts=True) for one, ranks in of)
        columns |= {"reduce e": apart, "average e": tuple(share * ms for ms in apart)}
        of = [(one, ranks[:1] if stage_bytes.by_pipe(parallel) else ranks) for one, ranks in of]
        rows = [parallel.of_experts * len(set(ranks)) for _, ranks in of]  # in addition to each rank's own
        sizes = [one.gathered * n / (n + 1) for n, (one, _) in zip(rows, of, strict=True)]
        each = zip(sizes, of, strict=True)
        columns["gather e"] = tuple(_sum(job, size, ranks, 1, experts=True) for size, (_, ranks) in each)
    return replace(costs, tied=float(tied)).with_ms(**columns, **{"reduce t": (tie,)})


def _parts(ranks: float) -> float:
    """The share of a vector that each of `ranks` ranks sends in one half of a ring all-reduce."""
    return 1 - 1 / ranks


def _sum(job: Job, size: float, holders: Sequence[int], halves: int, *, experts: bool = False) -> float:
    """ms of an all-reduce over these ranks of all replicas of the pipeline, or of those with the same `experts`; with
    `halves` = 1 of half of it."""
    replicas = job.parallel.of_experts if experts else job.parallel.copies
    if replicas * len(set(holders)) == 1 or (not size and (experts or job.costs.reduce is None)):
        return 0.0
    if job.costs.reduce is not None:
        return job.costs.reduce * halves / 2
    machine = Machine.of(job)
    return (machine.experts_ms if experts else machine.sum_ms)(size, holders, halves=halves)


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


def _sizes(
    job: Job,
    placement: Placement,
    stages: Sequence[Sequence[int]],
    table: Sequence[Layer],
    bytes: tuple[StageBytes, ...] | None,
) -> dict[str, tuple[Size, ...]]:
    """Activations from F to B ("kept") and from B to W ("left"); of layers that recompute F keeps the input only."""
    left_bytes = tuple(sum(table[i].size.act_w for i in part) if bytes else 0.0 for part in stages)
    whole, left = _activations(job, placement, stages, table, bytes, left_bytes)
    left_sizes = tuple(map(Size, left, left_bytes))
    if bytes is None:
        return {"kept": tuple(map(Size, whole)), "left": left_sizes}
    kept = []
    for s, (units, stage) in enumerate(zip(whole, bytes, strict=True)):
        size = stage_bytes.kept_by([table[i] for i in stages[s]], moves=job.memory.offloads(s)) - stage.given
        kept.append(Size(units * size / (stage.share or 1.0), size))
    return {"kept": tuple(kept), "left": left_sizes}


def _activations(
    job: Job,
    placement: Placement,
    stages: Sequence[Sequence[int]],
    table: Sequence[Layer],
    bytes: tuple[StageBytes, ...] | None,
    left: PerStage,
) -> tuple[PerStage, PerStage]:
    """Units that F keeps without recompute and that B leaves: given, else from bytes, else equal shares of 1 per rank.

    `left` are the bytes that B leaves.
    """
    layered = estimate.given_activations(job, list(table))
    if layered is not None:
        raw_b = tuple(sum(layered[i][0] * table[i].part for i in part) for part in stages)
        raw_w = tuple(sum(layered[i][1] for i in part) for part in stages)
    elif job.costs.act_b is not None and job.costs.per != "layer":
        whole = _per_stage(job, "act_b", placement)
        raw_w = whole if job.costs.act_w is None else _per_stage(job, "act_w", placement)
        raw_b = tuple(units * _part(part, table) for units, part in zip(whole, stages, strict=True))
    elif bytes is not None and job.costs.f is None:
        raw_b, raw_w = tuple(stage.share for stage in bytes), left
    else:
        raw_b = raw_w = (placement.ranks / placement.stages,) * placement.stages
    unit = sum(raw_b) / placement.ranks or 1.0
    return tuple(x / unit for x in raw_b), tuple(x / unit for x in raw_w)


def _transfers(
    job: Job, placement: Placement, stages: Sequence[Sequence[int]], table: Sequence[Layer]
) -> tuple[tuple[Links, ...], tuple[Links, ...]]:
    """ms of transfers, and the ms for which they occupy their link: given, or estimated from the links.

    If costs are given without `comm`, transfers take no time.
    """
    if job.costs.comm is not None or (job.costs.f is not None and job.links is None):
        ms = job.costs.comm or 0.0
        return links_of(placement, lambda stage, edge: ms), ()
    sizes, machine = boundaries(job, stages, table), Machine.of(job)
    return (
        links_of(placement, lambda stage, edge: machine.link(edge).ms(sizes[stage])),
        links_of(placement, lambda stage, edge: sizes[stage] / machine.link(edge).speed),
    )
