"""Words of the field, explained in terms of zbc (glossary.md): `zbc explain WORD`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple


class Word(NamedTuple):
    """`names`: in papers, Megatron-LM, DeepSpeed, torch and zbc, zbc's own first; `page` of docs/."""

    names: tuple[str, ...]
    text: str
    page: str


def _read() -> Iterator[Word]:
    """Yields the sections of glossary.md: names as the heading, lines of text, the page as the last line."""
    for section in (resources.files("zbc.explain") / "glossary.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        names, *text, page = section.strip().split("\n")
        yield Word(tuple(names.split(", ")), " ".join(text), page)


WORDS = tuple(_read())


def find(text: str) -> Word | None:
    """The entry with this name, in any spelling; None if there is none."""
    known = {_plain(name): word for word in WORDS for name in word.names}
    return known.get(_plain(text)) or known.get(_plain(text).removesuffix("s"))


def near(text: str) -> list[str]:
    """Names that are similar to `text` or contain it."""
    names = [name for word in WORDS for name in word.names]
    plain = {_plain(name): name for name in names}
    inside = [name for key, name in plain.items() if len(text) > 2 and _plain(text) in key]
    close = [plain[key] for key in difflib.get_close_matches(_plain(text), plain, 3, 0.75)]
    return [*dict.fromkeys([*close, *inside])][:4]


def _plain(text: str) -> str:
    return re.sub(r"[\s_\-\"=.]+", "", text.lower())
