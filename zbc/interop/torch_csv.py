"""The CSV files of torch.distributed.pipelining, in the form torch calls compute_only.

One row per rank, one action per cell, in the order they run; an empty cell is an idle slot:

    0F0,0F1,,,0B0,0B1       0F0  forward of stage 0 for microbatch 0
    ,1F0,1F1,1I0,1B1,1W0    1I0  input gradient, 1W0 weight gradient, 1B1 both in one

and (2F3;1B0)OVERLAP_F_B is a group of two that torch may run at once, zbc's OVERLAP.

torch uses other letters for backwards than zbc: I is B, B is BW. torch ignores the rest of a malformed cell
(`2F0garbage` is 2F0 to it), counts a repeated F once, and accepts an order that deadlocks; here all of that is an
error.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zbc.errors import ZbcError, raise_found
from zbc.host.contents import contents
from zbc.interop import refused
from zbc.ir import Kind, Op, Placement, Program
from zbc.ops import UNIT_SCOPES

# Names kinds: those that torch's format has letters for.
LETTERS = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
_KINDS = {letter: kind for kind, letter in LETTERS.items()}
_CELL = re.compile(r"(0|[1-9]\d*)([FIWB])(0|[1-9]\d*)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(?:(?:WAIT_)?(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)")
_MOST = 1_000_000  # a larger number of a stage or microbatch is a typo
_SHOWN = 24  # characters of a cell in a message


@dataclass(frozen=True, slots=True)
class Sheet:
    """A CSV file as a program; `columns[rank][step]` is the 0-based column of each op."""

    source: str
    program: Program
    columns: tuple[tuple[int, ...], ...]


@dataclass
class _Draft:
    """The cells read so far."""

    source: str
    ranks: list[list[Op]] = field(default_factory=list)
    columns: list[list[int]] = field(default_factory=list)
    lowered: int = 0  # cells of torch's lowered form
    found: ZbcError | None = None  # the first of them

    def actions(self) -> Iterator[tuple[Op, tuple[int, int]]]:
        """The actions, with row and column."""
        for row, (ops, columns) in enumerate(zip(self.ranks, self.columns, strict=True)):
            yield from ((op, (row, at)) for op, at in zip(ops, columns, strict=True) if not op.kind.is_mark)


def place(source: str, row: int, column: int) -> str:
    """The place of a cell for errors; the text counts rows and columns from 1."""
    return f"{source}: row {row + 1}, column {column + 1}"


# ---- reading -------------------------------------------------------------------------------------------------


def read(path: Path) -> Sheet:
    """Reads a CSV file; see `loads`. Raises E411 if it cannot be read as text."""
    try:
        text = contents(path, pipe=True).decode("utf-8-sig")
    except OSError as error:
        hint = "`zbc export PLAN --format torch-csv -o FILE.csv` writes one"
        raise ZbcError("E411", f"csv: cannot read {path}: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError as error:
        text = f"csv: {path} is not UTF-8 text (byte {error.start})"
        raise ZbcError("E411", text, hint="save it as UTF-8") from None
    return loads(text, str(path))


def loads(text: str, source: str = "order.csv") -> Sheet:
    """The order that a CSV text describes, one pipe, without transfers; not yet proven (see check/). Raises E411 (not a
    CSV file, cells that are no actions, or rows that make no pipeline), all problems at once."""
    draft = _Draft(source)
    raise_found(_cells(draft, text))
    raise_found(_shape(draft))
    rank_of = {op.stage: rank for op, (rank, _) in draft.actions()}
    placement = Placement((tuple(rank_of[stage] for stage in sorted(rank_of)),))
    microbatches = 1 + max(op.mb for ops in draft.ranks for op in ops)
    ranks = tuple(map(tuple, draft.ranks))
    program = Program(placement, microbatches, ranks, (Path(source).name,))
    return Sheet(source, program, tuple(map(tuple, draft.columns)))


def _cells(draft: _Draft, text: str) -> Iterator[ZbcError]:
    """Parses every cell into the draft; yields problems."""
    if "\0" in text:
        raise ZbcError("E411", f"csv: {draft.source} holds NUL bytes", hint="save it as plain text")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row, cells in enumerate(reader):
            draft.ranks.append([])
            draft.columns.append([])
            if not any(cell.strip() for cell in cells):
                hint = "each row is a rank, and a rank needs work; delete the row"
                yield ZbcError("E411", f"csv: row {row + 1} is empty", where=place(draft.source, row, 0), hint=hint)
            for column, cell in enumerate(cells):
                yield from _cell(draft, row, column, cell.strip())
    except csv.Error as error:
        text = f"csv: {draft.source} is not a CSV file: {error}"
        where = f"{draft.source}: line {reader.line_num}"
        raise ZbcError("E411", text, where=where, hint="one row per rank, commas between actions, no quotes") from None
    if not draft.ranks:
        raise ZbcError("E411", f"csv: {draft.source} is empty", hint="one row per rank, as in 0F0,0F1,0B0,0B1")


def _cell(draft: _Draft, row: int, column: int, cell: str) -> Iterator[ZbcError]:
    pair = _PAIR.fullmatch(cell)
    parts = [part.strip() for part in pair[1].split(";")] if pair else [cell]
    if pair and (len(parts) != 2 or not all(parts)):
        yield _bad(draft, row, column, cell, "pairs look like (0F1;1B0)OVERLAP_F_B")
        return
    if pair:
        draft.ranks[row].append(Op(Kind.OVERLAP, 0))
        draft.columns[row].append(column)
    for part in parts:
        if not part:
            continue
        match = _CELL.fullmatch(part)
        if _LOWERED.fullmatch(part):
            yield from _lowered(draft, row, column, part)
            return
        if match is None or max(int(match[1][:9]), int(match[3][:9])) > _MOST:
            yield _bad(draft, row, column, part, _advice(part, match is not None))
            return
        draft.ranks[row].append(Op(_KINDS[match[2]], int(match[1]), int(match[3])))
        draft.columns[row].append(column)


def _lowered(draft: _Draft, row: int, column: int, cell: str) -> Iterator[ZbcError]:
    """An error for the first cell of torch's lowered form; the others, usually many, are only counted in it."""
    draft.lowered += 1
    if draft.found is None:
        hint = 'this is torch\'s lowered form; dump it with format="compute_only" (zbc export: --dialect compute_only)'
        draft.found = _bad(draft, row, column, cell, hint)
        yield draft.found
    else:
        rest = draft.lowered - 1
        draft.found.details = (f"and {rest} more action{'s' * (rest > 1)} that compute_only does not have",)


