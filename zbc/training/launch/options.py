"""What a user may ask of a run besides its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """What the command line, or a caller of Python, says of a run; None leaves it to the plan.

    The last three are the launcher's: what tells one launch from another, restarts included; whether ranks of this
    launch were started before; whether rank 0 says after every step how far the run is.
    """

    plan: Path  # its folder
    steps: int | None = None  # instead of the plan's
    out: Path | None = None  # the run directory
    save_hf: Path | None = None  # where the weights go in the end, as a Hugging Face folder
    save_adapter: Path | None = None  # where its adapters go, as a folder of peft
    resume: str | None = None  # "auto", "none", or the path of a checkpoint or of a run: see checkpoint/resume.py
    forward: Path | None = None  # instead of a training: the file that rows go to
    trace: frozenset[int] = frozenset()  # the steps to record, from 0
    local: int | None = None  # so many ranks are started here
    device: str | None = None  # of --local: where the ranks compute, "cpu" or "cuda"
    threads: bool = False  # of --local: ranks are threads of one process, on one device
    max_restarts: int = 0  # of --local: how often the ranks are started again
    launch: str = ""
    restarted: bool = False
    live: bool = False
