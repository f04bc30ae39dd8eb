"""`zbc run --forward`: runs a dataset once through the pipeline, without a backward, into one safetensors file.

For built-in models with cross entropy a row has the log-probabilities of a sample's targets, 0 for one that does not
count; for others the model's output. Rows are in the order of the samples, as float32. If samples differ in length, the
file has their `lengths`, too, and the rows are filled up to the longest possible one. The last batch is filled up with
the first ones.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbc.errors import ZbcError, unwritten
from zbc.plan.manifest import Manifest
from zbc.runtime.core.bundle import shown
from zbc.runtime.core.state import BatchSource, Worker
from zbc.runtime.core.tensors import Loss
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.words.vocabulary_state import Meeting, Unit, Vocabulary
from zbc.runtime.features.words.words import PLAIN
from zbc.topology import At
from zbc.training.building.context import Settings, steps_of
from zbc.training.data.data import Batches, Tokens, all_samples, place, tokens_of
from zbc.training.data.pairs import Samples
from zbc.training.data.split import SplitBatches, Steps
from zbc.training.data.unequal import Documents, all_documents
from zbc.training.evaluate import EvaluationRun, forward_run, forwards, total
from zbc.training.models.model import log_probabilities_of

_DIMS = 7  # of a row, at most
_HEADER = 512  # bytes of a file before its tensors
_SIZES = {"F32": 4, "I64": 8}


# The rows of a batch's samples, from those of its microbatches; and their lengths, if they are shorter than a row.
Cut = Callable[[int, Tensor], tuple[Tensor, list[int] | None]]


class InOrder(NamedTuple):
    batches: BatchSource
    most: int  # batches
    cut: Cut


def in_order(settings: Settings, manifest: Manifest, at: At) -> InOrder:
    """The data for a rank at these coordinates along INNER. Raises E504 for no samples, and as `all_samples`."""
    data, chosen, size, count = settings.data, settings.model, manifest.microbatch_size, manifest.topology.batch
    samples: Samples
    if data.items == "steps":
        samples = steps_of(settings, manifest, as_given=True)
    elif data.balance != "none":
        samples = all_documents(data, chosen, settings.train.seed)
    else:
        samples = all_samples(data, chosen, settings.train.seed)
    total, per_batch = len(samples), count * size
    if not total:
        text, hint = "data: there are no samples to run forward", "is data.path the right file, and long enough?"
        raise ZbcError("E504", text, where=place(data, chosen), hint=hint)
    tokens, lowered, most = tokens_of(manifest, chosen, at), settings.lowered, -(-total // per_batch)
    if isinstance(samples, Steps):
        given = SplitBatches(samples, seed=None, lowered=lowered, where=settings.where, tokens=tokens)
        steps = samples

        def rows_of(batch: int, rows: Tensor) -> tuple[Tensor, list[int] | None]:
            own = [(mb * size + row, one.tokens) for mb, one in enumerate(steps.step(batch)) for row in range(one.rows)]
            return rows[[row for row, _ in own]], [tokens for _, tokens in own if tokens is not None] or None

        return InOrder(given, total, rows_of)
    batches = Batches(samples, seed=None, microbatches=count, size=size, lowered=lowered, tokens=tokens)
    lengths = samples.lengths.tolist() if isinstance(samples, Documents) else None

    def cut(batch: int, rows: Tensor) -> tuple[Tensor, list[int] | None]:
        first = batch * per_batch
        return rows[: total - first], lengths and lengths[first : first + per_batch]

    return InOrder(batches, most, cut)


@dataclass
class ForwardRun(EvaluationRun):
    """The PhaseRun of a rank; `row` makes rows from output and targets, `rows` has those of a batch, by microbatch."""

    row: Callable[[Tensor, Tensor], Tensor] = lambda output, targets: output
    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    def weigh(self, worker: Worker, number: int, target: Tensor, share: float) -> float:
        self.rows.setdefault(number, []).append(target)
        return 1.0

    def criterion(self, worker: Worker, number: int, loss: Loss) -> Loss:
        return partial(self.collect, self.rows[number])

    def told(self, worker: Worker, unit: Unit, meeting: Meeting) -> None:
        (log, logit), parts = meeting.known, self.rows[worker.number(unit[0])]
        found = (logit - log).where(meeting.told.weight != 0, log.new_zeros(()))
        parts[unit[1]] = found.view(parts[unit[1]].shape).float()

    def collect(self, parts: list[Tensor], output: Tensor, target: Tensor) -> Tensor:
        """Stores the rows, in place of the loss. A forward that runs twice overwrites them."""
        if not isinstance(output, Tensor):
            text = f"run: --forward writes one tensor, and the last layer returns {shown(output)}"
            raise ZbcError("E505", text, hint="let the last layer return the tensor to be written")
        parts[-1] = self.row(output, target).float()
        return output.new_zeros(())


def forward(worker: Worker, out: Path, most: int | None = None) -> tuple[str, int]:
    """Writes the rows of the job's dataset to `out`, of `most` batches at most; returns their name and their number.
    All ranks call this together. Raises E504 for no samples, E608 for a file that cannot be written."""
    manifest = worker.phase_runs[-1].plan.manifest
    settings, shared = Settings.of(manifest), worker.features.find(Vocabulary)
    size, per_batch = manifest.microbatch_size, manifest.topology.batch
    reads = worker.batches is not None or worker.rank == 0 or manifest.balance is not None
    data = in_order(settings, manifest, worker.at) if reads else None
    (count,) = total(worker, data.most if data and worker.rank == 0 else 0)
    count = count if most is None else min(count, most)
    layers = [layer.module for stage in worker.stages.values() for layer in stage.layers]
    row = log_probabilities_of(settings.model, worker.features.of(SharedLayers).group, layers)
    name, tokens = "outputs" if row is None else "log_probs", tokens_of(manifest, settings.model, worker.at)
    last = worker.phase_runs[-1]
    run = forward_run(ForwardRun, last.plan, last.layout, worker.rank, data and data.batches)
    worker.prepare(run)
    run.row, shape = row or run.row, list[int]()
    own = () if tokens is None else (slice(None), tokens.rows)
    if shared is not None:
        shared.output.terms = PLAIN  # without z loss and label smoothing
    with nullcontext() if worker.rank else closing(_Rows(out, name)) as file:
        for batch in forwards(worker, run, count):
            rows = {n: torch.cat(parts, 1) if len(parts) > 1 else parts[0] for n, parts in run.rows.items()}
            run.rows.clear()
            if worker.share or (shared is not None and worker.rank != shared.last):
                rows.clear()
            shape = shape or _shape(worker, rows, tokens)
            found = torch.zeros(per_batch, size, *shape, device=worker.device)
            for number, values in rows.items():
                found[(number, *own)] = values
            worker.all_reduce(found, worker.everyone)
            if file is not None and data is not None:
                file.write(*data.cut(batch, found.flatten(0, 1).cpu()))
        if file is not None:
            file.end()
    return name, 0 if file is None else file.count


def _shape(worker: Worker, rows: dict[int, Tensor], tokens: Tokens | None) -> list[int]:
    """The shape of the row of one sample, from the rank with microbatch 0."""
    here = 0 in rows and not any(worker.at)
    own = list(rows[0].shape[1:]) if here else []
    if own and tokens is not None:
        own[0] = tokens.length
    dims, *sizes = total(worker, len(own), *(own + [0] * _DIMS)[:_DIMS])
    return sizes[:dims]


class _Rows:
    """A safetensors file of a float32 tensor, and maybe of int64 `lengths` of its rows; written batch by batch, and
    renamed once it is complete."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name, self.count = path, name, 0
        self._part, self._shape, self._lengths = path.with_name(f"{path.name}.part"), list[int](), list[int]()
        with self._writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb")
            self._file.write(bytes(_HEADER))

    def write(self, rows: Tensor, lengths: list[int] | None) -> None:
        self.count, self._shape = self.count + len(rows), list(rows.shape[1:])
        self._lengths += lengths or []
        with self._writing():
            self._file.write(rows.contiguous().numpy().tobytes())

    def end(self) -> None:
        every, about, at = [self.count, *self._shape], dict[str, Any](), 0
        parts = [(self._name, "F32", every), ("lengths", "I64", [self.count])]
        for name, kind, shape in parts[: 1 + bool(self._lengths)]:
            start, at = at, at + _SIZES[kind] * math.prod(shape)
            about[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, at]}
        with self._writing():
            self._file.write(struct.pack(f"<{len(self._lengths)}q", *self._lengths))
            self._file.seek(0)
            header = json.dumps(about).encode().ljust(_HEADER - 8)
            self._file.write(struct.pack("<Q", len(header)) + header)
            self._file.close()
            os.replace(self._part, self._path)

    def close(self) -> None:
        """Removes an incomplete file."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"run: cannot write {self._path}: {unwritten(self._path, error)}"
            raise ZbcError("E608", text, hint="name another file with --forward") from error
