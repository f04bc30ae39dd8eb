"""A job: the tables of its file, and, while it is read, what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zbc.errors import ZbcError, raise_all
from zbc.job import toml
from zbc.job.model_section import Model
from zbc.job.profile import Profile
from zbc.job.sections import (
    PLANNED,
    PLANNING,
    SECTIONS,
    Checkpoint,
    Data,
    GivenCosts,
    Hardware,
    Log,
    Memory,
    Optimizer,
    Parallel,
    Partition,
    Schedule,
    Train,
)


@dataclass(frozen=True)
class Job:
    """A complete, valid description, and where each value was written."""

    document: toml.Document
    model: Model
    parallel: Parallel
    schedule: Schedule
    partition: Partition
    hardware: Hardware
    costs: GivenCosts
    memory: Memory
    optimizer: Optimizer
    train: Train
    data: Data
    checkpoint: Checkpoint
    log: Log
    profile: Profile | None = None  # what costs.profile names

    def __repr__(self) -> str:
        schedule = self.schedule.kind or self.schedule.file or self.schedule.plugin
        sizes = f"{self.parallel.pp} ranks, {self.schedule.microbatches} microbatches"
        return (
            f"<zbc job {self.document.source}: {schedule}, {self.model.family} of {self.model.layers} layers, {sizes}>"
        )

    def where(self, *path: str | int) -> str:
        return self.document.where(path)

    @property
    def objective(self) -> str:
        """`makespan` or `span`: what one step costs with this optimizer, unless the job says otherwise."""
        return self.schedule.objective or ("makespan" if self.optimizer.sync == "before-step" else "span")

    def planning(self) -> dict[str, Any]:
        """What decides the plan, as plain data: the sections, and what is in the profile instead of where it lies.

        Where initial weights come from is not part of that.
        """
        data = {name: getattr(self, name).model_dump(mode="json") for name in PLANNING}
        del data["model"]["pretrained"]
        data["costs"]["profile"] = None
        measured = {} if self.profile is None else {"profile": self.profile.plain()}
        return {**data, "optimizer": {key: getattr(self.optimizer, key) for key in PLANNED}, **measured}

    def training(self) -> dict[str, Any]:
        """The sections the runtime reads, as plain data."""
        names = [name for name in SECTIONS if name not in PLANNING]
        data = {name: getattr(self, name).model_dump(mode="json") for name in names}
        return {**data, "pretrained": self.model.pretrained}


@dataclass
class Draft:
    """The sections that could be read, and every problem found so far."""

    document: toml.Document
    sections: dict[str, Any]
    problems: list[ZbcError]
    profile: Profile | None = None

    def finish(self) -> Job:
        """The job, or every problem at once."""
        raise_all(self.problems)
        return Job(self.document, **self.sections, profile=self.profile)

    def add(self, code: str, message: str, *path: str | int, hint: str | None = None) -> None:
        self.problems.append(ZbcError(code, message, where=self.document.where(path), hint=hint))
