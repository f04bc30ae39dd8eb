"""Costs of every op, with one interface for given and estimated costs.

Times are ms. Memory is activation units (one rank's share of one microbatch = 1.0) and, for known models, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

from zbc.compiler.cost.stage_bytes import NO_BYTES, StageBytes
from zbc.errors import ZbcError
from zbc.ir import COPY, WHOLE, Edge, Kind, Op, Placement, chain
from zbc.ops import EXPERTS, OWNERS, TIED, VALUES, WORDS, Ref, experts_of


@dataclass(frozen=True, slots=True)
class ShareBytes:
    """Bytes of a rank's vocabulary shard: its resident state, its values (see `zbc.ops.VALUES`) per unit, and the
    temporaries of its ops, by their columns."""

    state: StageBytes
    values: Mapping[str, float]
    needs: Mapping[str, float]

    @property
    def working(self) -> float:
        """The most a rank may hold of units at a time: one with its logits, and two that are looked up."""
        return sum(self.values[name] for name in ("logits", "sums", "hidden", "hidden", "words", "words"))


PerStage = tuple[float, ...]
Column = tuple[float | tuple[float, ...], ...]  # an entry per stage: of any slice of a microbatch, or one per slice
Links = Mapping[Edge, float]  # ms of a transfer along each edge, or back


def _activations_of(refs: Mapping[Kind, tuple[Ref, ...]]) -> dict[Kind, str]:
    """The one value of each kind that is an activation, if any; of copies, the part that can move."""
    found = ((kind, ref.what) for kind, each in refs.items() for ref in each)
    return {kind: "host" if kind in COPY else what for kind, what in found if VALUES[what].memory == "activations"}


_SUMS = ("f_sums", "b_sums", "bw_waits")
BY_SLICE = ("f", "b", "w", "bw", *_SUMS)  # columns with an entry for each slice of a microbatch
_WAITS = {"f": "f_sums", "b": "b_sums", "bw": "bw_waits"}  # the column of an op's wait for collectives, by its own
_MAKES = _activations_of({kind: kind.row.writes for kind in Kind})
_FREES = _activations_of({kind: kind.row.frees for kind in Kind})


class Size(NamedTuple):
    """Memory of a value on its rank; 0 bytes if the model's sizes are not known before it is built."""

    units: float
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of ops, transfers and values.

    `ms` has a column of times for each kind of work, with an entry per stage, or one entry for work of no stage. Read
    it with `of`, `column`, `total` and `duration`, to which a missing column costs nothing, and BW takes B + W.

        f b w bw         F, B, W and BW
        f_sums b_sums    of F, and of B and BW: the collectives of tensor-parallel ranks inside of them
        messages         of F, and of B and BW: time for which messages keep their rank from computing
        bw_waits         of BW: the part of its collectives that its own W does not hide; F and B wait for all of theirs
        reduce gather    one all-reduce of a stage's gradients over its replicas; all-gather of its stepped weights
        average          averaging a share of its weights over the replicas
        step tentative   STEP, and COMMIT; TENTATIVE
        agree            agreement of the ranks on a step with a barrier; one entry
        hop              a few numbers from a rank to the next; one entry
        out back         offloading a stage's activations to the host, and reloading them
        s t i e          ops of vocabulary shards, with an entry per rank; their collectives likewise:
                         spread meet sum give take

    Of an owner that is no stage a column has its letter, as "reduce v" and "step v", and one entry; of experts, as
    "reduce e", an entry per stage.

    `size` has the values of a stage for one microbatch: "kept" from F to B, "left" from B to W, "host" the part of
    "kept" that can be offloaded; with several slices also "kv", the keys and values of a microbatch from its first F to
    its last B, and as much for their gradients from its first B on. Read it with `units`, `bytes_of`, `held`,
    `held_bytes`. If the replicas of a stage have unlike ranks, `ms` has their mean, and `paces[pipe]` the time on a
    pipe's rank relative to the mean; else (). `links[pipe]` is the ms of a transfer between two stages, 0 on one rank;
    read it with `link`. A message occupies its link for `occupies[pipe]` ms: the next one from the same rank to the
    same rank waits; () if links take any number of messages. With `rendezvous` a message also waits until its receiver
    has posted a buffer. `bytes` is None if the model's sizes are not known before it is built.
    """

    ms: Mapping[str, Column]
    size: Mapping[str, tuple[Size | tuple[Size, ...], ...]]
    links: tuple[Links, ...]
    bytes: tuple[StageBytes, ...] | None = None
    source: str = "given"
    tied: float = 0.0  # bytes of the gradient of a weight that two stages share
    experts: tuple[StageBytes, ...] = ()  # memory of a stage's experts, if replicas share these out
    node: tuple[int, int] | None = None  # neighbours of a pipeline, and replicas of each, on one node
    overlap: float = 0.0  # the share of the shorter op of an overlap group that the longer one hides
    slices: int = 1  # of a microbatch; with several, an entry of F, B, W and their values has one for each
    sliced: tuple[tuple[StageBytes, ...], ...] = ()  # per slice, the `bytes` of every stage that depend on it
    rendezvous: bool = False
    occupies: tuple[Links, ...] = ()
    shared: int = 1  # neighbouring ranks with one link to the host: one copy out and one back at a time
    alone: float = 1.0  # the share of `out` and `back` that a copy takes while the other direction is idle
    paces: tuple[PerStage, ...] = ()
    shares: tuple[ShareBytes, ...] = ()  # memory of a rank's vocabulary shard, per slice; (): unknown

    @classmethod
    def uniform(
        cls, placement: Placement, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0, left: float = 1.0
    ) -> Costs:
        """Costs per rank, shared evenly by its stages: the papers' convention."""
        v = placement.stages / placement.ranks
        times = {name: (ms / v,) * placement.stages for name, ms in (("f", f), ("b", b), ("w", w))}
        size = {name: (Size(units / v),) * placement.stages for name, units in (("kept", 1.0), ("left", left))}
        return cls(times, size, links_of(placement, lambda stage, edge: comm))

    @classmethod
    def per_stage(
        cls, f: PerStage, b: PerStage, w: PerStage, kept: PerStage, left: PerStage, comm: Sequence[PerStage]
    ) -> Costs:
        """Costs of stages in a row; `kept` and `left` are units, `comm[pipe][s]` is ms from stage s on."""
        size = {"kept": tuple(map(Size, kept)), "left": tuple(map(Size, left))}
        links = tuple(dict(zip(chain(len(f)), pipe, strict=True)) for pipe in comm)
        return cls({"f": f, "b": b, "w": w}, size, links)

    def with_ms(self, **columns: Column) -> Costs:
        """Returns these costs with other columns; () removes a column."""
        return replace(self, ms={name: ms for name, ms in {**self.ms, **columns}.items() if ms})

    def with_units(self, **values: PerStage) -> Costs:
        """Returns these costs with these units for values of whole microbatches; their bytes stay."""
        counted = {
            name: tuple(Size(each, size) for each, size in zip(units, self.bytes_of(name), strict=True))
            for name, units in values.items()
        }
        return replace(self, size={**self.size, **counted})

    def counted(self, units: Callable[[int, Size], float], of: str = "") -> Costs:
        """Returns these costs with `units` of a stage's values, all values or only `of`; their bytes stay."""

        def again(stage: int, entry: Size | tuple[Size, ...]) -> Size | tuple[Size, ...]:
            if isinstance(entry, Size):
                return Size(units(stage, entry), entry.bytes)
            return tuple(Size(units(stage, one), one.bytes) for one in entry)

        some = {of: self.size[of]} if of else self.size
        size = {name: tuple(again(s, entry) for s, entry in enumerate(sizes)) for name, sizes in some.items()}
        return replace(self, size={**self.size, **size})

    def cut(self, rows: Sequence[float], **shares: Sequence[float]) -> Costs:
        """Returns the costs of microbatches in slices: `rows` is each slice's share of the tokens, `shares` its shares
        of the times f, b and w, if they differ."""
        names = [name for name in BY_SLICE if name in self.ms]
        ms = {name: _shared(self._column(name), shares.get(name[0], rows)) for name in names}
        size = {
            name: tuple(tuple(Size(one.units * row, one.bytes * row) for row in rows) for one in map(_whole, sizes))
            for name, sizes in self.size.items()
        }
        return replace(self, ms={**self.ms, **ms}, size=size, slices=len(rows))

    def portions(self, name: str, whole: PerStage) -> Column:
        """Splits `whole` ms of microbatches by slice, in the proportions of a column."""
        return tuple(
            tuple(ms * part / sum(entry) if sum(entry) else ms / len(entry) for part in entry)
            if isinstance(entry, tuple)
            else ms
            for ms, entry in zip(whole, self._column(name), strict=True)
        )

    def evened(self) -> Costs:
        """Returns these costs with equal activations in all slices, in units alone."""
        k = self.slices

        def even(entry: Size | tuple[Size, ...]) -> Size:
            return Size(sum(one.units for one in _by_slice(entry, k)) / k)

        size = {name: column if name == "kv" else tuple(map(even, column)) for name, column in self.size.items()}
        return replace(self, size=size, bytes=None, sliced=())

    def unit(self, pick: Callable[[Sequence[float]], float]) -> Costs:
        """Returns costs of a slice as a microbatch of its own: `pick` (as min, mean) joins the slices; "kv" is shared
        out."""
        k = self.slices
        if k == 1:
            return self
        kv = self.units("kv") if "kv" in self.size else (0.0,) * self.stages
        shared = {"kept": tuple(each / k for each in kv)}
        size = {
            name: tuple(
                Size(pick([one.units for one in _by_slice(entry, k)]) + more)
                for entry, more in zip(self.size[name], shared.get(name, (0.0,) * self.stages), strict=True)
            )
            for name in ("kept", "left")
        }
        ms = {
            name: tuple(pick(entry) if isinstance(entry, tuple) else entry for entry in column)
            for name, column in self.ms.items()
        }
        return replace(self, ms=ms, size=size, slices=1, sliced=())

    def joined(self) -> Costs:
        """Returns costs with a fused backward: B does everything, and W nothing."""
        nothing = (Size(0.0),) * self.stages
        whole = self.with_ms(b=self._column("bw"), w=(0.0,) * self.stages, bw=(), b_sums=self.ms.get("bw_waits", ()))
        return replace(whole, size={**self.size, "left": nothing})

    def least(self) -> Costs:
        """Returns costs that are a lower bound both of a BW and of a B and its W."""
        if "bw" not in self.ms:
            return self
        return self.with_ms(w=self.each(lambda b, w, bw: min(w, max(0.0, bw - b)), "b", "w", "bw"), bw=())

    def hidden(self) -> Costs:
        """Returns costs without waits for tensor-parallel collectives: a lower bound of every overlap group."""
        waits = [(name, _WAITS[name]) for name in ("f", "b", "bw") if _WAITS[name] in self.ms]
        less = {name: self.each(lambda ms, wait: max(0.0, ms - wait), name, waited) for name, waited in waits}
        return self.with_ms(**less, **dict.fromkeys(_SUMS, ()))

    @property
    def stages(self) -> int:
        return len(self.ms["f"])

    def of(self, column: str, stage: int = 0, part: int = 0) -> float:
        """ms by a column: of slice `part` of a microbatch, on one stage."""
        if stage <= EXPERTS:
            column, stage = f"{column} e", experts_of(stage)
        elif stage < 0:
            column, stage = f"{column} {OWNERS[stage]}", 0
        entries = self.ms.get(column)
        if entries is None:
            return self.of("b", stage, part) + self.of("w", stage, part) if column == "bw" else 0.0
        entry = entries[stage]
        return entry[part] if isinstance(entry, tuple) else entry

    def column(self, name: str) -> PerStage:
        """ms of every stage for a whole microbatch, as a tuple that loops can fetch once."""
        return tuple(sum(entry) if isinstance(entry, tuple) else entry for entry in self._column(name))

    def each(self, combine: Callable[..., float], *names: str) -> Column:
        """Applies `combine` to the ms of these columns, slice by slice if they have slices; returns a column."""
        return tuple(_combined(combine, entries) for entries in zip(*map(self._column, names), strict=True))

    def total(self, column: str, stages: Iterable[int]) -> float:
        """Sum of the ms of a column over these stages."""
        return sum(self.of(column, s) for s in stages)

    def duration(self, op: Op) -> float:
        """ms of an op; 0 for an op that takes no time of its own."""
        column = op.kind.row.cost
        if not column:
            return 0.0
        return self.pace(op.kind, op.pipe, op.stage) * self.of(column, op.stage, op.slice) - self.frozen(op)

    def pace(self, kind: Kind, pipe: int, stage: int) -> float:
        """The time of an op on its pipe's rank relative to its column."""
        return self.paces[pipe][stage] if self.paces and kind.computes and stage >= 0 else 1.0

    def fastest(self) -> Costs:
        """Returns costs as if all replicas of a stage ran on the fastest of its ranks."""
        if not self.paces:
            return self
        least = [min(each) for each in zip(*self.paces, strict=True)]
        names = [name for name in BY_SLICE if name in self.ms]
        scaled = {name: tuple(map(_times, self.ms[name], least)) for name in names}
        return replace(self.with_ms(**scaled), paces=())

    def weight_ms(self, op: Op) -> float:
        """ms of the weight gradients of a W or a BW without frozen layers."""
        w, stage, part = self.of("w", op.stage, op.slice), op.stage, op.slice
        if op.kind is Kind.W:
            return w
        sums, waits = self.sums(op)
        return min(w, max(0.0, self.of("bw", stage, part) - waits - self.of("b", stage, part) + sums))

    def frozen(self, op: Op) -> float:
        """ms that an op saves because layers are frozen."""
        return 0.0 if op.share == WHOLE else self.left_out(op, (WHOLE - op.share) / WHOLE)

    def left_out(self, op: Op, part: float) -> float:
        """ms that a W or a BW saves with that part of its layers frozen, which count alike. Collectives that the W of a
        BW hid are not saved."""
        less = self.weight_ms(op) * part
        if op.kind is Kind.W or not self.sums(op)[0]:
            return less
        return min(less, max(0.0, self.of("bw", op.stage, op.slice) - self.of("b", op.stage, op.slice)))

    def _column(self, name: str) -> Column:
        found = self.ms.get(name)
        if found is None and name == "bw":
            return self.each(add, "b", "w")
        return (0.0,) * self.stages if found is None else found

    def sums(self, op: Op) -> tuple[float, float]:
        """ms of the tensor-parallel collectives inside an op, and of these the ms that it waits if it runs alone."""
        column = op.kind.row.cost
        if column not in _WAITS or _SUMS[0] not in self.ms:
            return 0.0, 0.0
        inside = self.of("f_sums" if column == "f" else "b_sums", op.stage, op.slice)
        return inside, self.of(_WAITS[column], op.stage, op.slice)

    def pair(self, first: Op, second: Op, one: float, other: float) -> float:
        """ms of an overlap group of two ops that take `one` and `other` ms alone.

        Each computes during collectives of the other, so the group takes as long as all its computation, or as all its
        collectives: f + b + max(0, f_sums + b_sums - f - b), with f and b the compute times (arXiv 2510.27257).
        """
        (sums, wait), (more, longer) = self.sums(first), self.sums(second)
        one, other = max(0.0, one - wait), max(0.0, other - longer)
        return max(one + other - self.overlap * min(one, other), sums + more)

    def link(self, pipe: int, a: int, b: int) -> float:
        """ms of a transfer from stage `a` to its neighbour `b`, an output or a gradient."""
        return self.links[pipe][(a, b) if a < b else (b, a)]

    def units(self, value: str) -> PerStage:
        """Activation units of a value on every stage, for a whole microbatch."""
        return tuple(_whole(size).units for size in self.size[value])

    def bytes_of(self, value: str) -> PerStage:
        """Bytes of a value on every stage, for a whole microbatch; 0 if sizes are not known."""
        return tuple(_whole(size).bytes for size in self.size[value])

    def bytes_at(self, stage: int, part: int = 0) -> StageBytes | None:
        """Memory of a stage without its activations, for ops of slice `part`; None if sizes are not known."""
        if self.bytes is None:
            return None
        return self.sliced[part][stage] if self.sliced else self.bytes[stage]

    def bytes_owned(self, owner: int) -> StageBytes:
        """Memory of an owner of weights; NO_BYTES if sizes are not known."""
        if owner == TIED:
            return replace(NO_BYTES, summed=self.tied, gradients=self.tied)
        if owner <= EXPERTS:
            return self.experts[experts_of(owner)] if self.experts else NO_BYTES
        if owner == WORDS:
            return self.shares[0].state if self.shares else NO_BYTES
        return NO_BYTES if self.bytes is None else self.bytes[owner]

    def bytes_on(self, stages: Iterable[int]) -> list[StageBytes]:
        """Memory of whole stages on one rank, of their experts on it, and of its vocabulary shard; [] if sizes are not
        known."""
        shares = [one.state for one in self.shares[:1]]
        return [] if self.bytes is None else [*(size for s in stages for size in self.bytes_of_stage(s)), *shares]

    def bytes_of_stage(self, stage: int) -> list[StageBytes]:
        """Memory of a stage, and of its experts if replicas share these out; [] if sizes are not known."""
        owners = (stage, experts_of(stage)) if self.experts else (stage,)
        return [] if self.bytes is None else [*map(self.bytes_owned, owners)]

    def share_of(self, value: str, part: int = 0) -> float:
        """Bytes of a value of a vocabulary shard, for a slice; 0 if sizes are not known."""
        return self.shares[part if len(self.shares) > 1 else 0].values.get(value, 0.0) if self.shares else 0.0

    def share_need(self, op: Op) -> float:
        """Temporary bytes of a vocabulary op, or of an F that begins with the look-up; 0 if sizes are not known."""
        return self.shares[op.slice if len(self.shares) > 1 else 0].needs[op.kind.row.cost] if self.shares else 0.0

    def over(self, transfer: str) -> Costs:
        """Returns these costs with messages that wait for a buffer ("rendezvous"), or do not ("eager")."""
        return replace(self, rendezvous=transfer == "rendezvous")

    def held(self, op: Op) -> float:
        """Activation units, keys and values included, that an op adds to its rank; negative if it frees more."""
        made, freed = self._values(op)
        units = made.units - freed.units
        return units if self.slices == 1 else units + self.held_kv(op).units

    def held_bytes(self, op: Op) -> float:
        """Bytes that an op adds to its rank, likewise; 0 if sizes are not known."""
        made, freed = self._values(op)
        size = made.bytes - freed.bytes
        return size if self.slices == 1 else size + self.held_kv(op).bytes

    def held_kv(self, op: Op) -> Size:
        """The part of `held` in keys, values and their gradients: one buffer each for all slices of a microbatch.

        The first F of it makes one, its first B (of the last slice) the other; its last B frees both.
        """
        if "kv" not in self.size or op.kind.row.family not in ("forward", "input"):
            return _NOTHING
        size, forward = _whole(self.size["kv"][op.stage]), op.kind.row.family == "forward"
        begins, ends = op.slice == (0 if forward else self.slices - 1), not forward and op.slice == 0
        buffers = begins - 2 * ends
        return Size(buffers * size.units, buffers * size.bytes)

    def _values(self, op: Op) -> tuple[Size, Size]:
        """The sizes of the activation an op makes and of the one it frees."""
        made, freed = _MAKES.get(op.kind), _FREES.get(op.kind)
        return self._size(made, op) if made else _NOTHING, self._size(freed, op) if freed else _NOTHING

    def largest(self, value: str, stage: int) -> Size:
        """The largest size of a stage's value over all slices."""
        entry = self._entry(value, stage)
        return entry if isinstance(entry, Size) else max(entry, key=lambda size: size.bytes)

    def _size(self, value: str, op: Op) -> Size:
        entry = self._entry(value, op.stage)
        return entry if isinstance(entry, Size) else entry[op.slice]

    def _entry(self, value: str, stage: int) -> Size | tuple[Size, ...]:
        """A value's size on a stage; without a "host" entry, all activations that F keeps can be offloaded."""
        return self.size["kept" if value == "host" and value not in self.size else value][stage]

    def more_bytes(self, op: Op, *, first: bool = False) -> float:
        """Temporary bytes of a compute op beyond the larger of the bytes held before and after it.

        `first`: its gradients are the first of a step, which stay as they are.
        """
        return self._need(op, "first" if first else "more")

    def rise_bytes(self, op: Op, *, first: bool = False) -> float:
        """Peak bytes of a backward beyond the bytes held before it, the incoming gradient included.

        `first`: its gradients are the first of a step, which are counted as they are made.
        """
        return self._need(op, "coming" if first else "rise")

    def _need(self, op: Op, what: str) -> float:
        """`StageBytes.<what>` for an op; 0 if sizes are not known."""
        size = self.bytes_at(op.stage, op.slice)
        if size is None:
            return 0.0
        found: float = getattr(getattr(size, what), op.kind.row.cost, 0.0)
        return found


