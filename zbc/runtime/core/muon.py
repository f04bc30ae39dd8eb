"""Muon: orthogonalised momentum of a matrix as its update (K. Jordan et al. 2024); AdamW for all other parameters.

    M = mu M + (1 - mu) G                      a rank's shard of a matrix keeps its shard of M
    O = orthogonal((1 - mu) G + mu M)          of the whole matrix: ranks gather its shards
    P = P (1 - lr decay) - lr scale(shape) O   each rank updates its shard

The same numbers as `torch.optim.Muon`, which supports whole matrices only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zbc.job import spec
from zbc.job.sections import ROUNDS, OptimizerGroup
from zbc.plan.dealing import STACK
from zbc.runtime.core.grouped import of_expert
from zbc.runtime.core.rounded import TYPES

# The ends of models of zbc and of transformers, whose matrices are vocabulary tables: AdamW updates them.
OUTER = re.compile(r"embed\.|head\.|layers\.\d+\.root\.")
COEFFICIENTS = 3.4445, -4.7750, 2.0315


class Whole(NamedTuple):
    """A sharded matrix: `collect` gathers the whole from this rank's shard (blocks), `of` returns a whole's shard."""

    collect: Callable[[Tensor], Tensor]
    of: Callable[[Tensor], Tensor]


Wholes = Mapping[str, Whole]  # by the name of the matrix


def of_groups(options: spec.Optimizer, name: str) -> OptimizerGroup | None:
    """The first of [[optimizer.groups]] that names a parameter, or a piece of one; None if none does."""
    name = name.partition("[")[0]
    return next((group for group in options.groups if any(is_called(name, known) for known in group.names)), None)


def is_called(name: str, known: str) -> bool:
    """Whether a pattern names a parameter, by its name in memory or, of a stack, in files."""
    return fnmatchcase(name, known) or fnmatchcase(of_expert(name, 0), known)


def is_matrix(options: spec.Optimizer, name: str, parameter: Tensor) -> bool:
    """Whether Muon updates the parameter: a matrix, or a stack of those of experts."""
    stacked = of_expert(name, 0) != name
    matrix = not OUTER.match(name) and parameter.dim() == 2 + stacked
    return matrix and options.kind == "muon" and by_muon(options, name)


def by_muon(options: spec.Optimizer, name: str) -> bool:
    """Whether no group says that AdamW updates a matrix of this name."""
    return (group := of_groups(options, name)) is None or group.muon


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix, or each of a stack (E, rows, columns), with all singular values near 1, by Newton-Schulz in bfloat16;
    the shape is unchanged."""
    a, b, c = COEFFICIENTS
    x, add = matrix.bfloat16(), torch.addmm if matrix.dim() == 2 else torch.baddbmm
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = wide @ wide.mT
        wide = add(wide, add(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


def scale_of(shape: Sequence[int], how: Literal["rms", "original"]) -> float:
    """The factor of an update of a matrix of this shape: "rms" gives it the RMS of AdamW's (arXiv:2502.16982)."""
    *_, rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if how == "rms" else math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """Updates matrices; `wholes` has those of which this rank has a shard."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], options: spec.Optimizer, wholes: Mapping[nn.Parameter, Whole]
    ) -> None:
        super().__init__(groups, {"momentum": options.momentum})
        self._scale, self._wholes = options.scale, wholes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, decay, mu = group["lr"], group["weight_decay"], group["momentum"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, whole = self.state[parameter], self._wholes.get(parameter)
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                for some, grad, before in _parts(parameter, parameter.grad, state["momentum_buffer"]):
                    moved = grad.lerp(before.lerp_(grad, 1 - mu), mu)
                    moved = moved if whole is None else whole.collect(moved)
                    scale, moved = scale_of(moved.shape, self._scale), orthogonal(moved)
                    some.mul_(1 - lr * decay)
                    some.add_(moved if whole is None else whole.of(moved), alpha=-lr * scale)


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, stacks a few matrices at a time."""
    first = tensors[0]
    each = len(first) if first.dim() == 2 else max(1, STACK // max(1, first[0].numel()))
    return zip(*(torch.split(tensor, each) for tensor in tensors), strict=True)


class Together(torch.optim.Optimizer):
    """Several optimizers with parameters of their own, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def muon(
    options: spec.Optimizer,
    named: Mapping[str, nn.Parameter],
    adamw: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    wholes: Wholes,
) -> torch.optim.Optimizer:
    """Muon for the matrices among the parameters, and `adamw` for the rest."""
    matrices = {name: p for name, p in named.items() if is_matrix(options, name, p)}
    rest = {name: p for name, p in named.items() if name not in matrices}
    of = {p: wholes[known] for name, p in matrices.items() if (known := name.partition("[")[0]) in wholes}
    peak = options.peak_lr or 1.0
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(grouped(options, matrices, times=options.rates[0] / peak), options, of))
    if rest:
        made.append(adamw(grouped(options, rest, times=options.rates[1] / peak)))
    return made[0] if len(made) == 1 else Together(made)


def grouped(options: spec.Optimizer, named: Mapping[str, nn.Parameter], times: float = 1.0) -> list[dict[str, Any]]:
    """Groups of parameters with the same rate and weight decay; `times` multiplies the rate."""
    groups, stored = dict[tuple[float, float], list[nn.Parameter]](), TYPES[options.state]
    for name, parameter in named.items():
        group = of_groups(options, name)
        decay = options.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        rate = 1.0 if group is None else group.rate
        groups.setdefault((times * rate, decay), []).append(parameter)
    return [
        {"params": some, "lr": options.peak_lr * rate, "weight_decay": decay, "times": rate, "stored": stored}
        for (rate, decay), some in groups.items()
    ]
