"""`zbc run --forward`: runs a dataset once through the pipeline, without a backward, into one safetensors file.

For built-in models with cross entropy a row has the log-probabilities of a sample's targets, 0 for one that does not
count; for others the model's output. Rows are in the order of the samples, as float32. The last batch is filled up with
the first samples, whose rows are dropped.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from zbc import excludes
from zbc.errors import ZbcError, unwritten
from zbc.runtime.core.bundle import shown
from zbc.runtime.core.state import Worker
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.training.building.context import Settings
from zbc.training.building.shares import log_probabilities_of
from zbc.training.data.data import Batches, Samples, all_samples, place
from zbc.training.evaluate import EvaluationRun, forward_run, forwards

_DIMS = 8  # length of a message with the number of dimensions of a row and their sizes


@dataclass
class ForwardRun(EvaluationRun):
    """The PhaseRun of a rank; `row` makes rows from output and targets, `rows` has those of a batch, by microbatch."""

    row: Callable[[Tensor, Tensor], Tensor] = lambda output, targets: output
    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    def weigh(self, worker: Worker, number: int, target: Tensor, share: float) -> float:
        self._into = self.rows.setdefault(number, [])
        self._into.append(target)
        return 1.0

    def collect(self, output: Tensor, target: Tensor) -> Tensor:
        """Stores the rows, in place of the loss. A forward that runs twice overwrites them."""
        if not isinstance(output, Tensor):
            text = f"run: --forward writes one tensor, and the last layer returns {shown(output)}"
            raise ZbcError("E505", text, hint="let the last layer return the tensor to be written")
        self._into[-1] = self.row(output, target).float()
        return output.new_zeros(())


class _Repeated:
    """Samples, with the first ones repeated after the last, `count` in all."""

    def __init__(self, samples: Samples, count: int) -> None:
        self._samples, self._count = samples, count

    def __len__(self) -> int:
        return self._count

    def inputs(self, indices: Sequence[int], group: str = "") -> Tensor:
        numbers = [i % len(self._samples) for i in indices]
        return self._samples.inputs(numbers, group) if group else self._samples.inputs(numbers)

    def targets(self, indices: Sequence[int]) -> Tensor:
        return self._samples.targets([i % len(self._samples) for i in indices])

    def digest(self) -> int:
        return self._samples.digest()


class _InOrder(Batches):
    def taken(self, position: int, count: int) -> list[int]:
        return [min(i, self.count - 1) for i in range(position, position + count)]


def forward(worker: Worker, out: Path, most: int | None = None) -> tuple[str, int]:
    """Writes the rows of the job's dataset to `out`, of `most` batches at most; returns their name and their number.

    All ranks call this together. Raises E118 for incompatible features, E504 for no samples, E606 for a file that
    cannot be written.
    """
    manifest, settings = worker.plan.manifest, Settings.of(worker.plan.manifest)
    for name, there in (
        ("shared vocabulary", manifest.vocabulary is not None),
        ("balance", manifest.balance is not None),
        ("cp", worker.layout.tell > 1),
    ):
        if there:
            raise excludes.refused("forward", name, "run")
    size, per_batch = manifest.microbatch_size, manifest.topology.batch
    batches, total = _data(worker, settings, size * per_batch)
    told = torch.tensor([total if worker.rank == 0 else 0], dtype=torch.float64, device=worker.device)
    worker.all_reduce(told, worker.everyone)
    total = int(told.item())
    count = -(-total // (size * per_batch))
    count = count if most is None else min(count, most)
    total = min(total, count * size * per_batch)
    layers = [layer.module for stage in worker.stages.values() for layer in stage.layers]
    row = log_probabilities_of(settings.model, worker.features.of(SharedLayers).group, layers)
    name = "outputs" if row is None else "log_probs"
    run = forward_run(worker, ForwardRun, batches)
    run.row = run.row if row is None else row
    loss, worker.loss, shape = worker.loss, run.collect, list[int]()
    file = _Rows(out, name, total) if worker.rank == 0 else None
    try:
        for batch in forwards(worker, run, count):
            rows = {number: torch.cat(parts, 1) if len(parts) > 1 else parts[0] for number, parts in run.rows.items()}
            run.rows.clear()
            if worker.share:
                rows.clear()
            shape = shape or _shape(worker, rows)
            found = torch.zeros(per_batch, size, *shape, device=worker.device)
            for number, values in rows.items():
                found[number] = values
            worker.all_reduce(found, worker.everyone)
            if file is not None:
                file.write(found.flatten(0, 1)[: total - batch * per_batch * size].cpu())
        if file is not None:
            file.end()
    finally:
        worker.loss = loss
        if file is not None:
            file.close()
    return name, total


def _data(worker: Worker, settings: Settings, per_batch: int) -> tuple[Batches | None, int]:
    """The data of this rank, and the number of samples, which rank 0 determines even if it reads no data."""
    if worker.batches is None and worker.rank:
        return None, 0
    samples = all_samples(settings.data, settings.model, settings.train.seed)
    total, manifest = len(samples), worker.plan.manifest
    if not total:
        text, hint = "data: there are no samples to run forward", "is data.path the right file, and long enough?"
        raise ZbcError("E504", text, where=place(settings.data, settings.model), hint=hint)
    padded = _Repeated(samples, -(-total // per_batch) * per_batch)
    batches = _InOrder(
        padded,
        seed=0,
        microbatches=manifest.topology.batch,
        size=manifest.microbatch_size,
        lowered=settings.lowered,
    )
    return batches, total


def _shape(worker: Worker, rows: dict[int, Tensor]) -> list[int]:
    """The shape of the row of one sample, from the rank with microbatch 0."""
    own = list(rows[0].shape[1:]) if 0 in rows else []
    told = torch.zeros(_DIMS, dtype=torch.float64, device=worker.device)
    told[: len(own) + 1] = torch.tensor([len(own) if 0 in rows else 0, *own], dtype=torch.float64)
    worker.all_reduce(told, worker.everyone)
    dims, *sizes = (int(size) for size in told.tolist())
    return sizes[:dims]


class _Rows:
    """A safetensors file of one float32 tensor, written batch by batch, and renamed once it is complete."""

    def __init__(self, path: Path, name: str, count: int) -> None:
        self._path, self._name, self._count, self._begun = path, name, count, False
        self._part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb")
        except OSError as error:
            raise self._unwritten(error) from error

    def write(self, rows: Tensor) -> None:
        try:
            if not self._begun:
                self._begin(list(rows.shape[1:]))
            self._file.write(rows.contiguous().numpy().tobytes())
        except OSError as error:
            raise self._unwritten(error) from error

    def _begin(self, shape: list[int]) -> None:
        every = [self._count, *shape]
        about = {"dtype": "F32", "shape": every, "data_offsets": [0, 4 * math.prod(every)]}
        header = json.dumps({self._name: about}).encode()
        header += b" " * (-len(header) % 8)
        self._file.write(struct.pack("<Q", len(header)) + header)
        self._begun = True

    def end(self) -> None:
        try:
            self._file.close()
            os.replace(self._part, self._path)
        except OSError as error:
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Removes an incomplete file."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _unwritten(self, error: OSError) -> ZbcError:
        text = f"run: cannot write {self._path}: {unwritten(self._path, error)}"
        return ZbcError("E606", text, hint="name another file with --forward")
