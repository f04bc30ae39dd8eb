"""The program representation shared by the compiler, the plan files and the runtime.

A `Program` holds one list of `Op` per rank, in execution order. Passes map programs to programs; nothing here is
ever mutated. An op prints as one line and `Op.parse` reads that line back, so plan files, golden tests and error
messages all show the same text:

    F s1 m0          forward of stage 1, microbatch 0
    B s3 m2 up       input gradient, pipe 1 (the upward direction of a bidirectional schedule); pipe 2 and on: `pipe2`
    F s1 m0.2        slice 2 of a microbatch cut along its sequence
    SEND_F s1 m0 >r2 the peer rank follows from the placement; it is printed for the reader
    REDUCE s0        stage-wide: no microbatch
    TIE, VALIDATE    rank-wide: no stage
    OVERLAP          a mark: the two ops behind it are one group
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from zbc.errors import ZbcError
from zbc.topology import Topology


class Kind(StrEnum):
    """What an op does. This enum is the glossary."""

    F = "F"  # forward of one stage for one microbatch
    B = "B"  # backward, gradient of the stage input
    W = "W"  # backward, gradient of the stage weights
    BW = "BW"  # B and W in one walk of the graph
    SEND_F = "SEND_F"  # start sending a stage output to the rank of the next stage; does not wait
    RECV_F = "RECV_F"  # post the buffer for the output of the stage before; the F that needs it waits
    SEND_B = "SEND_B"  # start sending an input gradient to the rank of the stage before; does not wait
    RECV_B = "RECV_B"  # post the buffer for the gradient from the stage after; the B or BW that needs it waits
    OVERLAP = "OVERLAP"  # the next two ops, an F and a B or BW, are one group: both start when both have their input
    REDUCE = "REDUCE"  # start summing a stage's gradients over all ranks that hold a copy of it; VALIDATE waits
    TIE = "TIE"  # the same for the one weight that the first and the last stage share
    VALIDATE = "VALIDATE"  # all ranks agree on loss, gradient norm and whether to step: a barrier
    STEP = "STEP"  # optimizer step of one stage
    TENTATIVE = "TENTATIVE"  # write a stage's weights as if its step stood unclipped; all else of the optimizer stays
    NORM = "NORM"  # of the last step: wait for the sums of the ranks before, add this rank's, pass them to the next
    VERDICT = "VERDICT"  # of the last step: wait for the verdict of the next rank (the last one makes it), pass it back
    REDO = "REDO"  # if the last step does not stand: step as the verdict says, then run the forwards before this again
    COMMIT = "COMMIT"  # make the last step of one stage final: the ordinary optimizer step, unless REDO made it
    GATHER = "GATHER"  # start collecting a stage's weights from the ranks that each stepped a part of them

    # Hashing by value keeps dict look-ups of ops in C; Enum's own __hash__ is a Python call.
    __hash__ = str.__hash__

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE

    @property
    def is_send(self) -> bool:
        return self is Kind.SEND_F or self is Kind.SEND_B

    @property
    def is_recv(self) -> bool:
        return self is Kind.RECV_F or self is Kind.RECV_B

    @property
    def is_transfer(self) -> bool:
        return self in TRANSFER


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W, Kind.BW})
TRANSFER = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
STAGE_WIDE = frozenset({Kind.REDUCE, Kind.STEP, Kind.GATHER, Kind.TENTATIVE, Kind.COMMIT})
RANK_WIDE = frozenset({Kind.TIE, Kind.VALIDATE, Kind.NORM, Kind.VERDICT, Kind.REDO})
MARK = frozenset({Kind.OVERLAP})  # does nothing; as many as there are groups
EVERYWHERE = RANK_WIDE - {Kind.TIE}  # once on every rank
BARRIER = frozenset({Kind.VALIDATE, Kind.STEP})  # the end of a step that all ranks come to together
AHEAD = frozenset({Kind.TENTATIVE, Kind.NORM, Kind.VERDICT, Kind.REDO, Kind.COMMIT})  # what stands in for it otherwise
SUM = frozenset({Kind.REDUCE, Kind.TIE})  # of gradients
COLLECTIVE = frozenset({Kind.REDUCE, Kind.TIE, Kind.VALIDATE, Kind.GATHER})

_KINDS = {kind.value: kind for kind in Kind}
_OP = re.compile(
    r"(?P<kind>[A-Z_]+)(?: s(?P<stage>\d+))?(?: m(?P<mb>\d+)(?:\.(?P<slice>\d+))?)?"
    r"(?: (?:(?P<up>up)|pipe(?P<pipe>\d+)))?(?: (?P<arrow>[<>])r(?P<peer>\d+))?"
)


class Op(NamedTuple):
    """One step of one rank: `kind` of work on `stage` for microbatch `mb` of `pipe`, sequence part `slice`."""

    kind: Kind
    stage: int
    mb: int = 0
    pipe: int = 0
    slice: int = 0

    @property
    def key(self) -> Key:
        """What the op works on: (stage, microbatch, pipe, slice)."""
        return Key(self.stage, self.mb, self.pipe, self.slice)

    def __str__(self) -> str:
        kind = self.kind
        if kind in STAGE_WIDE:
            text = f"{kind.value} s{self.stage}"
        elif kind in RANK_WIDE or kind in MARK:
            return kind.value
        else:
            text = f"{kind.value} s{self.stage} m{self.mb}"
            if self.slice:
                text = f"{text}.{self.slice}"
        return f"{text} {'up' if self.pipe == 1 else f'pipe{self.pipe}'}" if self.pipe else text

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read one line of a plan; the peer, if printed, is dropped (see `parse_line`)."""
        return parse_line(text)[0]


