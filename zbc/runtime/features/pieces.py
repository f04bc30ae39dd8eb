"""Pieces of parameters, which are dealt to the ranks that shard a stage, and the rows of their messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbc.plan import dealing
from zbc.runtime.core.split import SplitLinear


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
