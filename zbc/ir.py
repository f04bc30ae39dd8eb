"""The program representation shared by the compiler, the plan files and the runtime.

A `Program` holds one list of `Op` per rank, in execution order. Passes map programs to programs; all values are
frozen. An op prints as one line and `Op.parse` reads that line back, so plan files, golden tests and error
messages all show the same text:

    F s1 m0          forward of stage 1, microbatch 0
    B s3 m2 up       input gradient, pipe 1 (the upward direction of a bidirectional schedule); pipe 2 and on: `pipe2`
    F s1 m0.2        slice 2 of a microbatch cut along its sequence
    SEND_F s1 m0 >r2 the peer rank follows from the placement; it is printed for the reader
    RECV_F s4 m0 from s1 <r1, SEND_B s4 m0 to s1 >r1: if a stage has several inputs, or its output several readers
    REDUCE s0        of an owner of weights, such as a stage: no microbatch
    REDUCE v         of this rank's rows of a shared vocabulary; REDUCE t: of weights that stages share;
    REDUCE e3        of this rank's experts of stage 3, with expert parallelism
    VALIDATE         rank-wide: no stage
    W s1 m3 75%      three quarters of the stage's layers get their weight gradients, the others are frozen (also BW)
    S m3.1           on every rank, for slice 1 of microbatch 3: no stage; with a shared vocabulary
    OVERLAP          a mark: the two ops after it are one overlap group
    F s0 m0 next     of the next step, if steps follow one another without a flush
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from zbc.errors import ZbcError
from zbc.ops import EXPERTS, NUMBERED, OWNERS, PATCHES, TIED, WORDS, At, Scope, experts_of, home_of, owner_text
from zbc.ops import Kind as Kind
from zbc.topology import Topology, inner_of

Edge = tuple[int, int]  # (source stage, sink stage)

# Whether ops of a kind print (their stage, their microbatch and slice).
_PRINTS = {
    kind: (kind.row.scope in (Scope.UNIT, Scope.STAGE), kind.row.scope in (Scope.UNIT, Scope.EVERY)) for kind in Kind
}
COPY = frozenset({Kind.OFFLOAD, Kind.RELEASE, Kind.RELOAD})  # activation offload and reload
_KINDS = {kind.value: kind for kind in Kind}
_OWNERS = {letter: owner for owner, letter in OWNERS.items()}
WHOLE = 100  # percent
IN_A_ROW = "in a row"  # added to a program's history by `repeated`
NEXT = 1 << 30  # `Op.mb` of microbatch k of the next step is NEXT + k
_OP = re.compile(
    r"(?P<kind>[A-Z_]+)(?: s(?P<stage>\d{1,9})| (?P<owner>[vt]|e\d{1,9}))?"
    r"(?: m(?P<mb>\d{1,9})(?:\.(?P<slice>\d{1,9}))?(?P<next> next)?)?"
    r"(?: (?:(?P<up>up)|pipe(?P<pipe>\d{1,9})))?(?: #(?P<count>\d{1,9}))?"
    r"(?: (?P<share>\d{1,2})%)?(?: (?P<way>from|to) s(?P<other>\d{1,9}))?(?: (?P<arrow>[<>])r(?P<peer>\d{1,9}))?"
)


class Op(NamedTuple):
    """One op of one rank: `kind` of work on `stage` for microbatch `mb` of `pipe`, sequence part `slice`. `stage`: for
    kinds of an owner of weights also WORDS, TIED or `experts_of(stage)`. `mb`: NEXT + k for microbatch k of the next
    step. `share`: for W and BW, the percentage of the stage's layers that get weight gradients; the others are frozen.
    `other`: for transfers of a stage with several edges on that side, the stage at the other end."""

    kind: Kind
    stage: int
    mb: int = 0
    pipe: int = 0
    slice: int = 0
    share: int = WHOLE
    other: int = -1

    @property
    def key(self) -> Key:
        """The op's (stage, microbatch, pipe, slice)."""
        return tuple.__new__(Key, self[1:5])  # twice as fast as by names, and read for every op

    @property
    def owner(self) -> int:
        """The owner of the weights it uses."""
        return WORDS if self.kind.unit_wide else self.stage

    def __str__(self) -> str:
        has_stage, has_mb = _PRINTS[self[0]]
        kind, stage, mb, pipe, part, share, end = self
        text = f"{kind} {owner_text(stage)}" if has_stage else str(kind)
        if has_mb:
            own = mb if mb < NEXT else mb - NEXT
            text = f"{text} m{own}.{part}" if part else f"{text} m{own}"
            text = text if mb < NEXT else f"{text} next"
        elif mb and kind in NUMBERED:
            text = f"{text} #{mb}"
        if pipe and (has_stage or has_mb):
            text = f"{text} {'up' if pipe == 1 else f'pipe{pipe}'}"
        if end >= 0:
            text = f"{text} {'to' if kind.is_send else 'from'} s{end}"
        return text if share == WHOLE else f"{text} {share}%"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read one line of a plan; the peer, if printed, is dropped (see `parse_line`)."""
        return parse_line(text)[0]


def turned(n: int, slices: int) -> int:
    """The unit (microbatch x slice) of a stage's n-th backward: backwards take slices of a microbatch in reverse. It is
    its own inverse: given a unit, the position of its backward."""
    return n - n % slices + slices - 1 - n % slices


def nth(kind: Kind, stage: int, n: int, slices: int, pipe: int = 0) -> Op:
    """The n-th op of a kind on its stage: a forward, or a backward of either kind."""
    mb, part = divmod(n if kind.is_forward else turned(n, slices), slices)
    return Op(kind, stage, mb, pipe, part)


def forward(stage: int, mb: int = 0, pipe: int = 0, part: int = 0) -> Op:
    """The op that computes the output of a stage for a unit."""
    return Op(Kind.F, stage, mb, pipe, part)


class Key(NamedTuple):
    """The unit of a step that tensors belong to."""

    stage: int
    mb: int
    pipe: int = 0
    slice: int = 0

    @property
    def name(self) -> str:
        """`s1 m0`, as in the text of an op."""
        return str(forward(*self)).partition(" ")[2]


def parse_line(text: str) -> tuple[Op, int | None]:
    """An op and the peer rank printed after it, if any. Raises E404 for anything else."""
    text = "REDUCE t" if text == "TIE" else text  # its name in older plans
    match = _OP.fullmatch(text)
    kind = _KINDS.get(match["kind"]) if match else None
    if match is None or kind is None:
        raise _not_an_op(text)
    stage, mb, part, up, pipe, arrow, peer = match.group("stage", "mb", "slice", "up", "pipe", "arrow", "peer")
    count, owner = match["count"], match["owner"]
    share, way, end = match["share"], match["way"], match["other"]
    wrong = owner is not None and not kind.stage_wide, share is not None and not kind.makes_part
    ways = {"to": kind.is_send, ">": kind.is_send, "from": kind.is_recv, "<": kind.is_recv, None: True}
    if any(wrong) or not (ways[way] and ways[arrow]):
        raise _not_an_op(text)
    op = Op(
        kind,
        int(stage or 0) if owner is None else _OWNERS[owner] if owner in _OWNERS else experts_of(int(owner[1:])),
        int(mb or count or 0) + (NEXT if match["next"] else 0),
        1 if up else int(pipe or 0),
        int(part or 0),
        WHOLE if share is None else int(share),
        -1 if end is None else int(end),
    )
    if str(op) != text.partition(" <")[0].partition(" >")[0]:  # 'F s01 m0', 'VALIDATE up', 'F s0 m0.0'
        raise _not_an_op(text)
    return op, None if peer is None else int(peer)


def _not_an_op(text: str) -> ZbcError:
    return ZbcError("E404", f"plan: not an op: {text!r}", hint="ops look like 'F s0 m3' or 'SEND_F s0 m3 >r1'")


class Message(NamedTuple):
    """A tensor sent from the stage that makes it to the stage that reads it: an output, or an input gradient."""

    source: int
    sink: int
    mb: int
    pipe: int
    slice: int

    @property
    def forward(self) -> bool:
        """Whether it is an output; stages are numbered along the edges that outputs take."""
        return self.source < self.sink

    @property
    def edge(self) -> Edge:
        """The edge it takes, in either direction."""
        return (self.source, self.sink) if self.forward else (self.sink, self.source)

    @property
    def send(self) -> Op:
        """The op that starts the message on the maker's rank, for error messages; plans use `Placement.send`."""
        return Op(Kind.SEND_F if self.forward else Kind.SEND_B, self.source, *self[2:])

    @property
    def recv(self) -> Op:
        """The op that posts its buffer on the reader's rank, for error messages; plans use `Placement.recv`."""
        return Op(Kind.RECV_F if self.forward else Kind.RECV_B, self.sink, *self[2:])


