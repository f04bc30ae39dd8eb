"""Files of every run, recorded or not: run.json describes the run, metrics.jsonl has a line per step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zbc.compiler.recorded.report import Quantity, quartiles
from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.job.throughput import Throughput, balance, idle_rate, settled_of
from zbc.job.wording import first_of
from zbc.topology import INNER, Topology
from zbc.trace.recording import object_of

RUN, METRICS = "run.json", "metrics.jsonl"


class _Step(BaseModel):
    """The values read of a line of metrics.jsonl."""

    model_config = ConfigDict(strict=True)
    step: int
    step_ms: float = Field(gt=0, allow_inf_nan=False)
    busy_ms: list[float] = Field(min_length=1)
    peak_bytes: list[int]
    sums_hidden: float | None = None
    expert_rows: list[list[float]] | None = None
    rates: Throughput = Throughput()


class Loads(NamedTuple):
    """Rows of experts relative to the mean of their block: 1 if loads are even."""

    blocks: dict[int, list[float]]  # by block with experts, of each expert
    ranks: list[float]  # of expert-parallel ranks, in order: of their experts together, mean over blocks
    imbalance: float  # of the busiest rank in a block, mean over blocks
    planned: float  # `imbalance` assumed by `model.imbalance`
    steps: int  # steps with recorded rows

    @property
    def busiest(self) -> float:
        """The load of the busiest expert in a block, mean over blocks."""
        return sum(map(max, self.blocks.values())) / len(self.blocks)

    def as_json(self) -> dict[str, Any]:
        return {"experts": {**self._asdict(), "busiest": self.busiest}}


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run directory: `about` is run.json, `steps` the lines of training steps."""

    folder: Path
    about: dict[str, Any]
    steps: tuple[dict[str, Any], ...]

    @property
    def plan_folder(self) -> str:
        """The plan that ran, as named on the command line."""
        return str(self.about.get("plan_folder", "PLAN"))

    @property
    def counted(self) -> tuple[dict[str, Any], ...]:
        """The steps that count: without the first one, which includes setup, if there are others."""
        return self.steps[1:] if len(self.steps) > 1 and self.steps[0]["step"] == 1 else self.steps

    def step(self) -> Quantity:
        """ms of steps with the optimizer."""
        predicted = self.about.get("predicted", {})
        sync = self.about.get("training", {}).get("optimizer", {}).get("sync", "before-step")
        meant = settled_of(predicted, sync) if "barrier_ms" in predicted else None
        return Quantity.of(meant, [row["step_ms"] for row in self.counted])

    def bubble(self) -> Quantity:
        """The share of a step in which the busiest rank does not compute; a step has its optimizer in it."""
        return Quantity.of(None, [1 - max(row["busy_ms"]) / row["step_ms"] for row in self.counted])

    def idle(self) -> Quantity:
        """The share of a step in which a rank does not compute, mean over ranks; predicted of the makespan."""
        return self._of("idle_rate", [idle_rate(row["busy_ms"], row["step_ms"]) for row in self.counted])

    def balance(self) -> Quantity:
        """The mean work of a rank relative to the busiest rank's."""
        return self._of("balance", [balance(row["busy_ms"]) for row in self.counted])

    def hidden(self) -> dict[str, Quantity]:
        """With tensor parallelism: the share of the time of its collectives in which rank 0 did something else."""
        values = [row["sums_hidden"] for row in self.counted if row.get("sums_hidden") is not None]
        if not values:
            return {}
        predicted = (self.about.get("predicted", {}).get("tp_sums") or {}).get("hidden")
        return {"sums_hidden": Quantity.of(predicted, values)}

    def loads(self) -> Loads | None:
        """Loads of experts; None in a model without, or if no step has them."""
        told, ep = [row["expert_rows"] for row in self.steps if row.get("expert_rows")], int(self.about.get("ep", 1))
        blocks = dict[int, list[float]]()
        for block, samples in enumerate(zip(*told, strict=True)):
            rows = [sum(load) for load in zip(*samples, strict=True)]
            if sum(rows):
                blocks[block] = [len(rows) * load / sum(rows) for load in rows]
        if not blocks:
            return None
        size = len(next(iter(blocks.values()))) // ep
        ranks = [[sum(load[at : at + size]) / size for at in range(0, ep * size, size)] for load in blocks.values()]
        mean = [sum(column) / len(ranks) for column in zip(*ranks, strict=True)]
        planned = float(self.about.get("imbalance", 1.0))
        return Loads(blocks, mean, sum(map(max, ranks)) / len(ranks), planned, len(told))

    def rates(self) -> dict[str, Quantity]:
        """Known throughput (samples and tokens per second, MFU) by key."""
        known = {key: [row[key] for row in self.counted if row.get(key) is not None] for key in Throughput._fields}
        return {key: self._of(key, values) for key, values in known.items() if values}

    def _of(self, key: str, values: list[float]) -> Quantity:
        return Quantity.of(self.about.get("predicted", {}).get(key), values)

    def busy(self) -> list[tuple[float | None, float]]:
        """Per rank, ms of compute in a step: predicted, and the median of the measured."""
        rows = self.about.get("predicted", {}).get("per_rank", [])
        columns = list(zip(*(row["busy_ms"] for row in self.counted), strict=True))
        node, inner = self.about.get("node"), tuple(self.about.get(axis.name, 1) for axis in INNER)
        order = tuple(self.about.get("order", ()))
        topology = Topology(len(rows), len(columns), node=tuple(node) if node else None, inner=inner, order=order)
        meant = [rows[topology.of(rank).pp]["busy_ms"] if rows else None for rank in range(len(columns))]
        return [(planned, quartiles(column)[1]) for planned, column in zip(meant, columns, strict=True)]

    def peak(self) -> list[int]:
        """Peak bytes per rank: of the process on a CPU, of allocated memory on a GPU."""
        return [max(column) for column in zip(*(row["peak_bytes"] for row in self.steps), strict=True)]

    @property
    def held(self) -> str:
        """The subject of `peak`: all of a process, or allocated memory on a GPU."""
        return "peak" if self.about.get("device") == "cuda" else "process"

    def as_json(self) -> dict[str, Any]:
        """The document of a run without a trace; keys it shares with a recorded one have the same meaning."""
        quantities = {"step": self.step(), "bubble_of_step": self.bubble()}
        quantities |= {"idle_rate": self.idle(), "balance": self.balance(), **self.hidden(), **self.rates()}
        numbers = as_numbers(quantities)
        busy = [{"rank": r, "predicted": meant, "measured": ms} for r, (meant, ms) in enumerate(self.busy())]
        about = {"plan": self.about.get("plan"), "schedule": self.about.get("schedule")}
        document = {"recorded": False, **about, "steps": len(self.steps), **numbers, "busy": busy, "peak": self.peak()}
        loads = self.loads()
        return document if loads is None else document | loads.as_json()