def _bad(draft: _Draft, row: int, column: int, cell: str, hint: str) -> ZbcError:
    text = f"csv: not an action: {cell[:_SHOWN]!r}{'...' if len(cell) > _SHOWN else ''}"
    return ZbcError("E411", text, where=place(draft.source, row, column), hint=hint)


def _advice(cell: str, too_large: bool) -> str:
    """A fix for a cell that is no action."""
    loose = re.fullmatch(r"0*(\d{1,7}) *([FIWBfiwb]) *0*(\d{1,7})", cell)
    begin = _CELL.match(cell)
    if too_large:
        return f"numbers of stages and microbatches end at {_MOST}"
    if loose is not None:
        return f"write {int(loose[1])}{loose[2].upper()}{int(loose[3])}"
    if begin is not None and re.match(r" *[;|\t] *\d+[FIWB]\d", cell[begin.end() :]):
        return f"write {begin[0]}, with a comma between actions"
    if begin is not None:
        return f"write {begin[0]}"
    return "actions are stage, letter and microbatch, as 1F0; letters are F, I, W and B"


def _shape(draft: _Draft) -> Iterator[ZbcError]:
    """E411 unless every stage is on one rank, no number is left out, and there is at least one action."""
    first: dict[int, tuple[int, int]] = {}
    reported: set[tuple[int, int]] = set()
    for op, (row, column) in draft.actions():
        home = first.setdefault(op.stage, (row, column))
        if home[0] != row and (op.stage, row) not in reported:
            reported.add((op.stage, row))
            text = f"csv: stage {op.stage} is on two ranks, row {home[0] + 1} and row {row + 1}"
            details = [f"first at row {home[0] + 1}, column {home[1] + 1}"]
            hint = "a stage belongs to one rank; torch has no bidirectional pipelines"
            yield ZbcError("E411", text, where=place(draft.source, row, column), details=details, hint=hint)
    yield from _gaps(draft, "stage")
    yield from _gaps(draft, "mb")


