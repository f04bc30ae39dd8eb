"""Formats numbers and lines for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB, GIB = 1024.0**2, 1024.0**3
# Control characters, marks that turn the direction of text or end a line, and halves of surrogate pairs.
_HARMFUL = (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROL = {code: f"\\u{code:04x}" for code in (*_HARMFUL, *range(0xD800, 0xE000)) if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """The text with control characters and the like escaped as \\u001b, safe to print and to write as UTF-8."""
    return text.translate(_CONTROL)


def short(value: float, digits: int = 4) -> str:
    """`digits` significant digits without trailing zeros: 25.5, 618.3, 12346, 0.01953."""
    text = fixed(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text else text


def fixed(value: float, digits: int = 4) -> str:
    """`digits` significant digits: 25.50, 618.3, 12346, 0.01953."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.9999 has one digit before its point only until it is rounded
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{decimals}f}"


def aligned(values: Sequence[float], digits: int = 4) -> list[str]:
    """A column of numbers, all with the decimals that the largest has at `digits` significant digits."""
    most = fixed(max((abs(value) for value in values), default=0.0), digits)
    decimals = len(most.partition(".")[2])
    return [f"{value:.{decimals}f}" for value in values]


def at_least(value: float, digits: int = 4) -> str:
    """A positive `value` rounded up to `digits` significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return short(math.ceil(value / step - 1e-9) * step, digits)


def percent(share: float) -> str:
    """0.123 as 12.3%."""
    return f"{100 * share:.1f}%"


def change(now: float, before: float) -> str:
    """`+3.1%`: by how much a number is larger."""
    return f"{100 * (now / before - 1):+.1f}%" if before > 0 else "+0.0%"


def size(count: float) -> str:
    """Bytes in the unit that fits: 940 B, 31.2 KiB, 5.42 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{short(count, 3)} {unit}"
        count /= 1024
    return f"{short(count, 3)} TiB"


def unit_of(most: float) -> tuple[str, float]:
    """The unit of a column of bytes, of which the largest are `most`, and its scale."""
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB)


def few(words: Sequence[str], most: int) -> list[str]:
    """The first `most` words, and how many more there are."""
    return [*words[:most], *([f"and {len(words) - most} more"] if len(words) > most else [])]


def listed(words: Sequence[object], most: int) -> str:
    """The first `most` words in a sentence: a, b and 3 more."""
    return ", ".join(map(str, words[:most])) + (f" and {len(words) - most} more" if len(words) > most else "")


def counted(number: int, one: str, many: str | None = None) -> str:
    """1 rank, 2 ranks."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def nth(number: int) -> str:
    """1st, 2nd, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def wrap(words: Sequence[str], width: int, between: str = "   ") -> list[str]:
    """Words joined into lines no wider than `width`."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(between) + len(word) <= width:
            lines[-1] += between + word
        else:
            lines.append(word)
    return lines
