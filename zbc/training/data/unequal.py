"""Samples of unequal length: documents of token files, random ones, or a user's dataset; steps of them: their
distribution over replicas, and their microbatches as tensors.

It is a pure function of the lengths, the seed and the position in the data, which each rank computes by itself; ranks
only check at the beginning that they have the same lengths. All steps have the same number of samples.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.plan.balancing import Microbatch, Shape, deal, deal_by_tokens, dealt_evenly, samples_of_step
from zbc.plan.manifest import Manifest
from zbc.plan.phases import Phases
from zbc.runtime.core.state import Share, Work
from zbc.runtime.core.tensors import IGNORED, Length
from zbc.runtime.features.packing import Rows
from zbc.runtime.seeding import seed_of
from zbc.training.data.data import KINDS, Batches, Pairs, RankBatches, Tokens, build_dataset, kept_of, place
from zbc.training.data.pairs import Samples, Words
from zbc.training.data.tokens import TokenFile
from zbc.training.models.model import loss as load_loss

AT_ONCE = 2**24  # tokens of a file that are scanned at a time
SPREAD = 1.1  # standard deviation of the logarithm of random lengths


class Documents(Samples):
    """A map-style dataset of sequences with lengths known in advance; as `Samples` each is in a row of its own, of
    `room` tokens, with padding behind it."""

    lengths: Tensor  # (samples,) int64
    room: int
    padding: int = IGNORED  # the target of padding, which does not count

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        """The input and the target of a sample, both (tokens, ...)."""

    def looks(self) -> int:
        """A digest of a few samples that do not depend on files and the seed alone."""
        return 0

    def digest(self) -> int:
        raw = self.lengths.numpy().tobytes() + self.looks().to_bytes(5, "big")
        return int.from_bytes(hashlib.sha256(raw).digest()[:5], "big")

    def rows(self, indices: Sequence[int], which: int) -> Tensor:
        return self.filled([[i] for i in indices], self.room, which)

    def filled(self, rows: Sequence[Sequence[int]], room: int, which: int) -> Tensor:
        """Inputs or targets of rows of several samples, with padding behind them: (rows, room, ...)."""
        parts = [[self.pair(i)[which] for i in row] for row in rows]
        like = next((sample for row in parts for sample in row), None)
        like = self.pair(0)[which] if like is None else like
        found = like.new_full((len(rows), room, *like.shape[1:]), (0, self.padding)[which])
        for target, row in zip(found, parts, strict=True):
            if row:
                joined = torch.cat(row)
                target[: len(joined)] = joined
        return found


class RandomDocuments(Documents):
    """Random tokens of log-normal lengths, made on demand from the sample's number."""

    def __init__(self, vocab: int, longest: int, seed: int, count: int = 2**16) -> None:
        self._vocab, self._seed, self.room = vocab, seed, longest
        source = torch.Generator().manual_seed(seed_of(seed, "lengths"))
        drawn = torch.empty(count, dtype=torch.float64).log_normal_(math.log(longest / 6), SPREAD, generator=source)
        self.lengths = drawn.ceil().clamp(1, longest).long()

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        index = number % len(self)
        source = torch.Generator().manual_seed(seed_of(self._seed, "noise", index))
        tokens = torch.randint(self._vocab, (int(self.lengths[index]) + 1,), generator=source)
        return tokens[:-1], tokens[1:]


class TokenDocuments(Documents):
    """Documents of token files, in pieces of at most `longest` tokens; a target is its piece shifted by one token.
    Raises E110 for a file without an end-of-document token, E505 for a token outside of the vocabulary."""

    def __init__(self, paths: Sequence[str], dtype: str | None, longest: int, vocab: int | None) -> None:
        self._files = [TokenFile(Path(path), dtype, vocab) for path in paths]
        found, self.room = [_pieces(file, longest) for file in self._files], longest
        self._starts = torch.cat([starts for starts, _ in found])
        self.lengths = torch.cat([lengths for _, lengths in found])
        self._firsts = [*accumulate((len(starts) for starts, _ in found), initial=0)]

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        index = number % len(self)
        file = self._files[bisect_right(self._firsts, index) - 1]
        tokens = file.words(int(self._starts[index]), int(self.lengths[index]) + 1)
        return tokens[:-1], tokens[1:]