class Key(NamedTuple):
    """The share of a step that tensors belong to."""

    stage: int
    mb: int
    pipe: int = 0
    slice: int = 0


def parse_line(text: str) -> tuple[Op, int | None]:
    """An op and the peer rank printed behind it, if any. Raises E404 for anything else."""
    match = _OP.fullmatch(text)
    kind = _KINDS.get(match["kind"]) if match else None
    if match is None or kind is None:
        raise _not_an_op(text)
    stage, mb, part, up, pipe, arrow, peer = match.group("stage", "mb", "slice", "up", "pipe", "arrow", "peer")
    wants_stage, wants_mb = kind not in RANK_WIDE and kind not in MARK, kind in COMPUTE or kind in TRANSFER
    if (stage is not None) != wants_stage or (mb is not None) != wants_mb:
        raise _not_an_op(text)
    if arrow is not None and arrow != (">" if kind.is_send else "<" if kind.is_recv else None):
        raise _not_an_op(text)
    op = Op(kind, int(stage or 0), int(mb or 0), 1 if up else int(pipe or 0), int(part or 0))
    if str(op) != text.partition(" <")[0].partition(" >")[0]:  # 'F s01 m0', 'VALIDATE up', 'F s0 m0.0'
        raise _not_an_op(text)
    return op, None if peer is None else int(peer)


def _not_an_op(text: str) -> ZbcError:
    return ZbcError("E404", f"plan: not an op: {text!r}", hint="ops look like 'F s0 m3' or 'SEND_F s0 m3 >r1'")


class Message(NamedTuple):
    """A tensor on its way: the output of a stage (`forward`) or a gradient, named by the stage that consumes it."""

    forward: bool
    stage: int
    mb: int
    pipe: int
    slice: int

    @property
    def send(self) -> Op:
        """The op that starts the message on the producer's rank."""
        kind, shift = (Kind.SEND_F, -1) if self.forward else (Kind.SEND_B, +1)
        return Op(kind, self.stage + shift, self.mb, self.pipe, self.slice)

    @property
    def recv(self) -> Op:
        """The op that posts its buffer on the consumer's rank."""
        return Op(Kind.RECV_F if self.forward else Kind.RECV_B, *self[1:])


