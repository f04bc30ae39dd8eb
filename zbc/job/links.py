"""`links.toml`: bandwidth and latency between each pair of ranks, or of nodes.

    per = "rank"                 # or "node": then the diagonal is the speed between two ranks of that node
    gbps = [[0, 25, 3], [25, 0, 3], [3, 3, 0]]      # GB/s
    us = [[0, 5, 30], [5, 0, 30], [30, 30, 0]]      # latency

One half is enough: a 0 takes the value across the diagonal. If both are given, the slower direction counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.job import toml

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LinkTable:
    """Symmetric GB/s and latencies in us; GB/s is 0 only on the diagonal of a table per rank."""

    per: str
    gbps: Rows
    us: Rows

    @property
    def size(self) -> int:
        return len(self.gbps)

    def plain(self) -> dict[str, Any]:
        return {"per": self.per, "gbps": [list(row) for row in self.gbps], "us": [list(row) for row in self.us]}

    def dumps(self) -> str:
        """The table as the text of a file."""
        lines = [f'per = "{self.per}"']
        for key, rows in (("gbps", self.gbps), ("us", self.us)):
            each = (f"  {json.dumps([float(f'{value:.6g}') for value in row])}," for row in rows)
            lines += [f"{key} = [", *each, "]"]
        return "\n".join(lines) + "\n"


def read(path: Path, where: str) -> LinkTable:
    """The table of a file that a job names at `where`. Raises E100, E101 and E110."""
    try:
        document = toml.load(path)
    except ZbcError as error:
        if error.code != "E101":
            raise
        hint = "`torchrun ... -m zbc profile --links -o links.toml` measures one; the path starts at the job's folder"
        raise ZbcError("E101", error.message, where=where, hint=hint) from None
    return checked(document.values, document)


def checked(values: Mapping[str, Any], document: toml.Document) -> LinkTable:
    """The table of plain values. Raises E110."""
    unknown = sorted(values.keys() - {"per", "gbps", "us"})
    if unknown:
        raise _wrong(f"unknown key {unknown[0]}", document, (unknown[0],), "a table has per, gbps and us")
    per = values.get("per", "rank")
    if per not in ("rank", "node"):
        raise _wrong(f"per is {per!r}", document, ("per",), 'write per = "rank", or "node"')
    gbps = _square(values, "gbps", document)
    us = _square(values, "us", document) if "us" in values else [[0.0] * len(gbps) for _ in gbps]
    if len(us) != len(gbps):
        text = f"us has {len(us)} rows, gbps has {len(gbps)}"
        raise _wrong(text, document, ("us",), f"both are {len(gbps)} x {len(gbps)}")
    for a, row in enumerate(gbps):
        for b in range(a, len(row)):
            if not (row[b] or gbps[b][a]) and (a != b or per == "node"):
                text = f"gbps[{a}][{b}] is 0, and so is gbps[{b}][{a}]" if a != b else f"gbps[{a}][{a}] is 0"
                what = "one of the two is what they send each other" if a != b else "it is what ranks of a node send"
                raise _wrong(text, document, ("gbps", a), what)
    return LinkTable(per, _both(gbps, min), _both(us, max))


def _square(values: Mapping[str, Any], key: str, document: toml.Document) -> list[list[float]]:
    """Rows of a square table of finite numbers, 0 or more."""
    rows = values.get(key)
    if not isinstance(rows, list) or not rows:
        text = f"{key} is missing" if rows is None else f"{key} is no table"
        raise _wrong(text, document, (key,), f"{key} = [[...]]")
    for at, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(rows):
            length = f"{len(row)} numbers" if isinstance(row, list) else repr(row)
            hint = f"{len(rows)} rows of {len(rows)} numbers"
            raise _wrong(f"{key} is not square: row {at} has {length}", document, (key, at), hint)
        for value in row:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
                raise _wrong(f"{key}[{at}] has {value!r}", document, (key, at), "numbers of 0 or more")
    return [[float(value) for value in row] for row in rows]


def _both(rows: Sequence[Sequence[float]], slower: Any) -> Rows:
    """Symmetric rows: a 0 filled from across the diagonal, else the slower of both directions."""
    size = range(len(rows))
    pair = [[rows[a][b] or rows[b][a] for b in size] for a in size]
    return tuple(tuple(float(slower(pair[a][b], pair[b][a])) for b in size) for a in size)


def misfit(table: LinkTable, world: int, per_node: int, where: str) -> ZbcError | None:
    """E110 for a table of another size than the run."""
    nodes = -(-world // per_node)
    count, what = (world, "ranks") if table.per == "rank" else (nodes, f"nodes of {per_node} ranks")
    if table.size == count:
        return None
    text = f"links: the table is {table.size} x {table.size}, the run has {count} {what}"
    return ZbcError("E110", text, where=where, hint=f"give {count} rows of {count} numbers")


def _wrong(text: str, document: toml.Document, path: toml.KeyPath, hint: str) -> ZbcError:
    return ZbcError("E110", f"links: {text}", where=document.where(path), hint=hint)
