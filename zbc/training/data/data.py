"""Training data: the samples of each step, their order, and microbatches as tensors.

The order is a pure function of (seed, position): all samples once per epoch in a new permutation. A step begins at the
position given by the phases of the training, the number of samples of all steps before it. Any rank can look up any
microbatch; resuming needs only one integer. Microbatches are numbered over all replicas, so no two replicas get the
same sample.
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence, Sized
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec, userobject
from zbc.plan.manifest import Manifest
from zbc.plan.phases import Phases
from zbc.runtime.core.state import BatchSource
from zbc.runtime.core.tensors import Batch, TensorSpec, each
from zbc.runtime.features.context_parallel import rows_in, rows_of
from zbc.runtime.seeding import reading, seed_of
from zbc.training.data import corpus
from zbc.training.data.chat import CHAT, Chat
from zbc.training.data.counted import Weights
from zbc.training.data.pairs import ANY, Samples, UnfitError, Words, pair_of
from zbc.training.data.tokens import TokenWindows

KINDS = ("text", "tokens", "synthetic")  # made of tokens, so that shapes are known without reading
_ORDERS = 4  # cached epochs
_KEPT = 1024  # cached targets of samples whose input was read, at most about this number
_STEPS = 3  # cached steps


class Windows(Samples):
    """Consecutive windows of `seq_len` tokens; a target is its window shifted by one token."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        count = max(0, (len(tokens) - 1) // seq_len)
        self._inputs = tokens[: count * seq_len].view(count, seq_len)
        self._targets = tokens[1 : count * seq_len + 1].view(count, seq_len) if count else self._inputs

    def __len__(self) -> int:
        return len(self._inputs)

    def rows(self, indices: Sequence[int], which: int) -> Tensor:
        return (self._inputs, self._targets)[which][torch.tensor(indices) % len(self)].long()


class RandomTokens(Samples):
    """Random tokens, made on demand from the sample's number; there is nothing to learn from them."""

    def __init__(self, vocab: int, seq_len: int, seed: int, count: int = 2**20) -> None:
        self._vocab, self._seq_len, self._seed, self._count = vocab, seq_len, seed, count

    def __len__(self) -> int:
        return self._count

    def rows(self, indices: Sequence[int], which: int) -> Tensor:
        return torch.stack([self._sample(i)[which:][: self._seq_len] for i in indices])

    def _sample(self, index: int) -> Tensor:
        source = torch.Generator().manual_seed(seed_of(self._seed, "noise", index % self._count))
        return torch.randint(self._vocab, (self._seq_len + 1,), generator=source)


