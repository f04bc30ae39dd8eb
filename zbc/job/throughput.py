"""Samples and tokens per second, MFU and idle rate from the time of a step.

Predictions and measured runs share this code, so they differ only by the time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zbc.job.flops import training_flops
from zbc.job.model_section import Model


class Throughput(NamedTuple):
    """Rates of all ranks together, except `_per_rank` and `mfu`; None: not known.

    `mfu`: operations of the model per second and rank, as a share of a rank's peak.
    """

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_rank: float | None = None
    mfu: float | None = None


NOTHING_KNOWN = Throughput()


def throughput(
    model: Model,
    samples: int,
    ms: float,
    world: int,
    peak_tflops: float | None,
    tokens: int | None = None,
    *,
    frozen: bool = False,
) -> Throughput:
    """Throughput of steps that train on `samples` sequences in `ms`, on `world` ranks.

    No tokens without model.seq_len; no MFU without `peak_tflops`, or for layers whose operations are not counted.
    `tokens`: of a step, for sequences of unequal length; no MFU then. `frozen`: only adapters train.
    """
    if not ms > 0 or not math.isfinite(ms):
        return Throughput()
    rate = 1e3 * samples / ms
    if tokens is not None:
        per_s = 1e3 * tokens / ms
        return Throughput(rate, per_s, per_s / world)
    every = None if model.seq_len is None else rate * model.seq_len
    flops = training_flops(model, frozen=frozen)
    mfu = None if flops is None or not peak_tflops else flops * rate / (world * peak_tflops * 1e12)
    return Throughput(rate, every, None if every is None else every / world, mfu)


def settled_of(predicted: Mapping[str, Any], sync: str) -> float:
    """ms of a step with its optimizer, in steady state: with the barrier, or without if the optimizer does (`sync`)."""
    ahead = None if sync == "before-step" else predicted.get("ahead_ms")
    return float(predicted["barrier_ms"] if ahead is None else ahead)


def idle_rate(busy: Sequence[float], whole: float) -> float:
    """The mean over ranks of 1 - busy / whole: the idle share of the GPUs, imbalance included."""
    return 1 - sum(busy) / len(busy) / whole if busy and whole > 0 else 0.0


def balance(busy: Sequence[float]) -> float:
    """Mean busy time of a rank divided by the largest: 1 if the load is balanced."""
    most = max(busy, default=0.0)
    return sum(busy) / len(busy) / most if most > 0 else 1.0
