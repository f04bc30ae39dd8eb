"""Times of a rank's ops of a parallel vocabulary, or their bytes and kernels, for planning jobs with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbc.job.profile import WordBytes, WordTimes
from zbc.job.rules import unshareable
from zbc.job.spec import Job
from zbc.runtime.core.tensors import AUTOCAST
from zbc.runtime.features.words.vocabulary import Embedding, Output, Told
from zbc.runtime.features.words.words import combine
from zbc.training.devices import Laps
from zbc.training.models.model import terms_of
from zbc.training.models.shared_words import ends_of
from zbc.training.profiling.kernels import Kernels
from zbc.training.profiling.rig import Rig
from zbc.training.profiling.times import quick
from zbc.training.recording.measure import Ledger

WARM_UP, ROUNDS = 2, 9  # the first do not count


class _Share:
    """ceil(vocab / (pp tp)) words of each table; `entry`: the first stage's input, `result`: the last one's output."""

    def __init__(self, job: Job, entry: Tensor, result: Tensor) -> None:
        model, device = job.model, result.device
        self.entry, self.result, self.learns = entry, result, not job.adapter.rank
        self.rows = -(-(model.vocab or 0) // (job.parallel.pp * job.parallel.tp))
        ends, table = ends_of(model), partial(torch.zeros, dtype=entry.dtype, device=device)
        each = [table(self.rows, size).normal_(std=0.02) for _, size in ends.tables.values()]
        self.tables = [nn.Parameter(rows, self.learns) for rows in each]
        self.output = Output(self.tables[-1], 0, AUTOCAST.get(model.dtype), terms_of(model), ends.shaped)
        self.embedding = Embedding(self.tables[0], 0, ends.still)
        self.words = torch.randint(0, model.vocab or 1, result.shape[:-1], device=device)
        self.weight = torch.tensor(1.0 / self.words.numel(), device=device)

    def run(self, run: Callable[[str, Callable[[], Any]], Any], sums: int) -> None:
        """The ops of a microbatch; `run` runs each, by its column."""
        own, _ = run("i", partial(self.embedding.look_up, self.words))
        how: Any = {"early": sums == 1, "keep": sums == 2 or self.learns}
        self.told: Told = run("s", partial(self.output.tell, self.result, self.words, self.weight, 1.0, **how))
        log, self.told.spread, self.told.row = combine(self.told.mine[None])[0], None, None
        run("t", partial(self.output.learn, self.told, log, part=sums == 2))
        run("e", partial(self.embedding.learn, own, self.entry))


def word_times(rig: Rig, device: torch.device) -> WordTimes | None:
    """ms of S, T, I and E of a microbatch; None if the vocabulary is not parallel."""
    job, model = rig.job, rig.job.model
    if job.parallel.vocabulary == "ends" or not model.seq_len or any(unshareable(vars(job))):
        return None
    torch.manual_seed(job.train.seed)
    kind = torch.bfloat16 if model.lowered else torch.float32
    tokens = job.schedule.microbatch_size * model.seq_len // job.parallel.cp
    widths = [size for _, size in ends_of(model).tables.values()]
    share = _Share(job, *(torch.randn(tokens, widths[i], device=device, dtype=kind) for i in (0, -1)))
    took, laps = defaultdict[str, list[float]](list), Laps(device)
    for _ in range(WARM_UP + ROUNDS):
        for sums in (1, 2):
            share.run(lambda name, op, sums=sums: laps.take(op, took[f"{name}{sums}"]), sums)  # type: ignore[misc]
    laps.read()
    ms = {name: quick(found[WARM_UP:]) for name, found in took.items()}
    return WordTimes(rows=share.rows, s=[ms["s1"], ms["s2"]], t=[ms["t1"], ms["t2"]], i=ms["i1"], e=ms["e1"])


def weighed(rig: Rig, kernels: Kernels) -> WordBytes:
    """The bytes and kernels of these ops; `rig` has words apart, on fake tensors."""
    job, rig = rig.job, rig.plain()
    entry, result = (torch.zeros(spec.shape, dtype=spec.dtype) for spec in (rig.inputs[1], rig.inputs[-1]))
    share, ledger, needs, values = _Share(job, entry, result), Ledger(), dict[str, int](), dict[str, int]()

    def run(name: str, op: Callable[[], Any]) -> Any:
        ledger.peak = before = ledger.kept
        with kernels.under(name), ledger:
            found = op()
        needs[name] = ledger.peak - before
        if name == "s":
            told: Told = found
            parts = told.mine.new_empty(job.parallel.pp, *told.mine.shape)
            kept = (told.soft, *told.target, told.mine, told.weight)
            values["logits"], values["sums"] = _size(*kept), _size(told.spread, told.row)
            values["stats"] = _size(parts, *combine(parts))
            values["hidden"] = _size(told.hidden)  # from S on, in the type of products
        return found

    for _ in range(2):  # the first microbatch makes the gradients
        share.run(run, job.vocabulary)
    made = rig.layers[1].make()(entry)
    made = made[0] if isinstance(made, tuple) else made
    same = job.parallel.tp == 1 and made.untyped_storage()._cdata == entry.untyped_storage()._cdata  # otherwise freed
    needs |= {"f": 0 if same else _size(entry), "s": needs["s"] + _size(result) - values["hidden"]}
    values |= dict.fromkeys(("words", "input", "bottom", "dinput"), _size(entry)) | {"top": _size(result)}
    values |= dict.fromkeys(("dtop", "turn"), share.told.mine.itemsize * result.numel())
    return WordBytes(
        rows=share.rows,
        parts=[table.numel() for table in share.tables],
        weights=_size(*share.tables, share.output.cast.low),
        told=_size(share.told.mine),
        values=values,
        needs=needs,
        kernels={name: kernels.kernels(name) for name in "site"},
    )


def _size(*tensors: Tensor | None) -> int:
    """Bytes of tensors, whose storages are their own."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)
