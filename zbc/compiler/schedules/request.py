"""The request for a schedule generator, and the registry's card of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from zbc.errors import ZbcError
from zbc.ir import Placement, Program

if TYPE_CHECKING:
    from zbc.compiler.cost.cost import Costs


@dataclass(frozen=True, slots=True)
class Request:
    """`p` ranks, `m` microbatches and `v` stages per rank; generators for real op times read `costs` too.

    Each microbatch comes in `slices` along its sequence: m x slices units of work. F of a stage runs them in order, its
    backwards run those of a microbatch in reverse.

    `memory_limit` is in activation units (one rank's share of one microbatch), one for all ranks or one each; None
    means no limit. `objective` is "makespan", "span" or "period"; `budget` is the seconds a search may take.
    `compiled` loads compiled kernels for the fast tier too, which pays if several searches follow one
    another.
    """

    p: int
    m: int
    v: int = 1
    group: int | None = None  # microbatches per round of interleaved schedules, or per unit of waves
    early: int | None = None  # forwards that run early, 0 to 2: of the next unit, in waves; of the warm-up
    overlap: bool = False  # dualpipe, and interleaved ones with early forwards: a forward and a backward are one group
    costs: Costs | None = None
    memory_limit: float | tuple[float, ...] | None = None
    objective: str = "makespan"
    budget: float = 0.0  # the fast tier alone
    compiled: bool = False
    slices: int = 1
    fits: Callable[[Program], bool] | None = None  # whether an order found fits on the devices, messages included

    @property
    def units(self) -> int:
        """Slices of all microbatches."""
        return self.m * self.slices

    def limits(self) -> list[float] | None:
        """The limit of each rank."""
        if self.memory_limit is None:
            return None
        return list(self.memory_limit) if isinstance(self.memory_limit, tuple) else [self.memory_limit] * self.p


_TEXTS = tomli.loads(Path(__file__).with_name("cards.toml").read_text())


def texts_of(name: str) -> dict[str, Any]:
    """What the card of a schedule tells readers: fields of `ScheduleCard`."""
    return {key: tuple(text) if isinstance(text, list) else text for key, text in _TEXTS[name].items()}


Generator = Callable[[Request], Program]


@dataclass(frozen=True, slots=True)
class ScheduleCard:
    """A registered schedule and its card."""

    name: str
    make: Generator
    placement: Callable[[int, int], Placement]  # (p, v) -> the placement of the stages
    placement_name: str
    chunks: tuple[int, int | None]  # fewest and most stages per rank; None: no upper limit
    default_chunks: int
    splits_backward: bool
    summary: str
    source: str
    makespan: str  # closed forms at T_F = T_B = T_W = 1 and no transfer time
    span: str
    memory: str  # peak on the fullest rank, activation units
    sliced: str = ""  # `memory` in k slices up to p, with the bubble divided by k; "": no closed form
    aliases: tuple[str, ...] = ()
    needs: str = "any number of microbatches"
    options: tuple[str, ...] = ()  # the supported ones of group, early and overlap
    groups: Callable[[int], range] | None = None  # groups that p ranks may have; None: any
    chunks_in: int = 1  # stages per rank are a multiple of this
    ranks_in: int = 1  # ranks are a multiple of this
    searched: bool = False  # made for the costs and the memory limit of the job
    grouped: bool = False  # its orders have overlap groups
    budget: float = 0.0  # seconds of search by default; 0 is the fast tier alone
    whole: bool = False  # it has no order for slices of microbatches
    branches: bool = False  # it has an order for graphs of layers
    steady: bool = False  # it has a steady state across steps, and so an order without a flush

    def allows(self, chunks: int | None) -> bool:
        """Whether a rank can have that many stages; None leaves it to the schedule."""
        low, high = self.chunks
        return chunks is None or (chunks >= low and (high is None or chunks <= high) and chunks % self.chunks_in == 0)

    def stages_per_rank(self, asked: int | None) -> int:
        """The chunks to use. Raises E110 if the schedule does not allow the requested number."""
        low, high = self.chunks
        v = self.default_chunks if asked is None else asked
        if not self.allows(v):
            allowed = f"{low}" if high == low else f"{low} or more" if high is None else f"{low} to {high}"
            allowed += f", in multiples of {self.chunks_in}," if self.chunks_in > 1 else ""
            text = f"schedule: {self.name} has {allowed} stages per rank, schedule.chunks is {v}"
            fitting = max(low, v + -v % self.chunks_in) if high is None else low
            raise ZbcError("E110", text, hint=f"set schedule.chunks = {fitting}, or leave it out")
        return v

    @property
    def traits(self) -> frozenset[str]:
        """Its traits in zbc/excludes.py."""
        copies = len(self.placement(2 * self.ranks_in, self.default_chunks).pipes) > 1
        has = {"whole": self.whole, "chains": not self.branches, "flush": not self.steady, "copies": copies}
        return frozenset(name for name, there in has.items() if there)

    def check_ranks(self, p: int) -> None:
        """Raise E110 with the nearest numbers that work if the schedule cannot have p ranks."""
        step = self.ranks_in
        if p % step:
            near = [str(n) for n in (p - p % step, p + -p % step) if n > 0]
            text = f"schedule: {self.name} needs a multiple of {step} ranks, parallel.pp is {p}"
            raise ZbcError("E110", text, hint=f"set parallel.pp = {' or '.join(near)}")