_NOTHING = Size(0.0)
CacheKey = tuple[Kind, int, int, int]


def key_of(op: Op) -> CacheKey:
    """The part of an op that decides its costs, whatever its microbatch and pipe: a key for caches."""
    return op[0], op[1], op[4], op[6]


def _whole(entry: Size | tuple[Size, ...]) -> Size:
    """The size for a whole microbatch."""
    if isinstance(entry, Size):
        return entry
    return Size(sum(one.units for one in entry), sum(one.bytes for one in entry))


def _by_slice(entry: Size | tuple[Size, ...], slices: int) -> tuple[Size, ...]:
    """Sizes slice by slice; a value with one size for all slices has it in each."""
    return (entry,) * slices if isinstance(entry, Size) else entry


def _shared(column: Column, shares: Sequence[float]) -> Column:
    wholes = [sum(entry) if isinstance(entry, tuple) else entry for entry in column]
    return tuple(tuple(ms * share for share in shares) for ms in wholes)


def _times(entry: float | tuple[float, ...], factor: float) -> float | tuple[float, ...]:
    return tuple(factor * ms for ms in entry) if isinstance(entry, tuple) else factor * entry


def _combined(combine: Callable[..., float], entries: Sequence[float | tuple[float, ...]]) -> float | tuple[float, ...]:
    parts = max((len(entry) for entry in entries if isinstance(entry, tuple)), default=0)
    if not parts:
        return combine(*entries)
    return tuple(map(combine, *(entry if isinstance(entry, tuple) else (entry,) * parts for entry in entries)))


def refuse_slices(what: str, slices: int, *, where: str | None = None) -> None:
    """Raise E124 if `what` is an order of slices of microbatches and nothing gives their lengths."""
    if slices != 1:
        text = f"{what} cuts microbatches into {slices} slices, and no job says where, so nobody knows what they cost"
        hint = f"set schedule.slices = {slices} in the job; or make ops of whole microbatches: slices = 1"
        raise ZbcError("E124", text, where=where, hint=hint)


def links_of(placement: Placement, ms: Callable[[int, tuple[int, int]], float]) -> tuple[Links, ...]:
    """`ms` of every edge of every pipe, given its source stage and its two ranks; 0 within a rank."""
    return tuple(
        {
            edge: ms(edge[0], ends) if placement.crosses(*edge, pipe) else 0.0
            for edge, ends in zip(placement.edges, placement.links(pipe), strict=True)
        }
        for pipe in range(len(placement.pipes))
    )
