"""Vocabulary-parallel output layer and embedding: time and memory of a rank's vocabulary shard.

With h features, N tokens and V words on p ranks, per microbatch (or slice) and rank; tensor-parallel ranks split the
V/p words of their pipeline rank, and exchange three numbers per token inside of S:

    S         2 N h V/p operations for the logits, and as many for the input's gradient with 1 sum
    T         2 N h V/p for the rows' gradient, and as many for the input's gradient with 2 sums
    I, E      the look-up of N rows; their gradients, added to V/p rows
    SPREAD    N h numbers to all ranks; TAKE the same, from the first stage
    GIVE      N h numbers from all ranks to one; SUM the same in float32
    MEET      three float32 numbers per token from each rank to all, and with 1 sum the numbers of SUM
    logits    4 N V/p bytes from S to T, float32 for any model type, twice if they are capped; with 1 sum
              8 N h more until MEET is completed

Final norm and learned positions stay on the last and the first stage. After arXiv 2411.05288.
"""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler.cost import ends, estimate, stepping
from zbc.compiler.cost.cost import ShareBytes
from zbc.compiler.cost.ends import Sizes
from zbc.compiler.cost.footprint import GRAD_BYTES
from zbc.compiler.cost.machine import Machine
from zbc.compiler.cost.profiled import measurements
from zbc.compiler.cost.stage_bytes import StageBytes, averaging
from zbc.job.profile import WordTimes
from zbc.job.spec import Job, LayerCost
from zbc.plan import dealing

STATISTICS = 12  # bytes per token that ranks exchange: maximum, sum of exp and the target's logit
OWN, FOUND = 13, 8  # bytes per token from S to T: the target's row, whether local, its weight; MEET's result
Times = tuple[float, float, float]  # ms of F, B and W


def columns(job: Job, rows: float = 1.0, slow: float = 1.0) -> dict[str, float]:
    """ms by column on a rank whose own work takes `slow` times as long; `rows` is the slice's share of a microbatch's
    tokens, and `job` has the slice's length as its sequence length."""
    given, measured = job.costs, job.profile.words if job.profile is not None else None
    found = _computed(job, rows) if measured is None else _measured(job, measured, rows)
    for name in found:
        if (ms := getattr(given, name)) is not None:
            found[name] = ms * rows
    if job.adapter.rank:  # frozen: no gradient of rows
        found |= {"e": 0.0} | ({"t": 0.0} if job.vocabulary == 1 else {})
    found = {name: slow * ms for name, ms in found.items()}
    return found | {"s": found["s"] + _together(job)} | _collectives(job)


def _computed(job: Job, rows: float) -> dict[str, float]:
    """ms of S, T, I and E, from the times of output layer and embedding."""
    sums = job.vocabulary
    out, back, grow = _output(job, rows)
    grow = 0.0 if job.adapter.rank else grow
    found = {"s": out + (back if sums == 1 else 0.0), "t": grow + (back if sums == 2 else 0.0)}
    return found | dict(zip("ie", _embedding(job, rows), strict=True))