class Pairs(Samples):
    """A user's map-style dataset of pairs (see pairs.py), all of one shape.

    The ranks of the first and the last stage each index it. Generators of torch, Python and numpy are seeded with
    `seed`, the epoch and the sample, so that both ranks draw the same; otherwise it must be deterministic.
    With `both`, for a rank that reads inputs and targets, a target is cached when its input is read.
    """

    def __init__(self, dataset: Any, name: str, seed: int, *, both: bool = False, words: Words = ANY) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            text = f"data: {name} returned {type(dataset).__name__}, which has no length or cannot be indexed"
            raise ZbcError("E502", text, hint="return a map-style dataset: __len__ and __getitem__(index)")
        self._dataset, self._name, self._seed, self._both, self.words = dataset, name, seed, both, words
        self._targets: dict[int, Any] = {}  # of samples whose input was read, by their number

    def __len__(self) -> int:
        return self._count

    @functools.cached_property
    def _count(self) -> int:
        return int(userobject.call(partial(len, self._dataset), {}, f"len({self._name})", "data.kind"))

    def rows(self, indices: Sequence[int], which: int) -> Any:
        found = [self._targets.pop(number, None) if which else None for number in indices]
        if any(one is None for one in found):
            pairs = self.read(indices)
            found = [pair[which] for pair in pairs]
            if self._both and not which and len(self._targets) < _KEPT:
                kept = zip(indices, pairs, strict=True)  # copies: a dataset may use their memory for the next sample
                self._targets |= {number: each(Tensor.clone, target) for number, (_, target) in kept}
        return self._stacked(indices, which, found)

    def digest(self) -> int:
        seen = hashlib.sha256()
        for index in sorted({0, len(self) // 2, len(self) - 1} if len(self) else ()):
            first, second = (b"".join(map(_raw, self._looked(index))) for _ in range(2))
            if first != second:
                text = f"data: two looks at sample {index} of {self._name} differ"
                hint = "draw from torch's, Python's or numpy's own generator, which are seeded for each sample"
                raise ZbcError("E505", text, hint=hint)
            seen.update(first)
        return int.from_bytes(seen.digest()[:5], "big")

    def _looked(self, index: int) -> list[Tensor]:
        """All tensors of a sample."""
        return [tensor for part in self._pair(index, self._look([index])[0]) for tensor in tensors_in(part)]

    def _stacked(self, indices: Sequence[int], which: int, found: list[Any]) -> Any:
        """Stacks tensors of samples, by name. Raises E505 if they have several shapes, or ids that the model does not
        have."""
        shapes = [each(lambda tensor: list(tensor.shape), one) for one in found]
        other = next((k for k, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is not None:
            what, numbers = ("input", "target")[which], [indices[k] % len(self) for k in (other, 0)]
            text = f"data: the {what} of sample {numbers[0]} of {self._name} has shape {shapes[other]}, that of sample"
            hint = "pad or cut samples to one shape, with the same entries"
            raise ZbcError("E505", f"{text} {numbers[1]} {shapes[0]}", hint=hint)
        name = lambda row: f"sample {indices[row] % len(self)} of {self._name}"  # noqa
        if isinstance(found[0], Tensor):
            return self.words.checked(torch.stack(found), which, name)
        return {entry: self.words.checked(torch.stack([x[entry] for x in found]), which, name) for entry in found[0]}

    def _look(self, numbers: Sequence[int]) -> list[Any]:
        with reading() as seed:
            return [self._item(number, seed) for number in numbers]

    def _item(self, number: int, seed: Callable[[int], None]) -> Any:
        epoch, index = divmod(number, len(self))
        seed(seed_of(self._seed, "sample", epoch, index))
        return self._dataset[index]

    def read(self, numbers: Sequence[int]) -> list[tuple[Any, Any]]:
        """Samples as pairs of one tensor each, or of several by name."""
        with reading() as seed:
            items = [self._item(number, seed) for number in numbers]
            return [self._pair(n % len(self), item) for n, item in zip(numbers, items, strict=True)]

    def _pair(self, index: int, sample: Any) -> tuple[Any, Any]:
        try:
            return pair_of(sample, self.words.named)
        except UnfitError as error:
            text = f"data: sample {index} of {self._name} {error}"
            hint = "return (input, target), tensors, arrays or numbers; or a mapping with input_ids and labels"
            if self.words.named is not None:
                hint = "return (input, target), or a mapping by the names that the layers and the loss take"
            raise ZbcError("E505", text, hint=hint) from None


def tensors_in(batch: Batch) -> list[Tensor]:
    return [batch] if isinstance(batch, Tensor) else [batch[name] for name in sorted(batch)]


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class SampleRange(Samples):
    def __init__(self, samples: Samples, start: int, stop: int) -> None:
        self._samples, self._start, self._stop = samples, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def rows(self, indices: Sequence[int], which: int) -> Any:
        count, total = len(self), len(self._samples)
        return self._samples.rows([self._start + i % count + i // count * total for i in indices], which)

    def digest(self) -> int:
        return self._samples.digest()


class Tokens(NamedTuple):
    """The positions of a rank's tokens in a sequence of `length`, and in shorter rows if there are any."""

    rows: Tensor
    length: int
    shorter: Callable[[int], Tensor] | None = None

    def at(self, length: int) -> Tensor:
        """The positions of its tokens in rows of `length` tokens."""
        return self.rows if length == self.length or self.shorter is None else self.shorter(length)

    def of(self, whole: Tensor) -> Tensor:
        """Its rows of a tensor (batch, length, ..). Raises E505 for other sequences."""
        if whole.dim() < 2 or (whole.shape[1] != self.length and self.shorter is None):
            text = f"run: a tensor {list(whole.shape)} of the data has no {self.length} tokens for ranks to share out"
            raise ZbcError("E505", text, hint="samples of model.seq_len tokens, for evaluation too; or parallel.cp = 1")
        return whole[:, self.at(whole.shape[1])]


def tokens_of(manifest: Manifest, model: spec.Model, at: Sequence[int]) -> Tokens | None:
    """The tokens of each sequence that a rank at these coordinates has, with context parallelism."""
    ranks, cuts, length = manifest.topology.along("cp"), manifest.cuts, model.seq_len or 0
    if ranks == 1:
        return None
    shorter = partial(rows_in, place=at[0], ranks=ranks) if manifest.tokens else None
    return Tokens(rows_of(cuts or [0, length], at[0], ranks), length, shorter)


class RankBatches(BatchSource):
    """Microbatches of `samples`, of which a rank has its `tokens`, if not all; real inputs are cast to `lowered`, if
    any. On ranks that compute losses they may have `weights`."""

    weights: Weights | None = None

    def __init__(self, samples: Samples, lowered: torch.dtype | None, tokens: Tokens | None) -> None:
        self._samples, self._lowered, self._tokens = samples, lowered, tokens
        self._kept: dict[int, dict[int, Batch]] = {}  # by step, targets that were counted, until they are requested

    @abstractmethod
    def read(self, step: int, mb: int, which: int) -> Any:
        """The inputs (`which` = 0) or the targets (1) of a microbatch with the tokens of all context parallel ranks."""

    @property
    def count(self) -> int:
        return len(self._samples)

    def digest(self) -> int:
        return self._samples.digest()

    def follow(self, phases: Phases) -> None:
        self._kept.clear()
        if self.weights is not None:
            self.weights.of.cache_clear()

    def counts(self, step: int, mb: int) -> tuple[float, float]:
        """The numbers of targets that count: of this rank's tokens, and of all tokens of a microbatch."""
        assert self.weights is not None
        whole, count = self.read(step, mb, 1), self.weights.count
        target, every = self.own(whole), count(whole)
        if self.weights.own(step, mb):
            self._kept.setdefault(step, {})[mb] = target
            while len(self._kept) > _STEPS:
                del self._kept[next(iter(self._kept))]
        return every if target is whole else count(target), every

    def weight(self, step: int, mb: int) -> float | None:
        return None if self.weights is None else self.weights.of(step, self.counts)[mb]

    def inputs(self, step: int, mb: int) -> Any:
        """The model input of a microbatch, on the CPU."""
        x, low = self.own(self.read(step, mb, 0)), self._lowered
        return x if low is None else each(lambda t: t.to(low) if t.is_floating_point() else t, x)

    def targets(self, step: int, mb: int) -> Any:
        if self.weights is not None:
            self.weights.of(step, self.counts)
        known = self._kept.get(step, {}).pop(mb, None)
        return self.own(self.read(step, mb, 1)) if known is None else known

    def own(self, whole: Any) -> Any:
        """This rank's part of `whole`."""
        return whole if self._tokens is None else self._tokens.of(whole)


class Batches(RankBatches):
    """The microbatches of every step.

    `seed`: of the order; None: that of the samples, with the first ones once more after the last.
    `phases` has the positions of steps; by default all have `microbatches`, otherwise that is the maximum of a step.
    `lengths`: those of the rows of each microbatch of a replica, to which sequences are cut.
    Raises E504, at `where`, if there are not enough samples for one step.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int | None,
        microbatches: int,
        size: int,
        phases: Phases | None = None,
        lowered: torch.dtype | None = None,
        where: str | None = None,
        tokens: Tokens | None = None,
        lengths: Sequence[int] = (),
    ) -> None:
        needed, self._count = microbatches * size, len(samples)
        if seed is not None and self._count < needed:
            parts = f"{microbatches} microbatch{'es' * (microbatches > 1)} of {size}"
            text = f"data: {self._count} samples, one step needs {needed} ({parts})"
            hint = "give more data, shorter sequences, or fewer or smaller microbatches"
            raise ZbcError("E504", text, where=where, hint=hint)
        self.phases = phases or Phases.even(needed)
        super().__init__(samples, lowered, tokens)
        self._lengths, self._seed, self._size = lengths, seed, size
        self._order = lru_cache(_ORDERS)(self._shuffled)

    def follow(self, phases: Phases) -> None:
        super().follow(phases)
        self.phases = phases

    def read(self, step: int, mb: int, which: int) -> Any:
        whole = self._samples.rows(self.numbers(step, mb), which)
        return whole[:, : self._lengths[mb % len(self._lengths)]] if self._lengths else whole

    def numbers(self, step: int, mb: int) -> list[int]:
        """The numbers over epochs (see `Samples`) of the samples of a microbatch."""
        return self.taken(self.phases.position(step) + mb * self._size, self._size)

    def taken(self, position: int, count: int) -> list[int]:
        """Those of `count` samples from a position on."""
        epoch, place = divmod(position, self._count)
        found: list[int] = []
        while len(found) < count:
            order, end = self._order(epoch), min(self._count, place + count - len(found))
            found += [order[i] + epoch * self._count for i in range(place, end)]
            epoch, place = epoch + 1, 0
        return found

    def _shuffled(self, epoch: int) -> Sequence[int] | Permutation:
        if self._seed is None:
            return range(self._count)
        return Permutation(self._count, seed_of(self._seed, "epoch", epoch))


def build_samples(data: spec.Data, model: spec.Model, seed: int, *, both: bool = False) -> Samples:
    """The training samples of `[data]`; `both`: this rank reads inputs and targets. Raises E501 to E505."""
    samples = all_samples(data, model, seed, both=both)
    kept = kept_of(data, samples)
    return SampleRange(samples, 0, len(samples) - kept) if kept else samples


def build_validation(
    data: spec.Data, model: spec.Model, seed: int, every: Callable[..., Samples] | None = None, name: str = ""
) -> Samples | None:
    """The validation samples of the set `name`, which are never trained on, of `every` one, by default `all_samples`;
    None if the job has none. Raises as `build_samples`."""
    every = every or all_samples
    if (path := data.sets[name]) is not None:
        return every(data.model_copy(update={"path": path, "validation": 0.0}), model, seed)
    if not data.kept:
        return None
    samples = every(data, model, seed)
    return SampleRange(samples, len(samples) - kept_of(data, samples), len(samples))


def place(data: spec.Data, model: spec.Model, *, kept: str | None = None) -> str:
    """The source of the training samples, or of those of a set `kept` for evaluation, by the job's keys."""
    key, path = ("path", data.path)
    if kept is not None and data.sets[kept] is not None:
        key, path = (f"validation{kept and '.'}{kept}", data.sets[kept])
    listed = path if path is None or isinstance(path, str) else ", ".join(path[:3]) + ", ..." * (len(path) > 3)
    named = f"data.kind = {data.kind}" if path is None else f"data.{key} = {listed}"
    if data.kind in KINDS:
        named += f", in samples of {model.seq_len} tokens"
    if data.kept:
        named += f", {'less what' if kept is None else 'of which'} data.validation = {data.kept:g} keeps"
    return named


def kept_of(data: spec.Data, samples: Sized) -> int:
    """The number of samples kept for validation: the last ones."""
    return math.ceil(data.kept * len(samples))


def build_dataset(data: spec.Data, model: spec.Model, seed: int) -> Any:
    """A user's dataset; its factory draws the same random numbers on all ranks. Raises E501 to E505."""
    if data.kind == CHAT:
        return Chat.of(data, model)
    factory = userobject.load(data.kind, "data.kind")
    with reading() as begin:
        begin(seed_of(seed, "data"))
        return userobject.call(factory, data.args, data.kind, "data.kind")


def all_samples(data: spec.Data, model: spec.Model, seed: int, *, both: bool = False) -> Samples:
    """All samples, for training and validation."""
    if data.kind not in KINDS:
        return Pairs(build_dataset(data, model, seed), data.kind, seed, both=both, words=Words.of(model, data))
    seq_len = _token_length(data, model)
    if data.kind == "synthetic":
        if model.vocab is None:
            raise ZbcError("E150", "config: synthetic data are tokens and need model.vocab")
        return RandomTokens(model.vocab, seq_len, seed)
    if data.kind == "tokens":
        paths = [data.path] if isinstance(data.path, str) else data.path or []
        return TokenWindows(paths, data.dtype, seq_len, model.vocab)
    raw = corpus.read(data.path)
    tokens = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return Windows(tokens, seq_len)


def input_spec(data: spec.Data, model: spec.Model, samples: Samples | None, size: int) -> Any:
    """The spec of the model input of one microbatch, or of each of its entries by name; reads the first sample of a
    factory's dataset."""
    if data.kind not in KINDS and samples is not None:
        if len(samples) == 0:
            text = f"data: {data.kind} returned a dataset without samples"
            raise ZbcError("E504", text, hint="its __len__ is 0: does it find its files?")
        name = f"{data.kind}, asked for its first sample,"
        first = userobject.call(partial(samples.inputs, [0]), {}, name, "data.kind")
        return each(lambda t: TensorSpec((size, *t.shape[1:]), t.dtype), first)
    return TensorSpec((size, _token_length(data, model)), torch.int64)


def _token_length(data: spec.Data, model: spec.Model) -> int:
    if model.seq_len is None:
        raise ZbcError("E150", f"config: {data.kind} data need model.seq_len")
    return model.seq_len


_ROUNDS = 6
_MASK = 2**64 - 1
_REMEMBERED = 4096  # values of a round, all for up to 2**24 items: mixing takes ten times as long as a look-up


class Permutation:
    """A permutation of range(count): `order[i]`, a pure function of (count, seed); made on demand, in microseconds.

    A Feistel network permutes the numbers below the smallest square of a power of two that covers them; results that
    are too large go through it again, so that it stays a permutation (cycle walking; at most four passes on average).
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        keys = (_mix(seed + round_ * 0x9E3779B97F4A7C15) for round_ in range(1, _ROUNDS + 1))
        self._rounds = [lru_cache(_REMEMBERED)(partial(_round, key, self._low)) for key in keys]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        half, low, rounds, count = self._half, self._low, self._rounds, self._count
        while True:
            left, right = index >> half, index & low
            for mixed in rounds:
                left, right = right, left ^ mixed(right)
            index = left << half | right
            if index < count:
                return index


def _round(key: int, low: int, half: int) -> int:
    return _mix(half ^ key) & low


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `x`."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