def chain(stages: int) -> tuple[Edge, ...]:
    """The edges of stages that follow one another."""
    return tuple(pairwise(range(stages)))


@dataclass(frozen=True, slots=True)
class Placement:
    """The rank of each stage, and the edges between stages.

    `pipes[pipe][stage]` is the rank. One pipe for ordinary schedules; bidirectional schedules hold each stage twice,
    once per direction. A pipe may leave out ranks, and ranks may differ in their number of stages.

    `edges` are (source, sink), the same in every pipe: F of the sink reads the output of F of the source, and backward
    of the source reads the input gradient of the sink. Always source < sink. By default the stages are a chain.
    """

    pipes: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...] = ()
    _sources: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _sinks: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _held: Mapping[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges = self.edges or chain(self.stages)
        sources, sinks = ([list[int]() for _ in range(self.stages)] for _ in range(2))
        held = dict[int, set[int]]()
        for a, b in edges:
            sources[b].append(a)
            sinks[a].append(b)
        for pipe in self.pipes:
            for stage, rank in enumerate(pipe):
                held.setdefault(rank, set()).add(stage)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "_sources", tuple(map(tuple, sources)))
        object.__setattr__(self, "_sinks", tuple(map(tuple, sinks)))
        object.__setattr__(self, "_held", {rank: tuple(sorted(stages)) for rank, stages in held.items()})

    @classmethod
    def linear(cls, p: int) -> Placement:
        """Stage s on rank s."""
        return cls((tuple(range(p)),))

    @classmethod
    def looped(cls, p: int, v: int) -> Placement:
        """Stages dealt round-robin: stage s on rank s mod p."""
        return cls((tuple(s % p for s in range(p * v)),))

    @classmethod
    def vshape(cls, p: int, v: int = 2) -> Placement:
        """Stages down the ranks and back up: 0 1 .. p-1 p-1 .. 1 0, `v` legs."""
        down, up = tuple(range(p)), tuple(reversed(range(p)))
        return cls((tuple(r for leg in range(v) for r in (up if leg % 2 else down)),))

    @classmethod
    def bidirectional(cls, down: Sequence[int]) -> Placement:
        """`down`, and its mirror image as a second pipe that holds a copy of every stage."""
        last = max(down)
        return cls((tuple(down), tuple(last - r for r in down)))

    @property
    def stages(self) -> int:
        return len(self.pipes[0])

    @property
    def ranks(self) -> int:
        return 1 + max(max(pipe) for pipe in self.pipes)

    @property
    def chunks(self) -> int | None:
        """The number of stages per rank and pipe; None if it is not the same for all."""
        counts = {pipe.count(rank) for pipe in self.pipes for rank in range(self.ranks)}
        return counts.pop() if len(counts) == 1 else None

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of ranks of each stage, if each rank has one stage and some stage has several ranks; else ()."""
        if len(self.pipes) == 1:
            return ()
        counts = tuple(len(set(self.holders(s))) for s in range(self.stages))
        return counts if sum(counts) == self.ranks else ()

    def only(self, pipe: int) -> Placement:
        """One of the pipes, as if it were the only one."""
        return replace(self, pipes=(self.pipes[pipe],))

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        return self.pipes[pipe][stage]

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks with a copy of `stage`, one per pipe."""
        return tuple(pipe[stage] for pipe in self.pipes)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages with a copy on `rank`, ascending."""
        return self._held.get(rank, ())

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages whose output `stage` reads, ascending; none for one that reads the data."""
        return self._sources[stage]

    def sinks(self, stage: int) -> tuple[int, ...]:
        """The stages that read the output of `stage`, ascending; none for one that ends in the loss."""
        return self._sinks[stage]

    def beside(self, stage: int, side: At | None) -> tuple[int, ...]:
        """The stages at the other end of the edges on one side of `stage` (see `Kind.takes`); () if `side` is None."""
        return self._sources[stage] if side is At.SOURCES else self._sinks[stage] if side is At.SINKS else ()

    @property
    def ends(self) -> tuple[int, ...]:
        """The stages without sources or without sinks, ascending: in a chain the first and the last."""
        return tuple(s for s in range(self.stages) if not (self._sources[s] and self._sinks[s]))

    def crosses(self, a: int, b: int, pipe: int = 0) -> bool:
        """Whether the two stages of an edge are on different ranks, so that the edge needs a transfer."""
        return self.pipes[pipe][a] != self.pipes[pipe][b]

    def links(self, pipe: int = 0) -> tuple[tuple[int, int], ...]:
        """The ranks at both ends of each edge, in the order of the edges; equal if there is no transfer."""
        homes = self.pipes[pipe]
        return tuple((homes[a], homes[b]) for a, b in self.edges)

    @property
    def branches(self) -> bool:
        """Whether the stages are not a chain."""
        return self.edges != chain(self.stages)

    def far(self, op: Op) -> int | None:
        """The stage at the other end of a transfer; None if the op names no edge: it leads out of the pipeline. An op
        names an edge by the stage at one end, and by both if that stage has several edges on that side."""
        stages = self.beside(op.stage, op.kind.takes or op.kind.gives)
        if len(stages) == 1:
            return stages[0] if op.other < 0 else None
        return op.other if op.other in stages else None

    def message(self, op: Op) -> Message | None:
        """The message of a transfer; None for other ops, and for a transfer that names no edge."""
        kind, stage, mb, pipe, part, *_ = op
        if not kind.is_transfer or pipe >= len(self.pipes) or stage >= self.stages:
            return None
        far = self.far(op)
        if far is None:
            return None
        ends = (stage, far) if kind.is_send else (far, stage)
        return Message(*ends, mb, pipe, part)

    def send(self, message: Message) -> Op:
        """The op that starts a message on the maker's rank."""
        return self._named(message.send, message.sink)

    def recv(self, message: Message) -> Op:
        """The op that posts the buffer of a message on the reader's rank."""
        return self._named(message.recv, message.source)

    def _named(self, op: Op, far: int) -> Op:
        several = len(self.beside(op.stage, op.kind.takes or op.kind.gives)) > 1
        return op._replace(other=far) if several else op

    def peer(self, op: Op) -> int | None:
        """The rank at the other end of a transfer; None if the op has no message."""
        message = self.message(op)
        if message is None:
            return None
        return self.pipes[op.pipe][message.sink if op.kind.is_send else message.source]

    def text(self, op: Op) -> str:
        """The op with its peer, as plan files print it."""
        peer = self.peer(op)
        return str(op) if peer is None else f"{op} {'>' if op.kind.is_send else '<'}r{peer}"