def _measured(job: Job, words: WordTimes, rows: float) -> dict[str, float]:
    """Measured ms of S, T, I and E; products are scaled to this number of words."""
    share = -(-(job.model.vocab or 0) // (job.parallel.pp * job.parallel.tp)) / words.rows
    s, t = words.s[job.vocabulary - 1] * share, words.t[job.vocabulary - 1] * share
    return {"s": s * rows, "t": t * rows, "i": words.i * rows, "e": words.e * rows}


def _together(job: Job) -> float:
    """ms in which tensor-parallel ranks exchange the statistics of their words inside of S.

    Given op times mean that such collectives take no time, as inside of blocks.
    """
    sizes, measured, tp = estimate.sizes_of(job), job.profile and job.profile.sums, job.parallel.tp
    if tp == 1 or sizes is None or job.costs.f is not None:
        return 0.0
    told = float(STATISTICS * sizes.tokens)
    return measured.ms(told) if measured else Machine.of(job).shared_ms("tp", tp * told, halves=1)


def _output(job: Job, rows: float) -> Times:
    """ms of one rank's shard of the output layer: logits and loss, the input gradient, the rows' gradient."""
    p, sizes = job.parallel.pp, estimate.sizes_of(job)
    if job.costs.f is not None:
        one: LayerCost | None = job.costs.head if job.costs.per == "layer" else None
        return (0.0, 0.0, 0.0) if one is None else (one.f * rows / p, one.b * rows / p, one.w * rows / p)
    if sizes is None:
        return 0.0, 0.0, 0.0
    if job.timed is not None:
        whole = measurements(job.timed, ["embed", "layers.0", "head"], job.optimizer.name)[2]
        shares = estimate.shares_of_words(Machine.of(job), ends.words(sizes), ends.head(sizes))
        return tuple(ms * part * rows / p for ms, part in zip((whole.f, whole.b, whole.w), shares, strict=True))  # type: ignore[return-value]
    return estimate.times_of(Machine.of(job), ends.words(_share_of(sizes, p)))


def _embedding(job: Job, rows: float) -> tuple[float, float]:
    """ms of looking up one rank's words, and of their gradient."""
    p, sizes = job.parallel.pp, estimate.sizes_of(job)
    if job.costs.f is not None:
        one: LayerCost | None = job.costs.embed if job.costs.per == "layer" else None
        return (0.0, 0.0) if one is None else (one.f * rows / p, (one.b + one.w) * rows / p)
    if sizes is None:
        return 0.0, 0.0
    if job.timed is not None:
        whole = measurements(job.timed, ["embed", "layers.0", "head"], job.optimizer.name)[0]
        f, _, w = estimate.shares_of_words(Machine.of(job), ends.look_up(sizes), ends.embedding(sizes))
        return whole.f * f * rows, whole.w * w * rows / p
    f, _, w = estimate.times_of(Machine.of(job), ends.look_up(_share_of(sizes, p)))
    return f, w


def _share_of(sizes: Sizes, p: int) -> Sizes:
    return replace(sizes, vocab=-(-sizes.vocab // p))


def _collectives(job: Job) -> dict[str, float]:
    """ms of the collectives among the ranks of a replica, at the speed of the slowest link among them.

    With given op times each takes `comm`.
    """
    p, sums, sizes = job.parallel.pp, job.vocabulary, estimate.sizes_of(job)
    names = ["spread", "meet", "give", "take", *(["sum"] if sums == 2 else [])]
    if p == 1:
        return dict.fromkeys(names, 0.0)
    if job.costs.comm is not None or job.costs.f is not None or sizes is None:
        return dict.fromkeys(names, job.costs.comm or 0.0)
    link = Machine.of(job).link(range(p))
    each = sizes.tokens * sizes.hidden
    summed = link.ms(GRAD_BYTES * each)
    told = link.ms((p - 1) * STATISTICS * sizes.tokens)
    found = {
        "spread": link.ms(sizes.width * each),
        "meet": told + (summed if sums == 1 else 0.0),
        "give": link.ms(sizes.stream * each),
        "take": link.ms(sizes.stream * each),
    }
    return found | ({"sum": summed} if sums == 2 else {})


def parameters(job: Job) -> int:
    """Parameters that train of the rank with most words: one table if embedding and output layer are tied, else two."""
    return 0 if job.adapter.rank else _held(job)


def _held(job: Job) -> int:
    return sum(_tables(job))


def _tables(job: Job) -> list[int]:
    """Elements of a rank's shard of each table."""
    sizes = estimate.sizes_of(job)
    shard = 0 if sizes is None else _share_of(sizes, job.parallel.pp).vocab * sizes.hidden
    return [shard] * (1 if job.model.tie_embeddings else 2)


def pool_ms(job: Job) -> float:
    """ms of the sum over all replicas of the gradients of a rank's rows."""
    if job.parallel.copies == 1:
        return 0.0
    halves = 2 if job.shard == "none" else 1
    if job.costs.reduce is not None:
        return job.costs.reduce * halves / 2
    return Machine.of(job).sum_ms(GRAD_BYTES * parameters(job), [0], halves=halves)


def renewal_ms(job: Job) -> float:
    """ms of all-gathering a rank's rows after the optimizer step, if replicas each stepped a part of them."""
    if job.parallel.copies == 1 or job.shard == "none":
        return 0.0
    if job.costs.reduce is not None:
        return job.costs.reduce / 2
    weight = 2 if job.model.parameters == "bfloat16" else 4
    return Machine.of(job).sum_ms(weight * parameters(job), [0], halves=1)


def share_bytes(job: Job) -> ShareBytes | None:
    """Memory of the rank with most words; None without shared words, or if sizes are known only once built."""
    sizes = estimate.sizes_of(job)
    if sizes is None or not job.vocabulary:
        return None
    count, low = parameters(job), job.model.parameters == "bfloat16"
    tokens, mine = sizes.tokens, _share_of(sizes, job.parallel.pp)
    out, stream = float(sizes.width * sizes.hidden * tokens), float(sizes.stream * sizes.hidden * tokens)
    keeps = not job.adapter.rank or job.vocabulary == 2  # logits from S to T
    wide, logits = float(GRAD_BYTES * sizes.hidden * tokens), 4.0 * mine.vocab * tokens * (1 + sizes.logits_cap)
    values = {
        "top": out,
        "hidden": out,
        "logits": logits * keeps + (STATISTICS + OWN) * tokens,
        "sums": 2 * wide if job.vocabulary == 1 else 0.0,
        "stats": float((job.parallel.pp * STATISTICS + FOUND) * tokens),
        "dtop": wide,
        "turn": wide,
        "words": stream,
        "input": stream,
        "bottom": stream,
        "dinput": stream,
    }
    words = float(mine.vocab * sizes.hidden) if sizes.width < GRAD_BYTES else 0.0
    narrow = (sizes.width * mine.vocab * tokens + out) * (words > 0)  # copies of logits, and of the gradient
    learnt = words * (not job.adapter.rank)
    grown = (sizes.width + GRAD_BYTES) * learnt
    # The gradient of the logits, with that of the input or of the weights; these are added to their sum as they are.
    turned = sizes.width * mine.vocab * tokens + max(out, sizes.width * learnt) if words else wide
    needs = {
        "s": logits + (STATISTICS + OWN) * tokens + values["sums"] + narrow + logits / 2 * sizes.logits_cap,
        "t": turned if job.vocabulary == 2 else narrow * keeps + grown,
        "i": stream,
        "e": wide * (1 + (stream < wide)) * (not job.adapter.rank),
        "f": stream * (not sizes.rotary or sizes.tp > 1),  # the looked-up rows, freed when F is completed
    }
    stepped = float(count)
    if count and job.shard != "none":  # tables are dealt in pieces
        stepped, _ = dealing.most(_tables(job), job.parallel.copies)
    masters = 4.0 * stepped if low and job.model.master else 0.0
    weights = (2.0 if low else 4.0) * _held(job) + 2.0 * mine.vocab * sizes.hidden * sizes.cast  # of the output layer
    kept = stepping.kept(job.optimizer) * stepped + averaging(job, count)
    return ShareBytes(StageBytes(weights, float(GRAD_BYTES * count), masters, kept, 0.0), values, needs)
