"""A program as integers: what all checks of one program share.

Op ids count through the ranks, so on one rank "earlier" is "smaller". A *row* is one stage of one pipe,
`pipe * stages + stage`; a row has `width` = microbatches x slices places, and `at[kind][row * width + mb * slices +
slice]` is the id of that op, -1 where no rank runs it. Everything the checks do per op is a walk along such lists.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from zbc.errors import ZbcError
from zbc.ir import COMPUTE, MARK, RANK_WIDE, TRANSFER, Kind, Op, Program

TRANSFERS = tuple(kind for kind in Kind if kind in TRANSFER)  # sets of strings have another order in every process
KEYED = (*(kind for kind in Kind if kind in COMPUTE), *TRANSFERS)
SPARSE = 16  # places per op beyond which a program is hopelessly incomplete
SMALL = 1 << 20  # places that are never too many


@dataclass(frozen=True, slots=True)
class Numbered:
    """`starts[r]` .. `starts[r+1]-1` are the ids of rank r; `owners[row]` is the rank that holds the row's stage."""

    program: Program
    starts: list[int]
    owners: list[int]
    width: int
    at: dict[Kind, list[int]]
    step_ops: list[int] = field(default_factory=list)  # stage-wide and rank-wide ops of existing stages
    groups: list[int] = field(default_factory=list)  # OVERLAP
    outside: list[int] = field(default_factory=list)  # no such stage, microbatch, pipe or slice
    repeated: list[int] = field(default_factory=list)  # ran before, on any rank; `at` has the first
    misplaced: list[int] = field(default_factory=list)  # on a rank that does not hold the stage
    backward: list[int] = field(default_factory=list)  # B or BW, laid out like `at`

    @property
    def size(self) -> int:
        """Number of ops."""
        return self.starts[-1]

    @property
    def explicit(self) -> bool:
        """Whether transfers between ranks must be ops: any transfer or step-level op says so."""
        return bool(self.step_ops) or any(max(self.at[kind], default=-1) >= 0 for kind in TRANSFERS)

    def place(self, op: int) -> tuple[int, int]:
        """(rank, step) of an op id."""
        rank = bisect_right(self.starts, op) - 1
        return rank, op - self.starts[rank]

    def span(self, row: int) -> tuple[int, int]:
        """The ids of the rank that holds a row: first, last + 1."""
        owner = self.owners[row]
        return (self.starts[owner], self.starts[owner + 1]) if owner + 1 < len(self.starts) else (0, 0)

    def cut(self, table: list[int], row: int) -> list[int]:
        """The part of a table that belongs to a row."""
        return table[row * self.width : (row + 1) * self.width]

    def op(self, op: int) -> Op:
        rank, step = self.place(op)
        return self.program.ranks[rank][step]

    def wanted(self, kind: Kind, row: int, index: int) -> Op:
        """The op a place of a row stands for, whether or not a rank runs it."""
        pipe, stage = divmod(row, self.program.placement.stages)
        mb, part = divmod(index, self.program.slices)
        return Op(kind, stage, mb, pipe, part)

    def name(self, op: Op) -> str:
        """An op with its peer."""
        return self.program.placement.text(op)

    def text(self, op: int) -> str:
        """`rank 0 step 3: SEND_F s0 m1 >r1`."""
        return self.program.text(*self.place(op))

    def where(self, op: int) -> str:
        rank, step = self.place(op)
        return f"rank {rank} step {step}"


def number(program: Program) -> Numbered:
    """Number the ops of a program. Raises E202 when it claims far more microbatches than it has ops for."""
    placement = program.placement
    rows, width = len(placement.pipes) * placement.stages, program.microbatches * program.slices
    if len(KEYED) * rows * width > max(SMALL, SPARSE * len(placement.pipes) * program.size):
        text = f"program: {program.size} ops are too few for {placement.stages} stages and {width} microbatches"
        raise ZbcError("E202", text, hint="give every stage an F and a BW (or B and W) for every microbatch")
    starts = [0]
    for ops in program.ranks:
        starts.append(starts[-1] + len(ops))
    owners = [rank for pipe in placement.pipes for rank in pipe]
    numbered = Numbered(program, starts, owners, width, {kind: [-1] * (rows * width) for kind in KEYED})
    for rank, ops in enumerate(program.ranks):
        _enter(numbered, rank, ops)
    numbered.backward.extend(map(max, numbered.at[Kind.B], numbered.at[Kind.BW]))
    return numbered


def _enter(numbered: Numbered, rank: int, ops: Sequence[Op]) -> None:
    """Enter the ops of one rank. The only loop over ops that unpacks them: half the time of all checks."""
    program, at, owners = numbered.program, numbered.at, numbered.owners
    stages, pipes = program.placement.stages, len(program.placement.pipes)
    microbatches, slices = program.microbatches, program.slices
    for i, (kind, stage, mb, pipe, part) in enumerate(ops, numbered.starts[rank]):
        table = at.get(kind)
        if table is None:
            _enter_step_op(numbered, rank, i)
        elif 0 <= stage < stages and 0 <= mb < microbatches and 0 <= pipe < pipes and 0 <= part < slices:
            row = pipe * stages + stage
            place = (row * microbatches + mb) * slices + part
            if table[place] < 0:
                table[place] = i
            else:
                numbered.repeated.append(i)
            if owners[row] != rank:
                numbered.misplaced.append(i)
        else:
            numbered.outside.append(i)


def _enter_step_op(numbered: Numbered, rank: int, i: int) -> None:
    program = numbered.program
    op = program.ranks[rank][i - numbered.starts[rank]]
    if op.kind in MARK:
        numbered.groups.append(i)
        return
    if not _exists(program, op):
        numbered.outside.append(i)
        return
    numbered.step_ops.append(i)
    if op.kind is not Kind.VALIDATE and rank not in program.members(op):
        numbered.misplaced.append(i)


def _exists(program: Program, op: Op) -> bool:
    """Whether a step-level op has something to work on in this program."""
    if op.kind is Kind.TIE:
        return program.tied
    if op.kind is Kind.GATHER and not program.sharded:
        return False
    return op.kind in RANK_WIDE or 0 <= op.stage < program.placement.stages
