"""A whole data set in the order of its samples, for forward runs: its batches, and the outputs of each sample.

Samples of unequal length are packed into rows as they come. The last batch is filled up with the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zbc.errors import ZbcError
from zbc.plan.manifest import Manifest
from zbc.runtime.core.state import BatchSource, Work
from zbc.runtime.features.packing import Rows
from zbc.topology import At
from zbc.training.building.context import Settings, steps_of, tokens_of
from zbc.training.data.data import Batches, SampleRange, Samples, all_samples, place
from zbc.training.data.split import SplitBatches, Steps
from zbc.training.data.unequal import Padded, all_documents

# The rows of a batch's samples, from those of its microbatches; and their lengths, if they are shorter than a row.
Cut = Callable[[int, Tensor], tuple[Tensor, list[int] | None]]


class InOrder(NamedTuple):
    batches: BatchSource
    most: int  # batches
    cut: Cut
    work: Work


class _Repeated(SampleRange):
    """The first ones are repeated after the last."""

    def _numbers(self, indices: Sequence[int]) -> list[int]:
        return [i % len(self._samples) for i in indices]


class _Batches(Batches):
    def taken(self, position: int, count: int) -> list[int]:
        return [min(i, self.count - 1) for i in range(position, position + count)]


class _Steps(SplitBatches):
    def _number(self, step: int) -> int:
        return step


class _Packed(Work):
    """Microbatches of `size` packed rows."""

    def __init__(self, packed: Padded, size: int, per_batch: int) -> None:
        self._packed, self._size, self._per_batch = packed, size, per_batch

    def rows(self, step: int, number: int) -> Rows:
        first = step * self._per_batch + number * self._size
        return tuple(self._packed.lengths(first + row) for row in range(self._size))


def in_order(settings: Settings, manifest: Manifest, at: At) -> InOrder:
    """The data for a rank at these coordinates along INNER. Raises E504 for no samples, and as `all_samples`."""
    data, chosen, size, count = settings.data, settings.model, manifest.microbatch_size, manifest.topology.batch
    samples: Samples
    if data.items == "steps":
        samples = steps_of(settings, manifest, as_given=True)
    elif data.balance != "none":
        documents = all_documents(data, chosen, settings.train.seed)
        samples = Padded(documents, chosen.seq_len or 1, packed=manifest.balance is not None)
    else:
        samples = all_samples(data, chosen, settings.train.seed)
    total, per_batch = len(samples), count * size
    if not total:
        text, hint = "data: there are no samples to run forward", "is data.path the right file, and long enough?"
        raise ZbcError("E504", text, where=place(data, chosen), hint=hint)
    if isinstance(samples, Steps):
        tokens, lowered = tokens_of(manifest, chosen, at), settings.lowered
        given = _Steps(samples, seed=0, count=count, lowered=lowered, where=settings.where, tokens=tokens)
        return InOrder(given, total, _of_steps(samples, size), Work())
    padded = _Repeated(samples, 0, -(-total // per_batch) * per_batch)
    batches = _Batches(
        padded,
        seed=0,
        microbatches=count,
        size=size,
        lowered=settings.lowered,
        tokens=tokens_of(manifest, chosen, at),
    )
    most = len(padded) // per_batch
    if not isinstance(samples, Padded):
        return InOrder(batches, most, lambda batch, rows: (rows[: total - batch * per_batch], None), Work())
    cut = _of_rows(samples, chosen.seq_len or 1, per_batch)
    return InOrder(batches, most, cut, _Packed(samples, size, per_batch))


def _of_steps(steps: Steps, size: int) -> Cut:
    def cut(batch: int, rows: Tensor) -> tuple[Tensor, list[int] | None]:
        given = [(mb * size + row, one.tokens) for mb, one in enumerate(steps.step(batch)) for row in range(one.rows)]
        lengths = [tokens for _, tokens in given if tokens is not None]
        return rows[[row for row, _ in given]], lengths or None

    return cut


def _of_rows(packed: Padded, longest: int, per_batch: int) -> Cut:
    def cut(batch: int, rows: Tensor) -> tuple[Tensor, list[int] | None]:
        first = batch * per_batch
        known = [packed.lengths(i) for i in range(first, min(len(packed), first + per_batch))]
        each = [one for row, own in zip(rows, known, strict=False) for one in row[: sum(own)].split(own)]
        padded = [functional.pad(one, (0, 0) * (one.dim() - 1) + (0, longest - len(one))) for one in each]
        return torch.stack(padded), [len(one) for one in each]

    return cut
