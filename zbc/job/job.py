"""A job: the tables of its file, and, while it is read, the problems found in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbc.errors import ZbcError, raise_all
from zbc.excludes import FLUSHLESS
from zbc.job import toml
from zbc.job.adapter import Adapter
from zbc.job.links import LinkTable
from zbc.job.model_section import Model
from zbc.job.profile import Profile
from zbc.job.sections import (
    PLANNED,
    PLANNING,
    SECTIONS,
    Checkpoint,
    Data,
    Filler,
    Freeze,
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
from zbc.job.world import Weighed
from zbc.text import GIB
from zbc.topology import Topology

RESERVE = 0.06  # share of a GPU's memory to keep free, unless the job or a profile says otherwise


@dataclass(frozen=True)
class Job:
    """A complete, valid job, with the place of each value in its file."""

    document: toml.Document
    model: Model
    parallel: Parallel
    schedule: Schedule
    partition: Partition
    hardware: Hardware
    costs: GivenCosts
    memory: Memory
    freeze: Freeze
    adapter: Adapter
    optimizer: Optimizer
    train: Train
    data: Data
    checkpoint: Checkpoint
    log: Log
    filler: Filler
    profile: Profile | None = None  # the file of --profile, or the card of a factory's layers
    carded: bool = False  # it is the card
    links: LinkTable | None = None  # the file of hardware.links
    uncounted: ZbcError | None = None  # why nothing is known of what its layers cost
    node: tuple[int, int] | None = None  # neighbours of a pipeline on a node, and replicas of each; None: open
    near: int = 0  # ranks on a node, once exchanges of experts' rows between nodes are planned in two steps
    weighed: tuple[Weighed, ...] = ()  # the candidates for pp and dp, if the job left them open

    def __repr__(self) -> str:
        sizes = f"{self.parallel.pp} ranks, {self.schedule.microbatches} microbatches"
        of = f"{self.schedule.kind}, {self.model.family} of {self.model.layers} layers"
        return f"<zbc job {self.document.source}: {of}, {sizes}>"

    def where(self, *path: str | int) -> str:
        return self.document.where(path)

    @property
    def timed(self) -> Profile | None:
        """The profile, if it has measured times."""
        return self.profile if self.profile is not None and self.profile.timed else None

    @property
    def balances(self) -> bool:
        """Whether replicas get unequal numbers of microbatches."""
        return self.data.balance == "length"

    @property
    def most_microbatches(self) -> int:
        """The most microbatches of a replica in a step."""
        planned = self.schedule
        return (planned.max_microbatches or 2 * planned.microbatches) if self.balances else planned.microbatches

    @property
    def objective(self) -> str:
        """The time that searches minimize: `schedule.objective`; default `makespan` with the optimizer's barrier, else
        `span`."""
        return self.schedule.objective or ("makespan" if self.optimizer.sync == "before-step" else "span")

    @property
    def flushless(self) -> bool:
        """Whether steps follow one another without a flush."""
        return self.optimizer.sync in FLUSHLESS

    @property
    def steady(self) -> bool:
        """Whether plans are compared by the step in steady state: without a flush always, without a barrier unless an
        objective is given."""
        return self.flushless or (self.optimizer.sync != "before-step" and self.schedule.objective is None)

    @property
    def topology(self) -> Topology:
        """The axes of a run of one pipe, with its ranks assigned to nodes."""
        return replace(self.parallel.topology, node=self.node)

    @property
    def slices(self) -> int:
        """Slices of a microbatch; 1 while their number is open."""
        asked = self.schedule.slices
        return asked if isinstance(asked, int) else 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each microbatch the tokens of its rows, where these are not whole ones; else ()."""
        asked = self.schedule.lengths
        return tuple(asked) if {*asked} - {self.row_tokens} else ()

    @property
    def row_tokens(self) -> int:
        """Those of a whole row: of the longest, where the model has no length."""
        return self.model.seq_len or max(self.schedule.lengths or [1])

    def with_tokens(self, tokens: Sequence[int]) -> Job:
        """The job with microbatches of other lengths; without any, with whole rows."""
        return replace(self, schedule=self.schedule.model_copy(update={"tokens": list(tokens) or None}))

    def of_length(self, tokens: int) -> Job:
        """The job with whole rows of `tokens` tokens; a model without a length is unchanged. Given times of messages
        and collectives are of as many tokens."""
        model = self.model if self.model.seq_len is None else self.model.model_copy(update={"seq_len": tokens})
        part, given = tokens / self.row_tokens, self.costs
        times = {name: getattr(given, name) for name in ("comm", "tp", "cp", "ep")}
        costs = given.model_copy(update={name: part * ms for name, ms in times.items() if ms is not None})
        return replace(self.with_tokens(()), model=model, costs=costs)

    def in_slices(self, count: int) -> Job:
        """The job with `count` slices of each microbatch."""
        return replace(self, schedule=self.schedule.model_copy(update={"slices": count}))

    @property
    def counted(self) -> bool:
        """Whether what its layers do is known: times may be estimated."""
        return self.model.builtin or (self.profile is not None and not self.profile.timed)

    def under(self, kind: str) -> Job:
        """The job with another schedule."""
        return replace(self, schedule=self.schedule.model_copy(update={"kind": kind}))

    @property
    def vocabulary(self) -> int:
        """Sums over all ranks per unit of a shared vocabulary; 0 if it is not shared, or that is still open."""
        return {"shared": 1, "shared-2": 2}.get(self.parallel.vocabulary, 0)

    @property
    def ties_words(self) -> bool:
        """Whether the embedding and the output layer, each on an end stage, train one matrix."""
        return self.model.tie_embeddings and not self.vocabulary and not self.adapter.rank

    def with_vocabulary(self, where: str) -> Job:
        """The job with its vocabulary at the "ends" or "shared"."""
        return replace(self, parallel=self.parallel.model_copy(update={"vocabulary": where}))

    def with_replicas(self, counts: Sequence[int]) -> Job:
        """The job with `counts` ranks for each stage."""
        return replace(self, parallel=self.parallel.model_copy(update={"replicas": list(counts)}))

    @property
    def words(self) -> list[int]:
        """The first word of each rank in a shared vocabulary, and its end; [] if it is not shared."""
        p, count = self.parallel.pp, self.model.vocab or 0
        return [count * rank // p for rank in range(p + 1)] if self.vocabulary else []

    @property
    def reserve_gib(self) -> float:
        """GiB of hardware.memory_gib kept free on each rank."""
        return self._reserve(self.hardware.least_gib or 0.0)

    @property
    def room(self) -> float | None:
        """Memory limit in bytes of the rank with the least memory; None for no limit."""
        rooms = self.rooms
        return None if rooms is None else min(rooms)

    @property
    def rooms(self) -> tuple[float, ...] | None:
        """Memory limit in bytes of each rank of the pipeline; None for no limit."""
        memory = self.hardware.memory_gib
        if memory is None:
            return None
        sizes = memory if isinstance(memory, list) else [memory] * self.parallel.pp
        return tuple((gib - self._reserve(gib)) * GIB for gib in sizes)

    def memory_for(self, held: float) -> float:
        """The least hardware.memory_gib with which a rank can hold `held` bytes."""
        gib = held / GIB
        if self.hardware.device == "cpu":
            return gib
        return max(gib / (1 - RESERVE), gib + self._measured_reserve)

    def _reserve(self, memory_gib: float) -> float:
        if self.hardware.device == "cpu":
            return 0.0
        return max(RESERVE * memory_gib, self._measured_reserve)

    @property
    def _measured_reserve(self) -> float:
        measured = None if self.profile is None else self.profile.reserve_bytes
        return 0.0 if measured is None else measured / GIB

    def planning(self) -> dict[str, Any]:
        """The settings that decide the plan, as plain data: sections, and the contents of profile and links. The source
        of initial weights is not among them."""
        data = {name: getattr(self, name).model_dump(mode="json") for name in PLANNING}
        del data["model"]["pretrained"], data["parallel"]["world"], data["schedule"]["batch"]
        data["hardware"]["links"] = None
        others = {name: {key: getattr(getattr(self, name), key) for key in keys} for name, keys in PLANNED.items()}
        measured = {} if self.profile is None else {"profile": self.profile.plain()}
        links = {} if self.links is None else {"links": self.links.plain()}
        return {**data, **others, **measured, **links}

    def training(self) -> dict[str, Any]:
        """The sections the runtime reads, as plain data."""
        names = [name for name in SECTIONS if name not in PLANNING]
        data = {name: getattr(self, name).model_dump(mode="json") for name in names}
        if data["data"]["kind"] == "chat":
            data["data"]["tokenizer"] = self.data.tokenizer or self.model.pretrained
        return {**data, "pretrained": self.model.pretrained}


@dataclass
class Draft:
    """The sections that could be read, and every problem found so far."""

    document: toml.Document
    sections: dict[str, Any]
    problems: list[ZbcError]
    profile: Profile | None = None
    links: LinkTable | None = None

    def finish(self) -> Job:
        """The job, or every problem at once."""
        raise_all(self.problems)
        return Job(self.document, **self.sections, profile=self.profile, links=self.links)

    def add(self, code: str, message: str, *path: str | int, hint: str | None = None) -> None:
        self.problems.append(ZbcError(code, message, where=self.document.where(path), hint=hint))
