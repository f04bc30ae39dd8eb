"""Times of a rank's ops of a parallel vocabulary, for planning jobs with one."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import nn

from zbc.job.profile import WordTimes
from zbc.runtime.core.tensors import AUTOCAST
from zbc.runtime.features.words.vocabulary import Embedding, Output
from zbc.runtime.features.words.words import combine
from zbc.training.devices import Laps
from zbc.training.profiling.rig import Rig
from zbc.training.profiling.times import quick

ROUNDS = 9  # after two that warm up
WARM_UP = 2


def word_times(rig: Rig, device: torch.device) -> WordTimes | None:
    """ms of S, T, I and E of a microbatch with ceil(vocab / (pp tp)) words; None if the vocabulary is not parallel."""
    job, model = rig.job, rig.job.model
    if job.parallel.vocabulary == "ends" or not (model.builtin and model.vocab and model.hidden and model.seq_len):
        return None
    ranks = job.parallel.pp * job.parallel.tp
    rows, tokens = -(-model.vocab // ranks), job.schedule.microbatch_size * model.seq_len // job.parallel.cp
    generator = torch.Generator(device).manual_seed(job.train.seed)
    kind = torch.bfloat16 if model.parameters == "bfloat16" else torch.float32
    low = AUTOCAST.get(model.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    output = Output(nn.Parameter(drawn(rows, model.hidden) * 0.02), 0, low, model.logits_cap)
    embedding = Embedding(nn.Parameter(drawn(rows, model.hidden)), 0)
    words = torch.randint(0, model.vocab, (tokens,), generator=generator, device=device)
    hidden, weight = drawn(tokens, model.hidden), torch.tensor(1.0 / tokens, device=device)
    took, laps = defaultdict[str, list[float]](list), Laps(device)

    for _ in range(WARM_UP + ROUNDS):
        for sums in (1, 2):
            told = laps.take(partial(output.tell, hidden, words, weight, 1.0, early=sums == 1), took[f"s{sums}"])
            log, _ = combine(told.mine[None])
            laps.take(partial(output.learn, told, log, part=sums == 2), took[f"t{sums}"])
        looked, _ = laps.take(partial(embedding.look_up, words), took["i"])
        laps.take(partial(embedding.learn, looked, hidden), took["e"])
    laps.read()
    times = {name: quick(found[WARM_UP:]) for name, found in took.items()}
    return WordTimes(rows=rows, s=[times["s1"], times["s2"]], t=[times["t1"], times["t2"]], i=times["i"], e=times["e"])
