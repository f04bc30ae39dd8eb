"""The main numbers of a plan directory, from its prediction and its job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zbc.errors import ZbcError
from zbc.job import gpu
from zbc.job.model_section import Model
from zbc.job.throughput import Throughput, balance, idle_rate, settled_of, throughput
from zbc.plan.directory import Manifest


@contextmanager
def prediction() -> Iterator[None]:
    """Raises E404 if a plan's prediction is malformed: an edited manifest may have a new, valid checksum."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError) as error:
        hint = "make it again with `zbc plan JOB.toml`"
        raise ZbcError("E404", "plan: what it predicts is not what a plan has", hint=hint) from error


def throughput_of(manifest: Manifest, ms: float) -> Throughput:
    """The throughput of this plan if a step takes `ms`."""
    model = Model.model_validate(manifest.planning["model"], strict=False)
    samples, world = manifest.microbatches * manifest.microbatch_size * manifest.topology.dp, manifest.topology.world
    peak = gpu.peak_tflops(manifest.planning.get("hardware", {}).get("gpu"))
    return throughput(model, samples, ms, world, peak, frozen=manifest.adapted)


def settled_ms(manifest: Manifest) -> float:
    """The predicted ms of a step with its optimizer, in steady state."""
    with prediction():
        return settled_of(manifest.predicted, manifest.planning.get("optimizer", {}).get("sync", "before-step"))


def headline(manifest: Manifest) -> dict[str, Any]:
    """`idle_rate`, `balance` and the predicted throughput, under the keys of a report."""
    settled = settled_ms(manifest)
    with prediction():
        busy = [rank["busy_ms"] for rank in manifest.predicted["per_rank"]]
        idle = idle_rate(busy, manifest.predicted["makespan_ms"])
        values = {"idle_rate": idle, "balance": balance(busy), **throughput_of(manifest, settled)._asdict()}
        return {key: None if value is None else round(value, 9) for key, value in values.items()}
