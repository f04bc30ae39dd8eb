"""Steps that a user's dataset has split into microbatches of its own: `data.items = "steps"`.

An item of the dataset is a step, a list of (input, target, weight) for each microbatch of all replicas. A microbatch
has up to `microbatch_size` rows; rows of built-in models have up to `seq_len` tokens. Each is padded to one shape, and
its loss counts the real rows only: targets of padding are ignored, or the output is cut to the real targets. The loss
of a step is the weighted mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.plan.manifest import Manifest
from zbc.runtime.core.bundle import taken_apart
from zbc.runtime.core.tensors import IGNORED, Batch, Loss, each
from zbc.training.data.counted import counting
from zbc.training.data.data import Batches, Pairs, RankBatches, Tokens, tensors_in
from zbc.training.data.pairs import ANY, UnfitError, Words, pair_of

_KEPT = 3  # cached steps


class Microbatch(NamedTuple):
    """One of a step; `rows` and `tokens` without padding."""

    inputs: Batch
    target: Tensor
    weight: float
    rows: int
    tokens: int | None  # of each row, if rows may be shorter


class Steps(Pairs):
    """A user's dataset of steps, each of `count` microbatches of up to `size` rows.

    `length`: of rows that may be shorter; None: all have one shape. `tokens`: of the rows of each microbatch of a
    replica, if unequal: longer microbatches are put in longer places. `ignores`: targets of padding are ignored.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        seed: int,
        *,
        count: int,
        size: int,
        length: int | None,
        ignores: bool,
        tokens: Sequence[int] = (),
        words: Words = ANY,
    ) -> None:
        super().__init__(dataset, name, seed, words=words)
        self.size, self._microbatches, self._length, self._ignores = size, count, length, ignores
        self._tokens = tokens
        self.step = lru_cache(_KEPT)(self._read)

    def _read(self, number: int) -> list[Microbatch]:
        """The microbatches of a step, padded. Raises E505 for others than the plan has."""
        return self._split(number % len(self), *self._look([number]))

    def rows(self, indices: Sequence[int], which: int) -> Any:
        """Those of the first microbatch of the first of these steps."""
        first = self.step(indices[0])[0]
        return first.target if which else each(lambda t: self._filled(t, 0, self._length), first.inputs)

    def _looked(self, index: int) -> list[Tensor]:
        return [t for one in self._split(index, *self._look([index])) for t in (*tensors_in(one.inputs), one.target)]

    def _split(self, index: int, item: Any) -> list[Microbatch]:
        where = f"data: step {index} of {self._name}"
        if not isinstance(item, Sequence) or len(item) != self._microbatches:
            has = f"has {len(item)}" if isinstance(item, Sequence) else f"is {type(item).__name__}, a list of"
            text = f"{where} {has} microbatches, a step of the plan has {self._microbatches}"
            hint = "return a list of (input, target, weight), one for each of schedule.microbatches times parallel.dp"
            raise ZbcError("E505", text, hint=hint)
        found = [self._microbatch(f"{where}, microbatch {mb},", one) for mb, one in enumerate(item)]
        if not self._tokens:
            return [self._padded(one, self._length) for one in found]
        rooms = [*self._tokens] * (len(found) // len(self._tokens))
        found.sort(key=lambda one: -_tokens_of(one))
        for place, one in zip(sorted(range(len(rooms)), key=lambda k: -rooms[k]), [*found], strict=True):
            found[place] = one
        if any(_tokens_of(one) > room for one, room in zip(found, rooms, strict=True)):
            most = [max(room, *map(_tokens_of, found[k :: len(self._tokens)])) for k, room in enumerate(self._tokens)]
            text = f"{where} has longer microbatches than schedule.tokens, the longest in the place of the longest"
            raise ZbcError("E505", text, hint=f"cut them, or plan with schedule.tokens = {most}, for this step")
        return [self._padded(one, room) for one, room in zip(found, rooms, strict=True)]

    def _microbatch(self, where: str, one: Any) -> Microbatch:
        if not isinstance(one, Sequence) or len(one) != 3:
            raise ZbcError("E505", f"{where} is not (input, target, weight)", hint="return tuples of three")
        try:
            x, target = pair_of(one[:2])
            weight = float(one[2])
        except (UnfitError, TypeError, ValueError) as error:
            raise ZbcError("E505", f"{where} {error}", hint="tensors or arrays, and a number as weight") from None
        if not 0 <= weight < math.inf:
            raise ZbcError("E505", f"{where} has the weight {weight:g}", hint="weights are finite numbers from 0 on")
        inputs = tensors_in(x)
        sizes = {len(t) if t.dim() else 0 for t in (*inputs, target)}
        if len(sizes) > 1 or not 1 <= max(sizes) <= self.size:
            text = f"{where} has inputs and targets of {' and '.join(map(str, sorted(sizes)))} rows"
            hint = f"as many rows of each, at least one and at most schedule.microbatch_size = {self.size}"
            raise ZbcError("E505", text, hint=hint)
        most = max([t.shape[1] for t in (*inputs, target) if t.dim() > 1], default=0)
        if self._length is not None and most > self._length:
            text = f"{where} has rows of {most} tokens, model.seq_len is {self._length}"
            raise ZbcError("E505", text, hint="cut them, or set model.seq_len to the longest")
        for which, tensors in enumerate((inputs, [target])):
            for tensor in tensors:
                self.words.checked(tensor, which, lambda row: f"{where[6:]} row {row},")
        if self._ignores and not (target != IGNORED).any():
            weight = 0.0
        tokens = None if self._length is None else inputs[0].shape[1]
        return Microbatch(x, target, weight, len(target), tokens)

    def _padded(self, one: Microbatch, length: int | None) -> Microbatch:
        target = self._filled(one.target, IGNORED, length) if self._ignores else one.target
        return one._replace(inputs=each(lambda t: self._filled(t, 0, length), one.inputs), target=target)

    def _filled(self, t: Tensor, padding: int, length: int | None) -> Tensor:
        shape = [self.size, *t.shape[1:]]
        if length is not None and t.dim() > 1:
            shape[1] = length
        if shape == list(t.shape):
            return t
        found = t.new_full(shape, padding)
        found[tuple(slice(n) for n in t.shape[:2])] = t
        return found

    def cut(self, loss: Loss) -> Loss:
        """A loss that gets outputs without padding; the same where targets of padding are ignored."""
        dims = 1 if self._length is None else 2

        def cut(output: Any, target: Tensor) -> Tensor:
            tensors, form = taken_apart(output)
            own = tuple(slice(n) for n in target.shape[:dims])
            kept = [t[own[: t.dim()]] if t.dim() and len(t) == self.size else t for t in tensors]
            whole: Any = tuple(kept) if form is None else form.around(kept)
            return loss(whole, target)

        return loss if self._ignores else cut


def _tokens_of(one: Microbatch) -> int:
    return max([t.shape[1] for t in tensors_in(one.inputs) if t.dim() > 1], default=1)


def count_of_step(manifest: Manifest) -> int:
    """The microbatches of a step of a job, also where a plan was made of it that has only some of them."""
    schedule, parallel = (manifest.planning.get(name, {}) for name in ("schedule", "parallel"))
    planned = schedule.get("microbatches", 0) * parallel.get("dp", 1)
    return int(planned) or manifest.topology.batch


class SplitBatches(RankBatches):
    """Microbatches of steps; the order of an epoch's steps is that of samples."""

    def __init__(
        self, steps: Steps, *, seed: int | None, lowered: torch.dtype | None, where: str, tokens: Tokens | None = None
    ) -> None:
        """`seed`: as of `Batches`; `tokens`: this rank's tokens of each sequence, if ranks share them."""
        super().__init__(steps, lowered, tokens)
        self._steps = steps
        self._order = Batches(steps, seed=seed, microbatches=1, size=1, where=where)

    def read(self, step: int, mb: int, which: int) -> Any:
        found = self._microbatch(step, mb)
        return found.target if which else found.inputs

    def counts(self, step: int, mb: int) -> tuple[float, float]:
        """As the dataset weighs a microbatch."""
        found = self._microbatch(step, mb)
        if self._tokens is None:
            return found.weight, found.weight
        own, every = counting(self.own(found.target)), counting(found.target)
        return found.weight * own / (every or 1), found.weight

    def _microbatch(self, step: int, mb: int) -> Microbatch:
        found = self._steps.step(*self._order.taken(step, 1))
        return found[mb % len(found)]  # a profile runs more of them