def message_of(op: Op) -> Message:
    """The message a SEND starts or a RECV takes."""
    kind, stage, mb, pipe, part = op
    if kind is Kind.SEND_F:
        return Message(True, stage + 1, mb, pipe, part)
    if kind is Kind.SEND_B:
        return Message(False, stage - 1, mb, pipe, part)
    return Message(kind is Kind.RECV_F, stage, mb, pipe, part)


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which stage: `pipes[pipe][stage]` is the rank.

    One pipe for ordinary schedules; bidirectional schedules hold each stage twice, once per direction.
    """

    pipes: tuple[tuple[int, ...], ...]

    @classmethod
    def linear(cls, p: int) -> Placement:
        """Stage s on rank s."""
        return cls((tuple(range(p)),))

    @classmethod
    def looped(cls, p: int, v: int) -> Placement:
        """Stages dealt round and round: stage s on rank s mod p."""
        return cls((tuple(s % p for s in range(p * v)),))

    @classmethod
    def vshape(cls, p: int, v: int = 2) -> Placement:
        """Stages go down the ranks and back up: 0 1 .. p-1 p-1 .. 1 0, `v` legs."""
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

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        return self.pipes[pipe][stage]

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks with a copy of `stage`, one per pipe."""
        return tuple(pipe[stage] for pipe in self.pipes)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages with a copy on `rank`, ascending."""
        return tuple(s for s in range(self.stages) if rank in self.holders(s))

    def neighbours(self, a: int, b: int, pipe: int = 0) -> bool:
        """Whether stages `a` and `b` both exist and live on different ranks, so that a tensor has to travel."""
        stages = self.pipes[pipe]
        return min(a, b) >= 0 and max(a, b) < len(stages) and stages[a] != stages[b]

    def peer(self, op: Op) -> int | None:
        """The rank at the other end of a transfer; None for other ops, and for a transfer out of the pipeline."""
        if not op.kind.is_transfer:
            return None
        other = op.stage + (1 if op.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
        if op.pipe >= len(self.pipes) or not 0 <= other < self.stages:
            return None
        return self.pipes[op.pipe][other]

    def text(self, op: Op) -> str:
        """The op with its peer, as plan files print it."""
        peer = self.peer(op)
        return str(op) if peer is None else f"{op} {'>' if op.kind.is_send else '<'}r{peer}"


def groups(ops: Sequence[Op]) -> dict[int, int]:
    """For every step inside a group, its OVERLAP included, the step of that OVERLAP."""
    return {step: first for first, op in enumerate(ops) if op.kind in MARK for step in range(first, first + 3)}


@dataclass(frozen=True, slots=True)
class Program:
    """Per rank, the ops in execution order. Compute-only schedules and complete plans are both Programs."""

    placement: Placement
    microbatches: int
    ranks: tuple[tuple[Op, ...], ...]
    history: tuple[str, ...] = ()  # the schedule, then every pass that ran
    slices: int = 1
    dp: int = 1  # replicas of the pipeline; each runs these ops, and collectives meet over all of them
    tied: bool = False  # the first and the last of several stages share a weight
    sharded: bool = False  # the ranks with a copy of a stage share out the work of its STEP, and GATHER the weights
    node: tuple[int, int] | None = None  # neighbours of a pipeline, and replicas of each, that share a node

    def __iter__(self) -> Iterator[tuple[int, int, Op]]:
        """Every op as (rank, step, op)."""
        for rank, ops in enumerate(self.ranks):
            for step, op in enumerate(ops):
                yield rank, step, op

    @property
    def topology(self) -> Topology:
        """The axes of a run of it."""
        where = self.placement
        return Topology(where.ranks, self.dp, len(where.pipes), self.node, self.slices, self.microbatches)

    @property
    def size(self) -> int:
        """Number of ops over all ranks."""
        return sum(len(ops) for ops in self.ranks)

    @property
    def alone(self) -> bool:
        """Whether no rank sums gradients with another: one replica, one pipe, no shared weight."""
        return self.topology.alone and not self.tied

    def members(self, op: Op) -> tuple[int, ...]:
        """The ranks of one replica that run a step-level op, ascending; a collective meets them in all replicas."""
        placement = self.placement
        if op.kind in EVERYWHERE:
            return tuple(range(placement.ranks))
        if op.kind is Kind.TIE:
            return tuple(sorted({*placement.holders(0), *placement.holders(placement.stages - 1)}))
        return tuple(sorted(set(placement.holders(op.stage))))

    def holders(self, op: Op) -> int:
        """How many ranks, over all replicas of the pipeline, meet in a collective."""
        return self.dp * len(self.members(op))

    def shared(self, op: Op) -> bool:
        """Whether a collective has anybody to meet."""
        return self.holders(op) > 1

    def where(self) -> dict[Op, tuple[int, int]]:
        """The (rank, step) at which each op runs; only for ops that run once (not collectives)."""
        return {op: (rank, step) for rank, step, op in self if op.kind not in COLLECTIVE and op.kind not in MARK}

    def text(self, rank: int, step: int) -> str:
        """One op for a message: `rank 0 step 3: SEND_F s0 m1 >r1`."""
        return f"rank {rank} step {step}: {self.placement.text(self.ranks[rank][step])}"

    def with_ranks(self, ranks: Sequence[Sequence[Op]], by: str) -> Program:
        return replace(self, ranks=tuple(map(tuple, ranks)), history=(*self.history, by))
