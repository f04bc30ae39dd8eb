"""Memory, memory traffic and time of optimizer steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from zbc.compiler.cost.machine import Machine
from zbc.job.model_section import Model
from zbc.job.profile import Kernel
from zbc.job.sections import ROUNDS, Optimizer
from zbc.job.spec import Job
from zbc.plan.dealing import STACK

if TYPE_CHECKING:
    from zbc.compiler.cost.estimate import Layer

LOW, WIDE = 2, 4  # bytes of a bfloat16 and of a float32
SIZES = {"bfloat16": LOW, "float32": WIDE}


def moments(options: Optimizer, *, matrix: bool = False) -> int:
    """Moments per element, in a `matrix` that Muon steps or in any other parameter."""
    if options.kind == "sgd":
        return int(options.momentum > 0)
    return 1 if matrix and options.kind == "muon" else 2


def kept(options: Optimizer, *, matrix: bool = False) -> int:
    """Bytes of optimizer state per element: moments, and in float32 a last update and an average of the weights."""
    more = bool(options.feedback) + (options.ema is not None)
    return SIZES[options.state] * moments(options, matrix=matrix) + WIDE * more


def master(model: Model) -> int:
    """Bytes per element of the weights that a step updates."""
    return WIDE if model.master else LOW


def widened(options: Optimizer, model: Model, *, matrix: bool = False) -> int:
    """Numbers per element that a step copies to float32, a few parameters at a time, and rounds back."""
    low = moments(options, matrix=matrix) * (SIZES[options.state] < WIDE)
    return low + (master(model) < WIDE)


def matrices(options: Optimizer, layers: Iterable[Layer]) -> list[tuple[int, int]]:
    """The shapes of the matrices that Muon steps; [] with other optimizers."""
    return [shape for layer in layers for shape in layer.matrices] if options.kind == "muon" else []


def elements(options: Optimizer, layers: Iterable[Layer]) -> int:
    """The number of parameters in these matrices."""
    return sum(map(math.prod, matrices(options, layers)))


def state_bytes(options: Optimizer, layers: Sequence[Layer], params: int) -> float:
    """Bytes of optimizer state of `params` parameters of these layers."""
    inside = min(params, elements(options, layers))
    return float(kept(options) * (params - inside) + kept(options, matrix=True) * inside)


def moved(options: Optimizer, model: Model, *, matrix: bool = False) -> tuple[float, float]:
    """Bytes that STEP and TENTATIVE move per parameter.

    STEP reads gradient, weight and state (two numbers for Adam, one for momentum) and writes weight and state, and the
    copy of the weights that forward reads, if there is one; numbers in bfloat16 are copied to float32 and back.
    TENTATIVE does the same on fresh copies.
    """
    more = bool(options.feedback) + (options.ema is not None)
    step = WIDE + 2 * WIDE * (1 + moments(options, matrix=matrix) + more)
    step += 2 * (LOW + WIDE) * widened(options, model, matrix=matrix)
    # Feedback copies weights, and reads both again; an average reads weights and itself.
    step += 28 * bool(options.feedback) + 12 * (options.ema is not None)
    publish = float(master(model) + (LOW if model.lowered else WIDE))
    apart = options.sync != "post-validate" and model.lowered and model.master
    return step + publish * apart, step + publish + 2 * (master(model) + kept(options, matrix=matrix))


def kernels(shape: tuple[int, int]) -> list[Kernel]:
    """The kernels that make a matrix orthogonal by Newton-Schulz in bfloat16: three products a round."""
    short, long = sorted(shape)
    gram, whole = 2 * short**2, 2 * short * long
    of = ((short**2 * long, whole + gram), (short**3, 3 * gram), (short**2 * long, gram + 3 * whole))
    return [("product", 2.0 * flops, float(moved), ROUNDS) for flops, moved in of]


def ms_of(job: Job, layers: Sequence[Layer], params: int) -> tuple[float, float]:
    """ms of STEP and of TENTATIVE for `params` parameters of these layers, all on one rank."""
    options, machine = job.optimizer, Machine.of(job)
    found = matrices(options, layers)
    inside = min(params, sum(map(math.prod, found)))
    plain, of_matrices = (moved(options, job.model, matrix=matrix) for matrix in (False, True))
    # Each of the ranks that share a layer makes the whole matrix orthogonal.
    more = sum(machine.ms(kernels((rows * job.parallel.tp, columns))) for rows, columns in found)
    ends = zip(plain, of_matrices, strict=True)
    step, tentative = (machine.ms([("", 0.0, a * (params - inside) + b * inside, 0)]) + more for a, b in ends)
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
