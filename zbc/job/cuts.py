"""Partitions the sequence of a microbatch into slices: of equal time under causal attention, equal length, or as given.

A token at position t costs `linear + attend t`: its matrix products, and the keys it attends to. So tokens [a, b) take
linear (b - a) + attend (b^2 - a^2) / 2, and the boundaries of slices of equal time are roots of a quadratic. Forward
and backward of attention and of products keep this ratio; only W has no attention. The start of kernels takes as long
in each slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, sqrt
from typing import TYPE_CHECKING

from zbc.job.flops import of_block
from zbc.job.job import Job
from zbc.job.model_section import Model
from zbc.job.section import Problem
from zbc.job.sections import Hardware, Parallel, Schedule

if TYPE_CHECKING:
    from zbc.job.profile import Profile, SliceTime

LEAST = 3  # slices of which times are needed
MULTIPLE = {"cuda": 128, "cpu": 1}  # of tokens: tiles of the kernels
Cuts = tuple[int, ...]  # starts of the slices, and the end of the sequence


def cuts_of(job: Job) -> Cuts:
    """The boundaries of a job's slices; () for one slice."""
    count, length = job.slices, job.model.seq_len
    if count == 1 or length is None:
        return ()
    asked, multiple = job.schedule.cuts, multiple_of(job.hardware, job.parallel)
    if isinstance(asked, list):
        return tuple(sum(asked[:j]) for j in range(count + 1))
    times = SliceTimes.of(job.profile)
    rates = (1.0, 0.0) if asked == "even" else flops(job.model) if times is None else times.rates
    return balanced(length, count, *(rates if any(rates) else (1.0, 0.0)), multiple)


def multiple_of(hardware: Hardware, parallel: Parallel) -> int:
    """Tokens that slices are multiples of: tiles of the kernels, and equal parts for the ranks that share tokens."""
    return lcm(MULTIPLE[hardware.device], parallel.sent, 2 * parallel.cp if parallel.cp > 1 else 1)


def shares_of(job: Job, cuts: Cuts) -> dict[str, list[float]]:
    """Each slice's shares of a block's F, B and W."""
    each = zip(*(part_of(job, *ends) for ends in pairwise(cuts)), strict=True)
    return {name: [part / (sum(parts) or 1.0) for part in parts] for name, parts in zip("fbw", each, strict=True)}


def part_of(job: Job, begin: int, end: int) -> tuple[float, float, float]:
    """The cost of F, B and W of a block for some tokens of a row: ms by times of slices, else operations."""
    times = SliceTimes.of(job.profile)
    if times is not None:
        return times.each(begin, end)
    linear, attend = flops(job.model)
    mixed = linear * (end - begin) + attend * (end * end - begin * begin) / 2
    return mixed, mixed, float(end - begin)


def flops(model: Model) -> tuple[float, float]:
    """Operations of a block's forward per token, and per token and key; (1, 0) if the model's sizes are not known."""
    if not model.builtin or model.hidden is None:
        return 1.0, 0.0
    weights, queries = of_block(model)
    return 2.0 * weights, 4.0 * queries


def share(cuts: Cuts, linear: float, attend: float) -> list[float]:
    """Each slice's share of a microbatch's time; the sum is 1."""
    costs = [linear * (b - a) + attend * (b * b - a * a) / 2 for a, b in pairwise(cuts)]
    whole = sum(costs)
    return [cost / whole for cost in costs]


