"""The long text of every error: its meaning, an example, a fix. `zbc explain CODE` prints it.

One Markdown file, E*.md, for each family of codes: a summary of the family, then a section per code, with the codes
that it stands for besides. A test requires that the codes are exactly those that zbc raises.
"""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple


class Explanation(NamedTuple):
    """`title` is one line; `text` explains, in lines of at most 80 characters."""

    title: str
    text: str


def _read() -> tuple[dict[str, str], dict[str, Explanation], dict[str, str]]:
    families, catalogue, gone = dict[str, str](), dict[str, Explanation](), dict[str, str]()
    for file in sorted(resources.files("zbc.explain").iterdir(), key=lambda file: file.name):
        if file.name.startswith("E"):
            about, *sections = file.read_text(encoding="utf-8").split("\n## ")
            families[file.name[1]] = about.removeprefix("# ").strip()
            for section in sections:
                head, _, text = section.partition("\n")
                code, _, title = head.partition(" ")
                merged, _, rest = text.partition("\n") if text.startswith("formerly also ") else ("", "", text)
                gone |= dict.fromkeys(merged.removeprefix("formerly also ").split(", ") if merged else (), code)
                catalogue[code] = Explanation(title, rest.strip())
    return families, catalogue, gone


# Second character of a code -> summary of its family; code -> its text, in order; code that is gone -> its successor.
FAMILIES, CATALOGUE, GONE = _read()
