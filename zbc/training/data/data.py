"""What a step trains on: which samples, in which order, as tensors of one microbatch.

The order is a pure function of (seed, position): all samples once per epoch in a fresh permutation, and a step begins
at the position that the phases of the training give, which is how many samples the steps before it took. Any rank can
look up any microbatch; resuming needs one integer and nothing else. With several replicas microbatches are counted over
all, so no two replicas see the same sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec, userobject
from zbc.plan.phases import Phases
from zbc.runtime.seeding import seed_of, seeded
from zbc.runtime.tensors import TensorSpec
from zbc.training.data import corpus
from zbc.training.data.permutation import Permutation
from zbc.training.data.tokens import TokenWindows

KINDS = ("text", "tokens", "synthetic")  # made of tokens, so that a shape is known without looking
_PAIR = tuple, list
_AT_ONCE = 32  # samples that are looked up in one go, ahead of the microbatch that is asked for


class Samples(Protocol):
    """A map-style dataset that gives whole microbatches."""

    def __len__(self) -> int: ...

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        """The inputs of these samples, stacked along a new first dimension; with a `group` those for its layers, where
        samples have inputs for several."""

    def targets(self, indices: Sequence[int]) -> Tensor:
        """Their targets, stacked."""


class Windows:
    """Windows of `seq_len` tokens, one after the other; a target is its window shifted by one token."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        count = max(0, (len(tokens) - 1) // seq_len)
        self._inputs = tokens[: count * seq_len].view(count, seq_len)
        self._targets = tokens[1 : count * seq_len + 1].view(count, seq_len) if count else self._inputs

    def __len__(self) -> int:
        return len(self._inputs)

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        return self._inputs[torch.tensor(indices)].long()

    def targets(self, indices: Sequence[int]) -> Tensor:
        return self._targets[torch.tensor(indices)].long()


class RandomTokens:
    """Random tokens, made on demand from the sample's number; nothing can be learned from them."""

    def __init__(self, vocab: int, seq_len: int, seed: int, count: int = 2**20) -> None:
        self._vocab, self._seq_len, self._seed, self._count = vocab, seq_len, seed, count

    def __len__(self) -> int:
        return self._count

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        return torch.stack([self._sample(i)[:-1] for i in indices])

    def targets(self, indices: Sequence[int]) -> Tensor:
        return torch.stack([self._sample(i)[1:] for i in indices])

    def _sample(self, index: int) -> Tensor:
        source = torch.Generator().manual_seed(seed_of(self._seed, "noise", index))
        return torch.randint(self._vocab, (self._seq_len + 1,), generator=source)


class Pairs:
    """A user's map-style dataset of (input, target) tensors, all of one shape.

    The ranks of the first and the last stage each index it, so `dataset[i]` has to be the same every time; only the
    factory call may draw from torch's generator, which is seeded for it.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            text = f"data: {name} returned {type(dataset).__name__}, which has no length or cannot be indexed"
            raise ZbcError("E502", text, hint="return a map-style dataset: __len__ and __getitem__(index)")
        self._dataset, self._name = dataset, name

    def __len__(self) -> int:
        return int(userobject.call(partial(len, self._dataset), {}, f"len({self._name})", "data.kind"))

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        return self._stacked(indices, 0, group)

    def targets(self, indices: Sequence[int]) -> Tensor:
        return self._stacked(indices, 1, None)

    def _stacked(self, indices: Sequence[int], which: int, group: str | None) -> Tensor:
        """Raises E505 for samples of several shapes."""
        found = [self.pair(i, group)[which] for i in indices]
        other = next((i for i, one in zip(indices, found, strict=True) if one.shape != found[0].shape), None)
        if other is not None:
            what, shapes = (
                ("input", "target")[which],
                (list(found[0].shape), list(self.pair(other, group)[which].shape)),
            )
            text = f"data: the {what} of sample {other} of {self._name} has shape {shapes[1]}, that of sample"
            raise ZbcError("E505", f"{text} {indices[0]} {shapes[0]}", hint="pad or cut samples to one shape")
        return torch.stack(found)

    def pair(self, index: int, group: str | None = "") -> tuple[Tensor, Tensor]:
        """A sample; of inputs for several groups of layers that for one, or any where `group` is None."""
        pair = self._dataset[index]
        fit = isinstance(pair, _PAIR) and len(pair) == 2  # no generator here: this is asked for every sample
        if group != "" and fit and isinstance(pair[0], Mapping):
            group = next(iter(pair[0]), "") if group is None else group
            if group not in pair[0]:
                text = (
                    f"data: sample {index} of {self._name} has inputs for {', '.join(map(str, pair[0]))}, and none for"
                )
                raise ZbcError("E505", f"{text} {group}", hint="give a tensor for each group that reads no other one")
            pair = pair[0][group], pair[1]
        if not fit or not isinstance(pair[0], Tensor) or not isinstance(pair[1], Tensor):
            text = f"data: sample {index} of {self._name} is not a pair (input tensor, target tensor)"
            raise ZbcError("E505", text, hint="return two tensors; a class number is torch.tensor(3)")
        return pair[0], pair[1]


class SampleRange:
    """Samples `start` to `stop` of others."""

    def __init__(self, samples: Samples, start: int, stop: int) -> None:
        self._samples, self._start, self._stop = samples, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        return self._samples.inputs([self._start + i for i in indices], group)

    def targets(self, indices: Sequence[int]) -> Tensor:
        return self._samples.targets([self._start + i for i in indices])


class Batches:
    """The microbatches of every step. Inputs in floating point come as `lowered`, if that is given.

    `phases` says where steps begin; by default all are of `microbatches`, which else is the most that one has.
    Raises E504, at `where`, if the samples do not make one step.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        seed: int,
        microbatches: int,
        size: int,
        phases: Phases | None = None,
        lowered: torch.dtype | None = None,
        where: str | None = None,
    ) -> None:
        needed, self._count = microbatches * size, len(samples)
        if self._count < needed:
            parts = f"{microbatches} microbatch{'es' * (microbatches > 1)} of {size}"
            text = f"data: {self._count} samples, one step needs {needed} ({parts})"
            hint = "give more data, shorter sequences, or fewer or smaller microbatches"
            raise ZbcError("E504", text, where=where, hint=hint)
        self.phases = phases or Phases.even(needed)
        self._lowered = lowered
        self._samples, self._seed, self._size = samples, seed, size
        self._orders: dict[int, Permutation] = {}
        self._begun = self.phases, 0, self.phases.position(0)
        self._next: tuple[int, list[int]] = 0, []  # a position, the numbers of the samples from there on

    @property
    def count(self) -> int:
        """How many samples there are."""
        return self._count

    def follow(self, phases: Phases) -> None:
        """Have the steps begin where `phases` says."""
        self.phases = phases

    def close(self) -> None:
        """There is nothing to end."""

    def inputs(self, step: int, mb: int, group: str = "") -> Tensor:
        """The model input of a microbatch, on the CPU; that for a `group` of layers, where there are several."""
        numbers = self.indices(step, mb)
        x = self._samples.inputs(numbers, group) if group else self._samples.inputs(numbers)
        return x if self._lowered is None or not x.is_floating_point() else x.to(self._lowered)

    def targets(self, step: int, mb: int) -> Tensor:
        """Its target, on the CPU."""
        return self._samples.targets(self.indices(step, mb))

    def indices(self, step: int, mb: int) -> list[int]:
        """The numbers of its samples."""
        phases, known, start = self._begun
        if known != step or phases is not self.phases:
            start = self.phases.position(step)
            self._begun = self.phases, step, start
        size, (first, numbers) = self._size, self._next
        place = start + mb * size
        if not first <= place <= first + len(numbers) - size:
            first, numbers = self._next = place, self.taken(place, max(size, _AT_ONCE))
        return numbers[place - first : place - first + size]

    def taken(self, position: int, count: int) -> list[int]:
        """The numbers of `count` samples from a position on."""
        epoch, place = divmod(position, self._count)
        found: list[int] = []
        while len(found) < count:
            order, end = self._order(epoch), min(self._count, place + count - len(found))
            found += [order[i] for i in range(place, end)]
            epoch, place = epoch + 1, 0
        return found

    def _order(self, epoch: int) -> Permutation:
        order = self._orders.get(epoch)
        if order is None:
            order = self._orders[epoch] = Permutation(self._count, seed_of(self._seed, "epoch", epoch))
        return order


