"""Storage for torch.distributed.checkpoint that holds numbers and JSON only, so that reading executes nothing.

torch's planners say which rank writes and reads which part of which tensor; its own file storage would keep that plan
in a pickle. Here parts are in safetensors files and the plan is in index.json. Everything is flat: a part is elements
`start` to `start + n` of a tensor in memory order, so a whole parameter, a piece of ZeRO-1 and a scalar are alike.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zbc.errors import ZbcError
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.blockfile import BlockFile, Blocks

_TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


class Place(NamedTuple):
    """Where a part is kept."""

    file: str
    key: str  # of the tensor in it


class SafetensorsWriter(StorageWriter):
    """Writes one rank's parts into one file, for one checkpoint after the other; `alive` is called while it does.

    `finish` is for the rank that completes the checkpoint: it takes the metadata and results of all, and remembers
    what it made of metadata that it is given again.
    """

    def __init__(self, rank: int, alive: Callable[[], None] = lambda: None) -> None:
        self._name, self._alive = f"rank-{rank:04d}.safetensors", alive
        self._folder = Path()
        self._blocks: Blocks | None = None
        self._known: tuple[Metadata, dict[str, disk.Whole]] | None = None
        self.files: dict[str, disk.File] = {}  # what was written
        self.about: dict[str, Any] = {}  # what else the index is to say
        self.shapes: dict[str, list[int]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint, in the folder `checkpoint_id`."""
        self._folder = Path(checkpoint_id or "")
        self.files.clear()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result([])
            return done
        if self._blocks is None:
            self._blocks = Blocks()
        parts = {_key(item): _tensor(planner.resolve_data(item)) for item in plan.items}
        shapes = {_key(item): self._shape(item) for item in plan.items}
        path, part = self._folder / self._name, self._folder / f".{self._name}.part"
        self.files[self._name] = _write(part, parts, shapes, self._blocks, self._alive)
        os.replace(part, path)
        disk.sync_folder(self._folder)
        done.set_result([WriteResult(i.index, parts[_key(i)].nbytes, Place(self._name, _key(i))) for i in plan.items])
        return done

    def _shape(self, item: WriteItem) -> list[int]:
        """The shape of a part in its file: its tensor's own where it is all of it."""
        count, total = _extent(item)
        return self.shapes[item.index.fqn] if count == total else [count]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._known is None or self._known[0] is not metadata:
            self._known = metadata, self._wholes(metadata, results)
        own: dict[str, Any] = {"format": disk.FORMAT, "version": disk.VERSION, "files": self.files}
        disk.write_index(self._folder, disk.Index(**own, **self.about, tensors=self._known[1]))

    def _wholes(self, metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, disk.Whole]:
        """Where everything is, by name."""
        places = {result.index: result.storage_data for found in results for result in found}
        tensors = {}
        for name, about in metadata.state_dict_metadata.items():
            if not isinstance(about, TensorStorageMetadata):
                raise ZbcError("E703", f"run: {name} in a checkpoint is not a tensor")
            parts = []
            for chunk in about.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                parts.append(disk.Part(start=chunk.offsets[0], count=chunk.sizes[0], file=place.file, key=place.key))
            dtype = str(about.properties.dtype).removeprefix("torch.")
            whole = {"dtype": dtype, "shape": self.shapes[name], "parts": parts}
            tensors[name] = disk.Whole.model_validate(whole)
        return tensors

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads a complete checkpoint; `alive` is called now and then while it does. Raises E612 where it is damaged."""

    def __init__(self, folder: Path, alive: Callable[[], None] = lambda: None) -> None:
        self.folder, self._alive = folder, alive
        self.index = disk.read_index(folder)
        self._places: dict[MetadataIndex, Place] = {}
        self._metadata: Metadata | None = None

    @property
    def tensors(self) -> Mapping[str, disk.Whole]:
        return self.index.tensors

    def check_files(self, numbers: Iterable[int] | None = None) -> None:
        """Compare files with what was written; `numbers` chooses some by their place in the sorted list."""
        names = sorted(self.index.files)
        for number in range(len(names)) if numbers is None else numbers:
            disk.check_file(self.folder, names[number], self.index.files[names[number]], self._alive)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> Metadata:
        found: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, Place] = {}
        for name, about in self.tensors.items():
            chunks = []
            for part in about.parts:
                chunks.append(ChunkStorageMetadata(torch.Size([part.start]), torch.Size([part.count])))
                places[MetadataIndex(name, torch.Size([part.start]))] = Place(part.file, part.key)
            properties = TensorProperties(dtype=NAMES[about.dtype])
            found[name] = TensorStorageMetadata(properties, torch.Size([math.prod(about.shape)]), chunks)
        return Metadata(found, storage_data=places)  # type: ignore[arg-type]  # a dict is invariant in its values

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            place = self._places[item.storage_index]
            by_file.setdefault(place.file, []).append((place.key, item))
        for name, items in by_file.items():
            try:
                with safe_open(str(self.folder / name), framework="pt") as file:
                    for key, item in items:
                        target = planner.resolve_tensor(item)
                        target.copy_(self._elements(file, name, key, item, target.dtype))
                        planner.commit_tensor(item, target)
                        self._alive()
            except (OSError, SafetensorError) as error:
                raise disk.damaged(self.folder / name, str(error)) from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _elements(self, file: Any, name: str, key: str, item: ReadItem, dtype: torch.dtype) -> Tensor:
        start, count = item.storage_offsets[0], item.lengths[0]
        found: Tensor = file.get_tensor(key).reshape(-1)
        if found.dtype != dtype or len(found) < start + count:
            raise disk.damaged(self.folder / name, f"{key} is not what {disk.INDEX} says")
        return found[start : start + count]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(item: WriteItem) -> str:
    """What a part is called in its file: its tensor's own name where it is all of it."""
    count, total = _extent(item)
    start = item.index.offset[0] if item.index.offset else 0
    return item.index.fqn if count == total else f"{item.index.fqn}[{start}:{start + count}]"


