"""A rank's file of tensors, and the assembly of a tensor's parts from many files.

A part is elements `start` to `start + n` of a tensor in memory order: a whole parameter, a piece of ZeRO-1 and a scalar
are treated the same. Reading executes nothing: files hold a JSON header and numbers.

Why not the storage of torch.distributed.checkpoint (2.13)? FileSystemWriter pickles its index.
HuggingFaceStorageWriter writes safetensors, but
- it keeps only one of two pieces of a tensor in one file: its key is the name alone;
- it writes neither index nor checksums: the length of a tensor depends on the files that happen to exist;
- it makes one `bytes` object of a rank's whole state, holding the GIL while steps run.
For flat parts its planners would only add the intersection of two intervals, for a second of imports.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zbc.errors import ZbcError
from zbc.host.linefile import no_link
from zbc.training.checkpoint import folder as disk

TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in get_args(disk.Type)}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_SYNCED = 2**28  # bytes between two fsyncs, so that none takes long


class TensorPart(NamedTuple):
    """Elements of the tensor `name` from `start` on; `shape` is the shape of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor

    @property
    def key(self) -> str:
        """Its name in its file: the tensor's own name if it is the whole tensor."""
        return self.name if self._whole else f"{self.name}[{self.start}:{self.start + self.tensor.numel()}]"

    @property
    def kept_shape(self) -> list[int]:
        return list(self.shape) if self._whole else [self.tensor.numel()]

    @property
    def _whole(self) -> bool:
        return self.tensor.numel() == math.prod(self.shape)


def check_type(name: str, tensor: Tensor) -> None:
    """Raises E611 if a tensor has a type that the files cannot store."""
    if tensor.dtype not in _NAMES:
        text = f"run: {name} is {str(tensor.dtype).removeprefix('torch.')}, which checkpoints cannot hold"
        raise ZbcError("E611", text, hint="turn checkpoints off with checkpoint.every = 0")


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, on the CPU and contiguous."""
    return tensor.detach().to("cpu").reshape(-1).view(torch.uint8).numpy().data


def digest(tensor: Tensor) -> str:
    """A checksum (CRC-32) of the bits of a tensor."""
    return f"{zlib.crc32(_bytes(tensor)):08x}"


# ---- writing -------------------------------------------------------------------------------------------------


def write_parts(
    folder: Path, rank: int, parts: Sequence[TensorPart], alive: Callable[[], None] = lambda: None
) -> disk.Contents:
    """Writes one rank's file, if it has any parts; `alive` is called from time to time. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not parts:
        return disk.Contents(files={}, tensors={})
    name = f"rank-{rank:04d}.safetensors"
    path, unfinished = folder / name, folder / f".{name}.part"
    file = _write(unfinished, parts, alive)
    os.replace(unfinished, path)
    disk.sync_folder(folder)
    tensors: dict[str, disk.StoredTensor] = {}
    for part in parts:
        stored = disk.StoredPart(start=part.start, count=part.tensor.numel(), file=name, key=part.key)
        before = tensors[part.name].parts if part.name in tensors else []
        about = {"dtype": _NAMES[part.tensor.dtype], "shape": list(part.shape), "parts": [*before, stored]}
        tensors[part.name] = disk.StoredTensor.model_validate(about)
    return disk.Contents(files={name: file}, tensors=tensors)


def _write(path: Path, parts: Sequence[TensorPart], alive: Callable[[], None]) -> disk.File:
    """Writes a safetensors file: eight bytes for the length of a JSON header, the header, raw numbers. Not by that
    library, which holds the GIL for the whole file; computes the checksum on the way."""
    size, unsynced, checksum = 0, 0, 0
    try:
        with open(path, "wb", buffering=2**20, opener=no_link) as file:
            for data in _blocks(parts):
                checksum = zlib.crc32(data, checksum)
                file.write(data)
                size, unsynced = size + len(data), unsynced + len(data)
                if unsynced >= _SYNCED:
                    _sync(file)
                    unsynced = 0
                alive()
            _sync(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    return disk.File(bytes=size, crc32=checksum)


def _blocks(parts: Sequence[TensorPart]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        start, end = end, end + part.tensor.nbytes
        kind = _NAMES[part.tensor.dtype].replace("float", "f").replace("int", "i").replace("ui", "u").upper()
        header[part.key] = {"dtype": kind, "shape": part.kept_shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for part in parts:
        data = _bytes(part.tensor)
        for start in range(0, len(data), disk.BLOCK):
            yield data[start : start + disk.BLOCK]


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def put_together(written: Iterable[disk.Contents]) -> disk.Contents:
    """The contents of a checkpoint, merged from those of its files. Raises E703 if parts overlap or are missing."""
    files, tensors = dict[str, disk.File](), dict[str, disk.StoredTensor]()
    for contents in written:
        files |= contents.files
        for name, tensor in contents.tensors.items():
            before = tensors[name].parts if name in tensors else []
            parts = sorted([*before, *tensor.parts], key=lambda part: part.start)
            tensors[name] = tensor.model_copy(update={"parts": parts})
    whole = disk.Contents(files=files, tensors=tensors)
    if (wrong := whole.wrong()) is not None:
        raise ZbcError("E703", f"run: this is no whole checkpoint: {wrong}")
    return whole


# ---- reading -------------------------------------------------------------------------------------------------


class Reader:
    """A complete checkpoint; `alive` is called from time to time during reads. Raises E612 if it is damaged."""

    def __init__(self, folder: Path, alive: Callable[[], None] = lambda: None) -> None:
        self.folder, self._alive = folder, alive
        self.index = disk.read_index(folder)
        self.tensors: Mapping[str, disk.StoredTensor] = self.index.tensors
        self._open: dict[str, Any] = {}  # open files are memory-mapped and have no descriptor

    def check_files(self, first: int = 0, every: int = 1) -> None:
        """Compares files with their checksums: each `every`th of the sorted list, from `first` on."""
        for name in sorted(self.index.files)[first::every]:
            disk.check_file(self.folder, name, self.index.files[name], self._alive)

    def fill(self, target: Tensor, name: str, start: int = 0) -> None:
        """Overwrites a tensor on any device with the elements of `name` from `start` on."""
        about, count = self.tensors[name], target.numel()
        if start + count > math.prod(about.shape):
            text = f"run: the checkpoint lacks elements {start} to {start + count} of {name}"
            raise ZbcError("E612", text, hint="resume from another checkpoint")
        flat = torch.empty(count, dtype=TYPES[about.dtype])
        for part in about.parts:
            first, last = max(start, part.start), min(start + count, part.start + part.count)
            if first < last:
                stored = self._stored(part, flat.dtype)
                flat[first - start : last - start] = stored[first - part.start : last - part.start]
                self._alive()
        with torch.no_grad():
            target.copy_(flat.view(target.shape))

    def _stored(self, part: disk.StoredPart, dtype: torch.dtype) -> Tensor:
        path = self.folder / part.file
        try:
            if part.file not in self._open:
                self._open[part.file] = safe_open(str(path), framework="pt")
            tensor: Tensor = self._open[part.file].get_tensor(part.key).reshape(-1)
        except (OSError, SafetensorError) as error:
            raise disk.damaged(path, str(error)) from None
        if tensor.dtype != dtype or len(tensor) != part.count:
            raise disk.damaged(path, f"{part.key} is not what {disk.INDEX} says")
        return tensor