def build_samples(data: spec.Data, model: spec.Model, seed: int) -> Samples:
    """The samples of `[data]` to train on. Raises E501 to E505, E530 to E532."""
    samples = _all_samples(data, model, seed)
    kept = _kept(data, samples)
    return SampleRange(samples, 0, len(samples) - kept) if kept else samples


def build_validation(data: spec.Data, model: spec.Model, seed: int) -> Samples | None:
    """The samples to evaluate on, which are never trained on; None if the job keeps none. Raises as `build_samples`."""
    if data.validation_path is not None:
        return _all_samples(data.model_copy(update={"path": data.validation_path}), model, seed)
    if not data.validation:
        return None
    samples = _all_samples(data, model, seed)
    return SampleRange(samples, len(samples) - _kept(data, samples), len(samples))


def place(data: spec.Data, model: spec.Model, *, kept: bool = False) -> str:
    """What the samples of a training are made of, or of those `kept` for evaluation, in the words of the job."""
    key, path = ("path", data.path)
    if kept and data.validation_path is not None:
        key, path = ("validation_path", data.validation_path)
    named = f"data.kind = {data.kind}" if path is None else f"data.{key} = {_listed(path)}"
    if data.kind in KINDS:
        named += f", in samples of {model.seq_len} tokens"
    if data.validation:
        named += f", {'of which' if kept else 'less what'} data.validation = {data.validation:g} keeps"
    return named


def _listed(path: str | list[str]) -> str:
    return path if isinstance(path, str) else ", ".join(path[:3]) + ", ..." * (len(path) > 3)


def _kept(data: spec.Data, samples: Samples) -> int:
    return math.ceil(data.validation * len(samples))


def _all_samples(data: spec.Data, model: spec.Model, seed: int) -> Samples:
    if data.kind not in KINDS:
        factory = userobject.load(data.kind, "data.kind")
        with seeded(seed_of(seed, "data")):  # the first and the last stage's rank build the same dataset
            return Pairs(userobject.call(factory, data.args, data.kind, "data.kind"), data.kind)
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


def input_spec(data: spec.Data, model: spec.Model, samples: Samples | None, size: int, group: str = "") -> TensorSpec:
    """The model input of one microbatch, or that for a `group`; a factory's dataset is asked for its first sample."""
    if data.kind not in KINDS and samples is not None:
        if len(samples) == 0:
            text = f"data: {data.kind} returned a dataset without samples"
            raise ZbcError("E504", text, hint="its __len__ is 0: does it find its files?")
        name = f"{data.kind}, asked for its first sample,"
        first = userobject.call(partial(samples.inputs, [0], group), {}, name, "data.kind")
        return TensorSpec((size, *first.shape[1:]), first.dtype)
    return TensorSpec((size, _token_length(data, model)), torch.int64)


def _token_length(data: spec.Data, model: spec.Model) -> int:
    if model.seq_len is None:
        raise ZbcError("E150", f"config: {data.kind} data need model.seq_len")
    return model.seq_len
