"""Pieces of parameters, which are dealt to the ranks that shard a stage, and the rows of their messages; weights in one
storage, whose bytes are freed and restored under the same parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbc.plan import dealing
from zbc.runtime.core.split import SplitLinear

ALIGNED = 64  # bytes


class Piece(NamedTuple):
    """Elements `start` to `stop` of a parameter, in memory order."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


def cut(parameters: Mapping[str, nn.Parameter], whole: Collection[str] = ()) -> list[Piece]:
    """The pieces of all parameters, in order. Matrices that are `whole`, each one of a stack, have one, and so have
    parameters that are not contiguous in memory."""
    pieces = []
    for name, parameter in parameters.items():
        count = parameter.numel()
        if parameter.is_contiguous() and name not in whole:
            places = dealing.cut(count)
        else:
            each = count // len(parameter) if name in whole and parameter.dim() > 2 else count
            places = [(start, start + each) for start in range(0, count, each)] if count else [(0, 0)]
        pieces += [Piece(name, start, stop) for start, stop in places]
    return pieces


def deal(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """The pieces of each rank, in order."""
    return [[pieces[i] for i in share] for share in dealing.deal([piece.size for piece in pieces], ranks)]


class Row:
    """The pieces of a rank in the order of its message: first those in their own type."""

    def __init__(self, share: Sequence[Piece], low: Mapping[str, SplitLinear]) -> None:
        self._share = list(share)
        self._wide = [piece for piece in share if piece.name not in low]
        self._low = [piece for piece in share if piece.name in low]
        self.wide, self.low = (sum(piece.size for piece in some) for some in (self._wide, self._low))

    def parts(self, lowers: bool) -> tuple[list[Piece], list[Piece]]:
        """The pieces in their own type, and in the lower type."""
        return (self._wide, self._low) if lowers else (self._share, [])


def weights_read_low(trained: Mapping[str, nn.Parameter], casts: Iterable[SplitLinear]) -> dict[str, SplitLinear]:
    """The weights of linear layers that ops read as casts only, by name."""
    by_weight = {id(cast.module.weight): cast for cast in casts}
    linears = {name: by_weight[id(p)] for name, p in trained.items() if id(p) in by_weight and p.is_contiguous()}
    return {name: cast for name, cast in linears.items() if cast.module.weight.dtype == torch.float32}


def places_in(row: Tensor, pieces: Iterable[Piece]) -> list[Tensor]:
    """A view of the elements of each piece in a row."""
    sizes = [piece.size for piece in pieces]
    return list(torch.split_with_sizes(row[: sum(sizes)], sizes)) if sizes else []


def part_of(tensor: Tensor, piece: Piece, *, keep_shape: bool = False) -> Tensor:
    """The elements of a piece: a view if `tensor` is contiguous, or if the piece is all of it and `keep_shape`, as is
    that of whole matrices of a stack."""
    whole = piece.size == tensor.numel()
    if whole and keep_shape:
        return tensor
    found = tensor.reshape(-1)[piece.start : piece.stop]
    if keep_shape and tensor.dim() > 2 and not (piece.start % tensor[0].numel() or piece.size % tensor[0].numel()):
        return found.view(-1, *tensor.shape[1:])
    return found


class Flat:
    """The storage of `parameters` of one type, which become views of it. They keep their values."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._storage: torch.UntypedStorage | None = None
        if not parameters:
            return
        first = parameters[0]
        step = max(1, ALIGNED // first.element_size())
        sizes = [-(-p.numel() // step) * step for p in parameters]
        flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        for parameter, room in zip(parameters, torch.split(flat, sizes), strict=True):
            view = room[: parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self._storage = flat.untyped_storage()
        self._whole = self._storage.nbytes()

    @property
    def bytes(self) -> int:
        """The bytes allocated now."""
        return 0 if self._storage is None else self._storage.nbytes()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a part of the storage."""
        return self._storage is not None and tensor.untyped_storage().data_ptr() == self._storage.data_ptr()

    def free(self) -> None:
        if self._storage is not None:
            self._storage.resize_(0)

    def restore(self) -> None:
        """Allocates the bytes again, uninitialised."""
        if self._storage is not None and not self.bytes:
            self._storage.resize_(self._whole)
