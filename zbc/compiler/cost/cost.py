"""Costs of every op, with one interface for given and estimated costs.

Times are ms. Memory is activation units (one rank's share of one microbatch = 1.0) and, for known models, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from statistics import fmean
from typing import Any, NamedTuple

from zbc.compiler.cost.stage_bytes import NO_BYTES, StageBytes
from zbc.errors import ZbcError
from zbc.ir import COPY, NEXT, WHOLE, Edge, Kind, Op, Placement, Program, chain
from zbc.ops import EXPERTS, OWNERS, VALUES, WORDS, Ref, experts_of


@dataclass(frozen=True, slots=True)
class ShareBytes:
    """Bytes of a rank's vocabulary shard: its values (see `zbc.ops.VALUES`) per unit, and of its ops, by their columns,
    the temporaries."""

    values: Mapping[str, float]
    needs: Mapping[str, float]

    @property
    def working(self) -> float:
        """The most a rank may hold of units at a time: one with its logits, and two that are looked up."""
        return sum(self.values[name] for name in ("logits", "sums", "hidden", "hidden", "words", "words"))


PerStage = tuple[float, ...]
Column = tuple[float | tuple[float, ...], ...]  # an entry per stage: of any part (see `Costs.parts`), or one per part
Links = Mapping[Edge, float | tuple[float, ...]]  # ms of a transfer along each edge, or back; of any part, or per part


def _activations_of(refs: Mapping[Kind, tuple[Ref, ...]]) -> dict[Kind, str]:
    """The one value of each kind that is an activation, if any; of copies, the part that can move."""
    found = ((kind, ref.what) for kind, each in refs.items() for ref in each)
    return {kind: "host" if kind in COPY else what for kind, what in found if VALUES[what].memory == "activations"}


_SUMS = ("f_sums", "b_sums", "bw_waits")
_WORDS = ("s", "t", "i", "e", "spread", "meet", "sum", "give", "take")
# Columns with an entry for each slice, or for each of unequal microbatches.
BY_PART = ("f", "b", "w", "bw", *_SUMS, "messages", "out", "back", *_WORDS)
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

    `amounts` and `sizes` have columns of the values of a stage for one microbatch, in units and in bytes: "kept" from F
    to B, "left" from B to W, "host" the part of "kept" that can be offloaded; with several slices also "kv", the keys
    and values of a microbatch from its first F to its last B, and as much for their gradients from its first B on. Read
    them with `units`, `bytes_of`, `held`, `held_bytes`.

    If the replicas of a stage have unlike ranks, `ms` has their mean, and `paces[pipe]` the time on a pipe's rank
    relative to the mean; else (). `links[pipe]` is the ms of a transfer between two stages, 0 on one rank; read it with
    `link`. A message occupies its link for `occupies[pipe]` ms: the next one from the same rank to the same rank waits;
    () if links take any number of messages. With `rendezvous` a message also waits until its receiver has posted a
    buffer. `bytes` is None if the model's sizes are not known before it is built.
    """

    ms: Mapping[str, Column]
    amounts: Mapping[str, Column]
    links: tuple[Links, ...]
    sizes: Mapping[str, Column] = field(default_factory=dict)
    bytes: tuple[StageBytes, ...] | None = None
    source: str = "given"
    owners: Mapping[int, StageBytes] = field(default_factory=dict)  # memory of those that are no stages
    node: tuple[int, int] | None = None  # neighbours of a pipeline, and replicas of each, on one node
    near: int = 0  # ranks on a node, if exchanges of experts' rows between nodes take two steps
    overlap: float = 0.0  # the share of the shorter op of an overlap group that the longer one hides
    slices: int = 1  # of a microbatch; with several, an entry of F, B, W and their values has one for each
    unequal: int = 0  # microbatches, if they differ: then these entries, and those of links, have one for each of them
    sliced: tuple[tuple[StageBytes, ...], ...] = ()  # per part, the `bytes` of every stage that depend on it
    rendezvous: bool = False
    occupies: tuple[Links, ...] = ()
    shared: int = 1  # neighbouring ranks with one link to the host: one copy out and one back at a time
    alone: float = 1.0  # the share of `out` and `back` that a copy takes while the other direction is idle
    paces: tuple[PerStage, ...] = ()
    shares: tuple[ShareBytes, ...] = ()  # temporary memory of a rank's vocabulary shard, per part; (): unknown

    @classmethod
    def uniform(
        cls, placement: Placement, f: float = 1.0, b: float = 1.0, w: float = 1.0, comm: float = 0.0, left: float = 1.0
    ) -> Costs:
        """Costs per rank, shared evenly by its stages: the papers' convention."""
        v = placement.stages / placement.ranks
        times = {name: (ms / v,) * placement.stages for name, ms in (("f", f), ("b", b), ("w", w))}
        amounts = {name: (units / v,) * placement.stages for name, units in (("kept", 1.0), ("left", left))}
        return cls(times, amounts, links_of(placement, lambda stage, edge: comm))

    @classmethod
    def per_stage(
        cls, f: PerStage, b: PerStage, w: PerStage, kept: PerStage, left: PerStage, comm: Sequence[PerStage]
    ) -> Costs:
        """Costs of stages in a row; `kept` and `left` are units, `comm[pipe][s]` is ms from stage s on."""
        links = tuple(dict(zip(chain(len(f)), pipe, strict=True)) for pipe in comm)
        return cls({"f": f, "b": b, "w": w}, {"kept": kept, "left": left}, links)

    def with_ms(self, **columns: Column) -> Costs:
        """Returns these costs with other columns; () removes a column."""
        return replace(self, ms={name: ms for name, ms in {**self.ms, **columns}.items() if ms})

    def counted(self, units: Callable[[int, Size], float], of: str = "") -> Costs:
        """Returns these costs with `units` of a stage's values, all values or only `of`; their bytes stay."""
        names = [of] if of else [*self.amounts]
        both = {name: zip(self.amounts[name], self._column(name, self.sizes), strict=True) for name in names}
        again = {
            name: tuple(_combined(lambda *one, s=s: units(s, Size(*one)), each) for s, each in enumerate(pairs))
            for name, pairs in both.items()
        }
        return replace(self, amounts={**self.amounts, **again})

    def cut(self, rows: Sequence[float], **shares: Sequence[float]) -> Costs:
        """Returns the costs of microbatches in slices: `rows` is each slice's share of the tokens, `shares` its shares
        of the times f, b and w, if they differ."""

        def parts(whole: PerStage, of: Sequence[float] = rows) -> Column:
            return tuple(tuple(share * one for share in of) for one in whole)

        ms = {name: parts(self.column(name), shares.get(name, rows)) for name in "fbw"}
        amounts = {name: parts(self.units(name)) for name in self.amounts}
        sizes = {name: parts(self.bytes_of(name)) for name in self.sizes}
        return replace(self, ms={**self.ms, **ms}, amounts=amounts, sizes=sizes, slices=len(rows))

    def evened(self) -> Costs:
        """Returns these costs with equal activations in all slices, in units alone."""
        k = self.slices
        even = {name: tuple(one / k for one in self.units(name)) for name in self.amounts if name != "kv"}
        return replace(self, amounts={**self.amounts, **even}, bytes=None, sliced=())

    def unit(self, pick: Callable[[Sequence[float]], float]) -> Costs:
        """Returns costs of a part as a microbatch of its own: `pick` (as min, mean) joins the parts; "kv" is shared
        out."""
        if self.parts == 1 and not self.unequal:
            return self

        found, kv = self._changed(pick), self.units("kv") if "kv" in self.amounts else (0.0,) * self.stages
        kept = tuple(one + more / self.slices for one, more in zip(found.units("kept"), kv, strict=True))
        amounts = {"kept": kept, "left": found.amounts["left"]}
        return replace(found, amounts=amounts, sizes={}, slices=1, unequal=0, sliced=())

    def _changed(self, change: Callable[[Any], Any]) -> Costs:
        """Returns these costs with a `change` of all that has an entry per part."""

        def one(entry: Any) -> Any:
            return change(entry) if isinstance(entry, tuple) else entry

        ms, amounts, sizes = (
            {name: tuple(map(one, column)) for name, column in of.items()} for of in (self.ms, self.amounts, self.sizes)
        )
        links, occupies = (
            tuple({edge: one(ms) for edge, ms in pipe.items()} for pipe in of) for of in (self.links, self.occupies)
        )
        return replace(self, ms=ms, amounts=amounts, sizes=sizes, links=links, occupies=occupies)

    def joined(self) -> Costs:
        """Returns costs with a fused backward: B does everything, and W nothing."""
        whole = self.with_ms(b=self._column("bw"), w=(0.0,) * self.stages, bw=(), b_sums=self.ms.get("bw_waits", ()))
        nothing = {"left": (0.0,) * self.stages}
        return replace(whole, amounts={**self.amounts, **nothing}, sizes=self.sizes and {**self.sizes, **nothing})

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

    @property
    def parts(self) -> int:
        """How many entries there may be for a stage: the slices of any microbatch, or the microbatches of a step."""
        return self.unequal or self.slices

    def part(self, mb: int, part: int) -> int:
        """Which of these is a slice of a microbatch, of any of steps in a row."""
        return mb % NEXT % self.unequal if self.unequal else part

    def of(self, column: str, stage: int = 0, part: int = 0) -> float:
        """ms by a column: of a part, on one stage."""
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
        """ms of every stage for a whole microbatch (the mean of unequal ones), as a tuple that loops can fetch once."""
        count = self.unequal or 1
        return tuple(sum(entry) / count if isinstance(entry, tuple) else entry for entry in self._column(name))

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
        return self.paced(op.kind, op.pipe, op.stage, self.part(op.mb, op.slice)) - self.frozen(op)

    def paced(self, kind: Kind, pipe: int, stage: int, part: int) -> float:
        """ms of an op on its pipe's rank; messages and collectives inside of it take equally long on any rank."""
        column = kind.row.cost
        ms, pace = self.of(column, stage, part), self._pace(kind, pipe, stage)
        if pace == 1.0 or column not in _WAITS:
            return pace * ms
        return _at(pace, ms, self.of("messages", stage, part), self.of(_WAITS[column], stage, part))

    def _pace(self, kind: Kind, pipe: int, stage: int) -> float:
        of_stage = self.paces and kind.computes and stage >= 0 and not kind.unit_wide
        return self.paces[pipe][stage] if of_stage else 1.0

    def fastest(self) -> Costs:
        """Returns costs as if all replicas of a stage ran on the fastest of its ranks."""
        if not self.paces:
            return self
        least = [min(each) for each in zip(*self.paces, strict=True)]
        paced, same = self.with_ms(pace=tuple(least)), ("", "")
        names = [(name, ("messages", _WAITS[name]) if name in _WAITS else same) for name in ("f", "b", "w", "bw")]
        scaled = {name: paced.each(_at, "pace", name, *waits) for name, waits in names if name in self.ms}
        return replace(self.with_ms(**scaled), paces=())

    def weight_ms(self, op: Op) -> float:
        """ms of the weight gradients of a W or a BW without frozen layers."""
        stage, part = op.stage, self.part(op.mb, op.slice)
        w = self.of("w", stage, part)
        if not op.kind.is_backward:
            return w
        sums, waits = self.sums(op)
        return min(w, max(0.0, self.of("bw", stage, part) - waits - self.of("b", stage, part) + sums))

    def frozen(self, op: Op) -> float:
        """ms that an op saves because layers are frozen."""
        if op.share == WHOLE:
            return 0.0
        return self._pace(op.kind, op.pipe, op.stage) * self.left_out(op, (WHOLE - op.share) / WHOLE)

    def left_out(self, op: Op, share: float) -> float:
        """ms that a W or a BW saves with that share of its layers frozen, which count alike. Collectives that the W of
        a BW hid are not saved."""
        less = self.weight_ms(op) * share
        if not op.kind.is_backward or not self.sums(op)[0]:
            return less
        part = self.part(op.mb, op.slice)
        return min(less, max(0.0, self.of("bw", op.stage, part) - self.of("b", op.stage, part)))

    def _column(self, name: str, of: Mapping[str, Column] | None = None) -> Column:
        found = (self.ms if of is None else of).get(name)
        if found is None and name == "bw":
            return self.each(add, "b", "w")
        return (0.0,) * self.stages if found is None else found

    def sums(self, op: Op) -> tuple[float, float]:
        """ms of the tensor-parallel collectives inside an op, and of these the ms that it waits if it runs alone."""
        column = op.kind.row.cost
        if column not in _WAITS or _SUMS[0] not in self.ms:
            return 0.0, 0.0
        part = self.part(op.mb, op.slice)
        return self.of("f_sums" if column == "f" else "b_sums", op.stage, part), self.of(_WAITS[column], op.stage, part)

    def pair(self, first: Op, second: Op, one: float, other: float) -> float:
        """ms of an overlap group of two ops that take `one` and `other` ms alone.

        Each computes during collectives of the other, so the group takes as long as all its computation, or as all its
        collectives: f + b + max(0, f_sums + b_sums - f - b), with f and b the compute times (arXiv 2510.27257).
        """
        (sums, wait), (more, longer) = self.sums(first), self.sums(second)
        one, other = max(0.0, one - wait), max(0.0, other - longer)
        return max(one + other - self.overlap * min(one, other), sums + more)

    def renumbered(self, numbers: Sequence[int]) -> Costs:
        """The same with unequal microbatches in another order, the first of which is that of the first number."""

        def again(entry: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(entry[k] for k in numbers if entry)

        return replace(self._changed(again), sliced=again(self.sliced), shares=again(self.shares))

    def lag(self, pipe: int, a: int, b: int) -> float | tuple[float, ...]:
        """ms of a transfer from stage `a` to its neighbour `b`, an output or a gradient; of any part, or of each."""
        return self.links[pipe][(a, b) if a < b else (b, a)]

    def link(self, pipe: int, a: int, b: int, mb: int = 0) -> float:
        """The same of one microbatch, of any where all are alike."""
        found = self.lag(pipe, a, b)
        return found[self.part(mb, 0)] if isinstance(found, tuple) else found

    def lags(self, pipe: int) -> dict[Edge, float]:
        """ms of a transfer along each edge, or back, on the mean."""
        return {edge: fmean(ms) if isinstance(ms, tuple) else ms for edge, ms in self.links[pipe].items()}

    def units(self, value: str) -> PerStage:
        """Activation units of a value on every stage, for a whole microbatch; of unequal ones the largest."""
        return tuple(map(self._whole, self.amounts[value]))

    def bytes_of(self, value: str) -> PerStage:
        """Bytes of a value on every stage, for a whole microbatch; 0 if sizes are not known."""
        return tuple(map(self._whole, self._column(value, self.sizes)))

    def bytes_at(self, stage: int, part: int = 0) -> StageBytes:
        """Memory of a stage without its activations, for ops of `part`; NO_BYTES if sizes are not known."""
        return self.sliced[part][stage] if self.sliced else self.bytes_owned(stage)

    def run_by(self, program: Program) -> Costs:
        """These costs in a program, whose stages may split no backward."""
        if not any(one.whole for one in self.bytes or ()):
            return self
        split = program.split

        def of(stages: tuple[StageBytes, ...]) -> tuple[StageBytes, ...]:
            return tuple(one if s in split else one.unsplit for s, one in enumerate(stages))

        return replace(self, bytes=of(self.bytes or ()), sliced=tuple(map(of, self.sliced)))

    def bytes_owned(self, owner: int) -> StageBytes:
        """Memory of an owner of weights; NO_BYTES if sizes are not known."""
        if owner >= 0 and self.bytes is not None:
            return self.bytes[owner]
        return self.owners.get(owner, NO_BYTES)

    def bytes_on(self, stages: Iterable[int]) -> list[StageBytes]:
        """Memory of whole stages on one rank, of their experts on it, and of its vocabulary shard; [] if sizes are not
        known."""
        words = [self.owners[WORDS]] if WORDS in self.owners else []
        return [] if self.bytes is None else [*(size for s in stages for size in self.bytes_of_stage(s)), *words]

    def bytes_of_stage(self, stage: int) -> list[StageBytes]:
        """Memory of a stage, and of its experts if replicas share these out; [] if sizes are not known."""
        of = self.owners.get(experts_of(stage))
        return [] if self.bytes is None else [self.bytes[stage], *([] if of is None else [of])]

    def share_of(self, value: str, part: int = 0) -> float:
        """Bytes of a value of a vocabulary shard, for a part; 0 if sizes are not known."""
        return self.shares[part if len(self.shares) > 1 else 0].values.get(value, 0.0) if self.shares else 0.0

    def share_need(self, op: Op) -> float:
        """Temporary bytes of a vocabulary op, or of an F that begins with the look-up; 0 if sizes are not known."""
        part = self.part(op.mb, op.slice) if len(self.shares) > 1 else 0
        return self.shares[part].needs[op.kind.row.cost] if self.shares else 0.0

    def over(self, transfer: str) -> Costs:
        """Returns these costs with messages that wait for a buffer ("rendezvous"), or do not ("eager")."""
        return replace(self, rendezvous=transfer == "rendezvous")

    def held(self, op: Op) -> float:
        """Activation units, keys and values included, that an op adds to its rank; negative if it frees more."""
        return self._held(op, self.amounts)

    def held_bytes(self, op: Op) -> float:
        """Bytes that an op adds to its rank, likewise; 0 if sizes are not known."""
        return self._held(op, self.sizes)

    def held_kv(self, op: Op) -> Size:
        """The part of `held` in keys, values and their gradients: one buffer each for all slices of a microbatch.

        The first F of it makes one, its first B (of the last slice) the other; its last B frees both.
        """
        return Size(self._held_kv(op, self.amounts), self._held_kv(op, self.sizes))

    def _held_kv(self, op: Op, of: Mapping[str, Column]) -> float:
        forward = op.kind.is_forward
        if "kv" not in of or not (forward or op.kind.is_backward):
            return 0.0
        begins, ends = op.slice == (0 if forward else self.slices - 1), not forward and op.slice == 0
        return (begins - 2 * ends) * self._whole(of["kv"][op.stage])

    def _held(self, op: Op, of: Mapping[str, Column]) -> float:
        """What an op makes less what it frees, by these columns; without a "host" entry, all activations that F keeps
        can be offloaded."""
        change, part = 0.0, self.part(op.mb, op.slice)
        for value, sign in ((_MAKES.get(op.kind), 1), (_FREES.get(op.kind), -1)):
            column = of.get("kept" if value == "host" and value not in of else value or "")
            if column is not None:
                entry = column[op.stage]
                change += sign * (entry[part] if isinstance(entry, tuple) else entry)
        return change + self._held_kv(op, of)

    def _whole(self, entry: float | tuple[float, ...]) -> float:
        """Of a whole microbatch; of unequal ones of the largest."""
        if not isinstance(entry, tuple):
            return entry
        return max(entry) if self.unequal else sum(entry)

    def need_bytes(self, op: Op, *, first: bool = False) -> float:
        """Temporary bytes of a compute op; 0 if sizes are not known.

        Of an F those beyond the larger of the bytes held before and after it; of a backward its peak beyond the bytes
        held before it, the incoming gradient included. `first`: its gradients are the first of a step, which are
        counted as they are made.
        """
        column, size = op.kind.row.cost, self.bytes_at(op.stage, self.part(op.mb, op.slice))
        return size.needs.get(f"first {column}" if first and not op.kind.is_forward else column, 0.0)

    def key(self, op: Op) -> CacheKey:
        """The cache key of an op's costs, which do not depend on its pipe."""
        return op[0], op[1], self.part(op[2], op[4]), op[6]


CacheKey = tuple[Kind, int, int, int]


def _at(pace: float, ms: float, *waits: float) -> float:
    """ms of an op whose work takes `pace` times as long, and its waits do not."""
    return pace * (ms - sum(waits)) + sum(waits)


def _combined(combine: Callable[..., float], entries: Sequence[float | tuple[float, ...]]) -> float | tuple[float, ...]:
    parts = max((len(entry) for entry in entries if isinstance(entry, tuple)), default=0)
    if not parts:
        return combine(*entries)
    return tuple(map(combine, *(entry if isinstance(entry, tuple) else (entry,) * parts for entry in entries)))


def refuse_slices(what: str, slices: int, *, where: str | None = None) -> None:
    """Raise E110 if `what` is an order of slices of microbatches and nothing gives their lengths."""
    if slices != 1:
        text = f"{what} cuts microbatches into {slices} slices, and no job says where, so nobody knows what they cost"
        hint = f"set schedule.slices = {slices} in the job; or make ops of whole microbatches: slices = 1"
        raise ZbcError("E110", text, where=where, hint=hint)


def links_of(placement: Placement, ms: Callable[[int, tuple[int, int]], float]) -> tuple[Links, ...]:
    """`ms` of every edge of every pipe, given its source stage and its two ranks; 0 within a rank."""
    return tuple(
        {
            edge: ms(edge[0], ends) if placement.crosses(*edge, pipe) else 0.0
            for edge, ends in zip(placement.edges, placement.links(pipe), strict=True)
        }
        for pipe in range(len(placement.pipes))
    )
