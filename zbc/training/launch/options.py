"""Options of a run that are not in its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class RunOptions:
    """Options from the command line, or from a Python caller; None: as in the plan.

    The last three are the launcher's: an id of the launch, the same for its restarts; whether ranks of this launch were
    started before; whether rank 0 shows the progress after every step.
    """

    plan: Path  # its folder
    steps: int | None = None  # instead of the plan's
    out: Path | None = None  # the run directory
    save_hf: Path | None = None  # a Hugging Face folder for the weights after training
    save_adapter: Path | None = None  # a folder of peft for its adapters
    save_raw: bool = False  # both get the weights themselves, not their averages
    resume: str | None = None  # "auto", "none", or the path of a checkpoint or of a run: see checkpoint/resume.py
    forward: Path | None = None  # instead of a training: the file for rows of a forward run
    trace: frozenset[int] = frozenset()  # the steps to record, from 0
    local: int | None = None  # the number of ranks to start here
    device: str | None = None  # of --local: the ranks' device, "cpu" or "cuda"
    threads: bool = False  # of --local: ranks are threads of one process, on one device
    max_restarts: int = 0  # of --local: maximum number of restarts of the ranks
    launch: str = ""
    restarted: bool = False
    live: bool = False


class Ended(NamedTuple):
    """The end of a run: its directory, None on other ranks than 0 and without training; `trained`: whether steps were
    left to train; `stopped`: a message, if it ended before its last step."""

    folder: Path | None
    trained: bool
    stopped: str | None
