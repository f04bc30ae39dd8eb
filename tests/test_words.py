"""Docstrings name things, and code where order or memory is argued has comments: floors, not aims."""

import ast
import re
import tokenize
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "zbc"
# "What a rank holds" in place of "bytes of a rank"; direct questions and "what if" are fine.
NOUN_PHRASE = re.compile(r"(?<!`)\b[Ww]hat\b(?! if\b)(?![^.;:]*\?)")
PER_WORDS = 1_000  # words of docstring for each noun phrase, at least
COMMENTED = 0.02  # share of lines with a comment, at least
PACKAGES = [".", *sorted({path.parent.name for path in SOURCE.glob("*/*.py")})]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def files(package):
    return SOURCE.glob("*.py") if package == "." else (SOURCE / package).rglob("*.py")


def docstrings(package):
    nodes = (node for path in files(package) for node in ast.walk(ast.parse(path.read_bytes())))
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]


def commented(path):
    """The lines of a file that have a comment, and all of its lines."""
    with path.open("rb") as file:
        comments = {token.start[0] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT}
    return len(comments), len(path.read_bytes().splitlines())


@pytest.mark.long("runtime")
@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_name_things(package):
    texts = docstrings(package)
    found = [text for text in texts for _ in NOUN_PHRASE.finditer(text)]
    assert len(found) <= sum(len(text.split()) for text in texts) // PER_WORDS, found


@pytest.mark.parametrize("package", ["compiler", "runtime"])
def test_the_core_has_comments(package):
    counts = [commented(path) for path in files(package)]
    comments, lines = map(sum, zip(*counts, strict=True))
    assert comments >= COMMENTED * lines
