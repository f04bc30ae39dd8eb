"""Compares a log of another tool with a plan of the same job."""

from __future__ import annotations

from zbc.compiler.recorded.report import Quantity, quartiles
from zbc.interop.logs import Log
from zbc.plan.directory import Manifest
from zbc.plan.headline import headline, settled_ms


def settings_of(manifest: Manifest) -> dict[str, float]:
    """Settings of a plan under the names of a log's settings."""
    run, model = manifest.topology, manifest.planning.get("model", {})
    settings = {"pp": run.pp, "dp": run.dp, "tp": manifest.tp, "cp": manifest.cp, "ranks": run.world}
    settings |= {"ep": manifest.ep} if manifest.ep else {}
    settings["microbatch_size"] = manifest.microbatch_size
    settings["sequences"] = manifest.microbatches * manifest.microbatch_size * run.dp
    sizes = {name: model.get(name) for name in ("seq_len", "layers", "hidden")}
    return {name: float(value) for name, value in {**settings, **sizes}.items() if value is not None}


def differences(log: Log, manifest: Manifest) -> dict[str, tuple[float, float]]:
    """Settings in which the plan is of another job: (value in the log, value in the plan)."""
    planned = settings_of(manifest)
    return {
        name: (value, planned[name])
        for name, value in log.settings.items()
        if name in planned and value != planned[name]
    }


def quantities(log: Log, manifest: Manifest | None) -> dict[str, Quantity]:
    """Measured quantities of the steps that count, with the plan's predictions; keys are those of a run's report.

    Tokens per second that a log lacks follow from the tokens of a step, by the log or else the plan. With a plan MFU is
    counted as zbc does, so that it differs from the predicted one by the time of a step alone.
    """
    meant = {} if manifest is None else {"step": settled_ms(manifest), **headline(manifest)}
    settings = {**({} if manifest is None else settings_of(manifest)), **log.settings}
    tokens = settings["sequences"] * settings["seq_len"] if {"sequences", "seq_len"} <= settings.keys() else None
    ranks, steps = settings.get("ranks"), log.counted
    samples = dict[str, list[float]]()

    def add(key: str, value: float | None) -> None:
        if value is not None:
            samples.setdefault(key, []).append(value)

    for step in steps:
        rate, ms = step.tokens_per_s_per_rank, step.ms
        if tokens and ranks:
            rate = rate or (1e3 * tokens / ms / ranks if ms else None)
            ms = ms or (1e3 * tokens / (rate * ranks) if rate else None)
        add("step", ms)
        add("tokens_per_s_per_rank", rate)
        add("tokens_per_s", rate * ranks if rate and ranks else None)
        if rate and meant.get("mfu") and meant.get("tokens_per_s_per_rank"):
            add("mfu", meant["mfu"] * rate / meant["tokens_per_s_per_rank"])
        add("tool_mfu", step.mfu)
        add("tool_tflops", step.tflops)
    result = dict[str, Quantity]()
    for key in ("step", "tokens_per_s", "tokens_per_s_per_rank", "mfu", "tool_mfu", "tool_tflops"):
        if key in samples:
            low, middle, high = quartiles(samples[key])
            result[key] = Quantity(meant.get(key), middle, low, high)
    return result
