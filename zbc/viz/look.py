"""The look of ops, the same in every picture: a letter that needs no colour, and a colour that still works in grey.

Letters are sufficient: they show the kind; lower case is every second stage of a rank; and the second pipe of a
bidirectional schedule has other letters, similar in shape:

    first pipe    F forward  B input gradient  W weight gradient  D both at once
    second pipe   P          E                 M                  Q

Fills differ in lightness (F dark, D, B, W light), so that they are distinct in print without colour, and are from a
palette that is safe for the common kinds of colour blindness. The look of a kind is a column of its row in zbc/ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.ir import COPY, Kind, Op, Placement
from zbc.ops import Look

LOOKS = {kind: kind.row.look for kind in Kind if kind.row.look is not None}
RESERVED = {"recompute": "R"}
UNKNOWN = Look("X", "X", "other", ("#bbbbbb", "#cccccc"), (250, 252))  # kinds without a look
IDLE = "#ffffff"
MEETING = "#b3261e"
HIDDEN = "#8b97a5"  # hidden sums of tensor-parallel ranks; exposed ones are as red as a collective of all ranks


def look(kind: Kind) -> Look:
    """The look of ops of a kind."""
    return LOOKS.get(kind, UNKNOWN)


def chunks_of(placement: Placement, rank: int) -> dict[tuple[int, int], int]:
    """(pipe, stage) -> its index among the rank's stages in that pipe, modulo 4. The second has small letters and a bar
    below, the third a bar above, the fourth all of these."""
    return {
        (pipe, stage): number % 4
        for pipe, homes in enumerate(placement.pipes)
        for number, stage in enumerate(stage for stage, home in enumerate(homes) if home == rank)
    }


def chunk_entries(most: int) -> list[tuple[str, int]]:
    """(text of the legend, index) for each stage of a rank after the first, up to `most` stages."""
    last = "fourth" if most <= 4 else "fourth, then from the first again"
    return [*zip(("second stage of a rank", "third", last), (1, 2, 3), strict=True)][: most - 1]


def letter(op: Op, *, odd: bool = False) -> str:
    """The letter of an op: another letter in the second pipe, a small one on the second stage of a rank (`odd`)."""
    appearance = look(op.kind)
    text = appearance.other if op.pipe else appearance.letter
    return text.lower() if odd else text


def label(op: Op, *, odd: bool = False) -> str:
    """`F3`, `f3` for a second stage, `P3` in the second pipe, `F3.1` for a slice; collectives have no number."""
    if not op.kind.computes and op.kind not in COPY:
        return letter(op)
    return f"{letter(op, odd=odd)}{op.mb}" + (f".{op.slice}" if op.slice else "")


def entries(kinds: set[Kind], *, two: bool) -> Iterator[tuple[Look, str]]:
    """The legend of a picture's letters, in the order of `Kind`: `F forward`; with two pipes `F/P forward`."""
    for kind in Kind:
        if kind in kinds:
            appearance = look(kind)
            second = f"/{appearance.other}" if two and appearance.other != appearance.letter else ""
            yield appearance, f"{appearance.letter}{second} {appearance.name}"
