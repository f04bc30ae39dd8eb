"""Logs of Megatron-LM and torchtitan: step times, tokens per second, memory by rank, and settings.

Lines may have any prefix of a launcher, such as the rank, and colours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median

from zbc.errors import ZbcError
from zbc.text import GIB, MIB

MEGATRON, TITAN = "Megatron-LM", "torchtitan"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(r"\[rank\s*(\d+)\]", re.IGNORECASE)

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|(.*elapsed time per iteration.*)")
_MEGABYTES = re.compile(r"\[Rank (\d+)\].*memory \(MB\).*\bmax allocated:\s*([\d.]+)")
_ARGUMENT = re.compile(r"^\W*(?:\d+:\s*)?([a-z_]+) \.{2,} (\S+)\s*$")
_NAMES = {  # Megatron's argument -> name of the setting
    "pipeline_model_parallel_size": "pp",
    "data_parallel_size": "dp",
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "world_size": "ranks",
    "micro_batch_size": "microbatch_size",
    "global_batch_size": "sequences",
    "seq_length": "seq_len",
    "num_layers": "layers",
    "hidden_size": "hidden",
}

_STEP = re.compile(
    r"\bstep:\s*(\d+)\s+loss:\s*(\S+).*?\bmemory:\s*([\d.]+)GiB\S*\s+(?:tps|wps):\s*([\d,]+)"
    r"(?:\s+tflops:\s*([\d,.]+))?(?:\s+mfu:\s*([\d.]+)%)?"
)
_WHEN = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})")
_MESH = re.compile(r"device mesh with \[([^\]]*)\], \[([^\]]*)\]")
_BATCH = re.compile(r"global batch size (\d+)[^,]*, sequence length (\d+)")
_PEAK = re.compile(r"Peak FLOPS used for computing MFU: ([\d.e+]+)")
_AXES = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "dp", "dp": "dp", "tp": "tp", "cp": "cp", "ep": "ep"}


@dataclass
class Step:
    """The numbers of a step in a log, or the mean of the steps since the previous one in it."""

    number: int
    ms: float | None = None
    loss: float | None = None
    tokens_per_s_per_rank: float | None = None
    tflops: float | None = None  # per rank
    mfu: float | None = None


@dataclass
class Log:
    """`settings`: sizes of the run by name; `peak`: the largest bytes in the log, by rank of the run."""

    path: Path
    tool: str = ""
    steps: dict[int, Step] = field(default_factory=dict)
    peak: dict[int, float] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    times: dict[int, list[tuple[datetime, int]]] = field(default_factory=dict)  # rank -> (time of a line, its step)

    @property
    def counted(self) -> list[Step]:
        """The steps that count: without the first, which includes the start of the run, if there are others."""
        steps = sorted(self.steps.values(), key=lambda step: step.number)
        return steps[1:] if len(steps) > 1 else steps

    def by_pp(self, pp: int, ranks: int) -> dict[int, float]:
        """The peak of each rank of a pipeline; in both tools pp is the outermost axis of ranks."""
        peaks: dict[int, float] = {}
        for rank, size in self.peak.items():
            at = rank // max(1, ranks // pp)
            peaks[at] = max(size, peaks.get(at, 0.0))
        return dict(sorted(peaks.items()))


def read(path: Path) -> Log:
    """Reads a log. Raises E430 if it cannot be read or has no step."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ZbcError("E430", f"report: cannot read {path}: {error.strerror or error}") from None
    log = Log(path)
    for line in _COLOUR.sub("", text).splitlines():
        for take in _TAKERS:
            take(line, log)
    if not log.steps:
        text = f"report: {path} has no line of Megatron-LM or torchtitan that tells of a step"
        hint = "name what the ranks print (Megatron's comes from the last one), or a run directory of zbc"
        raise ZbcError("E430", text, hint=hint)
    if log.tool == TITAN:
        for number, ms in _between(log.times).items():
            log.steps[number].ms = ms
    axes = [log.settings[name] for name in ("pp", "dp", "tp", "cp") if name in log.settings]
    if axes:
        log.settings.setdefault("ranks", prod(axes))
    return log


def _iteration(line: str, log: Log) -> None:
    match = _ITERATION.search(line)
    if match is None:
        return
    log.tool, number = MEGATRON, int(match[1])
    fields = dict(part.rsplit(":", 1) for part in match[2].split("|") if ":" in part)
    values = {name.strip(): _number(text) for name, text in fields.items()}
    per_gpu = next((value for name, value in values.items() if name.startswith("throughput per GPU")), None)
    ms, loss = values.get("elapsed time per iteration (ms)"), values.get("lm loss")
    log.steps[number] = Step(number, ms=ms, loss=loss, tflops=per_gpu)
    if (size := values.get("global batch size")) is not None:
        log.settings["sequences"] = size


def _megabytes(line: str, log: Log) -> None:
    if (match := _MEGABYTES.search(line)) is not None:
        rank = int(match[1])
        log.peak[rank] = max(log.peak.get(rank, 0.0), float(match[2]) * MIB)


def _argument(line: str, log: Log) -> None:
    match = _ARGUMENT.match(line)
    if match is not None and match[1] in _NAMES and (value := _number(match[2])) is not None:
        log.settings[_NAMES[match[1]]] = value


def _step(line: str, log: Log) -> None:
    match = _STEP.search(line)
    if match is None:
        return
    log.tool, number, rank = TITAN, int(match[1]), _RANK.search(line)
    step = log.steps.setdefault(number, Step(number))
    loss = _number(match[2])
    if loss is not None and loss != -1:  # ranks without a loss print this
        step.loss = loss
    step.tokens_per_s_per_rank = _number(match[4])
    step.tflops = None if match[5] is None else _number(match[5])
    step.mfu = None if match[6] is None else float(match[6]) / 100
    at = 0 if rank is None else int(rank[1])
    log.peak[at] = max(log.peak.get(at, 0.0), float(match[3]) * GIB)
    if (when := _WHEN.search(line)) is not None:  # torchtitan does not print step times
        log.times.setdefault(at, []).append((datetime.fromisoformat(f"{when[1]}.{when[2]}"), number))


def _mesh(line: str, log: Log) -> None:
    if (match := _MESH.search(line)) is not None:
        names = [name.strip(" '\"") for name in match[1].split(",")]
        sizes = [int(size) for size in match[2].split(",")]
        for axis in dict.fromkeys(_AXES[name] for name in names if name in _AXES):
            log.settings[axis] = prod(size for name, size in zip(names, sizes, strict=False) if _AXES.get(name) == axis)
    if (match := _BATCH.search(line)) is not None:
        log.settings |= {"sequences": float(match[1]), "seq_len": float(match[2])}
    if (match := _PEAK.search(line)) is not None:
        log.settings["peak_tflops"] = float(match[1]) / 1e12


_TAKERS: tuple[Callable[[str, Log], None], ...] = (_iteration, _megabytes, _argument, _step, _mesh)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _between(times: Mapping[int, list[tuple[datetime, int]]]) -> dict[int, float]:
    """Step -> ms per step since the previous one in the log; the median over ranks."""
    durations = dict[int, list[float]]()
    for stamps in times.values():
        for (begin, first), (end, number) in pairwise(stamps):
            if number > first:
                durations.setdefault(number, []).append((end - begin).total_seconds() * 1e3 / (number - first))
    return {number: median(samples) for number, samples in durations.items()}