def _pieces(file: TokenFile, longest: int) -> tuple[Tensor, Tensor]:
    """The first tokens of pieces of documents in a file, and the numbers of tokens they have to predict."""
    end, tokens = file.about.end, file.about.tokens
    if end is None:
        text = f"data: {file.path} does not say which token ends a document, so its samples have no length"
        raise ZbcError("E110", text, hint='tokenize it with an end token, or set data.balance = "none"')
    ends = [torch.nonzero(file.read(a, min(AT_ONCE, tokens - a)) == end)[:, 0] + a for a in range(0, tokens, AT_ONCE)]
    last = torch.tensor([tokens - 1] * (tokens > 0), dtype=torch.int64)
    stops = torch.tensor(sorted({*torch.cat([*ends, last]).tolist()}), dtype=torch.int64) + 1
    begins = torch.cat([torch.zeros(min(1, len(stops)), dtype=torch.int64), stops[:-1]])
    lengths = stops - begins - 1
    counts = (lengths + longest - 1) // longest
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    piece = torch.arange(len(which)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    starts = begins[which] + piece * longest
    return starts, (stops[which] - 1 - starts).clamp(max=longest)


class PairDocuments(Documents):
    """A user's dataset of (input, target) sequences with an attribute `lengths`, one number for each. Raises E110 for a
    dataset without it, or with a sample longer than `longest` tokens, the length of a row."""

    def __init__(self, pairs: Pairs, dataset: Any, name: str, longest: int) -> None:
        self._pairs, self._name, self.room = pairs, name, longest
        given = getattr(dataset, "lengths", None)
        if given is None or len(given) != len(pairs):
            found = "has no lengths" if given is None else f"has {len(given)} lengths for {len(pairs)} samples"
            text = f"data: {name} {found}, and data.balance needs one for each sample"
            raise ZbcError("E110", text, hint="give the dataset an attribute lengths: tokens of each sample")
        self.lengths = torch.as_tensor(given).long()
        wrong = torch.nonzero((self.lengths > longest) | (self.lengths < 1))[:, 0]
        if len(wrong):
            first = int(wrong[0])
            text = f"data: sample {first} of {name} has {int(self.lengths[first])} tokens, a row has room for {longest}"
            raise ZbcError("E110", text, hint="cut it, or set a larger model.seq_len")

    def looks(self) -> int:
        return self._pairs.digest()

    def pair(self, number: int) -> tuple[Tensor, Tensor]:
        epoch, index = divmod(number, len(self))  # of the pairs the last ones may be kept for validation
        ((x, y),), wanted = self._pairs.read([index + epoch * len(self._pairs)]), int(self.lengths[index])
        for what, found in (("input", x), ("target", y)):
            if found.dim() == 0 or len(found) != wanted:
                text = f"data: the {what} of sample {index} of {self._name} has shape {list(found.shape)}"
                raise ZbcError("E110", f"{text}, its length is {wanted}", hint="let both have one row for each token")
        for which, found in enumerate((x, y)):
            self._pairs.words.checked(found, which, lambda row: f"sample {index} of {self._name}")
        return x, y


LOOKED_AT = 4096  # samples whose lengths determine the number of samples of a step
KEPT, SHARES = 3, 256  # cached steps, and microbatches


def dealer_of(manifest: Manifest, own: Tokens | None = None) -> Dealer | None:
    """The dealer of a plan's samples, if they are of unequal length, for a rank with the tokens `own` of all rows.
    Raises E110, E501 to E505."""
    planning, training, how = manifest.planning, manifest.training, manifest.balance
    data = spec.Data.model_validate(training["data"], strict=False)
    model = spec.Model.model_validate(planning["model"], strict=False)
    seed, where, replicas = int(training["train"]["seed"]), place(data, model), manifest.topology.dp
    if how is not None:
        shape = Shape(replicas, how.room, manifest.microbatch_size, how.most, manifest.ranks, how.quadratic)
        return Dealer(build_documents(data, model, seed), shape, manifest.microbatches, seed, where, own)
    if data.balance == "none" or not manifest.tokens:
        return None
    shape = Shape(replicas, model.seq_len or 1, manifest.microbatch_size, manifest.microbatches, manifest.ranks)
    of = build_documents(data, model, seed), shape, len(manifest.tokens), seed, where, own
    return ByTokens(*of, manifest.tokens, manifest.unit)


def build_documents(data: spec.Data, model: spec.Model, seed: int) -> Documents:
    """The training samples of `[data]`. Raises E110, E501 to E505."""
    found = all_documents(data, model, seed)
    found.lengths = found.lengths[: len(found) - kept_of(data, found)]
    return found


def all_documents(data: spec.Data, model: spec.Model, seed: int) -> Documents:
    """All samples, for training and validation; padding has a target that the loss does not count."""
    longest = model.seq_len or 1
    found: Documents
    if data.kind not in KINDS:
        dataset, words = build_dataset(data, model, seed), Words.of(model, data)._replace(named=None)
        found = PairDocuments(Pairs(dataset, data.kind, seed, words=words), dataset, data.kind, longest)
    elif data.kind == "tokens":
        paths = [data.path] if isinstance(data.path, str) else data.path or []
        found = TokenDocuments(paths, data.dtype, longest, model.vocab)
    elif data.kind == "synthetic" and model.vocab is not None:
        found = RandomDocuments(model.vocab, longest, seed)
    else:
        raise ZbcError("E110", f"data: samples of {data.kind} have no length", hint='set data.balance = "none"')
    count = getattr(load_loss(model.loss), "count", None)
    if count is not None and len(found):
        like = found.pair(0)[1]
        found.padding = next((n for n in (IGNORED, 0, -1) if not count(torch.full_like(like, n))), IGNORED)
    return found


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step: the numbers (over epochs) and lengths of its samples; the microbatches of each replica, as indices into
    these."""

    samples: Sequence[int]
    lengths: Sequence[int]
    replicas: Sequence[Sequence[Microbatch]]


class Dealer(Work):
    """Deals samples of unequal length to replicas."""

    def __init__(
        self,
        documents: Documents,
        shape: Shape,
        microbatches: int,
        seed: int,
        where: str,
        own: Tokens | None = None,
        tokens: Sequence[int] = (),
        unit: int = 1,
    ) -> None:
        """`own`: this rank's tokens of rows, if ranks share them; `tokens`, `unit`: see `ByTokens`."""
        self._tokens, self._unit = tokens, unit
        self.documents, self.shape, self.most, self._own = documents, shape, shape.most, own
        self._lengths: list[int] = documents.lengths.tolist()
        least, size = self._least()
        self._order = Batches(documents, seed=seed, microbatches=least, size=size, where=where)
        self.samples = self._samples(microbatches)
        self.phases = Phases.even(self.samples)
        self.step, self._share = lru_cache(KEPT)(self._dealt), lru_cache(SHARES)(self._shared_out)

    def _least(self) -> tuple[int, int]:
        """The fewest microbatches of a step of all replicas, and their samples."""
        return self.shape.replicas, 1

    def _samples(self, microbatches: int) -> int:
        some = [self._lengths[i] for i in self._order.taken(0, min(LOOKED_AT, len(self.documents)))]
        return min(len(self.documents), samples_of_step(some, self.shape, microbatches))

    def _deal(self, lengths: Sequence[int]) -> Sequence[Sequence[Microbatch]] | None:
        return deal(lengths, self.shape)

    def follow(self, phases: Phases) -> None:
        self.phases = phases
        self.step.cache_clear()
        self._share.cache_clear()

    def _dealt(self, step: int) -> StepWork:
        """The work of a step. Raises E110 if its samples do not fit into `max_microbatches`."""
        samples = self._order.taken(self.phases.position(step), self.samples)
        lengths = [self._lengths[number % len(self._lengths)] for number in samples]
        replicas = self._deal(lengths)
        if replicas is None:
            needs, shape = max(map(len, dealt_evenly(lengths, self.shape))), self.shape
            text = f"data: the samples of step {step + 1} do not fit into {shape.most} microbatches of"
            hint = f"set schedule.max_microbatches = {needs}, or fewer schedule.microbatches"
            raise ZbcError("E110", f"{text} {shape.tokens} tokens", hint=hint)
        return StepWork(samples, lengths, replicas)

    def tokens(self, step: int) -> int:
        return sum(self.step(step).lengths)

    def count(self, step: int, replica: int) -> int:
        return len(self.step(step).replicas[replica])

    def share(self, step: int, number: int) -> Share:
        return self._share(step, number)

    def _shared_out(self, step: int, number: int) -> Share:
        lengths = self.step(step).lengths
        samples = self._rows(step, number, lengths)
        filled, length = [*map(sum, samples)], self._length(max(map(sum, samples)))
        if self._own is not None:
            at = self._own.at(self.shape.room if length is None else length.tokens)
            filled = [int((at < count).sum()) for count in filled]
        return Share(sum(filled) / sum(lengths), length, samples)

    def _length(self, longest: int) -> Length | None:
        return None

    def _rows(self, step: int, number: int, of: Sequence[int]) -> Rows:
        """The numbers `of` the samples in each row of a microbatch."""
        replica, mb = divmod(number, self.most)
        found = [tuple(of[i] for i in row) for row in self.step(step).replicas[replica][mb]]
        return (*found, *([()] * (self.shape.rows - len(found))))

    def read(self, step: int, number: int, which: int) -> Tensor:
        """The inputs (`which` = 0) or the targets (1) of a microbatch; the rest of a row is padding."""
        length = self.share(step, number).length
        room = self.shape.room if length is None else length.tokens
        return self.documents.filled(self._rows(step, number, self.step(step).samples), room, which)


class ByTokens(Dealer):
    """Deals one sample to each row, the longest to the microbatches that have the most `tokens` in the plan. The rows
    of a microbatch are as long as the longest of them, in multiples of `unit` tokens."""

    def _least(self) -> tuple[int, int]:
        return self.shape.replicas * len(self._tokens), self.shape.rows

    def _samples(self, microbatches: int) -> int:
        return math.prod(self._least())

    def _deal(self, lengths: Sequence[int]) -> list[list[Microbatch]]:
        return deal_by_tokens(lengths, self.shape, self._tokens)

    def count(self, step: int, replica: int) -> int:
        return len(self._tokens)

    def _length(self, longest: int) -> Length:
        return Length(min(self.shape.room, -(-longest // self._unit) * self._unit), self.shape.room)


def dealt(manifest: Manifest, steps: int = 20) -> dict[str, Any]:
    """What dealing makes of the first `steps` of a plan, by the lengths of samples. Raises E110, E501 to E505.

    `fill`: the share of tokens that is not padding. Of unequal counts: the `samples` of a step, the fewest and the most
    microbatches of a replica, and the `gain`, the time with equally many samples for each replica divided by the time
    of these. Of dealing by tokens: the `tokens` of the rows of each microbatch, the median of all steps and replicas,
    and in how many steps one is `longer` than planned.
    """
    dealer, steps = dealer_of(manifest), min(steps, int(manifest.training["train"]["steps"]))
    assert dealer is not None
    if isinstance(dealer, ByTokens):
        return _by_tokens(dealer, manifest, steps)
    equal = unequal = 0.0
    tokens, counts, shape = 0, list[int](), dealer.shape
    for step in range(steps):
        work = dealer.step(step)
        equal += max(shape.time(batches, work.lengths) for batches in dealt_evenly(work.lengths, shape))
        unequal += max(shape.time(batches, work.lengths) for batches in work.replicas)
        tokens += sum(work.lengths)
        counts += map(len, work.replicas)
    fill, ends = tokens / (sum(counts) * shape.tokens), (min(counts), max(counts))
    gain = equal / unequal if unequal else 1.0
    return {"steps": steps, "samples": dealer.samples, "fill": fill, "counts": ends, "gain": gain}


def _by_tokens(dealer: ByTokens, manifest: Manifest, steps: int) -> dict[str, Any]:
    planned, batch = manifest.tokens, manifest.topology.batch
    shares = [[dealer.share(step, n).length for n in range(batch)] for step in range(steps)]
    found = [[length.tokens for length in step if length is not None] for step in shares]
    medians = [median_low([n for step in found for n in step[mb :: len(planned)]]) for mb in range(len(planned))]
    longer = sum(any(n > planned[k % len(planned)] for k, n in enumerate(step)) for step in found)
    fill = sum(map(dealer.tokens, range(steps))) / (dealer.shape.rows * sum(map(sum, found)))
    return {"steps": steps, "tokens": medians, "longer": longer, "fill": fill}


class Fixed(Work):
    """`lengths`: tokens of the rows of each microbatch of a replica, of `whole` at most; `rows`: rows with one of these
    numbers, over all replicas; `every`: microbatches whose mean is one loss."""

    def __init__(self, lengths: Sequence[int], whole: int, rows: int, every: int) -> None:
        self._sum = rows * sum(lengths)
        means = [sum(lengths[start : start + every]) / every for start in range(0, len(lengths), every)]
        self._shares = [Share(n / means[mb // every], Length(n, whole)) for mb, n in enumerate(lengths)]

    def share(self, step: int, number: int) -> Share:
        return self._shares[number % len(self._shares)]

    def tokens(self, step: int) -> int:
        return self._sum


class PackedBatches(RankBatches):
    """A `BatchSource` of microbatches with packed rows; the rest of a row is padding."""

    def __init__(self, dealer: Dealer, lowered: torch.dtype | None = None, tokens: Tokens | None = None) -> None:
        super().__init__(dealer.documents, lowered, tokens)
        self._dealer = dealer

    def read(self, step: int, mb: int, which: int) -> Tensor:
        return self._dealer.read(step, mb, which)
