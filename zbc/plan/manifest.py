"""The manifest of a plan, and the names of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from zbc.ir import TRAITS, Op, Placement
from zbc.topology import Topology, inner_of

FORMAT = "zbc-plan"
VERSION = 1
MANIFEST = "plan.json"
# Fields that stand in a manifest only where they say something.
OPTIONAL = frozenset(
    {"averages", "balance", "cp", "cuts", "edges", "ep", "flushless", "one_sided", "scatters", "vocabulary"}
)
SLICES = "slices"  # capability: ops of slices of a microbatch, which attend to the slices before them
STEPS = "steps"  # capability: ops of the next step
FROZEN = "frozen"  # capability: ops in which some layers get no weight gradients
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[\w-]+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Boundary(_Strict):
    """The tensor between two neighbouring stages: its shape for one microbatch (one slice of it) and its dtype."""

    shape: list[Count]
    dtype: str


class RampPlan(_Strict):
    """The first steps of a training, or the next ones, run another plan: with fewer microbatches. Where replicas get
    unequal numbers of them, each step has the plans that it needs."""

    folder: Name  # of that plan, inside of this one
    microbatches: Count
    steps: Index  # 0: chosen in each step
    sha256: str  # of its manifest


class Words(_Strict):
    """How all ranks share an output layer and an embedding: rank r has the words [rows[r], rows[r + 1]) of both."""

    sums: Annotated[int, Field(ge=1, le=2)]  # per unit, in its middle
    rows: list[Index]


class Unequal(_Strict):
    """Samples of unequal length are dealt to replicas, which have plans for other numbers of microbatches in `ramp`."""

    room: Count  # tokens of a row of a microbatch
    most: Count  # microbatches of a replica in a step
    quadratic: float  # cost of a token that sees another one, over that of a token by itself


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
    copies: Count = 1  # data-parallel replicas of the pipeline; `ranks` are those of one
    cp: Count = 1  # ranks that share the tokens of a rank's microbatches, and run its ops
    tp: Count = 1  # ranks that share the layers of a rank of the pipeline, and run its ops
    tied: bool = False  # stages share a weight
    ties: list[Index] = []  # those stages; none: the first and the last
    sharded: bool = False  # the copies of a stage share out the optimizer's work
    resident: Index = 0  # stages whose gathered weights a rank has room for; 0: weights stay
    with_w: bool = False  # where weights are freed: W needs them, too
    scatters: bool = False  # gradients are summed into the ranks' parts after each run of backwards of a stage
    one_sided: bool = False  # freed weights, and their gradients, travel without a meeting of the replicas
    placement: list[list[Index]]  # stage -> rank per pipe
    edges: list[list[Index]] = []  # (stage, stage that reads its output); absent where stages are a chain
    layers: list[list[str]]  # stage -> layer names
    boundaries: list[Boundary | None]  # after each stage but the last; None: the runtime derives it
    capabilities: list[str]
    predicted: dict[str, Any]
    planning: dict[str, Any]
    training: dict[str, Any]
    files: dict[str, str]  # name -> sha256
    cuts: list[Index] = []  # where slices begin in the sequence, and its end; absent for one slice
    flushless: bool = False  # the ops are the body of a cycle: steps follow one another without a flush
    ep: Index = 0  # neighbouring replicas that share out the experts of each block; 0: each has all of them
    averages: Index = 0  # replicas average weights and sum no gradients: 1, landing a step later; 2, at once
    balance: Unequal | None = None  # absent where all replicas have equally many microbatches
    vocabulary: Words | None = None  # absent where the first and the last stage have it
    node: list[Count] = []  # neighbours of a pipeline, and copies of each, on one node; else copies follow each other
    order: list[Index] = []  # seat -> rank of the run, see zbc/topology.py; else as numbered
    ramp: list[RampPlan] = []  # what a training begins with, before it runs this plan
    sha256: str = ""  # of this manifest without this field
    _hosts: tuple[str, ...] = ()  # of each rank of a run, as it runs

    def digest(self) -> str:
        return digest_of(self._plain())

    def dumps(self) -> str:
        return json.dumps({**self._plain(), "sha256": self.digest()}, indent=1) + "\n"

    def _plain(self) -> dict[str, Any]:
        """All but the sha256, as it is written."""
        plain = {name for name in OPTIONAL if getattr(self, name) == type(self).model_fields[name].default}
        return self.model_dump(mode="json", exclude={"sha256", *plain})

    @property
    def traits(self) -> dict[str, Any]:
        """Those of its program."""
        found = {name: getattr(self, name) for name in TRAITS if name not in ("dp", "vocabulary", "node")}
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        sums = 0 if self.vocabulary is None else self.vocabulary.sums
        return found | {"dp": self.copies, "vocabulary": sums, "node": self.topology.node}

    @property
    def topology(self) -> Topology:
        """The axes of a run of the plan."""
        node = (self.node[0], self.node[1]) if self.node else None
        pipes, order = len(self.placement[0]), tuple(self.order)
        counts = tuple(len(set(ranks)) for ranks in self.placement) if pipes > 1 else ()
        replicas = counts if sum(counts) == self.ranks else ()
        axes = self.ranks, self.copies, pipes, node, self.slices, self.microbatches, inner_of(self)
        return Topology(*axes, order, replicas, self._hosts)

    def on(self, hosts: Iterable[str]) -> None:
        """Name ranks by the machines that they run on."""
        self._hosts = tuple(hosts)

    def holders(self, stage: int) -> int:
        """How many ranks of a run hold a stage."""
        return self.topology.copies * len(set(self.placement[stage]))

    def host(self, rank: int) -> dict[str, Any]:
        """What a rank of the pipeline takes of the host's memory for activations: `bytes` and `slabs`; {}: nothing."""
        found: dict[str, Any] = self.predicted.get("host", {}).get(f"rank {rank}", {})
        return found

    def slabs(self, rank: int) -> dict[int, int]:
        """How many activations of a stage a rank has on the host at once."""
        return {int(stage.removeprefix("s")): count for stage, count in self.host(rank).get("slabs", {}).items()}

    def to_placement(self) -> Placement:
        return Placement(tuple(zip(*self.placement, strict=True)), tuple((a, b) for a, b in self.edges))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank needs: its ops in order, and the manifest."""

    rank: int
    ops: tuple[Op, ...]
    manifest: Manifest


def rank_file(rank: int) -> str:
    """The name of a rank's file in a plan directory."""
    return f"rank-{rank:04d}.json"


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The sha256 of a manifest as JSON with sorted keys."""
    return sha(json.dumps(manifest, sort_keys=True).encode())


def sha(data: bytes) -> str:
    """The sha256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
