"""Chooses the number of ranks of each stage: the shortest step of replicated stages by a closed form.

    sum of F + B of all stages, and of two transfers between neighbours
    + (M - 1) x the largest F + B
    + the longest all-reduce, less the part that the drain hides: the transfers and backwards of the earlier stages

where a stage of r ranks takes 1/r of the time. Devices are taken in order. Exact: labels (sum so far, drain so far, the
most exposed all-reduce, the largest stage) over layers and devices. Dominated labels are dropped, and those that cannot
beat the best plan so far even with the rest of the work in perfect balance. The simulator decides between the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

_TINY = 1e-9

Stage = tuple[int, int, int]  # its layers from, up to, and its ranks


class Problem(NamedTuple):
    """Layers in a row: ms of F and B of a microbatch on one rank, bytes of gradients and of the tensor before each."""

    f: Sequence[float]
    b: Sequence[float]
    grads: Sequence[float]
    before: Sequence[float]
    devices: int
    per_node: int
    near: float  # bytes per ms within a node
    far: float
    microbatches: int


class Plan(NamedTuple):
    """ms of a step by the closed form, and its stages."""

    ms: float
    stages: tuple[Stage, ...]


class _Label(NamedTuple):
    total: float
    drain: float
    worst: float  # the most of an all-reduce that no drain hides
    largest: float  # F + B of a stage
    stages: tuple[Stage, ...]


class _Costs:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.f, self.b, self.grads = ([0.0, *accumulate(row)] for row in (problem.f, problem.b, problem.grads))

    def grown(self, label: _Label, device: int, stage: Stage) -> _Label:
        """The label with one more stage, whose first rank is `device`."""
        (i, j, r), problem = stage, self.problem
        f, b = (self.f[j] - self.f[i]) / r, (self.b[j] - self.b[i]) / r
        transfer = 0.0
        if i:
            transfer = problem.before[i] / self._speed(device - 1, device)
        reduce = 2 * (r - 1) / r * (self.grads[j] - self.grads[i]) / self._speed(device, device + r - 1)
        hidden = label.drain + transfer
        total, largest = label.total + f + b + 2 * transfer, max(label.largest, f + b)
        return _Label(total, hidden + b, max(label.worst, reduce - hidden), largest, (*label.stages, stage))

    def _speed(self, a: int, b: int) -> float:
        problem = self.problem
        return problem.near if a // problem.per_node == b // problem.per_node else problem.far


_NONE = _Label(0.0, 0.0, 0.0, 0.0, ())


def length(problem: Problem, stages: Sequence[Stage]) -> float:
    """ms of a step by the closed form."""
    costs, label, device = _Costs(problem), _NONE, 0
    for stage in stages:
        label = costs.grown(label, device, stage)
        device += stage[2]
    return _ms(problem, label)


def _ms(problem: Problem, label: _Label) -> float:
    return label.total + label.worst + (problem.microbatches - 1) * label.largest


def plans(problem: Problem, slack: float = 0.0) -> list[Plan]:
    """The best plan, and others that are longer by at most `slack` and lead in something; the shortest first."""
    costs, layers, devices = _Costs(problem), len(problem.f), problem.devices
    best = min((length(problem, stages) for stages in _short(problem)), default=float("inf"))
    front: dict[tuple[int, int], list[_Label]] = {(0, 0): [_NONE]}
    for i in range(layers):
        for used in range(devices):
            for label in front.pop((i, used), ()):
                for r in range(1, min(problem.microbatches, devices - used) + 1):
                    last = used + r == devices
                    for j in (layers,) if last else range(i + 1, layers):
                        grown = costs.grown(label, used, (i, j, r))
                        behind = costs.f[layers] - costs.f[j] + costs.b[layers] - costs.b[j]
                        rest = 0.0 if last else behind / (devices - used - r)
                        ahead = grown._replace(total=grown.total + rest, largest=max(grown.largest, rest))
                        if _ms(problem, ahead) <= best * (1 + slack + _TINY):
                            best = _ms(problem, grown) if last and _ms(problem, grown) < best else best
                            _keep(front.setdefault((j, used + r), []), grown)
    ranked = sorted(Plan(_ms(problem, label), label.stages) for label in front.get((layers, devices), []))
    return [plan for plan in ranked if plan.ms <= best * (1 + slack + _TINY)]


def _short(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """Yields plans of one and of two stages: the start of the search for a better one."""
    layers, devices, most = len(problem.f), problem.devices, problem.microbatches
    if devices <= most:
        yield ((0, layers, devices),)
    for cut in range(1, layers):
        for r in range(1, devices):
            if max(r, devices - r) <= most:
                yield (0, cut, r), (cut, layers, devices - r)


def _keep(labels: list[_Label], new: _Label) -> None:
    """Adds a label unless another is as good in everything, and drops labels that it beats."""
    total, drain, worst, largest, _ = new
    for old in labels:
        if old[0] <= total and old[1] >= drain and old[2] <= worst and old[3] <= largest:
            return
    labels[:] = [
        old for old in labels if not (total <= old[0] and drain >= old[1] and worst <= old[2] and largest <= old[3])
    ]
    labels.append(new)


def joined(problem: Problem, count: int) -> Problem:
    """The problem with the two lightest neighbours merged into one layer, again and again, until there are `count`."""
    f, b, grads, before = (list(row) for row in problem[:4])
    while len(f) > count:
        k = min(range(len(f) - 1), key=lambda k: f[k] + b[k] + f[k + 1] + b[k + 1])
        for row in (f, b, grads):
            row[k : k + 2] = [row[k] + row[k + 1]]
        del before[k + 1]
    return problem._replace(f=f, b=b, grads=grads, before=before)
