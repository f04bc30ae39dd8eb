"""Optional sinks of a run's metrics, in addition to metrics.jsonl: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import math
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError

_WANDB = "wandb_run"  # key in run.json of the run's id at W&B


def check(log: Mapping[str, Any]) -> None:
    """Raises E602 if `[log]` needs a package that is not installed; does not import it."""
    for package in (name.partition(":")[0] for name in log.get("to", ())):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # without origin: a folder of that name, no package
            hint = f"pip install 'zbc[{package}]', or drop it from log.to; metrics.jsonl is always written"
            raise ZbcError("E602", f"run: {package} is not installed", hint=hint)


def names(log: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """Entries of `run.json` that identify the run at its sinks when it resumes; `before` is the previous run.json."""
    kept = before.get(_WANDB)
    wanted = any(name.startswith("wandb:") for name in log.get("to", ()))
    return {_WANDB: kept if isinstance(kept, str) and kept else uuid.uuid4().hex} if wanted else {}


def open_sinks(
    log: Mapping[str, Any], folder: Path, about: Mapping[str, Any], first: int | None = None
) -> list[TensorBoard | WeightsAndBiases]:
    """The sinks of `[log]`, writing below the run directory `folder`; `about` is the content of `run.json`. `first`:
    the number of steps after which the run resumes; metrics of later steps are dropped."""
    return [
        TensorBoard(folder, first) if name == "tensorboard" else WeightsAndBiases(name.partition(":")[2], folder, about)
        for name in log.get("to", ())
    ]


class TensorBoard:
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self, folder: Path, first: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=None if first is None else first + 1)

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Writes the metrics of a step (from 1); lists have one value per rank."""
        for name, value in scalars(numbers):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project of `log.to`, its files in `wandb/` of the run directory. WANDB_MODE=offline keeps it there. A
    resumed run is resumed there, too. W&B ignores steps that it has already; they are the same."""

    def __init__(self, project: str, folder: Path, about: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(
                project=project, dir=str(folder), name=folder.name, config=dict(about), id=about[_WANDB], resume="allow"
            )
        except Exception as error:
            said = (str(error).strip() or type(error).__name__).splitlines()
            hint = "`wandb login`, or set WANDB_MODE=offline to keep the run on this machine, or drop it from log.to"
            text = f"run: Weights & Biases does not start: {said[0]}"
            raise ZbcError("E602", text, hint=hint, details=said[1:4]) from error

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(numbers)), step=step)

    def close(self) -> None:
        self._run.finish()


def scalars(numbers: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Finite numbers by name; the values of a list get the rank after the name: `busy_ms/rank3`."""
    for name, value in numbers.items():
        pairs = [(f"{name}/rank{i}", v) for i, v in enumerate(value)] if isinstance(value, list) else [(name, value)]
        for key, number in pairs:
            if key != "step" and isinstance(number, int | float) and math.isfinite(number):
                yield key, float(number)
