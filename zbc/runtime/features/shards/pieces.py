"""Pieces of parameters, which are dealt to the ranks that shard a stage, and the rows of their messages; the weights of
a stage whose replicas each update a shard: their storage, and the rows of messages with them.

Freed weights are views of one storage, whose bytes are released and allocated again, under the same parameters; those
that ops read only as casts in a lower type are gathered straight into these casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbc.plan import dealing
from zbc.runtime.core.optimizer import Named
from zbc.runtime.core.private import copy_all
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
        most = dealing.CHUNK if parameter.is_contiguous() and name not in whole else count
        most = count // len(parameter) if name in whole and parameter.dim() > 2 else most
        pieces += [Piece(name, start, stop) for start, stop in dealing.cut(count, most)]
    return pieces


def deal(pieces: Sequence[Piece], ranks: int) -> list[list[Piece]]:
    """The pieces of each rank, in order."""
    return [[pieces[i] for i in share] for share in dealing.deal([piece.size for piece in pieces], ranks)]


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


NO_CASTS: Mapping[str, Tensor] = {}


class Weights:
    """The `trained` weights, in the pieces of each rank, `shares[mine]` of this one, which updates `own`. `frees`: they
    are freed and gathered within a step; `quiet`: graphs are still used after they were written."""

    def __init__(
        self, trained: Named, shares: Sequence[Sequence[Piece]], mine: int, *, frees: bool, quiet: bool
    ) -> None:
        self._trained, self._shares, self._mine, self._frees, self._quiet = trained, shares, mine, frees, quiet
        self.length = max(sum(piece.size for piece in share) for share in shares)
        self.own = {piece: nn.Parameter(self._place(piece)) for piece in shares[mine]}

    def lay(self, casts: Sequence[SplitLinear], kind: torch.dtype | None) -> None:
        """To be called once weights have their types: puts those that are freed into one storage. `casts`: of weights,
        those in the type `kind` are gathered if nothing else is read."""
        lows = self._frees and kind is not None
        self._casts, self._kind, self._low = casts, kind, weights_read_low(self._trained, casts) if lows else {}
        wide = [p for name, p in self._trained.items() if p.is_contiguous() and name not in self._low]
        self._flat = Flat(wide if self._frees else [])
        self._there = self._frees  # whether weights that are read as casts only are resident
        self._rows = {lowers: [self._parts(share, lowers) for share in self._shares] for lowers in (False, True)}
        sizes = [[sum(piece.size for piece in some) for some in parts] for parts in self._rows[True]]
        self._message: list[int] = [max(some) for some in zip(*sizes, strict=True)]

    @property
    def lowers(self) -> bool:
        """Whether gathers within a step bring casts."""
        return bool(self._low)

    def _parts(self, share: Sequence[Piece], lowers: bool) -> tuple[list[Piece], list[Piece]]:
        """The pieces of a rank in the order of its message: in their own type, then in the lower type."""
        low = self._low if lowers else ()
        return [piece for piece in share if piece.name not in low], [piece for piece in share if piece.name in low]

    def restore(self, *, whole: bool) -> None:
        """Allocates the bytes of freed weights; `whole`: also of those that a step reads as casts only."""
        self._flat.restore()
        for name in self._low if whole else ():
            parameter = self._trained[name]
            parameter.data.untyped_storage().resize_(parameter.nbytes)
            self._there = True

    def moved(self) -> None:
        """Updates the pieces, which are views of the weights, after the weights got other storage."""
        for piece, parameter in self.own.items():
            parameter.data = self._place(piece)

    def fill(self, row: Tensor, lowers: bool) -> None:
        for places, pieces in zip(self._split(row, lowers), self._rows[lowers][self._mine], strict=True):
            copy_all(places_in(places, pieces), [self.own[piece].detach().reshape(-1) for piece in pieces])

    def adopted(self, lowers: bool) -> dict[str, Tensor]:
        """Uninitialised casts to gather into."""
        if not lowers or self._kind is None:
            return {}
        return {name: cast.adopt(self._kind) for name, cast in self._low.items()}

    def spread(self, parts: Iterable[Tensor], casts: Mapping[str, Tensor], lowers: bool) -> None:
        """Copies the rows of all ranks into weights and casts."""
        targets, sources = list[Tensor](), list[Tensor]()
        for index, (message, share) in enumerate(zip(parts, self._rows[lowers], strict=True)):
            if self._frees or index != self._mine:
                for places, pieces in zip(self._split(message, lowers), share, strict=True):
                    views = [self._view(piece, casts) for piece in pieces]
                    targets += views
                    sources += [a.view(b.shape) for a, b in zip(places_in(places, pieces), views, strict=True)]
        copy_all(targets, sources)

    def refill(self, *, lowers: bool) -> None:
        """Recomputes the casts that were not gathered."""
        for cast in self._casts:
            if not self._frees:
                cast.forget()
            elif not lowers or cast not in self._low.values():
                cast.refill()

    def row_bytes(self, lowers: bool) -> int:
        """Bytes of each rank's message."""
        width = next(iter(self._trained.values())).element_size()
        if not lowers or self._kind is None:
            return self.length * width
        size = self._message[0] * width + self._message[1] * self._kind.itemsize
        return -(-size // 8) * 8  # so that the rows of all ranks can be read as numbers

    def _split(self, message: Tensor, lowers: bool) -> tuple[Tensor, Tensor]:
        """The two parts of a message: weights in their own type, and in the lower type."""
        first = next(iter(self._trained.values()))
        wide = (self._message[0] if lowers else self.length) * first.element_size()
        kind = self._kind if lowers and self._kind is not None else first.dtype
        return message[:wide].view(first.dtype), message[wide:].view(kind)

    def free(self) -> None:
        self._flat.free()
        for cast in self._casts if self._frees else ():
            cast.free()
        if self._there:
            for name in self._low:
                self._trained[name].data.untyped_storage().resize_(0)
            self._there = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether FREE would free the bytes of a tensor, since it is a view of a weight."""
        return self._flat.holds(tensor)

    def _view(self, piece: Piece, casts: Mapping[str, Tensor] = NO_CASTS) -> Tensor:
        if piece.name in casts:
            return part_of(casts[piece.name].data, piece, keep_shape=True)
        parameter = self._trained[piece.name]
        # Writes through `data` do not change the version.
        return part_of(parameter.data if self._quiet else parameter.detach(), piece, keep_shape=True)

    def _place(self, piece: Piece) -> Tensor:
        """The tensor that this rank updates for a piece."""
        return self._view(piece).clone() if self._frees else self._view(piece)
