"""How ops look, the same in every picture: a letter that needs no colour, and a colour that still works in grey.

Letters carry all there is to know: the kind; lower case for every second stage of a rank; and other letters for the
second pipe of a bidirectional schedule, which look like those of the first one turned or closed:

    first pipe    F forward  B input gradient  W weight gradient  D both at once
    second pipe   P          E                 M                  Q

Fills differ in lightness (F dark, D, B, W light), so that they stay apart in print without colour, and are taken from a
palette that is safe for the common kinds of colour blindness. Kinds with a look but without a schedule that draws them
yet (recompute, offload, reload) stand here so that nobody else takes their letters.
"""

from __future__ import annotations

from typing import NamedTuple

from zbc.ir import COMPUTE, Kind, Op, Placement


class Look(NamedTuple):
    """Letters in the first and the second pipe, what they mean, and the fills of even and odd microbatches."""

    letter: str
    other: str
    name: str
    fills: tuple[str, str]
    ink: str


LOOKS = {
    Kind.F: Look("F", "P", "forward", ("#28588f", "#3b6ca5"), "#ffffff"),
    Kind.B: Look("B", "E", "backward for the input", ("#e3a04f", "#eab26e"), "#000000"),
    Kind.W: Look("W", "M", "backward for the weights", ("#f5e3a8", "#f9edc5"), "#000000"),
    Kind.BW: Look("D", "Q", "both backwards in one", ("#4f9d83", "#66ad95"), "#000000"),
    Kind.REDUCE: Look("S", "S", "sum of gradients", ("#b9a7cf", "#b9a7cf"), "#000000"),
    Kind.TIE: Look("T", "T", "sum of the shared weight", ("#b9a7cf", "#b9a7cf"), "#000000"),
    Kind.GATHER: Look("G", "G", "gather of weights", ("#d8cfe4", "#d8cfe4"), "#000000"),
    Kind.TENTATIVE: Look("A", "A", "tentative step", ("#5a5a5a", "#5a5a5a"), "#ffffff"),
    Kind.COMMIT: Look("C", "C", "final step", ("#c4c4c4", "#c4c4c4"), "#000000"),
}
RESERVED = {"recompute": "R", "offload": "O", "reload": "L"}
UNKNOWN = Look("X", "X", "other", ("#bbbbbb", "#cccccc"), "#000000")  # kinds that came later than this table
IDLE = "#ffffff"


def look(kind: Kind) -> Look:
    """How ops of a kind are drawn."""
    return LOOKS.get(kind, UNKNOWN)


def odd_stages(placement: Placement, rank: int) -> set[tuple[int, int]]:
    """The (pipe, stage) of the second, fourth, .. stage of a rank in each pipe."""
    found = set()
    for pipe, homes in enumerate(placement.pipes):
        mine = [stage for stage, home in enumerate(homes) if home == rank]
        found |= {(pipe, stage) for stage in mine[1::2]}
    return found


def letter(op: Op, *, odd: bool = False) -> str:
    """The letter of an op: another one in the second pipe, a small one on the second stage of a rank (`odd`)."""
    found = look(op.kind)
    text = found.other if op.pipe else found.letter
    return text.lower() if odd else text


def label(op: Op, *, odd: bool = False) -> str:
    """`F3`, `f3` for a second stage, `P3` in the second pipe, `F3.1` for a slice; collectives have no number."""
    if op.kind not in COMPUTE:
        return letter(op)
    return f"{letter(op, odd=odd)}{op.mb}" + (f".{op.slice}" if op.slice else "")


def legend(placement: Placement, kinds: set[Kind]) -> list[str]:
    """What the letters of a picture mean: `F forward`, and both pipes' letters where there are two."""
    two = len(placement.pipes) > 1
    words = []
    for kind in [kind for kind in LOOKS if kind in kinds] + [kind for kind in kinds if kind not in LOOKS]:
        found = look(kind)
        both = two and found.other != found.letter
        words.append(f"{found.letter}{f'/{found.other}' if both else ''} {found.name}")
    if two:
        words.append("second letters: the pipe that runs upwards")
    return words


def chunks(placement: Placement) -> int:
    """The most stages a rank has in one pipe."""
    return max(pipe.count(rank) for pipe in placement.pipes for rank in range(placement.ranks))
