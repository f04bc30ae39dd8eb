"""Types for the fields of job sections."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zbc.job.spellings import of_plan

Count = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=1, le=10_000_000)]  # of a model: more is a typo
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# Larger numbers are typos: sums over a step would lose the precision of floats, or be infinite.
Ms = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]  # up to eleven days
Us = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=1e-9, le=1e9, allow_inf_nan=False)]  # GB/s, Gbit/s, TFLOP/s
Gib = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]  # bytes are a typo
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]  # of memory, in any unit
FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:name
Problem = tuple[str, str | tuple[str | int, ...], str, str]  # code, key, text and hint of an error: see rules.py
# The largest jobs that are planned: beyond, planning would take hours or run out of memory.
LAYERS, RANKS = 100_000, 100_000  # ranks of a run, over all replicas of the pipeline
OPS = 10_000_000  # compute ops of a step, over all ranks: a quarter of an hour and some 19 GiB


class Section(BaseModel):
    """A table of a job file. It is frozen; unknown keys and values of another type are problems."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, values: Any) -> Any:
        return of_plan(cls.__name__.lower(), values)


def key(default: Any, about: str, **more: Any) -> Any:
    """A field with its default (`...`: it has to be given) and its description, which is the reference of the key."""
    return Field(default, description=about, **more)
