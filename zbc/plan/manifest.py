"""The manifest of a plan, and the names of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from zbc.ir import TRAITS, Kind, Op, Placement
from zbc.topology import Topology, inner_of, row_unit

FORMAT = "zbc-plan"
VERSION = 1
MANIFEST = "plan.json"
# Fields that a manifest has only if they differ from their defaults.
OPTIONAL = frozenset(
    {"averages", "balance", "cp", "cuts", "dense", "duplex", "edges", "ep", "flushless", "folded", "near", "one_sided"}
    | {"scatters", "vocabulary"}
)
SLICES = "slices"  # capability: ops of slices of a microbatch, which attend to the slices before them
STEPS = "steps"  # capability: ops of the next step
_AHEAD = frozenset(kind.value for kind in Kind if kind.row.closes == "ahead")
FROZEN = "frozen"  # capability: ops in which some layers get no weight gradients
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[\w-]+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Boundary(_Strict):
    """The tensor between two neighbouring stages: its shape for a microbatch, or for a slice of it, and its dtype."""

    shape: list[Count]
    dtype: str


class RampPlan(_Strict):
    """A plan with another number of microbatches, for the first steps of a training; or, if replicas get unequal
    numbers of them, for the steps that need it."""

    folder: Name  # of that plan, inside of this one
    microbatches: Count
    steps: Index  # 0: chosen in each step
    sha256: str  # of its manifest


class Words(_Strict):
    """Vocabulary parallel: rank r has the words [rows[r], rows[r + 1]) of the output layer and the embedding."""

    sums: Annotated[int, Field(ge=1, le=2)]  # per unit, in its middle
    rows: list[Index]


class Unequal(_Strict):
    """Samples of unequal length, dealt to replicas; `ramp` has the plans for other numbers of microbatches."""

    room: Count  # tokens of a row of a microbatch
    most: Count  # microbatches of a replica in a step
    quadratic: float  # cost of a token per token of its sequence, over its own cost


class Manifest(_Strict):
    """`plan.json`."""

    format: str
    version: int
    id: str
    schedule: str
    parameters: dict[str, Any]
    passes: list[str]
    ranks: Count
    stages: Count
    microbatches: Count
    microbatch_size: Count
    slices: Count
    copies: Count = 1  # data-parallel replicas of the pipeline; `ranks` is the size of one
    cp: Count = 1  # context parallelism: ranks that share the tokens of a pipeline rank's microbatches
    tp: Count = 1  # tensor parallelism: ranks that share the layers of a pipeline rank
    tied: bool = False  # stages share a weight
    ties: list[Index] = []  # those stages; none: the first and the last
    sharded: bool = False  # the copies of a stage share out the optimizer's work
    resident: Index = 0  # max unsharded stages of a rank; 0: weights stay
    with_w: bool = False  # if weights are freed: W needs them, too
    scatters: bool = False  # gradients are reduce-scattered after each run of backwards of a stage
    one_sided: bool = False  # freed weights, and their gradients, travel without collectives
    placement: list[list[Index]]  # stage -> rank per pipe
    edges: list[list[Index]] = []  # (stage, stage that reads its output); absent for a chain
    layers: list[list[str]]  # stage -> layer names
    boundaries: list[Boundary | None]  # after each stage but the last; None: the runtime derives it
    capabilities: list[str]
    predicted: dict[str, Any]
    planning: dict[str, dict[str, Any]]
    training: dict[str, Any]
    files: dict[str, str]  # name -> sha256
    cuts: list[Index] = []  # starts of the slices in the sequence, and its end; absent for one slice
    flushless: bool = False  # the ops are the body of a cycle: steps follow one another without a flush
    duplex: bool = False  # a rank copies to its host and back at once; else it runs one copy at a time
    ep: Index = 0  # expert parallelism: neighbours that share out the experts of a block; 0: each rank has all
    folded: bool = False  # these are neighbours along tp first: each has whole experts; else parts, as of all layers
    dense: list[Index] = []  # the stages without experts, if `ep`
    near: Index = 0  # ranks on a node, if exchanges of rows between nodes take two steps; else 0
    averages: Index = 0  # replicas average weights and sum no gradients: 1, applied a step later; 2, at once
    balance: Unequal | None = None  # absent if all replicas have the same number of microbatches
    vocabulary: Words | None = None  # absent if the first and the last stage have it
    node: list[Count] = []  # neighbours of a pipeline, and copies of each, on one node; else copies follow each other
    order: list[Index] = []  # seat -> rank of the run, see zbc/topology.py; else as numbered
    ramp: list[RampPlan] = []  # the plans of a training's first steps, before it runs this one
    sha256: str = ""  # of this manifest without this field
    _host: Callable[[int], str] | None = None  # name of the host of a rank, in a run on several

    def digest(self) -> str:
        return digest_of(self._plain())

    def dumps(self) -> str:
        return json.dumps({**self._plain(), "sha256": self.digest()}, indent=1) + "\n"

    def _plain(self) -> dict[str, Any]:
        """All fields but the sha256, as plain data of a file."""
        plain = {name for name in OPTIONAL if getattr(self, name) == type(self).model_fields[name].default}
        return self.model_dump(mode="json", exclude={"sha256", *plain})

    @property
    def ahead(self) -> bool:
        """Whether its steps close without a barrier."""
        return not _AHEAD.isdisjoint(self.capabilities)

    @property
    def traits(self) -> dict[str, Any]:
        """The traits of its program."""
        traits = {name: getattr(self, name) for name in TRAITS if name not in ("dp", "vocabulary", "node")}
        traits = {name: tuple(value) if isinstance(value, list) else value for name, value in traits.items()}
        sums = 0 if self.vocabulary is None else self.vocabulary.sums
        return traits | {"dp": self.copies, "vocabulary": sums, "node": self.topology.node}

    @property
    def adapted(self) -> bool:
        """Whether adapters train in place of weights."""
        return bool(self.planning.get("adapter", {}).get("rank"))

    @property
    def topology(self) -> Topology:
        """The axes of a run of the plan."""
        node = (self.node[0], self.node[1]) if self.node else None
        pipes, order = len(self.placement[0]), tuple(self.order)
        counts = tuple(len(set(ranks)) for ranks in self.placement) if pipes > 1 else ()
        replicas = counts if sum(counts) == self.ranks else ()
        axes = self.ranks, self.copies, pipes, node, self.slices, self.microbatches, inner_of(self)
        return Topology(*axes, order, replicas, self._host, self.ep, self.folded, self.near)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each microbatch the planned tokens of its rows, if these are unequal or samples are dealt by them."""
        return tuple(self.planning.get("schedule", {}).get("tokens") or ())

    @property
    def unit(self) -> int:
        """The tokens of a row are a multiple of it: ranks share them (`parallel.cp` in two chunks, `tp_sequence`)."""
        return row_unit(self.cp, self.tp if self.planning.get("parallel", {}).get("tp_sequence") else 1)

    def on(self, host: Callable[[int], str]) -> None:
        """Sets the name of the host of each rank, in a run on several, for messages."""
        self._host = host

    def holders(self, stage: int) -> int:
        """The number of ranks of a run that hold a stage."""
        return self.topology.copies * len(set(self.placement[stage]))

    def host(self, rank: int) -> dict[str, Any]:
        """Host memory for the activations of a rank of the pipeline: `bytes` and `slabs`; {}: none."""
        predicted: dict[str, Any] = self.predicted.get("host", {}).get(f"rank {rank}", {})
        return predicted

    def slabs(self, rank: int) -> dict[int, int]:
        """Stage -> the most microbatches whose activations a rank has on the host at once."""
        return {int(stage.removeprefix("s")): count for stage, count in self.host(rank).get("slabs", {}).items()}

    def to_placement(self) -> Placement:
        return Placement(tuple(zip(*self.placement, strict=True)), tuple((a, b) for a, b in self.edges))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The plan of one rank: its ops in order, and the manifest."""

    rank: int
    ops: tuple[Op, ...]
    manifest: Manifest


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.json"


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The sha256 of a manifest as JSON with sorted keys."""
    return sha(json.dumps(manifest, sort_keys=True).encode())


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
