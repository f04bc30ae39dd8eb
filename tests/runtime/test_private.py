"""Undocumented names of torch are used in one file of zbc only, and all names in it are used."""

import re
from pathlib import Path

import pytest

import zbc
from zbc.runtime.core import private

ROOT = Path(zbc.__file__).parent
PRIVATE = re.compile(r"\btorch(?:\.\w+)*(?:\.| import )_[A-Za-z]")
ELSEWHERE = {"training/launch/forking.py"}  # a name for the fork server, which must not import torch


def _sources():
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}


def test_private_parts_of_torch_are_named_in_one_file():
    found = {name for name, text in _sources().items() if PRIVATE.search(text)}
    assert found == {"runtime/core/private.py", *ELSEWHERE}


@pytest.mark.long
def test_nothing_there_is_left_over():
    text = "\n".join(text for name, text in _sources().items() if name != "runtime/core/private.py")
    names = [name for name in vars(private) if not name.startswith("_") and name not in ("annotations", "Any")]
    own = [name for name in names if getattr(vars(private)[name], "__module__", "") == private.__name__]
    assert own and all(re.search(rf"\b{name}\b", text) for name in [*own, *private.__all__])
