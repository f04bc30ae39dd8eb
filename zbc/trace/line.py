"""The lines of a rank's file in a recorded run (recording.py): their contents, and their strict parsing."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.ir import Op
from zbc.ops import Lane

FORMAT, VERSION = "zbc-trace", 1
STEP = ("step", "begin_ns", "took_ns", "lead_ns", "waits", "close_ns")  # of a step: what it has, and what it may have
STEP_MAY = ("copies", "tokens")
RECORD = "record it again with `zbc run PLAN --trace STEPS`"


class Cause(IntEnum):
    """The cause of a wait inside an op."""

    MESSAGE = 0  # a tensor, or numbers, from a neighbour
    SUM = 1  # a sum of gradients over replicas that was started before
    ALL = 2  # a sum over all ranks
    DELIVERY = 3  # the completion of a send
    GATHER = 4  # weights that other ranks stepped
    COPY = 5  # activations on their way to the host or back


class Wait(NamedTuple):
    """A wait inside op number `op` of a step, in ns; the number of ops stands for the close of the step."""

    op: int
    cause: Cause
    ns: int


class ClockOffset(NamedTuple):
    """The clock of rank 0 is `offset_ns` ahead of this rank's at `at_ns`, give or take `uncertainty_ns`."""

    at_ns: int
    offset_ns: int
    uncertainty_ns: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One step of one rank as it is written; see recording.py."""

    step: int  # from 1
    begin_ns: int
    took_ns: Sequence[int]
    lead_ns: Sequence[int]
    waits: Sequence[int]
    close_ns: int
    copies: Sequence[int] = ()
    tokens: Sequence[int] = ()  # of the rows of each microbatch; (): all are whole


@dataclass(frozen=True, slots=True)
class MemorySamples:
    """Memory of a rank at each op of a step, in bytes: rows are ops, columns categories."""

    step: int
    categories: tuple[str, ...]
    bytes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Head:
    """The plan, rank and process of a trace."""

    plan: str  # its id
    rank: int  # of the run
    device: str
    process: str  # host:pid
    ops: int
    cores: int | None = None  # usable by the process, if it computed on the CPU; None in older traces, too

    @property
    def host(self) -> str:
        return self.process.rpartition(":")[0]


# ---- reading -------------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers; a truncated last line is left out."""
    try:
        raw = contents(path)
    except OSError as error:
        raise ZbcError("E430", f"trace: cannot read {path}: {error.strerror}", hint=RECORD) from None
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise damaged(f"{path}:{number}", f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise damaged(f"{path}:{number}", "not an object")
        yield number, values


def head_of(values: dict[str, Any], place: str, rank: int, plan: str, ops: int) -> Head:
    """The first line of a rank's trace. Raises E430 if its plan (an id), rank or number of ops differs."""
    if values.get("format") != FORMAT or values.get("version") != VERSION:
        version = f"format {values.get('format')!r}, version {values.get('version')!r}"
        raise damaged(place, f"{version}; this zbc reads {FORMAT!r}, version {VERSION}")
    for key, wanted in (("plan", plan), ("rank", rank), ("ops", ops)):
        if values.get(key) != wanted:
            raise damaged(place, f"{key} is {values.get(key)!r}, the plan beside it says {wanted!r}")
    device, process = values.get("device"), values.get("process")
    if not isinstance(device, str) or not isinstance(process, str):
        raise damaged(place, "device and process have to be texts")
    cores = values.get("cores")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or cores < 1):
        raise damaged(place, f"cores is {cores!r}, it has to be a whole number from 1 on")
    return Head(plan, rank, device, process, ops, cores)


