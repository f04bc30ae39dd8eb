"""Memory, memory traffic and time of optimizer steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from zbc.compiler.cost.machine import Kernel, Machine
from zbc.job.sections import ROUNDS, Optimizer
from zbc.job.spec import Job
from zbc.plan.dealing import STACK

if TYPE_CHECKING:
    from zbc.compiler.cost.estimate import Layer

WIDE = 4  # bytes of a number of optimizer state


def numbers(options: Optimizer, *, matrix: bool = False) -> int:
    """Numbers of optimizer state per element, in a `matrix` that Muon steps or in any other parameter."""
    fed = bool(options.feedback) + (options.ema is not None)
    if options.kind == "sgd":
        return fed + bool(options.momentum)
    return fed + (1 if matrix and options.kind == "muon" else 2)


def matrices(options: Optimizer, layers: Iterable[Layer]) -> list[tuple[int, int]]:
    """The shapes of the matrices that Muon steps; [] with other optimizers."""
    return [shape for layer in layers for shape in layer.matrices] if options.kind == "muon" else []


def elements(options: Optimizer, layers: Iterable[Layer]) -> int:
    """The number of parameters in these matrices."""
    return sum(map(math.prod, matrices(options, layers)))


def state_bytes(options: Optimizer, layers: Sequence[Layer], params: int) -> float:
    """Bytes of optimizer state of `params` parameters of these layers."""
    inside = min(params, elements(options, layers))
    return float(WIDE * (numbers(options) * (params - inside) + numbers(options, matrix=True) * inside))


def moved(options: Optimizer, parameters: str, *, matrix: bool = False) -> tuple[float, float]:
    """Bytes that STEP and TENTATIVE move per parameter, in float32.

    STEP reads gradient, weight and state (two numbers for Adam, one for momentum) and writes weight and state, and the
    copy of the weights that forward reads, if there is one. TENTATIVE does the same on fresh copies.
    """
    state = WIDE * numbers(options, matrix=matrix)
    step = (
        4 + 2 * (4 + state) + 28 * bool(options.feedback) + 12 * (options.ema is not None)
    )  # feedback copies weights, and reads both again; an average reads weights and itself
    publish = 6.0 if parameters == "bfloat16" else 8.0
    ahead = options.sync == "post-validate"
    plain = step + publish if parameters == "bfloat16" and not ahead else step
    return plain, step + publish + 2 * (4 + state)


def kernels(shape: tuple[int, int]) -> list[Kernel]:
    """The kernels that make a matrix orthogonal by Newton-Schulz in bfloat16: three products a round."""
    short, long = sorted(shape)
    gram, whole = 2 * short**2, 2 * short * long
    return [
        Kernel(2.0 * short**2 * long, whole + gram, ROUNDS),
        Kernel(2.0 * short**3, 3 * gram, ROUNDS),
        Kernel(2.0 * short**2 * long, gram + 3 * whole, ROUNDS),
    ]


def ms_of(job: Job, layers: Sequence[Layer], params: int) -> tuple[float, float]:
    """ms of STEP and of TENTATIVE for `params` parameters of these layers, all on one rank."""
    options, machine = job.optimizer, Machine.of(job)
    found = matrices(options, layers)
    inside = min(params, sum(map(math.prod, found)))
    plain, of_matrices = (moved(options, job.model.parameters, matrix=matrix) for matrix in (False, True))
    # Each of the ranks that share a layer makes the whole matrix orthogonal.
    more = sum(machine.ms(kernels((rows * job.parallel.tp, columns))) for rows, columns in found)
    ends = zip(plain, of_matrices, strict=True)
    step, tentative = (machine.ms([Kernel(0, a * (params - inside) + b * inside, 0)]) + more for a, b in ends)
    return step, tentative


def needs(options: Optimizer, layers: Iterable[Layer], tp: int) -> float:
    """Temporary bytes of Muon's step of a matrix, or of some of a stack, of which each of `tp` ranks has a part: its
    update in float32, and in bfloat16 two copies and two squares."""
    most = 0.0
    for layer in layers:
        for (rows, columns), count in Counter(matrices(options, [layer])).items():
            short, long = sorted((rows * tp, columns))
            some = min(layer.experts, max(1, STACK // (rows * columns))) if count >= layer.experts > 0 else 1
            most = max(most, some * (WIDE * short * long + 2.0 * (2 * short * long + 2 * short**2)))
    return most
