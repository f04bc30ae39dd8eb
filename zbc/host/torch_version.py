"""Versions of torch that zbc runs on, without loading torch."""

from __future__ import annotations

import re

OLDEST = (2, 11)  # see pyproject.toml


def release(version: str) -> tuple[int, int]:
    """`2.13.0+cpu` as (2, 13)."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else OLDEST  # own builds are accepted
