"""`zbc.forward`: one inference pass over a data set by the ranks of a plan, from Python. Its ranks load torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zbc.api import Run
from zbc.plan.directory import read_manifest


def forward(
    run: Run | str | Path,
    plan: str | Path,
    out: str | Path,
    *,
    steps: int | None = None,
    threads: bool = False,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """`zbc run PLAN --forward OUT` with the weights of a run's newest checkpoint, on ranks of this machine.

    Returns the path of the file: a row for each sample of the plan's data set. `steps`: batches at most; `tell` gets
    lines of progress. Raises E612 for a run without checkpoints, and the errors of `zbc run`.
    """
    from zbc.training.launch import launch
    from zbc.training.launch.launch import RunOptions

    weights = str(run.folder if isinstance(run, Run) else run)
    file, world = Path(out).absolute(), read_manifest(Path(plan)).topology.world
    launch.run(RunOptions(Path(plan), forward=file, resume=weights, steps=steps, local=world, threads=threads), tell)
    return file
