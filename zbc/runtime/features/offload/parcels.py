"""Parcels: the saved activations of a microbatch, which are offloaded to the host and reloaded.

    kept --OFFLOAD--> going --RELEASE--> away --RELOAD--> coming --B, BW--> back

Any other order is E703. While F runs, hooks collect the tensors that autograd saves in the parcel, each storage once;
with recompute, the parcel has the inputs of the layers. A storage stays on the device

    if it is small (`SMALL`), a parameter, of integers, like inputs and targets (masks are offloaded), or not plain
    memory of this device
    if it existed before F and is not the stage's input, or has other references at OFFLOAD: buffers, casts of
    weights, tables, attributes of a layer. Offloading it would free nothing
    if it is the stage's output, which is sent or passed on

The hooks disable autograd's own check for tensors that change after they are saved, so it is done here (E509).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from zbc.errors import ZbcError
from zbc.ir import Op
from zbc.ops import SMALL
from zbc.runtime.core.private import users
from zbc.runtime.features.offload.copying import Copier, Piece, Slab, Ticket

_ALIGN = 64  # bytes
_WHOLE = {torch.int16, torch.int32, torch.int64}


class Pool:
    """The slabs of a rank: the plan has their number per stage; they are made for the first parcel, and reused. A slab
    grows if a layer saves more for one microbatch than for another."""

    def __init__(self, copier: Copier, counts: dict[int, int]) -> None:
        self.copier = copier
        self._counts = dict(counts)
        self._free: dict[int, list[Slab]] = {}
        self.slabs: list[Slab] = []

    def take(self, op: Op, size: int) -> Slab:
        """A free slab of `size` bytes. Raises E703 if more parcels are offloaded at once than the plan has slabs."""
        free = self._free.get(op.stage)
        if free is None:
            free = self._free[op.stage] = [Slab(self.copier.slab(size)) for _ in range(self._counts.get(op.stage, 0))]
            self.slabs += free
        if not free:
            raise ZbcError("E703", f"run: {op}: no slab of host memory is left for stage {op.stage}", hint="plan again")
        slab = free.pop()
        if len(slab.memory) < size:
            slab.memory = self.copier.slab(size)
        return slab

    def give(self, stage: int, slab: Slab) -> None:
        self._free[stage].append(slab)

    def wait(self, ticket: Ticket) -> None:
        """Makes the compute of the rank wait for a copy."""
        ticket.result()


class _Kept:
    """A storage of the parcel; `seen` is a tensor in it, whose version is checked."""

    __slots__ = ("at", "layer", "seen", "size", "storage", "version")

    def __init__(self, storage: UntypedStorage, tensor: Tensor, layer: str) -> None:
        self.storage: UntypedStorage | None = storage
        self.seen: Tensor | None = tensor.detach()
        self.size, self.version, self.layer, self.at = storage.nbytes(), tensor._version, layer, -1

    def look(self) -> None:
        if self.seen is not None and self.seen._version != self.version:
            raise _changed(self.layer)


class _View(NamedTuple):
    """A tensor in a storage of the parcel."""

    kept: _Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Stays(NamedTuple):
    """A tensor that is not offloaded."""

    tensor: Tensor
    version: int
    layer: str


def _changed(layer: str) -> ZbcError:
    text = f"run: layer {layer}: a tensor that its backward needs was changed in place after it was saved"
    return ZbcError("E509", text, hint=f"change a copy in {layer}: x + 1 in place of x += 1, or x.clone() before")


class Parcel:
    """The saved activations of one forward of `x`, which runs inside `with parcel.hooks():`. It takes the place of the
    stage's input, whose gradient is in `grad`."""

    def __init__(self, pool: Pool, x: Tensor) -> None:
        self.pool, self.device = pool, x.device
        self.state, self.layer = "kept", ""
        self.grad: Tensor | None = None
        self._found: dict[int, _Kept] = {}  # by the storage's address
        self._moved: list[_Kept] = []
        self._slab: Slab | None = None
        self._ticket: Ticket | None = None
        self._form = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")  # of the input
        self._inputs: list[Tensor] | None = None  # of the layers, with recompute
        self._packed: list[_View | _Stays] = []
        self._flows = False

    def hooks(self) -> saved_tensors_hooks:
        """New hooks, not cached: they reference the parcel, which would then be freed by garbage collection only."""
        return saved_tensors_hooks(self._pack, self._unpack)

    # ---- F --------------------------------------------------------------------------------------------------

    def enter(self, x: Tensor, anchor: Tensor) -> Tensor:
        """The stage's input as a tensor that is not a leaf, so that it can be offloaded."""
        return _Enter.apply(anchor, x, self)  # type: ignore[no-any-return, no-untyped-call]

    def adopt(self, inputs: list[Tensor], names: Iterable[str], *, flows: bool) -> None:
        """Moves the inputs of the layers from their list into the parcel, until they are reloaded."""
        self._inputs, self._flows = inputs, flows
        for x, name in zip(inputs, names, strict=True):
            self.layer = name
            self._packed.append(self._pack(x))
        inputs.clear()

    def leave(self, *outside: Tensor) -> None:
        """Called after F: removes tensors that are not offloaded: the stage's output, an input that existed before."""
        for tensor in outside:
            self._found.pop(tensor.untyped_storage()._cdata, None)

    def _pack(self, tensor: Tensor) -> _View | _Stays:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == self.device.type
        stays = not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
        stays = stays or isinstance(tensor, nn.Parameter) or tensor.dtype in _WHOLE
        if stays or (storage := tensor.untyped_storage()).nbytes() < SMALL:
            return _Stays(tensor, tensor._version, self.layer)
        kept = self._found.get(storage._cdata)
        if kept is None:
            kept = self._found[storage._cdata] = _Kept(storage, tensor, self.layer)
        return _View(kept, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _unpack(self, packed: _View | _Stays) -> Tensor:
        if isinstance(packed, _Stays):
            if packed.tensor._version != packed.version:
                raise _changed(packed.layer)
            return packed.tensor
        kept, dtype, shape, stride, offset = packed
        kept.look()
        if kept.storage is None:
            raise ZbcError("E703", f"run: what F left is used while it is {self.state}")
        return torch.empty(0, dtype=dtype, device=self.device).set_(kept.storage, offset, shape, stride)

    # ---- offload and reload ---------------------------------------------------------------------------------

    def offload(self, op: Op) -> None:
        """OFFLOAD: starts the copy to the host. Raises E509."""
        self._turn(op, "kept", "going")
        size = 0
        for kept in self._found.values():
            kept.look()
            if kept.storage is None or users(kept.storage) > 2:  # `seen` and the storage itself
                continue  # stays on the device, and `seen` is checked again
            kept.seen, kept.at = None, size
            size += -(-kept.size // _ALIGN) * _ALIGN
            self._moved.append(kept)
        self._found.clear()
        self._slab = self.pool.take(op, size)
        self._ticket = self.pool.copier.out(self._slab, self._pieces())

    def release(self, op: Op) -> None:
        """RELEASE: waits for the copy, and frees the memory on the device."""
        self._turn(op, "going", "away")
        self.pool.wait(self._awaited())
        for kept in self._moved:
            if kept.storage is not None:
                self.pool.copier.release(kept.storage)
            kept.storage = None

    def reload(self, op: Op) -> None:
        """RELOAD: allocates memory, starts the copy back."""
        self._turn(op, "away", "coming")
        gone, slab = self._awaited(), self._slab
        assert slab is not None
        for kept in self._moved:
            kept.storage = self.pool.copier.take(kept.size)
        self._ticket = slab.read = self.pool.copier.back(slab, self._pieces(), gone)

    def arrive(self, op: Op) -> Tensor | Parcel:
        """B, BW: waits for the reload; returns the object that will have the stage input's gradient in `grad`. From
        here on only the graph holds the reloaded tensors, so each is freed after its last use."""
        self._turn(op, "coming", "back")
        self.pool.wait(self._awaited())
        if self._slab is not None:
            self.pool.give(op.stage, self._slab)
        self._slab = None
        self._moved.clear()
        if self._inputs is None:
            return self
        self._inputs += map(self._unpack, self._packed)
        self._packed.clear()
        return self._inputs[0].requires_grad_(self._flows)

    def coming(self) -> bool:
        """Whether a copy is in flight that the next op has to wait for."""
        return self._ticket is not None and not self._ticket.done()

    def zeros(self) -> Tensor:
        """The gradient of an input on which nothing depends."""
        return torch.zeros_like(self._form, device=self.device)

    def _pieces(self) -> list[Piece]:
        return [Piece(kept.storage, kept.at) for kept in self._moved if kept.storage is not None]

    def _awaited(self) -> Ticket:
        assert self._ticket is not None
        return self._ticket

    def _turn(self, op: Op, before: str, after: str) -> None:
        if self.state != before:
            text = f"run: {op}: what F left is {self.state}, it must be {before}"
            raise ZbcError("E703", text, hint="plan again")
        self.state = after


class _Enter(torch.autograd.Function):
    """Connects the stage's input to `anchor`, a leaf that gets no gradient: the input's gradient goes to the parcel."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, parcel: Parcel) -> Tensor:
        ctx.parcel = parcel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parcel = ctx.parcel
        grad, stride = grads[0], parcel._form.stride()
        if grad.stride() != stride:  # in the layout of the leaf, as autograd does
            grad = torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        parcel.grad = grad
        return None, None, None
