"""What a user may ask of a run besides its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    steps: int | None = None  # instead of the plan's
    out: Path | None = None  # the run directory
    save_hf: Path | None = None  # where the weights go in the end, as a Hugging Face folder
    live: bool = False  # rank 0 says after every step how far the run is
    trace: frozenset[int] = frozenset()  # the steps to record, from 0
