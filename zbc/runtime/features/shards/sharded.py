"""ZeRO: the replicas of a stage shard its optimizer state (arXiv 1910.02054, section 5.1), gradients and weights.

Parameters are split into *pieces* of at most CHUNK elements, the grid in which gradient norms are summed, and the
pieces are dealt to the ranks as evenly as possible (zbc/plan/dealing.py). A rank has state for its own pieces only:

    REDUCE   a reduce-scatter gives every rank the sum of the gradients of its pieces
    STEP     updates them in place: a piece is a view of the working weights
    SCATTER  with sharded gradients, a reduce-scatter of the gradients so far; the results are accumulated
    GATHER   an all-gather of all pieces, before the next step uses them

Without a barrier the pieces are updated tentatively, and gathered; if a step is then clipped or skipped they are
updated accordingly, and gathered once more.

If weights are *freed* (resharded), a rank has the weights of a stage only while its ops need them: all are views of one
storage, whose bytes FREE releases and GATHER allocates again, so that graphs that wait for their backward still
reference them. The pieces then have storage of their own. Weights that ops read only in a lower type are gathered in
that type, straight into the layer's cast: half the bytes are sent, and the weight itself takes no memory.

On one host ranks may read weights from each other's memory and write gradients into it: no collectives (windows.py).

Element by element, updates are the same as those of an unsharded optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core import rounded
from zbc.runtime.core.bucket import GradientSum, flags, gradient_type
from zbc.runtime.core.muon import Whole, is_matrix
from zbc.runtime.core.optimizer import NO_WHOLES, Held, StageOptimizer, build_optimizer, kept_by
from zbc.runtime.core.private import add_all, copy_all
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tensors import constant, lower_precision
from zbc.runtime.core.validate import chunks, squares_of
from zbc.runtime.features.shards.pieces import Weights, cut, deal, part_of, places_in
from zbc.runtime.features.shards.windows import SlotSum, Window, WindowCopier
from zbc.runtime.transports.transport import Pending, Transport


class Sum(NamedTuple):
    """A reduction of gradients through a window."""

    pending: Pending
    slots: SlotSum
    every: bool  # whether this rank had all gradients


class Sharded(StageOptimizer, GradientSum):
    """The optimizer of a stage with replicas on `ranks`, as a `StageOptimizer` and a `GradientSum`.

    If several ranks of a pipeline hold the stage, weights may be sharded over one of them in all replicas; gradients
    are then all-reduced `among` all holders, and each keeps its shard.

    `whole` names parameters that this rank updates unsharded, and that are summed elsewhere. `lowered` is the type that
    forward reads, if it is not the parameters' own: a rank then has float32 `masters`, of its pieces only. `frees`: the
    weights are freed and gathered within a step, those that layers read as casts in the type `low`; `scatters`:
    gradients are reduced after each run of backwards; `cycles`: steps follow one another without a flush.
    """

    def __init__(
        self,
        options: spec.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        casts: Iterable[SplitLinear] = (),
        wholes: Mapping[str, Whole] = NO_WHOLES,
        *,
        ranks: tuple[int, ...],
        rank: int,
        among: tuple[int, ...] = (),
        whole: frozenset[str] = frozenset(),
        lowered: torch.dtype | None = None,
        masters: bool = True,
        ahead: bool = False,
        frees: bool = False,
        low: torch.dtype | None = None,
        scatters: bool = False,
        cycles: bool = False,
    ) -> None:
        self._options = options
        self._later = not (ahead or cycles)  # other ranks' updates arrive only in the next step's gather
        self._frees = frees
        self._ranks, self._mine = ranks, ranks.index(rank)
        self._among = among if len(among) > len(ranks) else ()
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad and name not in whole}
        types = {(p.dtype, gradient_type(p)) for p in self._trained.values()}
        if len(types) > 1:
            names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind, _ in types))
            text = f"run: parallel.shard needs parameters of one type in a stage, found {names}"
            raise ZbcError("E110", text, hint="drop parallel.shard")
        self._matrices = {name for name, p in self._trained.items() if is_matrix(options, name, p)}
        self._shares = deal(cut(self._trained, self._matrices), len(ranks))
        self.weights = Weights(self._trained, self._shares, self._mine, frees=frees, quiet=frees or cycles)
        self._own, self._length = self.weights.own, self.weights.length
        self._width = self._length + max(map(len, self._shares))  # with a flag per piece that has a gradient
        self._whole = {name: parameters[name] for name in sorted(whole)}
        own = {str(piece): p for piece, p in self._own.items()} | self._whole
        of = options, own, (casts := tuple(casts)), wholes
        super().__init__(build_optimizer(*of, lowered=lowered, masters=masters, ahead=ahead))
        self.parameters, self.apart, self.mirrored = parameters, True, bool(self._among)
        if lowered is not None:  # masters exist by now; only now the weights are lowered, and pieces are views of them
            lower_precision((p for name, p in parameters.items() if name not in whole), lowered)
            self.weights.moved()
        first = next(iter(self._trained.values()), None) if lowered is None or not masters else None
        self._type = torch.float32 if first is None else first.dtype  # of the tensors that are updated
        self.weights.lay(casts, low)
        self.scatters = scatters
        # In flight, in the order of their start: shards of all ranks, this one's, whether this rank had all gradients
        self._sums: list[tuple[Pending, Tensor, Tensor, bool]] = []
        self._added: tuple[Tensor, bool] | None = None  # the accumulated result of completed ones; likewise
        self._coming: tuple[Pending, Tensor, bool] | None = None  # weights, and whether casts are gathered, not weights
        self._window: Window | None = None  # in place of collectives
        self._in_slots: set[str] | None = None  # the parameters whose gradients of this step are in slots
        self._slot_sum: Sum | None = None
        self._fetch: Pending | None = None

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares per chunk; zeros for the chunks that other ranks report."""
        found = squares_of({name: p.grad for name, p in self._whole.items() if p.grad is not None})
        own = squares_of({piece: p.grad for piece, p in self._own.items() if p.grad is not None})
        if not own:
            return found
        counts = {piece.name: chunks(self._trained[piece.name].numel()) for piece in own}
        starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        firsts = [(starts[piece.name] + piece.start // dealing.CHUNK, len(sums)) for piece, sums in own.items()]
        where = tuple(place for first, count in firsts for place in range(first, first + count))
        sums = torch.cat(list(own.values()))
        every = torch.zeros(sum(counts.values()), dtype=torch.float64, device=sums.device)
        every.index_add_(0, constant(where, torch.int64, sums.device), sums)
        return found | dict(zip(counts, torch.split(every, list(counts.values())), strict=True))

    def drop(self) -> None:
        self._inner.drop()
        for parameter in self.parameters.values():
            parameter.grad = None

    def held(self) -> list[Held]:
        pieces = {str(piece): piece for piece in self._own}
        entries = []
        for inner in self._inner.held():
            piece = pieces.get(inner.name)
            if piece is None:
                entries.append(inner)
            else:
                shape = tuple(self._trained[piece.name].shape)
                entries.append(Held(piece.name, piece.start, shape, inner.tensor, shared=False))
        rest = {name: p for name, p in self.parameters.items() if name not in self._trained and name not in self._whole}
        return entries + [Held(name, 0, tuple(p.shape), p) for name, p in rest.items()]

    def incomplete(self) -> list[Held]:
        if self._later:
            return []
        return [Held(name, 0, tuple(p.shape), p) for name, p in self._trained.items()]

    def loaded(self) -> None:
        self._inner.loaded()
        self.drop()

    @property
    def dealt(self) -> frozenset[str]:
        return frozenset(self._trained)

    def collect(self, name: str, transport: Transport) -> tuple[Tensor, dict[str, Tensor]]:
        """A whole sharded parameter, and its optimizer state; all ranks with a replica call this; blocks."""
        kept, shape = kept_by(self._options, matrix=name in self._matrices), self._trained[name].shape
        wide = [key for key in kept if kept[key]] + self.also
        single = [key for key in kept if not kept[key]]
        shares = [[piece for piece in share if piece.name == name] for share in self._shares]
        most = max(sum(piece.size for piece in share) for share in shares)
        count = 1 + len(wide)
        kind = torch.promote_types(self._type, torch.float32)
        mine = torch.zeros(count * most + len(single) + 1, dtype=kind, device=self._trained[name].device)
        rows, rest = mine[: count * most].view(count, most), mine[count * most :]
        state = {} if self.optimizer is None else self.optimizer.state
        held = {entry.name: entry.tensor for entry in self._inner.held()}
        at = 0
        for piece in shares[self._mine]:
            tensor = held[str(piece)]
            found = state.get(tensor, {})
            for row, value in zip(rows, (tensor.data, *(found.get(key) for key in wide)), strict=True):
                if value is not None:
                    row[at : at + piece.size].copy_(value.reshape(-1))
            if found:  # every piece of a parameter has had the same number of steps
                rest.copy_(torch.stack([*(found[key].to(rest) for key in single), rest.new_ones(())]))
            at += piece.size
        parts = mine.new_empty(len(self._ranks), len(mine))
        transport.start_gather(mine, parts, self._ranks).wait()
        whole = mine.new_empty(count, math.prod(shape))
        for part, share in zip(parts, shares, strict=True):
            at = 0
            for piece in share:
                whole[:, piece.start : piece.stop] = part[: count * most].view(count, most)[:, at : at + piece.size]
                at += piece.size
        told = next((part[count * most :] for part in parts if part[-1]), None)
        value, *others = whole.view(count, *shape)
        if told is None:
            return value.to(self._type), {}
        stored = rounded.TYPES[self._options.state] or kind
        values = {key: row.to(stored if key in kept else kind) for key, row in zip(wide, others, strict=True)}
        return value.to(self._type), values | dict(zip(single, told, strict=False))

    # ---- gradients ----------------------------------------------------------------------------------------------

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        grads = [(piece.name, p.grad) for piece, p in self._own.items()]
        grads += [(name, p.grad) for name, p in self._whole.items()]
        return ((name, grad) for name, grad in grads if grad is not None)

    def start(self, transport: Transport) -> None:
        if not self._trained:
            return
        if self._window is not None:
            self._slot_sum = self._post(self._window, transport)
            return
        if self._sums and not self.scatters:
            raise ZbcError("E703", "run: a sum of gradients was started twice", where=f"rank {transport.rank}")
        self.poll()
        first = next(iter(self._trained.values()))
        parts = torch.zeros(len(self._ranks), self._width, dtype=gradient_type(first), device=first.device)
        there = self._move(parts)
        most = self._width - self._length
        present = [index < len(share) and share[index].name in there for share in self._shares for index in range(most)]
        parts[:, self._length :] = flags(present, parts.dtype, parts.device).view(-1, most)
        every = all(piece.name in there for piece in self._own)
        if self._among:
            self._sums.append((transport.start_sum(parts.view(-1), self._among), parts, parts[self._mine], every))
            return
        mine = torch.empty_like(parts[0])
        self._sums.append((transport.start_scatter(parts, mine, self._ranks), parts, mine, every))

    def scatter(self, transport: Transport) -> None:
        if self._window is None:
            self.start(transport)
        else:
            self._put(self._window)

    def _post(self, window: Window, transport: Transport) -> Sum:
        """Writes the last gradients of a step into the slots of their owners, and marks them as written."""
        if self._slot_sum is not None:
            raise ZbcError("E703", "run: a sum of gradients was started twice", where=f"rank {transport.rank}")
        there = self._put(window)
        for row, share in zip(window.slots, self._shares, strict=True):
            present = [piece.name in there for piece in share]
            row[self._length : self._length + len(share)] = flags(present, row.dtype, row.device)
        self._in_slots, slots = None, window.post()
        return Sum(transport.watch(slots, gather=False), slots, all(piece.name in there for piece in self._own))

    def _put(self, window: Window) -> set[str]:
        """Moves the gradients into slots, or adds them to earlier ones; returns the names of all so far."""
        before, there = self._in_slots, {name for name, p in self._trained.items() if p.grad is not None}
        if before is None and len(there) < len(self._trained):
            for row in window.slots:
                row.zero_()
        self._move(window.slots, add=before is not None)
        self._in_slots = there | (before or set())
        return self._in_slots

    def _move(self, parts: Iterable[Tensor], *, add: bool = False) -> set[str]:
        """Moves the gradients into their rows, or `add`s them there; returns their names."""
        there = {name: p.grad for name, p in self._trained.items() if p.grad is not None}
        targets, sources = list[Tensor](), list[Tensor]()
        for row, share in zip(parts, self._shares, strict=True):
            for piece, place in zip(share, places_in(row, share), strict=True):
                if piece.name in there:
                    targets.append(place)
                    sources.append(part_of(there[piece.name], piece))
        (add_all if add else copy_all)(targets, sources)
        for parameter in self._trained.values():
            parameter.grad = None
        return set(there)

    def poll(self) -> bool:
        """Frees the messages of completed reductions; returns whether none is in flight."""
        while self._sums and self._sums[0][0].ready():
            self._collect()
        return not self._sums

    def _collect(self) -> None:
        """Waits for the first reduction in flight, and adds this rank's shard to the earlier results."""
        pending, _, mine, every = self._sums.pop(0)
        pending.wait()
        before = self._added
        mine = mine.clone() if self._among else mine  # frees the shards of others
        self._added = (mine, every) if before is None else (before[0].add_(mine), before[1] or every)

    def finish(self) -> None:
        while self._sums:
            self._collect()
        if self._slot_sum is not None:
            pending, slots, every = self._slot_sum
            pending.wait()
            self._added, self._slot_sum = (slots.total, every), None
        if self._added is None:
            return
        mine, every = self._added
        present = [1.0] * len(self._own) if every else mine[self._length :].tolist()
        for place, parameter, there in zip(places_in(mine, self._own), self._own.values(), present, strict=False):
            parameter.grad = place.view(parameter.shape) if there != 0 else None
        self._added = None

    # ---- weights ------------------------------------------------------------------------------------------------

    def start_gather(self, transport: Transport, *, whole: bool = False) -> None:
        """Starts the gather of the weights that the other ranks updated; `whole`: none of them as casts."""
        if not self._trained:
            return
        self.weights.restore(whole=whole)
        lowers = self.weights.lowers and not whole
        if self._window is not None and not whole:
            casts = self.weights.adopted(lowers)
            fetch = self._window.fetch(lambda parts: self.weights.spread(parts, casts, lowers))
            self._fetch = transport.watch(fetch, gather=True)
            return
        size, device = self.weights.row_bytes(lowers), next(iter(self._trained.values())).device
        mine = torch.zeros(size, dtype=torch.uint8, device=device)
        self.weights.fill(mine, lowers)
        parts = torch.empty(len(self._ranks), size, dtype=torch.uint8, device=device)
        self._coming = transport.start_gather(mine, parts, self._ranks), parts, lowers  # the gather holds `mine`

    @property
    def arrived(self) -> bool:
        """Whether `finish_gather` would not wait."""
        return self._coming is None or self._coming[0].ready()

    def finish_gather(self) -> None:
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None
            self.weights.refill(lowers=self.weights.lowers)
        if self._coming is None:
            return
        pending, parts, lowers = self._coming
        pending.wait()
        self.weights.spread(parts, self.weights.adopted(lowers), lowers)
        self._coming = None
        self.weights.refill(lowers=lowers)

    def open_window(self, transport: Transport, copier: WindowCopier) -> None:
        """Opens a window of shared memory for all later gathers and reductions within steps; all ranks call this;
        blocks."""
        if not self._trained:
            return
        first, row = next(iter(self._trained.values())), self.weights.row_bytes(self.weights.lowers)
        self._window = Window(transport, self._ranks, row, self._width, gradient_type(first), copier)
        self.publish()

    def stepped(self, transport: Transport, *, skipped: bool) -> None:
        self.publish()

    def publish(self) -> None:
        """Publishes the updated pieces of this rank in its window."""
        if self._window is not None:
            self.weights.fill(self._window.weights, lowers=self.weights.lowers)
            self._window.publish()

    @property
    def kept(self) -> list[Tensor]:
        """This rank's shards of the weights, if weights are freed, and its window."""
        own: list[Tensor] = [*self._own.values()] if self._frees else []
        return own if self._window is None else [*own, self._window.weights]
