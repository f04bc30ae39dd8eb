"""Metrics of a run: one JSON object per step in the run directory, and a line on the console for some steps.

    runs/plan-1/
      run.json         the run: plan, schedule, ranks, settings, prediction
      metrics.jsonl    one line per step, complete at any moment
      tensorboard/     the same, if log.to asks for it

Rank 0 writes; every number of a step is the same on all ranks, so it has the loss wherever the last stage is.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import zbc
from zbc.errors import ZbcError, unwritten
from zbc.host.folders import RUNS
from zbc.job import gpu
from zbc.job.spec import Model, Optimizer
from zbc.job.throughput import balance, idle_rate, throughput
from zbc.plan.directory import Manifest
from zbc.plan.headline import headline
from zbc.plan.phases import Phases
from zbc.runtime.core.progress import EvaluationResult, StepResult
from zbc.text import counted, percent, short, size, wrap
from zbc.topology import INNER
from zbc.training.checkpoint.resume import Start
from zbc.training.launch import rundir
from zbc.training.launch.launch import RunOptions
from zbc.training.metrics import sinks

_ONE_LINE = 10_000  # columns without COLUMNS and a terminal: lines are not wrapped
_OF_PLAN = ("schedule", "ranks", "copies", "node", "order", "stages", "microbatches", "microbatch_size")  # in run.json


@dataclass
class RunRecord:
    """The run directory during the run, as a context manager: `-o`, or the first free `runs/<plan name>-<n>`; or the
    resumed run's, where the metrics of steps after `first` are dropped: they are trained again.

    Raises E608 if it cannot be written, E614 if `-o` holds a run already.
    """

    manifest: Manifest
    options: RunOptions
    steps: int
    processes: list[str]  # per rank, host:pid
    phases: Phases  # of the training
    first: int = 0  # steps trained before, by the run that this one resumes
    start: Start = field(default_factory=Start)  # the checkpoint of these steps, and the run directory
    tokens: Callable[[int], int | None] = lambda step: None  # of a step, if samples are of unequal length

    def __post_init__(self) -> None:
        training = self.manifest.training
        self._log, optimizer = training["log"], Optimizer.model_validate(training["optimizer"], strict=False)
        planned = training["train"]["steps"]
        self._rate = functools.partial(self.phases.rate, optimizer.rates[0], optimizer.schedule, planned)
        self._model = Model.model_validate(self.manifest.planning["model"], strict=False)
        self._unit = "samples" if self._model.seq_len is None else "tokens"
        try:
            self._open(self.start.run)
        except OSError as error:
            place = Path(error.filename or self.options.out or RUNS)
            text = f"run: cannot write the run directory {place}: {unwritten(place, error)}"
            raise ZbcError("E608", text, hint="make room there, or choose another one with -o DIR") from None

    def _open(self, go_on: Path | None) -> None:
        about, told = self._about(), {} if go_on is None else rundir.told(go_on)
        about |= sinks.names(self._log, told)
        if go_on is not None:
            about["before"] = rundir.before(told)
            self.folder, self._file = go_on, rundir.gone_on(go_on, self.first, about)
            self._sinks = sinks.open_sinks(self._log, go_on, about, self.first)
            return
        name, out = self.options.plan.resolve().name, self.options.out
        with rundir.begun(RUNS, name, out, about) as (self.folder, self._file):
            self._sinks = sinks.open_sinks(self._log, self.folder, about)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        with nullcontext() if error is None else suppress(OSError):  # a full disk, which was reported
            for sink in self._sinks:
                sink.close()

    def headline(self) -> str:
        m = self.manifest
        run = m.topology
        ranks = counted(run.world, f"{self.options.device} rank") + run.axes
        counts = [*(str(part.microbatches) for part in m.ramp), counted(m.microbatches, "microbatch", "microbatches")]
        work = f"{', then '.join(counts)} of {m.microbatch_size}"
        if m.balance is not None:
            work = f"1 to {m.balance.most} microbatches of {m.microbatch_size * m.balance.room} tokens"
        line = f"{m.schedule} on {ranks}, {work}, {counted(self.steps, 'step')}, plan {m.id}; writing {self.folder}"
        resumed = self.start.checkpoint
        return line if resumed is None else f"{line}\ngoing on from {resumed}, after step {self.first}"

    def record(self, result: StepResult) -> str | None:
        """Writes the metrics of a step; returns its line for the console, if it is a step to show."""
        numbers = self._numbers(result)
        step = numbers["step"]
        always = step in (self.first + 1, self.steps) or result.stop or result.skipped
        shown = always or step % self._log["every"] == 0
        if shown and (count := self._experts):  # in each step they would be most of the file
            rows = [*map(int, result.routed)]
            numbers["expert_rows"] = [rows[at : at + count] for at in range(0, len(rows), count)]
        self._write(numbers)
        return self._line(numbers) if shown else None

    def record_evaluation(self, result: EvaluationResult) -> str:
        """Writes an evaluation; returns its line for the console."""
        every, parts = (result, *result.others), list[str]()
        took = 1e3 * sum(each.seconds for each in every)
        numbers = {"step": result.step + 1, "eval_loss": result.loss, "eval_samples": result.samples, "eval_ms": took}
        for each in every:
            metric, of = "", f" of {each.kept}" * (each.kept > each.samples)
            if each.name:
                numbers[f"eval_{each.name}_loss"] = each.loss
            if each.metric is not None:
                numbers.setdefault("eval_metric", each.metric)
                numbers |= {f"eval_{each.name}_metric": each.metric} if each.name else {}
                metric = f", metric {each.metric:.4f}"
            parts.append(f"{each.name} loss {each.loss:.4f}{metric} over {each.samples}{of} samples".lstrip())
        self._write(numbers)
        width = len(str(self.steps))
        return f"step {result.step + 1:{width}d}/{self.steps}  evaluation: {'; '.join(parts)}, {took:.1f} ms"

    def _write(self, numbers: dict[str, Any]) -> None:
        """Writes a line of metrics. Raises E608 if that fails; existing lines stay complete."""
        known = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in numbers.items()}
        text = json.dumps(known)  # JSON has no NaN
        try:
            self._file.add(text + "\n")
            for sink in self._sinks:
                sink.write(numbers["step"], numbers)
        except OSError as error:
            what = f"step {numbers['step']}: cannot write {error.filename or self.folder}: {error.strerror or error}"
            hint = "make room there, or choose another run directory with -o DIR"
            if self.manifest.training.get("checkpoint", {}).get("every"):
                hint += "; --resume auto goes on from the newest checkpoint"
            raise ZbcError("E608", f"run: {what}", hint=hint) from None

    def _numbers(self, result: StepResult) -> dict[str, Any]:
        samples = self.phases.samples(result.step)
        hardware, world = self.manifest.planning.get("hardware", {}), self.manifest.topology.world
        tokens = self.tokens(result.step)
        frozen, ms = self.manifest.adapted, 1e3 * result.seconds
        rates = throughput(self._model, samples, ms, world, gpu.peak_tflops(hardware.get("gpu")), tokens, frozen=frozen)
        return {
            "step": result.step + 1,
            "loss": result.loss,
            "added_loss": result.added,
            **self._loads(result.routed),
            "grad_norm": result.grad_norm,
            **({"loss_scale": result.scale} if self._model.dtype == "float16" else {}),
            "skipped": result.skipped,
            "redone": result.redone,
            "lr": self._rate(result.step),
            "samples": self.phases.position(result.step + 1),
            **rates._asdict(),
            "step_ms": 1e3 * result.seconds,
            "idle_rate": idle_rate(result.busy_seconds, result.seconds),
            "balance": balance(result.busy_seconds),
            "bubble_rate_makespan": 1 - max(result.busy_seconds) / result.seconds if result.seconds > 0 else math.nan,
            "sums_hidden": result.sums_hidden,
            "busy_ms": [1e3 * seconds for seconds in result.busy_seconds],
            "peak_bytes": list(result.peak_bytes),
        }

    @property
    def _experts(self) -> int:
        """The number of experts of a block; 0 if their rows are not counted."""
        return (self._model.experts or 0) if self._model.builtin else 0

    def _loads(self, routed: Sequence[float]) -> dict[str, float]:
        """The load of the busiest expert divided by the mean of its block: mean and maximum over the blocks."""
        count = self._experts
        if not routed or not count:
            return {}
        blocks = [routed[at : at + count] for at in range(0, len(routed), count)]
        over = [max(rows) * count / sum(rows) for rows in blocks if sum(rows)]
        return {"expert_load": sum(over) / len(over), "expert_load_worst": max(over)} if over else {}

    def live(self, result: StepResult) -> str:
        numbers, done = self._numbers(result), result.step + 1
        full = 20 * done // self.steps
        rate = self._rate_text(numbers)
        left = str(timedelta(seconds=round((self.steps - done) * result.seconds)))
        return f"[{'#' * full}{'.' * (20 - full)}] {done}/{self.steps}  loss {result.loss:.4f}  {rate}  {left} left"

    def _line(self, numbers: dict[str, Any]) -> str:
        width = len(str(self.steps))
        peak = max(numbers["peak_bytes"])
        held = "peak" if self.options.device == "cuda" else "process"  # whose size includes more than tensors
        how = " SKIPPED" if numbers["skipped"] else " REDONE" if numbers["redone"] else ""
        parts = [
            f"step {numbers['step']:{width}d}/{self.steps}",
            f"loss {numbers['loss']:.4f}",
            *([f"added {numbers['added_loss']:.4g}"] if numbers["added_loss"] else []),
            *([f"load {numbers['expert_load']:.2f}"] if "expert_load" in numbers else []),
            f"grad norm {numbers['grad_norm']:.4g}{how}",
            *([f"loss scale {numbers['loss_scale']:g}"] if "loss_scale" in numbers else []),
            f"lr {numbers['lr']:.3g}",
            self._rate_text(numbers),
            f"{numbers['step_ms']:.1f} ms",
            *([] if numbers["mfu"] is None else [f"MFU {percent(numbers['mfu'])}"]),
            f"idle {percent(numbers['idle_rate'])}",
            f"balance {percent(numbers['balance'])}",
            *([] if numbers["sums_hidden"] is None else [f"sums hidden {percent(numbers['sums_hidden'])}"]),
            f"{held} {size(peak)} ({self.manifest.topology.name(numbers['peak_bytes'].index(peak))})",
        ]
        head, *rest = parts
        room = shutil.get_terminal_size((_ONE_LINE, 24)).columns - len(head) - 2
        return f"{head}  " + f"\n{'':>{len(head)}}  ".join(wrap(rest, room, between="  "))

    def _rate_text(self, numbers: dict[str, Any]) -> str:
        rate = numbers[f"{self._unit}_per_s"]
        return f"{'?' if rate is None else short(rate, 4)} {self._unit}/s"

    def _about(self) -> dict[str, Any]:
        m, start = self.manifest, self.start
        return {
            "format": "zbc-run",
            "version": 1,
            "plan": m.id,
            "plan_folder": str(self.options.plan),
            **{name: getattr(m, name) for name in _OF_PLAN},
            **{axis.name: count for axis, count in zip(INNER, m.topology.inner, strict=True)},
            "steps": self.steps,
            "device": self.options.device,
            "processes": self.processes,
            "zbc_version": zbc.__version__,
            "torch_version": torch.__version__,
            "launch": self.options.launch,
            "first_step": self.first + 1,
            "resumed": None if start.checkpoint is None else str(start.checkpoint),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "training": m.training,
            "predicted": {**m.predicted, **headline(m)},
        } | ({"ep": m.ep or 1, "imbalance": self._model.imbalance} if self._experts else {})
