"""Both engines, made once: compiling takes seconds."""

import pytest

from zbc.compiler.search.engine import Engine


@pytest.fixture(scope="session")
def plain():
    return Engine(compiled=False)


@pytest.fixture(scope="session")
def compiled():
    return Engine(compiled=True)