def _extent(item: WriteItem) -> tuple[int, int]:
    """Elements of a part, and of its tensor."""
    if item.tensor_data is None:
        raise ZbcError("E703", f"run: {item.index.fqn} in a checkpoint is not a tensor")
    return item.tensor_data.chunk.sizes[0], item.tensor_data.size[0]


def _tensor(found: Any) -> Tensor:
    tensor: Tensor = found
    return tensor


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _write(
    path: Path,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, list[int]],
    blocks: Blocks,
    alive: Callable[[], None],
) -> disk.File:
    """Write a safetensors file: eight bytes for the length of a JSON header, the header, raw numbers.

    Written here because its checksums are made on the way, and in blocks, which leave other threads their time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": _TYPES[tensor.dtype], "shape": shapes[key], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with BlockFile(path, blocks, alive) as file:
        file.add(memoryview(bytearray(len(text).to_bytes(8, "little") + text)))
        for tensor in tensors.values():
            here = _on_cpu(tensor)
            file.add(_bytes(here))
    return disk.File(bytes=file.bytes, block=blocks.size, crc32=file.sums)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def digest(tensor: Tensor) -> str:
    """What two tensors have in common if their bits are equal, and one in four billion of others."""
    here = _on_cpu(tensor)
    return f"{zlib.crc32(_bytes(here)):08x}"


def check_type(name: str, tensor: Tensor) -> None:
    """Raise E611 if a tensor is of a type that the files cannot hold."""
    if tensor.dtype not in _TYPES:
        text = f"run: {name} is {str(tensor.dtype).removeprefix('torch.')}, which checkpoints cannot hold"
        raise ZbcError("E611", text, hint="turn checkpoints off with checkpoint.every = 0")