def timing_of(values: dict[str, Any], ops: Sequence[Op], place: str) -> Timing:
    """The times of one recorded step; `ops`: the ops of the plan. Raises E430."""
    if values.keys() - STEP_MAY != {*STEP}:
        raise damaged(place, f"a step has {', '.join(STEP)}; found {', '.join(values)}")
    compute = sum(op.kind.computes for op in ops)
    took, lead, waits = (_column(values[name], name, place) for name in ("took_ns", "lead_ns", "waits"))
    for name, column, count in (("took_ns", took, len(ops)), ("lead_ns", lead, compute)):
        if len(column) != count:
            raise damaged(place, f"{name} has {len(column)} numbers, the plan has {count} such ops")
    if len(waits) % 3 or any(not 0 <= op <= len(ops) for op in waits[::3]):
        raise damaged(place, "waits has to be three numbers each: op, cause, ns")
    if any(cause not in _CAUSES for cause in waits[1::3]):
        raise damaged(place, f"waits has a cause beyond {max(_CAUSES)}")
    copies = _column(values.get("copies", []), "copies", place)
    if copies and len(copies) != 2 * sum(map(copying, ops)):
        raise damaged(place, "copies has to be two numbers for each: when it begins, how long it takes")
    tokens = _column(values.get("tokens", []), "tokens", place)
    step, begin, close = (_whole(values[name], name, place) for name in ("step", "begin_ns", "close_ns"))
    return Timing(step, begin, took, lead, waits, close, copies, tokens)


def copying(op: Op) -> bool:
    """Whether an op starts a copy of activations."""
    return op.kind.row.lane in (Lane.OUT, Lane.BACK)


_CAUSES = {cause.value: cause for cause in Cause}


def waits_of(flat: Sequence[int]) -> Iterable[Wait]:
    """The waits of a step, from the flat list of op, cause and ns of a line."""
    for op, cause, ns in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
        yield Wait(op, _CAUSES[cause], ns)


def memory_of(values: Any, ops: int, place: str) -> MemorySamples:
    """Memory samples of a rank, a row for each of `ops` ops. Raises E430."""
    fields = ("step", "categories", "bytes")
    if not isinstance(values, dict) or values.keys() != {*fields}:
        raise damaged(place, f"memory has {', '.join(fields)}")
    categories = values["categories"]
    if not isinstance(categories, list) or not all(isinstance(name, str) for name in categories):
        raise damaged(place, "categories has to be a list of names")
    rows = values["bytes"]
    if not isinstance(rows, list) or len(rows) != ops:
        raise damaged(place, f"bytes needs a row for each of {ops} ops")
    table = [_column(row, "bytes", place) for row in rows]
    if any(len(row) != len(categories) for row in table):
        raise damaged(place, f"every row of bytes needs {len(categories)} numbers")
    return MemorySamples(_whole(values["step"], "step", place), tuple(categories), table)


def clock_of(values: Any, place: str) -> ClockOffset:
    """The offset of the rank's clock to the clock of rank 0. Raises E430."""
    names = ClockOffset._fields
    if not isinstance(values, dict) or values.keys() != {*names}:
        raise damaged(place, f"a clock has {', '.join(names)}")
    return ClockOffset(**{name: _whole(values[name], name, place) for name in names})


def _whole(value: Any, name: str, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise damaged(place, f"{name} has to be a whole number, not {value!r}")
    return value


def _column(values: Any, name: str, place: str) -> array[int]:
    """The values as whole numbers from 0 to 2^50: 13 days in ns, a pebibyte. Raises E430."""
    try:
        column = array("q", values if isinstance(values, list) else [None])
    except (TypeError, OverflowError):
        raise damaged(place, f"{name} has to be a list of whole numbers") from None
    if column and min(column) < 0:
        raise damaged(place, f"{name} has a negative number")
    if column and max(column) > 2**50:
        raise damaged(place, f"{name} has {max(column)}, more than 2^50")
    return column


def damaged(place: str, found: str) -> ZbcError:
    """E430 for the line at `place`; `found`: the problem."""
    return ZbcError("E430", f"trace: damaged: {found}", where=place, hint=RECORD)
