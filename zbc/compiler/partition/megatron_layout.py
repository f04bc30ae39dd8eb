"""Megatron's pipeline layout string: the layers of each stage.

    Et*3|(tt|)*29,m|L        E embedding, t transformer layer, L head and loss, m multi-token prediction
                             | ends a stage; x*3 and (..)*29 repeat; commas mean nothing

Stages follow one another as in Megatron: stage s on rank s mod p. Megatron unrolls repeats with regular expressions and
so reads `((t|)*2)*3` in a way of its own; nested brackets are an error here. So are blanks and empty brackets, as in
Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from zbc.errors import ZbcError

LETTERS = "EtL"
_LONGEST = 100_000  # letters of an unrolled layout
_TOKEN = re.compile(r"(?P<group>\((?P<inner>[^()]*)\)|[A-Za-z|])(?:\*(?P<times>\d+))?")


def loads(layout: str, where: str | None = None) -> tuple[int, ...]:
    """The transformer layers of each stage; the embedding is in the first, the head in the last. Raises E130 with the
    place in the string for an invalid layout or one that zbc cannot place."""
    stages = "".join(_unrolled(layout, where)).split("|")
    for number, stage in enumerate(stages):
        unknown = next((letter for letter in stage if letter not in LETTERS), None)
        if unknown is not None:
            legal = "E, t and L" if unknown != "m" else "E, t and L; multi-token prediction is not there yet"
            raise _error(layout, where, f"stage {number} has {unknown!r}", f"letters are {legal}")
    flat = "".join(stages)
    if flat.replace("t", "") != "EL" or not flat.startswith("E") or not flat.endswith("L"):
        hint = "one E in front of all t, one L after them, as in Et|t|tL"
        runs = [(letter, len(list(run))) for letter, run in groupby(flat)]
        squeezed = "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs[:12]) or "none"
        raise _error(layout, where, f"its layers are {squeezed}", hint)
    return tuple(stage.count("t") for stage in stages)


def _unrolled(layout: str, where: str | None) -> list[str]:
    at, parts = 0, []
    while at < len(layout):
        if layout[at] == ",":
            at += 1
            continue
        match = _TOKEN.match(layout, at)
        if match is None or (match["inner"] is not None and not match["inner"].strip(",")):
            fault = f"{layout[at]!r} at character {at + 1}"
            raise _error(layout, where, fault, "letters E, t, L, bars, (..)*n and x*n, no blanks; brackets do not nest")
        inner = match["inner"]
        body = match["group"] if inner is None else "".join(_unrolled(inner, where))
        if inner is not None and match["times"] is None:
            raise _error(layout, where, f"brackets without *n at character {at + 1}", "write (tt|)*4, or drop them")
        parts.append(body * int(match["times"] or 1) if len(match["times"] or "") <= 6 else "")
        if sum(map(len, parts)) > _LONGEST or len(match["times"] or "") > 6:
            raise _error(layout, where, "more than a hundred thousand layers", "check the repeats")
        at = match.end()
    return parts


def _error(layout: str, where: str | None, found: str, hint: str) -> ZbcError:
    text = f"partition: not a layout for zbc: {layout[:60]!r}: {found}"
    return ZbcError("E130", text, where=where, hint=hint)


def dumps(stages: Sequence[Sequence[str]]) -> str:
    """The layout of layer names per stage (`embed`, `layers.0`, .., `head`), as short as `t*n` makes it."""
    flat = "|".join("".join({"embed": "E", "head": "L"}.get(name, "t") for name in names) for names in stages)
    return re.sub(r"t{3,}", lambda run: f"t*{len(run[0])}", flat)
