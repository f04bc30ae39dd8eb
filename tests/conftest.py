"""Golden files: texts a person has looked at. `pytest --update-golden` writes them anew; read the diff."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile("zbc", settings.default, deadline=None)  # a busy machine may stop a test for a moment
settings.load_profile("zbc")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the code prints now")


@pytest.fixture
def golden(request):
    """`golden(name, text)` fails unless tests/golden/`name` holds `text`."""

    def compare(name, text):
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no golden file {name}; look at the text and run pytest --update-golden:\n{text}"
        assert text == path.read_text(encoding="utf-8")

    return compare
