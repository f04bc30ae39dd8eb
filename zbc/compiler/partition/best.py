"""The best of the orders offered for one job, and why others do not do."""

from __future__ import annotations

from dataclasses import replace

from zbc.compiler.partition.oracles import over_of
from zbc.compiler.partition.single import Ordered, Prepared
from zbc.compiler.schedules import Schedule
from zbc.errors import ZbcError
from zbc.job.spec import Job

SAME = 1e-12


class Best:
    """The best order that fits, so far; of equally good ones the first."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.step = float("inf")
        self._ordered: Ordered | None = None
        self._too_large: tuple[float, Ordered] | None = None
        self._refused: list[tuple[bool, float, ZbcError]] = []  # whether it is about more than memory, the least limit

    def offer(self, ordered: Ordered) -> float:
        """Keep it if it is better and fits; what its step takes, in ms."""
        step = ordered.step_ms(self.job)
        if step < self.step * (1 - SAME):
            over = over_of(self.job, ordered)
            if not over:
                self._ordered, self.step = ordered, step
            elif self._ordered is None and (self._too_large is None or over < self._too_large[0]):
                self._too_large = over, ordered
        return step

    def note(self, schedule: Schedule, tried: int, *, all_tried: bool) -> None:
        """How many cuts of a schedule were tried, if it is the best."""
        if self._ordered is not None and self._ordered.name == schedule.name:
            self._ordered = replace(self._ordered, tried=tried, all_tried=all_tried)

    @property
    def found(self) -> bool:
        """Whether there is one that fits."""
        return self._ordered is not None

    @property
    def over(self) -> float:
        """By what share of a limit the least too large is above it; 0 if one fits."""
        return 0.0 if self.found else float("inf") if self._too_large is None else self._too_large[0]

    def rules_out(self, prepared: Prepared) -> bool:
        """Whether no order of that schedule and cut can be better; bounds know nothing of overlap."""
        return self.job.costs.overlap == 0 and bool(prepared.least_step >= self.step * (1 - SAME))

    def refuse(self, error: ZbcError, needed: float) -> None:
        """A schedule that cannot be, and the limit from which it could."""
        self._refused.append((error.code != "E303", needed, error))

    def answer(self) -> Ordered:
        """The best. If nothing fits, raises what names the least limit, or answers with what checks will refuse."""
        if self._ordered is None and self._refused:
            limited, _, error = min(self._refused, key=lambda entry: entry[:2])
            if not limited or self._too_large is None:
                raise error
        if self._ordered is not None:
            return self._ordered
        if self._too_large is None:
            raise ZbcError("E303", "schedule: no schedule can be made for this job")
        return self._too_large[1]
