"""What there is to say of one error code."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    """`title` is one line; `text` explains, in lines of at most 80 characters."""

    title: str
    text: str


def entry(title: str, text: str) -> Explanation:
    """An entry whose text is written between two line ends."""
    return Explanation(title, text.strip())
