"""What a user may ask of a run besides its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """What the command line, or a caller of Python, says of a run; None leaves it to the plan."""

    steps: int | None = None  # instead of the plan's
    out: Path | None = None  # the run directory
    save_hf: Path | None = None  # where the weights go in the end, as a Hugging Face folder
    resume: str | None = None  # "auto", "none", or a path: where to begin
    launch: str = ""  # what tells one launch from another, restarts included
    restarted: bool = False  # ranks of this launch were started before
    live: bool = False  # rank 0 says after every step how far the run is
    trace: frozenset[int] = frozenset()  # the steps to record, from 0
    device: str = "cpu"  # of --local: where the ranks compute, "cpu" or "cuda"
    max_restarts: int = 0  # of --local: how often the ranks are started again
