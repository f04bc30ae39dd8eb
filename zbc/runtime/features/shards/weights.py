"""The weights of a stage whose replicas each update a shard: their storage, and the rows of messages with them.

Freed weights are views of one storage, whose bytes are released and allocated again; those that ops read only as casts
in a lower type are gathered straight into these casts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zbc.runtime.core.private import copy_all
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.features.shards.pieces import Flat, Piece, Row, part_of, places_in, weights_read_low

NO_CASTS: Mapping[str, Tensor] = {}


class Weights:
    """The `trained` weights, in the pieces of each rank, `shares[mine]` of this one, which updates `own`. `frees`: they
    are freed and gathered within a step; `quiet`: graphs are still used after they were written."""

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        shares: Sequence[Sequence[Piece]],
        mine: int,
        *,
        frees: bool,
        quiet: bool,
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
        self._flat = Flat(wide) if self._frees else None
        self._there = self._frees  # whether weights that are read as casts only are resident
        self._rows = [Row(share, self._low) for share in self._shares]
        self._message = max(row.wide for row in self._rows), max(row.low for row in self._rows)

    @property
    def lowers(self) -> bool:
        """Whether gathers within a step bring casts."""
        return bool(self._low)

    def restore(self, *, whole: bool) -> None:
        """Allocates the bytes of freed weights; `whole`: also of those that a step reads as casts only."""
        if self._flat is not None:
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
        """Writes this rank's pieces into its message."""
        for places, pieces in zip(self._split(row, lowers), self._rows[self._mine].parts(lowers), strict=True):
            copy_all(places_in(places, pieces), [self.own[piece].detach().reshape(-1) for piece in pieces])

    def adopted(self, lowers: bool) -> dict[str, Tensor]:
        """Uninitialised casts to gather into."""
        if not lowers or self._kind is None:
            return {}
        return {name: cast.adopt(self._kind) for name, cast in self._low.items()}

    def spread(self, parts: Iterable[Tensor], casts: Mapping[str, Tensor], lowers: bool) -> None:
        """Copies the rows of all ranks into weights and casts."""
        targets, sources = list[Tensor](), list[Tensor]()
        for index, (message, row) in enumerate(zip(parts, self._rows, strict=True)):
            if self._frees or index != self._mine:
                for places, pieces in zip(self._split(message, lowers), row.parts(lowers), strict=True):
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
        """Frees the bytes of the weights."""
        if self._flat is not None:
            self._flat.free()
            for cast in self._casts:
                cast.free()
        if self._there:
            for name in self._low:
                self._trained[name].data.untyped_storage().resize_(0)
            self._there = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether FREE would free the bytes of a tensor, since it is a view of a weight."""
        return self._flat is not None and self._flat.holds(tensor)

    def _view(self, piece: Piece, casts: Mapping[str, Tensor] = NO_CASTS) -> Tensor:
        if piece.name in casts:
            return part_of(casts[piece.name].data, piece, keep_shape=True)
        parameter = self._trained[piece.name]
        # Writes through `data` do not change the version.
        return part_of(parameter.data if self._quiet else parameter.detach(), piece, keep_shape=True)

    def _place(self, piece: Piece) -> Tensor:
        """The tensor that this rank updates for a piece."""
        return self._view(piece).clone() if self._frees else self._view(piece)
