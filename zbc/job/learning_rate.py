"""`[optimizer.schedule]`: the learning rate as a pure function of the step, without state.

    constant   warm-up, then lr
    linear     warm-up, then down to min_lr in a straight line
    cosine     warm-up, then down to min_lr along half a cosine (arXiv 1608.03983, without restarts)
    wsd        warm-up, lr, and down to min_lr in a straight line over the last decay_steps (arXiv 2404.06395)

Warm-up goes up in a straight line: step i of w (from 1) has lr i / w. The last step of a decay has min_lr.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zbc.job.section import Count, NotNegative, Problem, Section, key


class RateSchedule(Section):
    """`[optimizer.schedule]`."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    by: Literal["steps", "samples"] = key("steps", "samples: a step of half the microbatches counts as half a step")
    warmup_steps: Annotated[int, Field(ge=0)] = key(0, "steps of the linear warm-up to lr")
    decay_steps: Count | None = key(
        None, "steps of the decay; default all after the warm-up, wsd a tenth of train.steps"
    )
    min_lr: NotNegative = key(0.0, "rate at the end of the decay")


def decay_steps(schedule: RateSchedule, steps: float) -> float:
    """The number of decay steps in a training of `steps`."""
    if schedule.kind == "constant":
        return 0
    if schedule.decay_steps is not None:
        return schedule.decay_steps
    rest = max(1, steps - schedule.warmup_steps)
    return min(max(1, steps // 10), rest) if schedule.kind == "wsd" else rest


def rate(lr: float, schedule: RateSchedule, steps: int, step: int) -> float:
    """The learning rate of step `step` (from 0) of a training of `steps`; after its end the last one."""
    return rate_after(lr, schedule, steps, step + 1)


def rate_after(lr: float, schedule: RateSchedule, steps: float, done: float) -> float:
    """The learning rate of the step after which `done` of `steps` are done; both may be fractions."""
    down = decay_steps(schedule, steps)
    if done < schedule.warmup_steps:
        return lr * done / schedule.warmup_steps
    start = max(steps - down, schedule.warmup_steps) if schedule.kind == "wsd" else schedule.warmup_steps
    part = min(1.0, max(0.0, (done - start) / down)) if down else 0.0
    if schedule.kind == "cosine":
        part = 0.5 * (1.0 - math.cos(math.pi * part))
    return lr + (schedule.min_lr - lr) * part


def problems(lr: float, schedule: RateSchedule, steps: float) -> Iterator[Problem]:
    """E110 for settings that contradict each other."""
    key, warmup, down = "optimizer.schedule", schedule.warmup_steps, schedule.decay_steps
    of = f"the {steps:g} full steps that the samples of train.steps make"
    of = f"train.steps = {int(steps)}" if schedule.by == "steps" else of
    if warmup > steps:
        yield "E110", f"{key}.warmup_steps", f"{key}.warmup_steps = {warmup} is more than {of}", "shorten it"
    elif down is not None and warmup + down > steps:
        text = f"{key}.decay_steps = {down} and warmup_steps = {warmup} are more than {of}"
        yield "E110", f"{key}.decay_steps", text, f"use {max(1, int(steps) - warmup)} or fewer"
    if schedule.min_lr > lr:
        text = f"{key}.min_lr = {schedule.min_lr:g} is above optimizer.lr = {lr:g}"
        yield "E110", f"{key}.min_lr", text, "lower it"
    if schedule.kind == "constant" and (down is not None or schedule.min_lr):
        idle = f"{key}.{'min_lr' if down is None else 'decay_steps'}"
        text, hint = f'{idle} does nothing with kind = "constant"', 'drop it, or use "cosine", "linear" or "wsd"'
        yield "E110", idle, text, hint
    elif schedule.kind == "constant" and schedule.by == "samples" and not warmup:
        text = f'{key}.by = "samples" does nothing where the rate is the same in all steps'
        hint = 'drop it, give warmup_steps, or use kind = "cosine", "linear" or "wsd"'
        yield "E110", f"{key}.by", text, hint