def groups(ops: Sequence[Op]) -> dict[int, int]:
    """Position of each op of an overlap group, its OVERLAP included -> position of that OVERLAP."""
    return {step: first for first, op in enumerate(ops) if op.kind.is_mark for step in range(first, first + 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTraits:
    """Properties of a program that its ops do not show: the one list of them, stored in plans."""

    dp: int = 1  # data parallelism: replicas of the pipeline; each runs these ops, collectives are over all of them
    cp: int = 1  # context parallelism: ranks of a run that share the tokens of each rank's microbatches
    tp: int = 1  # tensor parallelism: ranks of a run that share the layers of each rank
    node: tuple[int, int] | None = None  # neighbours of a pipeline, and replicas of each, that share a node
    order: tuple[int, ...] = ()  # seat of the topology -> rank of the run; (): as numbered
    tied: bool = False  # several stages share a weight
    ties: tuple[int, ...] = ()  # the stages that share weights, if `tied`; (): both ends of the pipeline
    vocabulary: int = 0  # vocabulary parallel: sums per unit of the output layer; 0: the end stages have whole layers
    sharded: bool = False  # the ranks with a copy of a stage share out its STEP, and GATHER the weights
    resident: int = 0  # max unsharded stages of a rank; 0: weights stay, and are gathered once per step
    with_w: bool = False  # if weights are freed: W needs them, too
    scatters: bool = False  # gradients are reduce-scattered after each run of backwards of a stage
    one_sided: bool = False  # weights that are freed, and their gradients, travel without collectives
    ep: int = 0  # expert parallelism: neighbours that share out the experts of a block; 0: each rank has all
    folded: bool = False  # these are neighbours along tp first: each has whole experts; else parts, as of all layers
    dense: tuple[int, ...] = ()  # the stages without experts, if `ep`
    near: int = 0  # ranks on a node, if their exchanges between nodes take two steps; see Topology.steps
    averages: int = 0  # replicas average weights and sum no gradients: 1, applied a step later; 2, at once
    flushless: bool = False  # steps follow one another without a flush: the ops are the body of a cycle
    duplex: bool = False  # a rank copies to its host and back at once; else it runs one copy at a time

    def has_experts(self, stage: int) -> bool:
        """Whether a stage has experts that replicas share out."""
        return self.ep > 0 and stage not in self.dense


TRAITS = tuple(one.name for one in fields(ProgramTraits))
_ALL = attrgetter(*TRAITS)


@dataclass(frozen=True, slots=True)
class Program(ProgramTraits):
    """The ops of each rank in execution order: a compute-only schedule, or a complete plan."""

    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Op, ...], ...]
    history: tuple[str, ...] = ()  # the schedule, then every pass that ran
    slices: int = 1

    def __repr__(self) -> str:
        ops = sum(map(len, self.ranks))
        sizes = f"{self.placement.ranks} ranks, {self.placement.stages} stages, {self.microbatches} microbatches"
        return f"<Program {' '.join(self.history)}: {sizes}, {ops} ops>"

    def __iter__(self) -> Iterator[tuple[int, int, Op]]:
        """Every op as (rank, step, op)."""
        for rank, ops in enumerate(self.ranks):
            for step, op in enumerate(ops):
                yield rank, step, op

    @property
    def traits(self) -> tuple[object, ...]:
        """The values of the fields TRAITS, in that order."""
        values: tuple[object, ...] = _ALL(self)
        return values

    @property
    def topology(self) -> Topology:
        """The topology of a run of this program."""
        where, names = self.placement, ("dp", "node", "slices", "microbatches", "order", "ep", "folded", "near")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Topology(where.ranks, pipes=len(where.pipes), inner=inner_of(self), replicas=where.replicas, **own)

    @property
    def copies(self) -> int:
        """The number of ranks of a run that hold the same part of a pipeline rank's layers."""
        return self.dp * self.cp

    @property
    def size(self) -> int:
        """Number of ops over all ranks."""
        return sum(len(ops) for ops in self.ranks)

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of its ops."""
        return frozenset().union(*({op[0] for op in ops} for ops in self.ranks))

    @property
    def split(self) -> frozenset[int]:
        """The stages with separate B and W."""
        return frozenset(op.stage for ops in self.ranks for op in ops if op.kind.splits)

    @property
    def features(self) -> frozenset[str]:
        """The features that its rows depend on: names of `ops.PATCHES`, and of `Row.feature`."""
        named = ("vocabulary", "sharded", "scatters", "averages", "resident", "flushless")
        there = {
            "two sums": self.vocabulary > 1,
            "weights for W": self.resident > 0 and self.with_w,
            "waits for averages": self.averages > 1,
            "flushless in shares": self.flushless and self.sharded,
        }
        return frozenset([*(name for name in named if getattr(self, name)), *(name for name in there if there[name])])

    @property
    def patches(self) -> tuple[str, ...]:
        """Names of the `ops.PATCHES` that apply to its rows."""
        features = self.features
        return tuple(name for name in PATCHES if name in features)

    @property
    def grouped(self) -> bool:
        """Whether it has overlap groups."""
        return any(kind.is_mark for kind in self.kinds)

    @property
    def ahead(self) -> bool:
        """Whether its steps close without a barrier."""
        return any(op.kind.row.closes == "ahead" for op in self.ranks[0])

    @property
    def alone(self) -> bool:
        """Whether gradients are never summed across ranks: one replica, one pipe, no shared weight."""
        return self.topology.alone and not self.tied

    def owners(self, rank: int) -> tuple[int, ...]:
        """The owners that a rank steps: its stages, their experts with expert parallelism, and its rows of a shared
        vocabulary."""
        stages = self.placement.stages_of(rank)
        experts = map(experts_of, filter(self.has_experts, stages))
        return (*stages, *experts, *([WORDS] if self.vocabulary else []))

    def averaged(self, rank: int) -> tuple[int, ...]:
        """The owners that a rank averages with its replicas; weights that stages share are an owner of their own."""
        shares = self.tied and any(stage in self.tying for stage in self.placement.stages_of(rank))
        return (*self.owners(rank), *([TIED] if shares else [])) if self.averages else ()

    def members(self, op: Op) -> tuple[int, ...]:
        """The ranks of one replica that run a step-level op, ascending; a collective is over them in all replicas."""
        placement = self.placement
        if op.stage <= EXPERTS and not self.has_experts(home_of(op.stage)):
            return ()
        if op.kind.rank_wide or op.kind.unit_wide or op.stage == WORDS:
            return tuple(range(placement.ranks))
        stages = self.tying if op.stage == TIED else (home_of(op.stage),)
        return tuple(sorted({rank for stage in stages for rank in placement.holders(stage)}))

    @property
    def tying(self) -> tuple[int, ...]:
        """The stages that share weights, ascending."""
        return self.ties or self.placement.ends

    def holders(self, op: Op) -> int:
        """The size of a collective's group: over all replicas of the pipeline, for a collective of units over one."""
        fold = self.tp if self.folded else 1
        if op.kind is Kind.AVERAGE:
            return self.copies * fold // math.lcm(self.ep or 1, fold) if self.averages else 1
        replicas = 1 if op.kind.unit_wide else self.copies if op.kind.is_barrier else self.together
        copies = replicas * fold // (self.ep or 1) if op.stage <= EXPERTS else replicas
        alone = self.apart(op) and (op.stage == WORDS or not self.one_sided)
        ranks = self.members(op)
        return copies * len(ranks[:1] if alone else ranks)

    @property
    def together(self) -> int:
        """The number of copies with the same gradients and weights: if replicas average weights, only the copies in one
        replica, or in neighbours that share out experts."""
        return self.topology.span * self.cp if self.averages else self.copies

    def apart(self, op: Op) -> bool:
        """Whether a collective is over a rank's own replicas only: of its words, averages, or weights that it frees."""
        return op.stage == WORDS or op.kind is Kind.AVERAGE or (op.kind is Kind.GATHER and self.resident > 0)

    def shared(self, op: Op) -> bool:
        """Whether a collective has more than one member."""
        return self.holders(op) > 1

    def deals(self, stage: int) -> bool:
        """Whether replicas of a rank share out weights of a stage or of its experts."""
        return any(self.shared(Op(Kind.GATHER, owner)) for owner in (stage, experts_of(stage)))

    def where(self) -> dict[Op, tuple[int, int]]:
        """Op -> (rank, step), for ops that run once: no collectives, no marks."""
        return {op: (rank, step) for rank, step, op in self if not (op.kind.is_collective or op.kind.is_mark)}

    @property
    def cyclic(self) -> bool:
        """Whether its ops are the body of a cycle, not yet unrolled by `repeated`."""
        return self.flushless and self.history[-1] != IN_A_ROW

    @property
    def freezes(self) -> bool:
        """Whether some op leaves out weight gradients of frozen layers."""
        return any(op.share != WHOLE for ops in self.ranks for op in ops)

    def text(self, rank: int, step: int) -> str:
        """One op for a message: `rank 0 step 3: SEND_F s0 m1 >r1`."""
        return f"rank {rank} step {step}: {self.placement.text(self.ranks[rank][step])}"

    def with_ranks(self, ranks: Sequence[Sequence[Op]], by: str) -> Program:
        return replace(self, ranks=tuple(map(tuple, ranks)), history=(*self.history, by))


def repeated(program: Program, steps: int) -> Program:
    """Unrolls `steps` steps of a program without a flush into one program, with microbatches numbered through. Ops of
    the next step run one step earlier: the program begins with those of step 0, and the last step has none."""
    m = program.microbatches

    def of(ops: Sequence[Op]) -> Iterator[Op]:
        for step in range(-1, steps):
            for op in ops:
                ahead = op.mb >= NEXT
                if op.kind.stage_wide or op.kind.rank_wide:
                    if step >= 0:
                        yield op
                elif 0 <= step + ahead < steps:
                    yield op._replace(mb=op.mb - NEXT * ahead + m * (step + ahead))

    ranks = tuple(tuple(of(ops)) for ops in program.ranks)
    return replace(program, microbatches=m * steps, ranks=ranks, history=(*program.history, IN_A_ROW))