def _gaps(draft: _Draft, field: str) -> Iterator[ZbcError]:
    """E411 for unused numbers of stages, or of microbatches, below the largest used one."""
    first: dict[int, tuple[int, int]] = {}
    for op, at in draft.actions():
        first.setdefault(getattr(op, field), at)
    most = max(first)
    gaps = list(itertools.islice((number for number in range(most) if number not in first), 9))
    if gaps:
        word = "microbatch" if field == "mb" else field
        some = ", ".join(map(str, gaps[:8])) + (", ..." if len(gaps) > 8 else "")
        text = f"csv: no action of {word} {some}, but there is a {word} {most}"
        hint = "numbers run 0, 1, 2, ... without gaps"
        yield ZbcError("E411", text, where=place(draft.source, *first[most]), hint=hint)


# ---- writing -------------------------------------------------------------------------------------------------


def action(op: Op) -> str:
    """A compute op in torch's notation."""
    return f"{op.stage}{LETTERS[op.kind]}{op.mb}"


def dumps(program: Program) -> str:
    """The compute ops of every rank as CSV text, without idle slots; torch adds transfers and step-level ops. Raises
    E413 for a plan that torch cannot express."""
    refuse(program)
    return as_text(_row([op for op in ops if op.kind in LETTERS or op.kind.is_mark]) for ops in program.ranks)


def as_text(rows: Iterable[Iterable[str]]) -> str:
    """The text of a file with these cells; none of them needs quotes."""
    return "".join(",".join(cells) + "\n" for cells in rows)


def refuse(program: Program) -> None:
    """Raises E413 for a plan that torch cannot express, with all reasons at once."""
    pipes = len(program.placement.pipes)
    empty = [str(rank) for rank, ops in enumerate(program.ranks) if not any(op.kind.computes for op in ops)]
    # Torch adds messages, and ops that are not of units, by itself.
    own = {kind for kind in program.kinds if not kind.is_transfer and kind.row.scope in UNIT_SCOPES}
    missing = sorted(kind.value for kind in own - LETTERS.keys())
    reasons = {
        "it has a flush between steps, the plan has none": program.flushless,
        f"it has one pipe, the plan has {pipes}: a stage on several ranks": pipes > 1,
        "its stages are a chain, those of the plan a graph (model.graph)": program.placement.branches,
        f"it has no slices of a microbatch, the plan has {program.slices}": program.slices > 1,
        "it leaves out no weight gradients (freeze.most)": program.freezes,
        "it does not sum the gradients of a weight that two stages share (model.ties)": program.tied,
        f"every rank needs work, rank {', '.join(empty)} has none": empty,
        f"it has no action for {', '.join(missing)}": missing,
    }
    refused.refuse("torch-csv", "torch's pipelining runtime", reasons)


def _row(ops: Sequence[Op]) -> Iterator[str]:
    """The cells of a rank; the two ops after an OVERLAP share a cell, if torch has such pairs."""
    rest = iter(ops)
    for op in rest:
        yield from paired(next(rest), next(rest)) if op.kind.is_mark else [action(op)]


def paired(one: Op, other: Op) -> list[str]:
    """The cells of a group: torch's pairs are an F and a backward; it runs other groups one after the other."""
    cells = [action(one), action(other)]
    families = {one.kind.row.family, other.kind.row.family}
    return [f"({';'.join(cells)})OVERLAP_F_B"] if families == {"forward", "input"} else cells
