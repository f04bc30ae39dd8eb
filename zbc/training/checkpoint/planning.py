"""What torch.distributed.checkpoint plans with: the parts of tensors that a rank has, or wants.

Each rank runs the planner's sequence for itself, without torch's collectives, which pickle; what ranks have to tell
each other goes over the run's board as text.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from zbc.errors import ZbcError
from zbc.training.checkpoint.folder import File
from zbc.training.checkpoint.storage import Place, SafetensorsReader, SafetensorsWriter


class Part(NamedTuple):
    """Elements of the tensor `name`, in memory order from `start` on; `shape` is that of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor


class PartsToSave(DefaultSavePlanner):
    """Plans one write per part."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {MetadataIndex(part.name, torch.Size([part.start])): part for part in parts}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(index, p.tensor.dtype, p.tensor.numel(), p.shape) for index, p in self._parts.items()])

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index].tensor


class PartsToLoad(DefaultLoadPlanner):
    """Plans the reads that fill each part, from whatever parts there are. Raises E612 where some are missing."""

    def __init__(self, parts: Iterable[Part]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = {MetadataIndex(part.name, torch.Size([part.start])): part for part in parts}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        found = {} if self.metadata is None else self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for part in self._parts.values():
            about = found.get(part.name)
            count = part.tensor.numel()
            wanted = ChunkStorageMetadata(torch.Size([part.start]), torch.Size([count]))
            reads = []
            if isinstance(about, TensorStorageMetadata):
                reads = create_read_items_for_chunk_list(part.name, about, [wanted])
            if sum(item.lengths[0] for item in reads) != count:
                text = f"run: the checkpoint lacks elements {part.start} to {part.start + count} of {part.name}"
                raise ZbcError("E612", text, hint="resume from another checkpoint")
            items += reads
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._parts[read_item.dest_index]
        return part.tensor.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ZbcError("E612", f"run: {read_item.dest_index.fqn} in the checkpoint is not a tensor")


def _item(index: MetadataIndex, dtype: torch.dtype, count: int, shape: Sequence[int]) -> WriteItem:
    chunk = ChunkStorageMetadata(index.offset or torch.Size([0]), torch.Size([count]))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size([math.prod(shape)]))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


# ---- saving --------------------------------------------------------------------------------------------------


def write_parts(writer: SafetensorsWriter, parts: Sequence[Part]) -> dict[str, Any]:
    """Write one rank's parts; what the rank that completes the checkpoint needs to know of them, as plain data."""
    planner = PartsToSave(parts)
    planner.set_up_planner({})
    writer.shapes = {part.name: list(part.shape) for part in parts}
    writer.set_up_storage_writer(is_coordinator=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    places = {result.index: result.storage_data for result in writer.write_data(plan, planner).wait()}
    told = []
    for part in parts:
        place = places[MetadataIndex(part.name, torch.Size([part.start]))]
        dtype = str(part.tensor.dtype).removeprefix("torch.")
        told.append([part.name, list(part.shape), part.start, part.tensor.numel(), dtype, place.file, place.key])
    return {"files": {name: file.model_dump() for name, file in writer.files.items()}, "parts": told}


class Whole(NamedTuple):
    """The parts of all ranks, found to make whole tensors."""

    metadata: Metadata
    results: list[list[WriteResult]]
    shapes: dict[str, list[int]]


def make_whole(parts: Sequence[Sequence[Any]]) -> Whole:
    """Put together the "parts" that every rank told. Raises E703 if they overlap or leave something out."""
    plans, results, shapes = [], [], {}
    for told in parts:
        items, found = [], []
        for name, shape, start, count, dtype, file, key in told:
            index = MetadataIndex(name, torch.Size([start]))
            shapes[name] = shape
            items.append(_item(index, getattr(torch, dtype), count, shape))
            found.append(WriteResult(index, 0, Place(file, key)))
        plans.append(SavePlan(items))
        results.append(found)
    planner = PartsToSave(())
    planner.set_up_planner({}, is_coordinator=True)
    try:
        _, metadata = planner.create_global_plan(plans)
    except ValueError as error:
        raise ZbcError("E703", f"run: the parts of a checkpoint do not make whole tensors: {error}") from error
    return Whole(metadata, results, shapes)


def complete(writer: SafetensorsWriter, whole: Whole, files: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Complete a checkpoint from what every rank told: where everything is, and the files that it is in."""
    writer.files |= {name: File.model_validate(file) for name, file in files.items()}
    writer.shapes, writer.about = whole.shapes, dict(about)
    writer.finish(whole.metadata, whole.results)


# ---- loading -------------------------------------------------------------------------------------------------


def read_parts(reader: SafetensorsReader, parts: Sequence[Part]) -> None:
    """Fill flat tensors on the CPU from a checkpoint. Raises E612 where it is damaged or lacks something."""
    planner = PartsToLoad(parts)
    metadata = reader.read_metadata()
    planner.set_up_planner({}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