def balanced(length: int, count: int, linear: float, attend: float, multiple: int = 1) -> Cuts:
    """Slices of equal time, boundaries rounded to multiples; at least one multiple long if the length allows it."""
    total = linear * length + attend * length * length / 2
    cuts = [0]
    for j in range(1, count):
        goal = total * j / count
        at = 2 * goal / (linear + sqrt(linear * linear + 2 * attend * goal))  # stable for attend -> 0
        cuts.append(max(cuts[-1] + multiple, round(at / multiple) * multiple))
    for j in range(1, count):  # few multiples: leave at least one to each slice that follows
        last = -(-length // multiple) * multiple - (count - j) * multiple
        cuts[j] = min(cuts[j], last)
    return (*cuts, length)


# ---- invalid settings ------------------------------------------------------------------------------------------------


def problems(schedule: Schedule, model: Model, hardware: Hardware, parallel: Parallel) -> Iterator[Problem]:
    """E103 for slices and cuts that do not fit the sequence, E110 if there is no sequence to cut."""
    count, cuts, length = schedule.slices, schedule.cuts, model.seq_len
    if count == 1:
        if cuts != "balanced":
            text = "schedule.cuts says where slices end, and schedule.slices is 1"
            given = len(cuts) if isinstance(cuts, list) else 4
            yield "E110", "schedule.cuts", text, f"set schedule.slices = {given}, or drop it"
    elif length is None:
        text = "schedule.slices cuts sequences of tokens, and there is no model.seq_len"
        yield "E110", "schedule.slices", text, "give model.seq_len, or drop it"
    elif count != "auto":
        yield from _misplaced(cuts, count, length, multiple_of(hardware, parallel))
    elif isinstance(cuts, list):
        text = 'schedule.cuts are lengths of a given number of slices, and schedule.slices is "auto"'
        yield "E110", "schedule.cuts", text, f"set schedule.slices = {len(cuts)}, or drop schedule.cuts"


def _misplaced(cuts: str | list[int], count: int, length: int, multiple: int) -> Iterator[Problem]:
    most = -(-length // multiple)
    if count > most:
        text = f"schedule.slices = {count} slices do not fit into model.seq_len = {length} tokens"
        text += f" in multiples of {multiple}" if multiple > 1 else ""
        yield "E103", "schedule.slices", text, f"use {most} or fewer"
    elif isinstance(cuts, list) and len(cuts) != count:
        text = f"schedule.cuts has {len(cuts)} lengths, schedule.slices is {count}"
        yield "E103", "schedule.cuts", text, f"set schedule.slices = {len(cuts)}, or give {count} lengths"
    elif isinstance(cuts, list) and (sum(cuts) != length or any(part % multiple for part in cuts[:-1])):
        text = f"schedule.cuts are lengths that add up to {sum(cuts)}, model.seq_len is {length}"
        if sum(cuts) == length:
            text = f"schedule.cuts has lengths that are no multiples of {multiple}, as tiles of a GPU's kernels"
            text += " and ranks that share tokens need them"
        yield "E103", "schedule.cuts", text, f'set schedule.cuts = {_nearest(cuts, length, multiple)}, or "balanced"'


def _nearest(cuts: list[int], length: int, multiple: int) -> list[int]:
    """Valid lengths near the proportions of `cuts`."""
    scale, ends = length / sum(cuts), [0]
    for j in range(1, len(cuts)):
        left = (len(cuts) - j) * multiple
        at = round(sum(cuts[:j]) * scale / multiple) * multiple
        ends.append(max(ends[-1] + multiple, min(at, -(-length // multiple) * multiple - left)))
    return [b - a for a, b in pairwise([*ends, length])]


@dataclass(frozen=True, slots=True)
class SliceTimes:
    """ms of F, B and W of a block for a slice of a sequence, fitted to a profile's times of a few slices.

    A slice of `rows` tokens after `past` others takes floor + linear rows + attend rows (past + rows/2): the start of
    its kernels, its products, and the keys that its tokens see. `fits` has these three, by least squares, of each.
    """

    fits: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, profile: Profile | None) -> SliceTimes | None:
        """The fit for the blocks of a built-in family; None if the profile has times of too few slices."""
        block = None if profile is None else profile.layers.get("block")
        if block is None or len(block.slices) < LEAST:
            return None
        return cls(tuple(_fit(block.slices, name) for name in ("f", "b", "w")))

    def each(self, begin: int, end: int) -> tuple[float, float, float]:
        """ms of F, B and W of one slice."""
        shape = _shape(end - begin, begin)
        f, b, w = (sum(map(float.__mul__, fit, shape)) for fit in self.fits)
        return f, b, w

    @property
    def rates(self) -> tuple[float, float]:
        """Linear and attend of F, B and W together."""
        _, linear, attend = map(sum, zip(*self.fits, strict=True))
        return linear, attend


def _shape(rows: int, past: int) -> tuple[float, float, float]:
    return 1.0, float(rows), rows * (past + rows / 2)


def _fit(slices: Sequence[SliceTime], name: str) -> tuple[float, float, float]:
    """Floor, linear and attend by least squares; a number that would be negative is fixed at 0."""
    kept = [0, 1, 2]
    while True:
        solution = _solved(
            [[_shape(time.rows, time.past)[i] for i in kept] for time in slices],
            [getattr(time, name) for time in slices],
        )
        low = min(range(len(kept)), key=solution.__getitem__)
        if solution[low] >= 0 or len(kept) == 1:
            numbers = dict(zip(kept, solution, strict=True))
            return max(0.0, numbers.get(0, 0.0)), max(0.0, numbers.get(1, 0.0)), max(0.0, numbers.get(2, 0.0))
        del kept[low]


def _solved(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The least-squares solution x of rows x = values; columns are scaled, since tokens squared are large."""
    count = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(count)]
    table = [[row[i] / scale[i] for i in range(count)] for row in rows]
    left = [[sum(row[i] * row[j] for row in table) for j in range(count)] for i in range(count)]
    right = [sum(row[i] * value for row, value in zip(table, values, strict=True)) for i in range(count)]
    for i in range(count):
        pivot = max(range(i, count), key=lambda r: abs(left[r][i]))
        left[i], left[pivot], right[i], right[pivot] = left[pivot], left[i], right[pivot], right[i]
        if abs(left[i][i]) < 1e-12:
            continue
        for r in range(count):
            if r != i:
                factor = left[r][i] / left[i][i]
                left[r] = [a - factor * b for a, b in zip(left[r], left[i], strict=True)]
                right[r] -= factor * right[i]
    return [right[i] / left[i][i] / scale[i] if abs(left[i][i]) >= 1e-12 else 0.0 for i in range(count)]
