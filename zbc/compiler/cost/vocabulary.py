"""Vocabulary-parallel output layer and embedding: time and memory of a rank's vocabulary shard, by its card.

With h features and N tokens on p ranks, per microbatch (or slice) and rank:

    SPREAD    N h numbers to all ranks; TAKE the same, from the first stage
    GIVE      N h numbers from all ranks to one; SUM the same in float32
    MEET      three float32 numbers per token from each rank to all, and with 1 sum the numbers of SUM

Tensor-parallel ranks split the words of their pipeline rank, and exchange three numbers per token inside of S. Final
norm and learned positions stay on the last and the first stage. After arXiv 2411.05288.
"""

from __future__ import annotations

from zbc.compiler.cost import cards, estimate, stepping
from zbc.compiler.cost.cost import ShareBytes
from zbc.compiler.cost.footprint import GRAD_BYTES
from zbc.compiler.cost.machine import Machine
from zbc.compiler.cost.stage_bytes import StageBytes, averaging
from zbc.job.profile import WordBytes, WordTimes
from zbc.job.spec import Job
from zbc.plan import dealing


def _card(job: Job) -> WordBytes | None:
    """Bytes and kernels of a rank's words; None for layers whose words nobody knows."""
    return cards.words(job) if job.model.causal else None


def columns(job: Job, rows: float = 1.0, slow: float = 1.0) -> dict[str, float]:
    """ms by column on a rank whose own work takes `slow` times as long; `rows` is the slice's share of a microbatch's
    tokens, and `job` has the slice's length as its sequence length."""
    given, measured = job.costs, job.profile.words if job.profile is not None else None
    found = _computed(job, rows) if measured is None else _measured(job, measured, rows)
    found |= {name: ms * rows for name, ms in zip("stie", given.vocabulary or (), strict=False)}
    if job.adapter.rank:  # frozen: no gradient of rows
        found |= {"e": 0.0} | ({"t": 0.0} if job.vocabulary == 1 else {})
    found = {name: slow * ms for name, ms in found.items()}
    return found | {"s": found["s"] + _together(job)} | _collectives(job)


def _computed(job: Job, rows: float) -> dict[str, float]:
    """ms of S, T, I and E: given ones of output layer and embedding, or those of their kernels, at the pace at which
    these were measured."""
    given, p, sums = job.costs, job.parallel.pp, job.vocabulary
    if given.f is not None or (card := _card(job)) is None:
        if given.f is None or given.per != "layer":
            return dict.fromkeys("stie", 0.0)
        ends = [rows / p * ms for at in (-1, 0) for ms in _of_end(job, at)]
        (out, back, grow), (look, *grown) = ends[:3], ends[3:]
        grow = 0.0 if job.adapter.rank else grow
        found = {"s": out + (back if sums == 1 else 0.0), "t": grow + (back if sums == 2 else 0.0)}
        return found | {"i": look, "e": sum(grown)}
    machine = Machine.of(job)
    found = {name: machine.ms(kernels) for name, kernels in card.kernels.items()}
    if job.timed is None:
        return found
    first, last = (rows * pace for pace in estimate.paces_of_ends(job, job.timed))
    return {name: ms * (first if name in "ie" else last) for name, ms in found.items()}


def _of_end(job: Job, at: int) -> list[float]:
    """f, b and w of the first or last number of lists in `[costs]` that have embedding and head; 0 without."""
    given, whole = (job.costs.f, job.costs.b, job.costs.w), job.model.layers + 2 * job.model.builtin
    return [float(ms[at]) if isinstance(ms, list) and len(ms) == whole else 0.0 for ms in given]


def _measured(job: Job, words: WordTimes, rows: float) -> dict[str, float]:
    """Measured ms of S, T, I and E; products are scaled to this number of words."""
    share = -(-(job.model.vocab or 0) // (job.parallel.pp * job.parallel.tp)) / words.rows
    s, t = words.s[job.vocabulary - 1] * share, words.t[job.vocabulary - 1] * share
    return {"s": s * rows, "t": t * rows, "i": words.i * rows, "e": words.e * rows}


def _together(job: Job) -> float:
    """ms in which tensor-parallel ranks exchange the statistics of their words inside of S.

    Given op times mean that such collectives take no time, as inside of blocks.
    """
    measured, tp = job.profile and job.profile.sums, job.parallel.tp
    if tp == 1 or job.costs.f is not None or (card := _card(job)) is None:
        return 0.0
    if measured:
        return measured.ms(card.told)
    return Machine.of(job).rings_ms(job.topology.circles("tp"), tp * card.told, halves=1)


def _collectives(job: Job) -> dict[str, float]:
    """ms of the collectives among the ranks of a replica, at the speed of the slowest link among them.

    With given op times each takes `comm`.
    """
    p, sums, card = job.parallel.pp, job.vocabulary, _card(job)
    names = ["spread", "meet", "give", "take", *(["sum"] if sums == 2 else [])]
    if p == 1:
        return dict.fromkeys(names, 0.0)
    if job.costs.comm is not None or job.costs.f is not None or card is None:
        return dict.fromkeys(names, job.costs.comm or 0.0)
    link, values = Machine.of(job).link(range(p)), card.values
    sizes = {"spread": values["top"], "give": values["words"], "take": values["bottom"], "sum": values["turn"]}
    found = {name: link.ms(size) for name, size in sizes.items()}
    summed = found.pop("sum")
    told = link.ms((p - 1) * card.told)
    return found | ({"meet": told + summed} if sums == 1 else {"meet": told, "sum": summed})


def parameters(job: Job) -> int:
    """Parameters that train of the rank with most words: one table if embedding and output layer are tied, else two."""
    card = None if job.adapter.rank else _card(job)
    return 0 if card is None else sum(card.parts)


def share_bytes(job: Job) -> tuple[StageBytes, ShareBytes] | None:
    """Memory of the rank with most words, and temporary memory; None if sizes are known only once built."""
    card = _card(job)
    if card is None:
        return None
    count = parameters(job)
    stepped = float(count)
    if count and job.parallel.shard != "none":  # tables are dealt in pieces
        stepped, _ = dealing.most(card.parts, job.parallel.copies)
    masters = stepping.WIDE * stepped if job.model.lowered and job.model.master else 0.0
    kept = stepping.kept(job.optimizer) * stepped + averaging(job, count)
    state = StageBytes(float(card.weights), float(GRAD_BYTES * count), masters, kept)
    return state, ShareBytes(card.values, card.needs)