def beside(folder: Path) -> tuple[dict[str, Quantity], Loads | None]:
    """`RunLog.hidden` and `RunLog.loads` of a run whose steps are recorded; nothing if its log is missing."""
    with suppress(ZbcError):
        log = read(folder)
        return log.hidden(), log.loads()
    return {}, None


def as_numbers(quantities: Mapping[str, Quantity]) -> dict[str, Any]:
    """Quantities in the form of a document."""
    return {name: asdict(number) for name, number in quantities.items()}


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run directory."""
    return os.path.isfile(folder / RUN)


def read(folder: Path) -> RunLog:
    """Read a run directory. Raises E430 if it is none, no step ended, or a file is damaged."""
    about = _objects(folder / RUN, whole=True)[0]
    if about.get("format") != "zbc-run":
        raise ZbcError("E430", f"run: {folder / RUN} is not what a run writes (format {about.get('format')!r})")
    rows = _objects(folder / METRICS, whole=False)
    steps = tuple(row for row in rows if "step_ms" in row)
    for row in steps:
        try:
            _Step.model_validate({**row, "rates": [row.get(name) for name in Throughput._fields]})
        except ValidationError as error:
            text = f"run: damaged: {first_of(error, ' of a step')}"
            raise ZbcError("E430", text, where=str(folder / METRICS)) from None
        if {len(row["busy_ms"]), len(row["peak_bytes"])} != {len(steps[0]["busy_ms"])}:
            raise ZbcError("E430", "run: damaged: steps of other numbers of ranks", where=str(folder / METRICS))
    if not steps:
        text = f"run: {folder / METRICS} holds no step"
        raise ZbcError("E430", text, hint="the run ended before its first step; run it again")
    return RunLog(folder, about, steps)


def _objects(path: Path, *, whole: bool) -> list[dict[str, Any]]:
    """The JSON object of a file (`whole`), or one per line; a last line that was cut off is left out."""
    try:
        text = contents(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        hint = "name a run directory, as `zbc run` makes them below runs"
        raise ZbcError("E430", f"run: cannot read {path}: {reason}", hint=hint) from None
    lines = enumerate([text] if whole else text.split("\n")[:-1], start=1)
    return [object_of(line, f"{path}:{number}", "run") for number, line in lines]
